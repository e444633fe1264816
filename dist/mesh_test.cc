#include "dist/mesh.h"

#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

using Ranks = std::vector<int>;

TEST(Mesh, TensorRanksAreNeighboursAndStagesFarthestApart) {
  const MeshPoint mesh = {.pp = 2, .dp = 2, .ep = 2, .sp = 1, .tp = 2};
  EXPECT_EQ(group_of(mesh, 0, {Axis::kTensor}), (Ranks{0, 1}));
  EXPECT_EQ(group_of(mesh, 5, {Axis::kExpert}), (Ranks{5, 7}));
  EXPECT_EQ(group_of(mesh, 5, {Axis::kData}), (Ranks{1, 5}));
  EXPECT_EQ(group_of(mesh, 5, {Axis::kPipeline}), (Ranks{5, 13}));
  EXPECT_EQ(group_of(mesh, 13, {Axis::kSequence}), (Ranks{13}));
  EXPECT_EQ(to_string(mesh), "pp 2, dp 2, ep 2, sp 1, tp 2");
}

TEST(Mesh, ExpertsLieInsideOfAStage) {
  const MeshPoint mesh = {.pp = 2, .dp = 1, .ep = 4, .sp = 1, .tp = 1};
  EXPECT_EQ(group_of(mesh, 2, {Axis::kExpert}), (Ranks{0, 1, 2, 3}));
  EXPECT_EQ(group_of(mesh, 6, {Axis::kExpert}), (Ranks{4, 5, 6, 7}));
}

TEST(Mesh, GradientsOfExpertsMeetFewerRanksThanThoseOfOtherWeights) {
  const MeshPoint mesh = {.pp = 1, .dp = 2, .ep = 2, .sp = 2, .tp = 2};
  EXPECT_EQ(group_of(mesh, 0, shared_weight_axes()),
            (Ranks{0, 2, 4, 6, 8, 10, 12, 14}));
  EXPECT_EQ(group_of(mesh, 0, expert_weight_axes()), (Ranks{0, 2, 8, 10}));
}

TEST(Mesh, EveryRankHasAPlaceAndEveryGroupingCoversAllOnce) {
  const std::vector<Axis> all = {Axis::kPipeline, Axis::kData, Axis::kExpert,
                                 Axis::kSequence, Axis::kTensor};
  for (int code = 0; code < 3 * 3 * 3 * 2 * 2; ++code) {
    const MeshPoint mesh = {.pp = 1 + code % 3,
                            .dp = 1 + code / 3 % 3,
                            .ep = 1 + code / 9 % 3,
                            .sp = 1 + code / 27 % 2,
                            .tp = 1 + code / 54};
    const int world = mesh.pp * mesh.dp * mesh.ep * mesh.sp * mesh.tp;
    ASSERT_TRUE(check_mesh(mesh, world).ok());
    for (int r = 0; r < world; ++r) {
      EXPECT_EQ(rank_of(mesh, place_of(mesh, r)), r);
    }
    for (int subset = 0; subset < 32; ++subset) {
      std::vector<Axis> axes;
      size_t size = 1;
      for (int a = 0; a < 5; ++a) {
        if ((subset >> a & 1) == 0) continue;
        axes.push_back(all[a]);
        size *= static_cast<size_t>(mesh[all[a]]);
      }
      std::multiset<int> seen;
      int last = -1;
      for (const Ranks& group : groups(mesh, axes)) {
        EXPECT_EQ(group.size(), size);
        EXPECT_GT(group.front(), last);
        last = group.front();
        seen.insert(group.begin(), group.end());
        for (const int r : group) EXPECT_EQ(group_of(mesh, r, axes), group);
      }
      ASSERT_EQ(seen.size(), static_cast<size_t>(world));
      EXPECT_EQ(std::set<int>(seen.begin(), seen.end()).size(), seen.size());
    }
  }
}

TEST(Mesh, SaysWhatDoesNotFit) {
  EXPECT_EQ(check_mesh({.pp = 2, .dp = 3}, 8).message(),
            "the mesh pp 2, dp 3, ep 1, sp 1, tp 1 is not one of 8 processes");
  EXPECT_EQ(check_mesh({.pp = 0}, 1).message(),
            "the mesh pp 0, dp 1, ep 1, sp 1, tp 1 has an extent below 1");
  constexpr int kMost = 2147483647;
  EXPECT_FALSE(
      check_mesh({.pp = kMost, .dp = kMost, .ep = kMost, .sp = 2, .tp = 2}, 4)
          .ok());
}

}  // namespace
}  // namespace tapeline
