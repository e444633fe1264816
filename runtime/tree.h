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
// fields_complete), nor does a struct with FIELDS and a member that is a
// reference to what may change. The guard does not look into members without
// FIELDS beyond their first; a variant of parts is not a part, use optionals.
#pragma once

#include <algorithm>
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

namespace internal {

template <class T>
inline constexpr bool is_leaf =
    std::is_same_v<T, Parameter> || std::is_same_v<T, Buffer> ||
    std::is_same_v<T, Tensor>;
template <class T>
inline constexpr bool has_fields = requires {
  T::kFieldNames;
};
template <class T>
inline constexpr bool is_part = is_leaf<T> || has_fields<T>;
template <class T>
inline constexpr bool is_part<std::vector<T>> = is_part<T>;
template <class T>
inline constexpr bool is_part<std::optional<T>> = is_part<T>;
template <class T>
inline constexpr bool is_part<Layers<T>> = is_part<T>;

// Stands for a member in T's braces: converts to any type, or to any part, but
// not to T itself, which would be a copy.
template <class T, bool kPart>
struct AnyMember {
  template <class U>
  requires(!std::is_same_v<U, T> && (!kPart || is_part<U>)) operator U() const;
};
// Whether T has as many members as there are I, of which number kPart, if there
// is one, is a part.
template <class T, size_t kPart, size_t... I>
constexpr bool has_members(std::index_sequence<I...>) {
  return requires { T{AnyMember<T, I == kPart>{}...}; };
}
template <class T, size_t... N>
constexpr size_t member_count(std::index_sequence<N...>) {
  return std::max({N * has_members<T, N>(std::make_index_sequence<N>())...});
}
template <class T>
constexpr bool fields_complete() {
  constexpr size_t kMax = 16;
  constexpr size_t n = member_count<T>(std::make_index_sequence<kMax + 2>());
  static_assert(n <= kMax, "split the struct: too many members");
  using Members = std::make_index_sequence<n>;
  const auto count_parts = []<size_t... I>(std::index_sequence<I...>) {
    return (size_t{0} + ... + size_t{has_members<T, I>(Members())});
  };
  using Fields = decltype(std::declval<T&>().fields());
  return count_parts(Members()) == std::tuple_size_v<Fields>;
}

// The i-th of "a, b, c".
constexpr std::string_view field_name(std::string_view names, size_t i) {
  for (; i > 0; --i) {
    names.remove_prefix(names.find(',') + 1);
    while (names.starts_with(' ')) names.remove_prefix(1);
  }
  return names.substr(0, names.find(','));
}

// A path for who asks for none.
struct NoPath {};
NoPath join(NoPath, const auto&) { return {}; }
inline std::string join(const std::string& path, std::string_view name) {
  return path.empty() ? std::string(name) : path + "." + std::string(name);
}
inline std::string join(const std::string& path, int index) {
  return join(path, std::to_string(index));
}

// Calls f(path, leaf&) for every leaf; items are numbered from `first` on.
template <class T, class Path, class F>
void walk(T& part, const Path& path, F& f, int first = 0) {
  using U = std::remove_const_t<T>;
  static_assert(is_part<U>, "not a part: add FIELDS to this struct");
  if constexpr (is_leaf<U>) {
    f(path, part);
  } else if constexpr (has_fields<U>) {
    static_assert(fields_complete<U>(), "a part is missing from FIELDS");
    size_t i = 0;
    const auto walk_all = [&](auto&... field) {
      (walk(field, join(path, field_name(U::kFieldNames, i++)), f), ...);
    };
    std::apply(walk_all, part.fields());
  } else if constexpr (requires { part.has_value(); }) {
    if (part) walk(*part, path, f);
  } else if constexpr (requires { part.items; }) {
    walk(part.items, path, f, part.first);
  } else {
    for (auto& item : part) walk(item, join(path, first++), f);
  }
}

}  // namespace internal

// Calls f(path, leaf&) for every leaf.
template <class T, class F>
void visit(T& tree, F&& f) {
  internal::walk(tree, std::string(), f);
}

// Calls f(leaf&) for every leaf, in the order of visit().
template <class T, class F>
void visit_leaves(T& tree, F&& f) {
  const auto without_path = [&](internal::NoPath, auto& leaf) { f(leaf); };
  internal::walk(tree, internal::NoPath(), without_path);
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

}  // namespace tapeline
