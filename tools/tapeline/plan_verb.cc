// tapeline plan: what a run keeps, recomputes and offloads, before it runs.

#include <iostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/config/config.h"
#include "tools/tapeline/verbs.h"
#include "tools/train/plan.h"
#include "tools/train/run_options.h"

namespace tapeline {

int plan_verb(const Arguments& arguments) {
  std::string config;
  std::vector<std::string> sets;
  bool json = false;
  Flags flags("plan");
  flags.add("config", &config, "F", "TOML file (required)");
  flags.add("set", &sets, "KEY=VALUE", "over the file's value; repeatable");
  flags.add("json", &json, "", "print the plan as JSON");
  const absl::StatusOr<bool> parsed = parse_or_help(flags, arguments);
  if (!parsed.ok()) return fail(kExitUsage, parsed.status());
  if (!*parsed) return end_output();
  if (config.empty()) {
    return fail(kExitUsage, "--config is missing; give a TOML file");
  }
  const absl::StatusOr<Config> loaded = load_config(config_path(config), sets);
  if (!loaded.ok()) return fail(kExitBadInput, loaded.status());
  if (const absl::Status status = check_settings(*loaded); !status.ok()) {
    return fail(kExitBadInput, status);
  }
  const absl::StatusOr<RunPlan> plan =
      plan_run(*loaded, user_path(loaded->model.path));
  if (!plan.ok()) return fail(kExitBadInput, plan.status());
  std::cout << (json ? to_json(*plan).dump() + "\n" : to_text(*plan));
  return end_output();
}

}  // namespace tapeline
