// Trees: structs whose parts can be walked by name.
//
//   struct Block {
//     int dim;
//     RmsNorm norm{dim};
//     std::optional<Linear> gate;
//     FIELDS(norm, gate);
//   };
//
// A part is a Parameter, a Buffer, a Tensor, a struct with FIELDS, or a vector,
// optional or Layers of parts. visit(tree, f) calls f(path, leaf) depth first
// in FIELDS order; paths read like `blocks.0.norm.weight`. Modules are trees of
// Parameters and Buffers, a checkpoint's inputs and outputs trees of Tensors.
// A part that is missing from FIELDS does not compile (internal::
// fields_complete); a variant of parts is not a part, use optionals.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "runtime/parameter.h"
#include "runtime/tensor.h"

#define FIELDS(...)                                     \
  auto fields() { return std::tie(__VA_ARGS__); }       \
  auto fields() const { return std::tie(__VA_ARGS__); } \
  static constexpr std::string_view kFieldNames = #__VA_ARGS__

namespace tapeline {

// A run of layers that keeps its global numbering whatever a stage owns.
template <class T>
struct Layers {
  int first = 0;
  std::vector<T> items;
};

template <class M>
concept HasFields = requires(M m) {
  std::remove_cvref_t<M>::kFieldNames;
  m.fields();
};

namespace internal {

template <class T>
inline constexpr bool is_leaf =
    std::is_same_v<T, Parameter> || std::is_same_v<T, Buffer> ||
    std::is_same_v<T, Tensor>;
template <class T>
struct IsPart : std::bool_constant<is_leaf<T> || HasFields<T>> {};
template <class T>
struct IsPart<std::vector<T>> : IsPart<T> {};
template <class T>
struct IsPart<std::optional<T>> : IsPart<T> {};
template <class T>
struct IsPart<Layers<T>> : IsPart<T> {};

// Converts to any member type but T itself, so that brace-initialising T with
// n of these counts members and not copies.
template <class T>
struct AnyMember {
  template <class U>
  requires(!std::is_same_v<std::remove_cvref_t<U>, T>) constexpr operator U&()
      const& noexcept;
  template <class U>
  requires(!std::is_same_v<std::remove_cvref_t<U>, T>) constexpr operator U&&()
      const&& noexcept;
};
template <class T, size_t... I>
constexpr bool initializes(std::index_sequence<I...>) {
  return requires { T{(static_cast<void>(I), AnyMember<T>{})...}; };
}
inline constexpr size_t kMaxMembers = 16;
template <class T, size_t N = kMaxMembers>
constexpr size_t member_count() {
  if constexpr (N == 0) {
    return 0;
  } else if constexpr (initializes<T>(std::make_index_sequence<N>())) {
    return N;
  } else {
    return member_count<T, N - 1>();
  }
}

// The types of T's members, as a tuple pointer; never evaluated.
template <class T>
auto member_types(T& t) {
  constexpr size_t n = member_count<std::remove_const_t<T>>();
#define TAPELINE_MEMBERS(count, ...)                              \
  if constexpr (n == count) {                                     \
    auto& [__VA_ARGS__] = t;                                      \
    return std::type_identity<decltype(std::tie(__VA_ARGS__))>{}; \
  } else
  TAPELINE_MEMBERS(1, a)
  TAPELINE_MEMBERS(2, a, b)
  TAPELINE_MEMBERS(3, a, b, c)
  TAPELINE_MEMBERS(4, a, b, c, d)
  TAPELINE_MEMBERS(5, a, b, c, d, e)
  TAPELINE_MEMBERS(6, a, b, c, d, e, f)
  TAPELINE_MEMBERS(7, a, b, c, d, e, f, g)
  TAPELINE_MEMBERS(8, a, b, c, d, e, f, g, h)
  TAPELINE_MEMBERS(9, a, b, c, d, e, f, g, h, i)
  TAPELINE_MEMBERS(10, a, b, c, d, e, f, g, h, i, j)
  TAPELINE_MEMBERS(11, a, b, c, d, e, f, g, h, i, j, k)
  TAPELINE_MEMBERS(12, a, b, c, d, e, f, g, h, i, j, k, l)
  TAPELINE_MEMBERS(13, a, b, c, d, e, f, g, h, i, j, k, l, m)
  TAPELINE_MEMBERS(14, a, b, c, d, e, f, g, h, i, j, k, l, m, o)
  TAPELINE_MEMBERS(15, a, b, c, d, e, f, g, h, i, j, k, l, m, o, p)
  TAPELINE_MEMBERS(16, a, b, c, d, e, f, g, h, i, j, k, l, m, o, p, q)
  static_assert(n <= kMaxMembers, "split the struct: too many members");
#undef TAPELINE_MEMBERS
}
template <class... T>
constexpr size_t count_parts(std::type_identity<std::tuple<T&...>>) {
  return (size_t{0} + ... + IsPart<std::remove_const_t<T>>::value);
}
template <class M>
constexpr bool fields_complete() {
  using Types = decltype(member_types(std::declval<M&>()));
  return count_parts(Types{}) ==
         std::tuple_size_v<decltype(std::declval<M&>().fields())>;
}

// The i-th of "a, b, c".
constexpr std::string_view field_name(std::string_view names, size_t i) {
  for (; i > 0; --i) {
    names.remove_prefix(names.find(',') + 1);
    while (!names.empty() && (names[0] == ' ' || names[0] == '\n')) {
      names.remove_prefix(1);
    }
  }
  return names.substr(0, names.find(','));
}

inline std::string join(const std::string& path, std::string_view name) {
  return path.empty() ? std::string(name) : path + "." + std::string(name);
}

template <class T, class F>
void visit_at(T& part, const std::string& path, F& f);

template <class V, class F>
void visit_items(V& items, int first, const std::string& path, F& f) {
  for (size_t i = 0; i < items.size(); ++i) {
    visit_at(items[i], join(path, std::to_string(first + static_cast<int>(i))),
             f);
  }
}

template <class T>
struct IsVector : std::false_type {};
template <class T>
struct IsVector<std::vector<T>> : std::true_type {};
template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};
template <class T>
struct IsLayers : std::false_type {};
template <class T>
struct IsLayers<Layers<T>> : std::true_type {};

template <class T, class F>
void visit_at(T& part, const std::string& path, F& f) {
  using U = std::remove_const_t<T>;
  if constexpr (is_leaf<U>) {
    f(path, part);
  } else if constexpr (IsVector<U>::value) {
    visit_items(part, 0, path, f);
  } else if constexpr (IsLayers<U>::value) {
    visit_items(part.items, part.first, path, f);
  } else if constexpr (IsOptional<U>::value) {
    if (part) visit_at(*part, path, f);
  } else {
    static_assert(HasFields<U>, "not a part: add FIELDS to this struct");
    static_assert(fields_complete<U>(),
                  "a Parameter, Buffer, Tensor or module member is missing "
                  "from FIELDS");
    auto fields = part.fields();
    [&]<size_t... I>(std::index_sequence<I...>) {
      (visit_at(std::get<I>(fields), join(path, field_name(U::kFieldNames, I)),
                f),
       ...);
    }
    (std::make_index_sequence<std::tuple_size_v<decltype(fields)>>());
  }
}

// visit_at without paths.
template <class T, class F>
void each_at(T& part, F& f) {
  using U = std::remove_const_t<T>;
  if constexpr (is_leaf<U>) {
    f(part);
  } else if constexpr (IsVector<U>::value) {
    for (auto& item : part) each_at(item, f);
  } else if constexpr (IsLayers<U>::value) {
    for (auto& item : part.items) each_at(item, f);
  } else if constexpr (IsOptional<U>::value) {
    if (part) each_at(*part, f);
  } else {
    static_assert(HasFields<U>, "not a part: add FIELDS to this struct");
    static_assert(fields_complete<U>(),
                  "a Parameter, Buffer, Tensor or module member is missing "
                  "from FIELDS");
    auto fields = part.fields();
    std::apply([&](auto&... member) { (each_at(member, f), ...); }, fields);
  }
}

}  // namespace internal

