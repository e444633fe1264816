#include "kernels/route/route.h"

#include <vector>

#include "gtest/gtest.h"
#include "kernels/route/route_cases.h"
#include "tests/support/buffer.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

struct Tables {
  std::vector<double> offsets, row, token, slot;
};

Tables run_route(const std::vector<int32_t>& ids, int64_t tokens, int64_t top_k,
                 int64_t experts, int64_t capacity, bool with_space = false,
                 Launch l = launch()) {
  Buffer<int32_t> in({tokens, top_k}, /*gap=*/3), row({tokens, top_k}, 2);
  Buffer<int32_t> offsets({experts + 1}), token({capacity}), slot({capacity});
  in.set(std::vector<double>(ids.begin(), ids.end()));
  Buffer<int64_t> space({ceil_div(
      static_cast<int64_t>(route_workspace_bytes(l, tokens, top_k, experts)),
      sizeof(int64_t))});
  const View<int64_t> bytes = space.view();
  route(l, in.view(), offsets.view(), row.view(), token.view(), slot.view(),
        with_space && bytes.elements() > 0
            ? reinterpret_cast<std::byte*>(bytes.data)
            : nullptr);
  EXPECT_TRUE(space.guards_intact());
  for (const auto* out : {&offsets, &row, &token, &slot}) {
    EXPECT_TRUE(out->guards_intact());
  }
  return {offsets.values(), row.values(), token.values(), slot.values()};
}

std::vector<double> as_double(const std::vector<int32_t>& values) {
  return {values.begin(), values.end()};
}

class RouteCases : public testing::TestWithParam<RouteCase> {};
INSTANTIATE_TEST_SUITE_P(, RouteCases, testing::ValuesIn(route_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(RouteCases, RowsAreOrderedByExpertThenTokenThenSlot) {
  const RouteCase& c = GetParam();
  const RouteTables expected = tables_of(c);
  for (bool with_space : {false, true}) {
    SCOPED_TRACE(with_space);
    const Tables got = run_route(expected.ids, c.tokens, c.top_k, c.experts,
                                 expected.capacity, with_space);
    EXPECT_EQ(got.offsets, as_double(expected.offsets));
    EXPECT_EQ(got.row, as_double(expected.row));
    EXPECT_EQ(got.token, as_double(expected.token));
    EXPECT_EQ(got.slot, as_double(expected.slot));
  }
}

TEST(Route, SmallExampleByHand) {
  // token 0: experts 2, 0; token 1: unrouted, 2; token 2: 0, 2
  const Tables got = run_route({2, 0, -1, 2, 0, 2}, 3, 2, 4, 7);
  EXPECT_EQ(got.offsets, (std::vector<double>{0, 2, 2, 5, 5}));
  EXPECT_EQ(got.row, (std::vector<double>{2, 0, -1, 3, 1, 4}));
  EXPECT_EQ(got.token, (std::vector<double>{0, 2, 0, 1, 2, -1, -1}));
  EXPECT_EQ(got.slot, (std::vector<double>{1, 0, 0, 1, 1, -1, -1}));
}

// On the CPU: elsewhere the host cannot read ids.
TEST(RouteDeath, IdsOutsideOfTheExpertsAreErrors) {
  Threads cpu(1);
  EXPECT_DEATH(run_route({0, 4}, 1, 2, 4, 2, false, cpu),
               "expert id 4 of 4 at token 0");
  EXPECT_DEATH(run_route({0, -2}, 1, 2, 4, 2, false, cpu), "expert id -2 of 4");
}

TEST(RouteDeath, MoreExpertsThanAGpuCountsAreAnError) {
  Threads cpu(1);
  const Tables most = run_route({0, 12799}, 1, 2, 12800, 2, false, cpu);
  EXPECT_EQ(most.row, (std::vector<double>{0, 1}));
  EXPECT_DEATH(run_route({0, 1}, 1, 2, 12801, 2, false, cpu), "experts");
}

TEST(RouteDeath, RowsBeyondTheCapacityAreAnError) {
  Threads cpu(1);
  EXPECT_DEATH(run_route({0, 1, 2, 3}, 2, 2, 4, 3, false, cpu),
               "do not fit the capacity");
}

}  // namespace
}  // namespace tapeline
