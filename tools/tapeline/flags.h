// Command line flags of a verb.
//
//   Flags flags("generate");
//   flags.add("model", &model, "DIR", "folder of the model");
//   RETURN_IF_ERROR(flags.parse(arguments));
//
// --name=value or --name value; a boolean is --name, --name=true or =false; an
// optional value is taken after '=' alone; a repeatable flag collects. The last
// of several values wins. Everything else, also after --, is an error: no verb
// takes positions except where `positions` is set.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/status.h"

namespace tapeline {

// A flag that may stand without a value: --resume, --resume=PATH.
struct OptionalText {
  bool given = false;
  std::string value;
};

class Flags {
 public:
  explicit Flags(std::string verb) : verb_(std::move(verb)) {}

  using Target = std::variant<std::string*, int64_t*, double*, bool*,
                              std::vector<std::string>*, OptionalText*>;
  // `value` names the value in the help; empty for a boolean.
  void add(std::string name, Target target, std::string value,
           std::string help);
  void set_positions(std::vector<std::string>* positions,
                     std::string description);

  // InvalidArgument, one line, with the nearest known name.
  absl::Status parse(const std::vector<std::string>& arguments);
  std::string help() const;

 private:
  struct Flag {
    std::string name;
    Target target;
    std::string value, help;
  };
  absl::Status set(const Flag& flag, const std::optional<std::string>& text);

  std::string verb_;
  std::vector<Flag> flags_;
  std::vector<std::string>* positions_ = nullptr;
  std::string positions_help_;
};

}  // namespace tapeline
