#include "runtime/tree.h"

#include <array>
#include <functional>
#include <memory>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

using internal::field_name;
using internal::fields_complete;

struct Leafy {
  int64_t dim = 2;
  Parameter weight{{dim}};
  Buffer bias{{dim}};
  FIELDS(weight, bias);
};
struct Plain {
  double factor = 1;
  std::vector<int> table;
};
struct Module {
  std::string name;
  Plain plain;
  std::shared_ptr<const Plain> shared;
  std::function<int()> function;
  Leafy one;
  std::vector<int> numbers;
  std::optional<double> number;
  std::vector<Leafy> several = std::vector<Leafy>(2);
  std::optional<Leafy> absent, present = Leafy();
  Layers<Leafy> layers{3, std::vector<Leafy>(2)};
  bool last = false;
  // clang-format off
  FIELDS(one,several,
         absent,  present, layers);
  // clang-format on
};
struct Tensors {
  Tensor a, b;
  int count = 0;
  std::vector<Tensor> rest;
  FIELDS(a, b, rest);
};

static_assert(fields_complete<Leafy>());
static_assert(fields_complete<Module>());
static_assert(fields_complete<Tensors>());

// Every kind of part is missed.
template <class T>
struct Forgets {
  Parameter first;
  int number = 0;
  T forgotten;
  FIELDS(first);
};
static_assert(!fields_complete<Forgets<Parameter>>());
static_assert(!fields_complete<Forgets<Buffer>>());
static_assert(!fields_complete<Forgets<Tensor>>());
static_assert(!fields_complete<Forgets<Leafy>>());
static_assert(!fields_complete<Forgets<std::vector<Leafy>>>());
static_assert(!fields_complete<Forgets<std::optional<Parameter>>>());
static_assert(!fields_complete<Forgets<Layers<Leafy>>>());
static_assert(
    !fields_complete<Forgets<std::vector<std::optional<Parameter>>>>());
static_assert(fields_complete<Forgets<int>>());
static_assert(fields_complete<Forgets<std::vector<int>>>());
static_assert(fields_complete<Forgets<std::optional<Plain>>>());
static_assert(fields_complete<Forgets<std::function<Tensor()>>>());
static_assert(fields_complete<Forgets<std::array<int, 3>>>());
static_assert(fields_complete<Forgets<Shape>>());

// A struct of parts without FIELDS is told by its first member.
struct Bag {
  Tensor tensor;
  int number = 0;
};
static_assert(!fields_complete<Forgets<Bag>>());

struct ForgetsTheFirst {
  Leafy forgotten;
  Parameter second;
  FIELDS(second);
};
static_assert(!fields_complete<ForgetsTheFirst>());
struct Owner {
  std::unique_ptr<int> owned;
  const Leafy& constant;
  Parameter own;
  FIELDS(constant, own);
};
static_assert(fields_complete<Owner>());
struct Empty {
  FIELDS();
};
static_assert(fields_complete<Empty>());

TEST(Tree, FieldNamesAreThoseOfTheMembers) {
  EXPECT_EQ(field_name("a, bc,d", 0), "a");
  EXPECT_EQ(field_name("a, bc,d", 1), "bc");
  EXPECT_EQ(field_name("a, bc,d", 2), "d");
}

TEST(Tree, VisitsLeavesInOrderWithTheirPaths) {
  Module module;
  std::vector<std::string> paths;
  std::vector<const void*> leaves;
  visit(module, [&](const std::string& path, auto& leaf) {
    paths.push_back(path);
    leaves.push_back(&leaf);
  });
  EXPECT_EQ(paths, (std::vector<std::string>{
                       "one.weight", "one.bias", "several.0.weight",
                       "several.0.bias", "several.1.weight", "several.1.bias",
                       "present.weight", "present.bias", "layers.3.weight",
                       "layers.3.bias", "layers.4.weight", "layers.4.bias"}));
  std::vector<const void*> without_paths;
  const Module& constant = module;
  visit_leaves(constant,
               [&](const auto& leaf) { without_paths.push_back(&leaf); });
  EXPECT_EQ(without_paths, leaves);
}

TEST(Tree, ParametersAreNoBuffers) {
  Module module;
  std::vector<std::string> paths;
  for (const auto& [path, parameter] : parameters(module)) {
    paths.push_back(path);
    EXPECT_EQ(parameter->shape, (Shape{2}));
  }
  EXPECT_EQ(paths,
            (std::vector<std::string>{"one.weight", "several.0.weight",
                                      "several.1.weight", "present.weight",
                                      "layers.3.weight", "layers.4.weight"}));
}

TEST(Tree, ALeafIsATreeWithoutAPath) {
  Tensor leaf;
  visit(leaf, [&](const std::string& path, Tensor& at) {
    EXPECT_EQ(path, "");
    EXPECT_EQ(&at, &leaf);
  });
  std::vector<Tensor> items(2);
  std::string paths;
  visit(items, [&](const std::string& path, Tensor&) { paths += path + ";"; });
  EXPECT_EQ(paths, "0;1;");
}

}  // namespace
}  // namespace tapeline
