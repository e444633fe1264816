// How a Config and its table are shown: --print_config and docs/config.md.

#include <cmath>

#include "runtime/check.h"
#include "runtime/toml.h"
#include "tools/config/config.h"
#include "tools/config/settings.h"

namespace tapeline {
namespace {

template <class T>
Json to_json(const T& value) {
  return Json(value);
}
Json to_json(const std::vector<std::string>& values) {
  Json::Array array;
  for (const std::string& value : values) array.emplace_back(value);
  return Json(std::move(array));
}

// "train.steps" -> {"train", "steps"}; "seed" -> {"", "seed"}.
std::pair<std::string, std::string> section_and_name(const std::string& key) {
  const size_t dot = key.find('.');
  if (dot == std::string::npos) return {"", key};
  return {key.substr(0, dot), key.substr(dot + 1)};
}

std::string origin_of(const Config& config, const std::string& key) {
  const auto found = config.origins.find(key);
  if (found == config.origins.end()) return "default";
  std::string text = found->second;
  for (char& c : text) {
    // A comment ends with the line.
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text;
}

// Leaves of [model] in order, as dotted keys.
void print_model(const Config& config, const Json& value,
                 std::vector<std::string>& path, std::string& out) {
  if (value.is_object() && (!value.object().empty() || path.size() == 1)) {
    for (const auto& [key, member] : value.object()) {
      path.push_back(key);
      print_model(config, member, path, out);
      path.pop_back();
    }
    return;
  }
  const std::vector<std::string> below(path.begin() + 1, path.end());
  out += toml_key(below) + " = " + toml_value(value) + "  # " +
         origin_of(config, toml_key(path)) + "\n";
}

template <class T>
std::string_view type_name(const T&) {
  if constexpr (std::is_same_v<T, int64_t>) return "integer";
  if constexpr (std::is_same_v<T, double>) return "number";
  if constexpr (std::is_same_v<T, bool>) return "boolean";
  if constexpr (std::is_same_v<T, std::string>) return "string";
  return "strings";
}

std::string bound(double value) {
  const auto whole = static_cast<int64_t>(value);
  return static_cast<double>(whole) == value ? std::to_string(whole)
                                             : json_number(value);
}

std::string limits_text(const Limits& limits) {
  std::string out;
  for (std::string_view choice : limits.choices) {
    if (!out.empty()) out += ", ";
    out += "`";
    out += choice;
    out += "`";
  }
  if (std::isfinite(limits.least)) {
    out += (limits.open_least ? "> " : ">= ") + bound(limits.least);
  }
  if (std::isfinite(limits.most)) {
    if (!out.empty()) out += ", ";
    out += (limits.open_most ? "< " : "<= ") + bound(limits.most);
  }
  return out;
}

}  // namespace

std::string print_config(const Config& config) {
  std::string out, section;
  visit_settings(config, [&](const char* key, const auto& value, const Limits&,
                             const char*) {
    const auto [next, name] = section_and_name(key);
    if (next != section) out += "\n[" + next + "]\n";
    section = next;
    out += name + " = " + toml_value(to_json(value)) + "  # " +
           origin_of(config, key) + "\n";
    if (std::string_view(key) == "model.path") {
      std::vector<std::string> path = {"model"};
      print_model(config, config.model.keys, path, out);
    }
  });
  return out;
}

std::string config_markdown() {
  std::string out =
      "# Settings\n\n"
      "A run is described by a TOML file (`--config FILE`). "
      "`extends = \"base.toml\"`, relative\n"
      "to the file, reads another one first; `--set key=value` comes last and "
      "may be repeated.\n"
      "The value is TOML, or a string where it is none. `--print_config` shows "
      "every value and\n"
      "where it came from. An unknown key is an error.\n\n"
      "Keys below `[model]` are those of a Hugging Face `config.json`; with "
      "`model.path` they\n"
      "override the folder's.\n";
  const Config defaults;
  std::string section = "?";
  visit_settings(defaults, [&](const char* key, const auto& value,
                               const Limits& limits, const char* meaning) {
    const std::string next = section_and_name(key).first;
    if (next != section) {
      out += "\n## " + (next.empty() ? "Top level" : "[" + next + "]") +
             "\n\n| key | type | default | range | meaning |\n"
             "|---|---|---|---|---|\n";
    }
    section = next;
    out += "| `" + std::string(key) + "` | " + std::string(type_name(value)) +
           " | `" + toml_value(to_json(value)) + "` | " + limits_text(limits) +
           " | " + meaning + " |\n";
  });
  return out;
}

}  // namespace tapeline
