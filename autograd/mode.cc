#include "autograd/mode.h"

#include <mutex>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace tapeline {
namespace {

thread_local GradMode current_mode = GradMode::kOn;
thread_local int current_site = 0;
thread_local uint32_t current_scope = 0;

// Every path ever entered: a trie of (parent, name). Small: one entry per
// layer part of the models in the process.
struct ScopeTable {
  std::mutex mutex;
  std::vector<std::pair<uint32_t, std::string>> entries = {{0, ""}};
  absl::flat_hash_map<std::pair<uint32_t, std::string>, uint32_t> ids;
};
ScopeTable& scope_table() {
  static ScopeTable& table = *new ScopeTable;
  return table;
}

uint32_t enter(uint32_t parent, std::string name) {
  ScopeTable& table = scope_table();
  std::lock_guard lock(table.mutex);
  auto [entry, fresh] = table.ids.try_emplace(
      {parent, std::move(name)}, static_cast<uint32_t>(table.entries.size()));
  if (fresh) table.entries.emplace_back(parent, entry->first.second);
  return entry->second;
}

}  // namespace

GradMode grad_mode() { return current_mode; }
GradModeScope::GradModeScope(GradMode mode) : previous_(current_mode) {
  current_mode = mode;
}
GradModeScope::~GradModeScope() { current_mode = previous_; }

int use_site() { return current_site; }
UseSite::UseSite(int site) : previous_(current_site) { current_site = site; }
UseSite::~UseSite() { current_site = previous_; }

LayerScope::LayerScope(std::string_view name) : previous_(current_scope) {
  current_scope = enter(previous_, std::string(name));
}
LayerScope::LayerScope(std::string_view name, int index)
    : previous_(current_scope) {
  current_scope =
      enter(previous_, std::string(name) + "." + std::to_string(index));
}
LayerScope::~LayerScope() { current_scope = previous_; }

uint32_t layer_scope() { return current_scope; }

std::string layer_path(uint32_t scope) {
  ScopeTable& table = scope_table();
  std::lock_guard lock(table.mutex);
  std::string path;
  for (; scope != 0; scope = table.entries[scope].first) {
    const std::string& name = table.entries[scope].second;
    path = path.empty() ? name : name + "." + path;
  }
  return path;
}

}  // namespace tapeline
