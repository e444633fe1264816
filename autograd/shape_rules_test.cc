#include "autograd/shape_rules.h"

#include "gtest/gtest.h"

namespace tapeline {
namespace {

using testing::AssertionFailure;
using testing::AssertionResult;
using testing::AssertionSuccess;

AssertionResult is(const absl::StatusOr<Shape>& got, const Shape& expected) {
  if (!got.ok()) return AssertionFailure() << got.status().message();
  if (*got == expected) return AssertionSuccess();
  return AssertionFailure()
         << to_string(*got) << " instead of " << to_string(expected);
}

// An error that names the op in brackets first, and all of `parts`.
AssertionResult refused(const absl::StatusOr<Shape>& got, const std::string& op,
                        const std::vector<std::string>& parts) {
  if (got.ok()) return AssertionFailure() << "accepted, " << to_string(*got);
  const std::string message(got.status().message());
  if (message.rfind("[" + op + "] ", 0) != 0) {
    return AssertionFailure() << message << " does not begin with " << op;
  }
  for (const std::string& part : parts) {
    if (message.find(part) == std::string::npos) {
      return AssertionFailure() << message << " lacks " << part;
    }
  }
  return AssertionSuccess();
}

namespace rules = shape_rules;

TEST(ShapeRules, SameWantsEqualShapes) {
  EXPECT_TRUE(is(rules::same("add", {3, 4}, {3, 4}), {3, 4}));
  EXPECT_TRUE(is(rules::same("add", {}, {}), {}));
  EXPECT_TRUE(refused(rules::same("add", {3, 4}, {4, 3}), "add",
                      {"a is [3, 4]", "b is [4, 3]"}));
  EXPECT_TRUE(
      refused(rules::same("mul", {3}, {3, 1}), "mul", {"[3]", "[3, 1]"}));
}

TEST(ShapeRules, ReshapeKeepsTheNumberOfElements) {
  EXPECT_TRUE(is(rules::reshape({6, 4}, {2, 3, 4}), {2, 3, 4}));
  EXPECT_TRUE(is(rules::reshape({0, 4}, {2, 0}), {2, 0}));
  EXPECT_TRUE(
      refused(rules::reshape({6, 4}, {5, 5}), "reshape", {"[6, 4]", "[5, 5]"}));
}

TEST(ShapeRules, ReshapeRefusesNegativeExtents) {
  EXPECT_TRUE(
      refused(rules::reshape({6}, {-2, -3}), "reshape", {"[6]", "[-2, -3]"}));
}

TEST(ShapeRules, LinearContractsTheLastDimensions) {
  EXPECT_TRUE(is(rules::linear({5, 7}, {3, 7}), {5, 3}));
  EXPECT_TRUE(is(rules::linear({0, 7}, {3, 7}), {0, 3}));
  EXPECT_TRUE(
      refused(rules::linear({5, 7}, {7, 3}), "linear", {"[5, 7]", "[7, 3]"}));
  EXPECT_TRUE(refused(rules::linear({5, 2, 7}, {3, 7}), "linear",
                      {"[5, 2, 7]", "[3, 7]"}));
  EXPECT_TRUE(refused(rules::linear({5, 7}, {7}), "linear", {"[5, 7]", "[7]"}));
}

TEST(ShapeRules, HeadLinearUsesSomeRowsOfEachHead) {
  // 3 heads of 5 rows; rows 1 to 3 of each, 2 in all.
  HeadRows rows{3, 1, 3};
  EXPECT_TRUE(is(rules::head_linear({4, 3, 7}, {15, 7}, rows), {4, 3, 2}));
  rows.direction = HeadRows::Direction::kTransposed;
  EXPECT_TRUE(is(rules::head_linear({4, 3, 2}, {15, 7}, rows), {4, 3, 7}));
  EXPECT_TRUE(refused(rules::head_linear({4, 3, 7}, {15, 7}, rows),
                      "head_linear", {"[4, 3, 7]", "[15, 7]", "1 to 3"}));
}

TEST(ShapeRules, HeadLinearRefusesRowsOutsideOfAHead) {
  const Shape x = {4, 3, 7}, w = {15, 7};
  for (const HeadRows& rows :
       {HeadRows{3, 0, 6}, HeadRows{3, -1, 2}, HeadRows{3, 3, 2},
        HeadRows{2, 0, 2}, HeadRows{0, 0, 0}, HeadRows{5, 0, 3}}) {
    EXPECT_TRUE(refused(rules::head_linear(x, w, rows), "head_linear",
                        {"[4, 3, 7]", "[15, 7]"}))
        << rows.heads << " heads, " << rows.begin << " to " << rows.end;
  }
  EXPECT_TRUE(refused(rules::head_linear({4, 21}, w, {3, 0, 5}), "head_linear",
                      {"[4, 21]"}));
  EXPECT_TRUE(refused(rules::head_linear({4, 3, 6}, w, {3, 0, 5}),
                      "head_linear", {"[4, 3, 6]", "[15, 7]"}));
}

TEST(ShapeRules, NormWeighsTheLastDimension) {
  EXPECT_TRUE(is(rules::norm("rms_norm", {2, 3, 8}, {8}), {2, 3, 8}));
  EXPECT_TRUE(is(rules::norm("rms_norm", {8}, {8}), {8}));
  EXPECT_TRUE(refused(rules::norm("rms_norm", {8, 3}, {8}), "rms_norm",
                      {"[8, 3]", "[8]"}));
  EXPECT_TRUE(refused(rules::norm("layer_norm", {3, 8}, {1, 8}), "layer_norm",
                      {"[3, 8]", "[1, 8]"}));
  EXPECT_TRUE(refused(rules::norm("rms_norm", {}, {1}), "rms_norm", {"[1]"}));
}

TEST(ShapeRules, SwigluHalvesTheLastDimension) {
  EXPECT_TRUE(is(rules::swiglu({3, 10}), {3, 5}));
  EXPECT_TRUE(refused(rules::swiglu({3, 9}), "swiglu", {"[3, 9]"}));
  EXPECT_TRUE(refused(rules::swiglu({3, 2, 10}), "swiglu", {"[3, 2, 10]"}));
}

TEST(ShapeRules, EmbeddingTakesOneRowPerId) {
  EXPECT_TRUE(is(rules::embedding({6}, {100, 8}), {6, 8}));
  EXPECT_TRUE(refused(rules::embedding({6, 1}, {100, 8}), "embedding",
                      {"[6, 1]", "[100, 8]"}));
  EXPECT_TRUE(refused(rules::embedding({6}, {100}), "embedding", {"[100]"}));
}

TEST(ShapeRules, RopeWantsHalfATablePerToken) {
  EXPECT_TRUE(is(rules::rope({5, 2, 8}, {5, 4}), {5, 2, 8}));
  EXPECT_TRUE(
      refused(rules::rope({5, 2, 8}, {5, 8}), "rope", {"[5, 2, 8]", "[5, 8]"}));
  EXPECT_TRUE(
      refused(rules::rope({5, 2, 8}, {6, 4}), "rope", {"[5, 2, 8]", "[6, 4]"}));
  EXPECT_TRUE(refused(rules::rope({5, 8}, {5, 4}), "rope", {"[5, 8]"}));
}

TEST(ShapeRules, AttentionSharesKeyHeads) {
  EXPECT_TRUE(
      is(rules::attention({5, 6, 8}, {9, 2, 8}, {9, 2, 3}, 5), {5, 6, 3}));
  const Shape q = {5, 6, 8}, k = {9, 2, 8}, v = {9, 2, 3};
  const std::vector<std::string> all = {"[5, 6, 8]", "[9, 2, 8]", "[9, 2, 3]"};
  EXPECT_TRUE(refused(rules::attention(q, k, v, 4), "attention", all));
  EXPECT_TRUE(refused(rules::attention(q, {9, 4, 8}, {9, 4, 3}, 5), "attention",
                      {"[9, 4, 8]", "[9, 4, 3]"}));
  EXPECT_TRUE(refused(rules::attention(q, {9, 2, 7}, v, 5), "attention",
                      {"[9, 2, 7]"}));
  EXPECT_TRUE(refused(rules::attention(q, k, {8, 2, 3}, 5), "attention",
                      {"[8, 2, 3]"}));
  EXPECT_TRUE(refused(rules::attention(q, k, {9, 3, 3}, 5), "attention",
                      {"[9, 3, 3]"}));
  EXPECT_TRUE(refused(rules::attention(q, {9, 0, 8}, {9, 0, 3}, 5), "attention",
                      {"[9, 0, 8]"}));
  EXPECT_TRUE(
      refused(rules::attention({5, 48}, k, v, 5), "attention", {"[5, 48]"}));
}

TEST(ShapeRules, SelectKeysGivesTopKPerToken) {
  EXPECT_TRUE(is(rules::select_keys({5, 2, 8}, {9, 8}, {5, 2}, 5, 4), {5, 4}));
  const Shape q = {5, 2, 8}, k = {9, 8}, w = {5, 2};
  const std::vector<std::string> all = {"[5, 2, 8]", "[9, 8]", "[5, 2]"};
  EXPECT_TRUE(refused(rules::select_keys(q, k, w, 6, 4), "select_keys", all));
  EXPECT_TRUE(refused(rules::select_keys(q, k, w, 5, 0), "select_keys", all));
  EXPECT_TRUE(refused(rules::select_keys(q, {9, 7}, w, 5, 4), "select_keys",
                      {"[9, 7]"}));
  EXPECT_TRUE(refused(rules::select_keys(q, k, {5, 3}, 5, 4), "select_keys",
                      {"[5, 3]"}));
  EXPECT_TRUE(refused(rules::select_keys(q, k, {4, 2}, 5, 4), "select_keys",
                      {"[4, 2]"}));
  EXPECT_TRUE(refused(rules::select_keys(q, {9, 1, 8}, w, 5, 4), "select_keys",
                      {"[9, 1, 8]"}));
}

TEST(ShapeRules, SparseAttentionCutsValuesFromKeys) {
  EXPECT_TRUE(
      is(rules::sparse_attention({5, 2, 8}, {9, 8}, {5, 4}, 6), {5, 2, 6}));
  const Shape q = {5, 2, 8}, kv = {9, 8}, ids = {5, 4};
  const std::vector<std::string> all = {"[5, 2, 8]", "[9, 8]", "[5, 4]"};
  EXPECT_TRUE(
      refused(rules::sparse_attention(q, kv, ids, 9), "sparse_attention", all));
  EXPECT_TRUE(refused(rules::sparse_attention(q, kv, ids, -1),
                      "sparse_attention", all));
  EXPECT_TRUE(refused(rules::sparse_attention(q, kv, {6, 4}, 6),
                      "sparse_attention", {"[6, 4]"}));
  EXPECT_TRUE(refused(rules::sparse_attention(q, {9, 7}, ids, 6),
                      "sparse_attention", {"[9, 7]"}));
  EXPECT_TRUE(refused(rules::sparse_attention({5, 8}, kv, ids, 6),
                      "sparse_attention", {"[5, 8]"}));
}

RouterRule router_rule(int top_k, int groups = 1, int top_groups = 1) {
  RouterRule rule;
  rule.top_k = top_k;
  rule.groups = groups;
  rule.top_groups = top_groups;
  return rule;
}

TEST(ShapeRules, RouterChoosesWithinItsGroups) {
  EXPECT_TRUE(is(rules::router({5, 8}, router_rule(2)), {5, 2}));
  EXPECT_TRUE(is(rules::router({5, 8}, router_rule(8)), {5, 8}));
  EXPECT_TRUE(is(rules::router({5, 8}, router_rule(4, 4, 2)), {5, 4}));
  for (const RouterRule& rule :
       {router_rule(0), router_rule(9), router_rule(2, 3, 1),
        router_rule(5, 4, 2), router_rule(2, 4, 5), router_rule(2, 4, 0),
        router_rule(2, 0, 0)}) {
    EXPECT_TRUE(refused(rules::router({5, 8}, rule), "router",
                        {"[5, 8]", "top_k " + std::to_string(rule.top_k),
                         "groups " + std::to_string(rule.groups)}));
  }
  EXPECT_TRUE(refused(rules::router({8}, router_rule(2)), "router", {"[8]"}));
}

TEST(ShapeRules, DispatchMakesARowPerChoice) {
  EXPECT_TRUE(is(rules::dispatch({5, 8}, {5, 2}), {10, 8}));
  EXPECT_TRUE(refused(rules::dispatch({5, 8}, {4, 2}), "dispatch",
                      {"[5, 8]", "[4, 2]"}));
  EXPECT_TRUE(refused(rules::dispatch({5, 8}, {5}), "dispatch", {"[5]"}));
}

TEST(ShapeRules, GroupedLinearHasOneWeightPerExpert) {
  EXPECT_TRUE(is(rules::grouped_linear({10, 8}, {3, 6, 8}, 3), {10, 6}));
  EXPECT_TRUE(refused(rules::grouped_linear({10, 8}, {3, 6, 8}, 4),
                      "grouped_linear", {"[10, 8]", "[3, 6, 8]", "4 experts"}));
  EXPECT_TRUE(refused(rules::grouped_linear({10, 8}, {3, 8, 6}, 3),
                      "grouped_linear", {"[10, 8]", "[3, 8, 6]"}));
  EXPECT_TRUE(refused(rules::grouped_linear({10, 8}, {18, 8}, 3),
                      "grouped_linear", {"[18, 8]"}));
}

TEST(ShapeRules, CombineHasAWeightPerRow) {
  EXPECT_TRUE(is(rules::combine({10, 8}, {5, 2}, {5, 2}), {5, 8}));
  EXPECT_TRUE(refused(rules::combine({10, 8}, {5, 2}, {2, 5}), "combine",
                      {"[10, 8]", "[5, 2]", "[2, 5]"}));
  EXPECT_TRUE(refused(rules::combine({80}, {5, 2}, {5, 2}), "combine",
                      {"[80]", "[5, 2]"}));
}

TEST(ShapeRules, LinearCrossEntropyHasALabelAndAWeightPerToken) {
  EXPECT_TRUE(
      is(rules::linear_cross_entropy({5, 8}, {100, 8}, {5}, {5}), {5, 100}));
  const std::string op = "linear_cross_entropy";
  EXPECT_TRUE(refused(rules::linear_cross_entropy({5, 8}, {100, 7}, {5}, {5}),
                      op, {"[5, 8]", "[100, 7]"}));
  EXPECT_TRUE(refused(rules::linear_cross_entropy({5, 8}, {100, 8}, {4}, {4}),
                      op, {"[5, 8]", "[4]"}));
  EXPECT_TRUE(refused(rules::linear_cross_entropy({5, 8}, {100, 8}, {5}, {1}),
                      op, {"[5]", "[1]"}));
  EXPECT_TRUE(
      refused(rules::linear_cross_entropy({5, 8}, {100, 8}, {5, 1}, {5, 1}), op,
              {"[5, 1]"}));
}

}  // namespace
}  // namespace tapeline
