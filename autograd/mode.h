// What recording an op means right now: per-thread, scoped, restored by RAII.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace tapeline {

namespace internal {
// Another value for a variable until the scope ends.
template <class T>
class Scoped {
 public:
  Scoped(T& variable, T value)
      : variable_(variable), before_(std::exchange(variable, value)) {}
  ~Scoped() { variable_ = before_; }
  Scoped(const Scoped&) = delete;
  Scoped& operator=(const Scoped&) = delete;

 protected:
  const T& before() const { return before_; }

 private:
  T& variable_;
  const T before_;
};
}  // namespace internal

// kOff     ops compute and nothing else.
// kShadow  requires-grad bits propagate, nothing is recorded: the first pass of
//          a checkpoint.
// kOn      ops are recorded on the current tape; without one, as kOff.
enum class GradMode : uint8_t { kOff, kShadow, kOn };

namespace internal {
// Read by every op: no call, and nothing to initialize.
inline constinit thread_local GradMode current_mode = GradMode::kOn;
inline constinit thread_local int current_site = 0;
inline constinit thread_local uint32_t current_scope = 0;
}  // namespace internal

inline GradMode grad_mode() { return internal::current_mode; }

class GradModeScope : internal::Scoped<GradMode> {
 public:
  explicit GradModeScope(GradMode mode)
      : Scoped(internal::current_mode, mode) {}
};

// Where a parameter is used. A parameter used at several places (a tied head,
// a shared prediction layer) has one gradient accumulator per site; they are
// added in site order, so the sum does not depend on how stages are split.
inline int use_site() { return internal::current_site; }

class UseSite : internal::Scoped<int> {
 public:
  explicit UseSite(int site) : Scoped(internal::current_site, site) {}
};

// Names the part of the model that runs, for reports: layers.3.mlp. Entering a
// path for the first time copies its name, later entries allocate nothing.
class LayerScope : internal::Scoped<uint32_t> {
 public:
  explicit LayerScope(std::string_view name);
  LayerScope(std::string_view name, int index);
};

// The current path, as a number that fits in a node, and its text.
inline uint32_t layer_scope() { return internal::current_scope; }
std::string layer_path(uint32_t scope);

namespace internal {
// Back at a path that was current before: a replay.
class LayerScopeAt : Scoped<uint32_t> {
 public:
  explicit LayerScopeAt(uint32_t scope) : Scoped(current_scope, scope) {}
};
}  // namespace internal

}  // namespace tapeline
