// Every differentiable op of ops.h against differences in f64.
#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "gtest/gtest.h"
#include "runtime/device.h"
#include "tests/gradcheck/cases.h"

namespace tapeline {
namespace {

const OpCases& all_cases() {
  static const OpCases& cases = *[] {
    // Whatever an op leaves unwritten is NaN.
    Device::current().pool().set_poison(true);
    auto* all = new OpCases;
    for (const auto& some :
         {arithmetic_cases, shape_cases, dense_cases, attention_op_cases,
          dsa_cases, moe_cases, loss_cases, model_cases}) {
      for (OpCase& c : some()) all->push_back(std::move(c));
    }
    return all;
  }();
  return cases;
}

// Checks a case once per process.
struct Result {
  testing::AssertionResult match = testing::AssertionFailure();
  testing::AssertionResult errors = testing::AssertionSuccess();
  std::vector<Contribution> caught;
};
const Result& result(size_t i) {
  static std::map<size_t, Result>& results = *new std::map<size_t, Result>;
  auto [entry, fresh] = results.try_emplace(i);
  Result& r = entry->second;
  if (fresh) {
    const Gradcheck check(all_cases()[i].check);
    r.match = check.gradients_match();
    if (r.match && all_cases()[i].has_gradient) {
      r.errors = check.errors_are_caught(&r.caught);
    }
  }
  return r;
}

class OpGradients : public testing::TestWithParam<size_t> {};

TEST_P(OpGradients, AgreeWithDifferences) {
  EXPECT_TRUE(result(GetParam()).match);
}

TEST_P(OpGradients, AreNotTakenForRightWhenOffByOnePercent) {
  EXPECT_TRUE(result(GetParam()).errors);
}

INSTANTIATE_TEST_SUITE_P(Cases, OpGradients,
                         testing::Range<size_t>(0, all_cases().size()),
                         [](const testing::TestParamInfo<size_t>& info) {
                           const OpCase& c = all_cases()[info.param];
                           std::string op = c.op;
                           op.erase(std::remove(op.begin(), op.end(), '_'),
                                    op.end());
                           return op + "X" + c.what;
                         });

// --- Coverage

// Functions declared in ops.h, with the comment above each.
std::map<std::string, std::string> declared_ops() {
  std::ifstream file("autograd/ops.h");
  EXPECT_TRUE(file.good());
  std::map<std::string, std::string> ops;
  std::string line, comment;
  bool in_declaration = false;
  while (std::getline(file, line)) {
    if (line.rfind("//", 0) == 0) {
      comment += line.substr(2);
      continue;
    }
    const size_t open = line.find('(');
    if (!in_declaration && open != std::string::npos && line[0] != ' ') {
      const size_t begin = line.find_last_of(" &*", open) + 1;
      ops[line.substr(begin, open - begin)] = comment;
    }
    in_declaration = !line.empty() && line.back() != ';' &&
                     line.back() != '}' && line.back() != '{' &&
                     line[0] != '#' && (in_declaration || open != line.npos);
    comment.clear();
  }
  return ops;
}

// What has no gradient, by the words that ops.h says it with.
const std::map<std::string, std::string> kExempt = {
    {"select_keys", "Not differentiable"},
    {"select_all_keys", "Not differentiable"},
    {"choose_experts", "Not differentiable"},
    {"count_experts", "Not differentiable"},
    {"keepable_ops", "by name"},  // a list of ops, none itself
};
// Written with another op's name.
const std::set<std::string> kAliases = {"operator+"};

TEST(Coverage, FindsTheOpsOfTheHeader) {
  const auto ops = declared_ops();
  EXPECT_GE(ops.size(), 27u);
  for (const char* op : {"add", "split", "linear", "head_linear", "embedding",
                         "rope", "indexer_loss", "dispatch", "grouped_linear",
                         "linear_cross_entropy", "count_experts"}) {
    EXPECT_TRUE(ops.count(op)) << op;
  }
}

TEST(Coverage, EveryOpHasACaseOrSaysThatItHasNoGradient) {
  std::set<std::string> checked;
  for (const OpCase& c : all_cases()) checked.insert(c.op);
  const auto ops = declared_ops();
  for (const auto& [op, comment] : ops) {
    if (kAliases.count(op)) continue;
    const auto exempt = kExempt.find(op);
    if (exempt == kExempt.end()) {
      EXPECT_TRUE(checked.count(op)) << op << " of ops.h has no case";
      continue;
    }
    EXPECT_FALSE(checked.count(op)) << op << " is exempt and has a case";
    EXPECT_NE(comment.find(exempt->second), std::string::npos)
        << op << " is exempt, but ops.h says:" << comment;
  }
  for (const auto& [op, words] : kExempt) {
    EXPECT_TRUE(ops.count(op)) << op << " is exempt and not in ops.h";
  }
  for (const std::string& op : checked) {
    EXPECT_TRUE(ops.count(op)) << op << " has cases and is not in ops.h";
  }
}

// What each op gives gradients to: inputs by number, then parameters.
const std::map<std::string, std::pair<int, int>> kContributions = {
    {"add", {2, 0}},
    {"attach", {2, 0}},
    {"attention", {3, 0}},
    {"balance_loss", {1, 0}},
    {"cast", {1, 0}},
    {"combine", {2, 0}},
    {"concat", {3, 0}},
    {"dispatch", {1, 0}},
    {"embedding", {0, 1}},
    {"expand_heads", {1, 0}},
    {"grouped_linear", {1, 1}},
    {"head_linear", {1, 1}},
    {"indexer_loss", {3, 0}},
    {"layer_norm", {1, 2}},
    {"linear", {1, 1}},
    {"linear_cross_entropy", {1, 1}},
    {"mul", {2, 0}},
    {"reshape", {1, 0}},
    {"rms_norm", {1, 1}},
    {"router_logits", {1, 1}},
    {"rope", {1, 0}},
    {"routed_swiglu", {1, 0}},
    {"router_weights", {1, 0}},
    {"scale", {1, 0}},
    {"sparse_attention", {2, 0}},
    {"split", {1, 0}},
    {"sum", {1, 0}},
    {"swiglu", {1, 0}},
    {"z_loss", {1, 0}},
};

TEST(Coverage, EveryContributionOfEveryOpWasScaledAndCaught) {
  std::map<std::string, std::set<int>> inputs;
  std::map<std::string, std::set<int>> parameters;
  std::set<std::string> checked;
  for (size_t i = 0; i < all_cases().size(); ++i) {
    checked.insert(all_cases()[i].op);
    // Parameters are numbered by case: those of single-op cases are the op's.
    const bool single = all_cases()[i].what != "WholeModel";
    for (const Contribution& c : result(i).caught) {
      if (c.input >= 0) inputs[c.op].insert(c.input);
      if (c.parameter >= 0 && single) parameters[c.op].insert(c.parameter);
    }
  }
  for (const std::string& op : checked) {
    const auto expected = kContributions.find(op);
    ASSERT_NE(expected, kContributions.end()) << op;
    for (int i = 0; i < expected->second.first; ++i) {
      EXPECT_TRUE(inputs[op].count(i)) << op << " input " << i;
    }
    for (int p = 0; p < expected->second.second; ++p) {
      EXPECT_TRUE(parameters[op].count(p)) << op << " parameter " << p;
    }
  }
}

}  // namespace
}  // namespace tapeline
