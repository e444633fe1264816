#include "autograd/mode.h"

#include <deque>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace tapeline {
namespace {

// Every path ever entered: a trie of (parent, name). Small: one entry per
// layer part of the models in the process.
using Step = std::pair<uint32_t, std::string_view>;
struct ScopeTable {
  std::mutex mutex;
  std::deque<std::string> names;  // what steps view; never moves
  std::vector<Step> steps = {{0, ""}};
  absl::flat_hash_map<Step, uint32_t> ids;
};
ScopeTable& scope_table() {
  static ScopeTable& table = *new ScopeTable;
  return table;
}

uint32_t enter(uint32_t parent, std::string_view name) {
  ScopeTable& table = scope_table();
  std::lock_guard lock(table.mutex);
  if (auto known = table.ids.find(Step(parent, name));
      known != table.ids.end()) {
    return known->second;
  }
  const auto id = static_cast<uint32_t>(table.steps.size());
  table.steps.emplace_back(parent, table.names.emplace_back(name));
  table.ids.emplace(table.steps.back(), id);
  return id;
}

}  // namespace

LayerScope::LayerScope(std::string_view name)
    : Scoped(internal::current_scope, enter(layer_scope(), name)) {}
LayerScope::LayerScope(std::string_view name, int index)
    : Scoped(internal::current_scope,
             enter(enter(layer_scope(), name), std::to_string(index))) {}

std::string layer_path(uint32_t scope) {
  ScopeTable& table = scope_table();
  std::lock_guard lock(table.mutex);
  std::string path;
  for (; scope != 0; scope = table.steps[scope].first) {
    const std::string name(table.steps[scope].second);
    path = path.empty() ? name : name + "." + path;
  }
  return path;
}

}  // namespace tapeline
