// What recording an op means right now: per-thread, scoped, restored by RAII.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tapeline {

// kOff     ops compute and nothing else.
// kShadow  requires-grad bits propagate, nothing is recorded: the first pass of
//          a checkpoint.
// kOn      ops are recorded on the current tape; without one, as kOff.
enum class GradMode : uint8_t { kOff, kShadow, kOn };

GradMode grad_mode();

class GradModeScope {
 public:
  explicit GradModeScope(GradMode mode);
  ~GradModeScope();
  GradModeScope(const GradModeScope&) = delete;
  GradModeScope& operator=(const GradModeScope&) = delete;

 private:
  GradMode previous_;
};

// Where a parameter is used. A parameter used at several places (a tied head,
// a shared prediction layer) has one gradient accumulator per site; they are
// added in site order, so the sum does not depend on how stages are split.
int use_site();

class UseSite {
 public:
  explicit UseSite(int site);
  ~UseSite();
  UseSite(const UseSite&) = delete;
  UseSite& operator=(const UseSite&) = delete;

 private:
  int previous_;
};

// Names the part of the model that runs, for reports: layers.3.mlp. Entering a
// path for the first time copies its name, later entries allocate nothing.
class LayerScope {
 public:
  explicit LayerScope(std::string_view name);
  LayerScope(std::string_view name, int index);
  ~LayerScope();
  LayerScope(const LayerScope&) = delete;
  LayerScope& operator=(const LayerScope&) = delete;

 private:
  uint32_t previous_;
};

// The current path, as a number that fits in a node, and its text.
uint32_t layer_scope();
std::string layer_path(uint32_t scope);

namespace internal {
// Back at a path that was current before: a replay.
class LayerScopeAt {
 public:
  explicit LayerScopeAt(uint32_t scope);
  ~LayerScopeAt();
  LayerScopeAt(const LayerScopeAt&) = delete;
  LayerScopeAt& operator=(const LayerScopeAt&) = delete;

 private:
  uint32_t previous_;
};
}  // namespace internal

}  // namespace tapeline