// Calls f(leaf&) for every leaf, in the order of visit().
template <class T, class F>
void visit_leaves(T& tree, F&& f) {
  internal::each_at(tree, f);
}

// Calls f(path, leaf&) for every leaf.
template <class T, class F>
void visit(T& tree, F&& f, const std::string& path = "") {
  internal::visit_at(tree, path, f);
}

template <class M>
std::vector<std::pair<std::string, Parameter*>> parameters(M& module) {
  std::vector<std::pair<std::string, Parameter*>> out;
  visit(module, [&](const std::string& path, auto& leaf) {
    if constexpr (std::is_same_v<decltype(leaf), Parameter&>) {
      out.emplace_back(path, &leaf);
    }
  });
  return out;
}

template <class M>
std::vector<std::pair<std::string, Buffer*>> buffers(M& module) {
  std::vector<std::pair<std::string, Buffer*>> out;
  visit(module, [&](const std::string& path, auto& leaf) {
    if constexpr (std::is_same_v<decltype(leaf), Buffer&>) {
      out.emplace_back(path, &leaf);
    }
  });
  return out;
}

// Every tensor of a tree in visit order, and the tree's structure as text: two
// trees of one type with equal structure hold the same leaves.
template <class T>
std::vector<Tensor*> flatten(T& tree, std::string* structure = nullptr) {
  std::vector<Tensor*> leaves;
  visit(tree, [&](const std::string& path, auto& leaf) {
    if constexpr (std::is_same_v<decltype(leaf), Tensor&>) {
      leaves.push_back(&leaf);
      if (structure != nullptr) *structure += path + ";";
    }
  });
  return leaves;
}

}  // namespace tapeline
