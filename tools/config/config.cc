#include "tools/config/config.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <limits>
#include <optional>
#include <type_traits>

#include "runtime/edit_distance.h"
#include "runtime/file.h"
#include "runtime/status.h"
#include "runtime/toml.h"
#include "runtime/utf8.h"
#include "tools/config/settings.h"

namespace tapeline {
namespace {

constexpr size_t kMaxBases = 16;

// One value on its way into the Config.
struct Assignment {
  TomlEntry entry;
  std::string where;   // "file:line:column: ", in front of errors
  std::string origin;  // "file:line"
};

absl::Status invalid(std::string text) {
  return absl::InvalidArgumentError(std::move(text));
}

std::string dotted(const std::vector<std::string>& path) {
  return toml_key(path);
}

bool is_model_key(const std::vector<std::string>& path) {
  return path.size() >= 2 && path[0] == "model" &&
         !(path.size() == 2 && path[1] == "path");
}

std::vector<std::string> known_keys() {
  std::vector<std::string> keys;
  Config defaults;
  visit_settings(defaults, [&](const char* key, auto&, const Limits&,
                               const char*) { keys.push_back(key); });
  keys.push_back("extends");
  return keys;
}

// --- one value --------------------------------------------------------------

absl::Status wrong_kind(std::string_view wanted, const Json& got) {
  std::string text(wanted);
  text += ", not ";
  text += got.kind();
  if (!got.is_null()) text += " " + toml_value(got);
  return invalid("must be " + text);
}

absl::Status take(const Json& from, bool& to) {
  if (!from.is_boolean()) return wrong_kind("true or false", from);
  to = from.boolean();
  return absl::OkStatus();
}
absl::Status take(const Json& from, int64_t& to) {
  if (!from.is_integer()) return wrong_kind("an integer", from);
  to = from.integer();
  return absl::OkStatus();
}
absl::Status take(const Json& from, double& to) {
  if (!from.is_number()) return wrong_kind("a number", from);
  to = from.number();
  return absl::OkStatus();
}
absl::Status take(const Json& from, std::string& to) {
  if (!from.is_string()) return wrong_kind("a string", from);
  to = from.string();
  return absl::OkStatus();
}
absl::Status take(const Json& from, std::vector<std::string>& to) {
  if (!from.is_array()) return wrong_kind("an array of strings", from);
  to.clear();
  for (const Json& element : from.array()) {
    if (!element.is_string()) return wrong_kind("an array of strings", from);
    to.push_back(element.string());
  }
  return absl::OkStatus();
}

absl::Status check_number(double value, const Limits& limits) {
  // Written so that NaN fails.
  if (!(limits.open_least ? value > limits.least : value >= limits.least)) {
    return invalid(
        (limits.open_least ? "must be above " : "must be at least ") +
        Json(limits.least).dump());
  }
  if (!(limits.open_most ? value < limits.most : value <= limits.most)) {
    return invalid((limits.open_most ? "must be below " : "must be at most ") +
                   Json(limits.most).dump());
  }
  return absl::OkStatus();
}

absl::Status check_choice(const std::string& value, const Limits& limits) {
  if (limits.choices.empty()) return absl::OkStatus();
  std::vector<std::string> choices(limits.choices.begin(),
                                   limits.choices.end());
  if (std::find(choices.begin(), choices.end(), value) != choices.end()) {
    return absl::OkStatus();
  }
  std::string text = "must be one of";
  for (const std::string& choice : choices) text += " " + choice;
  return invalid(text + suggestion(value, choices));
}

template <class T>
absl::Status assign(const Json& from, const Limits& limits, T& to) {
  RETURN_IF_ERROR(take(from, to));
  if constexpr (std::is_same_v<T, int64_t> || std::is_same_v<T, double>) {
    return check_number(static_cast<double>(to), limits);
  } else if constexpr (std::is_same_v<T, std::string>) {
    return check_choice(to, limits);
  } else {
    return absl::OkStatus();
  }
}

// --- all values -------------------------------------------------------------

void set_model_key(Config& config, const Assignment& from) {
  const std::vector<std::string>& path = from.entry.path;
  Json* place = &config.model.keys;
  for (size_t i = 1; i < path.size(); ++i) {
    if (!place->is_object()) *place = Json::Object();
    place = &(*place)[path[i]];
  }
  *place = from.entry.table ? Json(Json::Object()) : from.entry.value;
  // A table that replaces a value takes its origins with it, and the reverse.
  const std::string key = dotted(path);
  std::erase_if(config.origins, [&](const auto& origin) {
    return origin.first.starts_with(key + ".") ||
           key.starts_with(origin.first + ".");
  });
  config.origins[key] = from.origin;
}

absl::Status unknown_key(const Assignment& from, const std::string& key) {
  const std::vector<std::string> known = known_keys();
  for (const std::string& candidate : known) {
    if (candidate.starts_with(key + ".")) {
      return invalid(from.where + "'" + key + "' is a table; did you mean '" +
                     candidate + "'?");
    }
  }
  if (!from.entry.table) {
    return invalid(from.where + "unknown key '" + key + "'" +
                   suggestion(key, known));
  }
  std::vector<std::string> tables;
  for (const std::string& candidate : known) {
    tables.push_back(candidate.substr(0, candidate.find('.')));
  }
  return invalid(from.where + "unknown table '" + key + "'" +
                 suggestion(key, tables));
}

absl::Status apply(const Assignment& from, Config& config) {
  if (is_model_key(from.entry.path)) {
    set_model_key(config, from);
    return absl::OkStatus();
  }
  const std::string key = dotted(from.entry.path);
  bool found = false, inside = key == "model";
  absl::Status status;
  visit_settings(config, [&](const char* name, auto& value,
                             const Limits& limits, const char*) {
    inside |= std::string_view(name).starts_with(key + ".");
    if (key != name) return;
    found = true;
    status = assign(from.entry.value, limits, value);
  });
  if (from.entry.table && inside) return absl::OkStatus();
  if (!found) return unknown_key(from, key);
  if (!status.ok()) {
    return invalid(from.where + "'" + key + "' " +
                   std::string(status.message()));
  }
  config.origins[key] = from.origin;
  return absl::OkStatus();
}

// --- files ------------------------------------------------------------------

std::string real_path(const std::string& path) {
  char resolved[PATH_MAX];
  return ::realpath(path.c_str(), resolved) != nullptr ? resolved : path;
}

// Appends the assignments of the file's bases and then its own.
absl::Status read_chain(const std::string& path,
                        std::vector<std::string>& open_files,
                        std::vector<Assignment>& out) {
  const std::string real = real_path(path);
  const bool cycle =
      std::find(open_files.begin(), open_files.end(), real) != open_files.end();
  if (cycle || open_files.size() > kMaxBases) {
    return invalid(path + ": extends " +
                   (cycle ? "itself, by way of " + open_files.back()
                          : "more than 16 files deep"));
  }
  open_files.push_back(real);
  ASSIGN_OR_RETURN(const std::vector<TomlEntry> entries, read_toml(path));
  std::vector<Assignment> own;
  for (const TomlEntry& entry : entries) {
    const std::string line = path + ":" + std::to_string(entry.line);
    const std::string where = line + ":" + std::to_string(entry.column) + ": ";
    if (entry.path != std::vector<std::string>{"extends"}) {
      own.push_back({entry, where, line});
      continue;
    }
    if (!entry.value.is_string()) {
      return invalid(where + "'extends' must be the name of a file");
    }
    const std::string base = join_path(parent_path(path), entry.value.string());
    const absl::Status read = read_chain(base, open_files, out);
    if (absl::IsNotFound(read)) {
      return invalid(where + std::string(read.message()));
    }
    RETURN_IF_ERROR(read);
  }
  out.insert(out.end(), own.begin(), own.end());
  open_files.pop_back();
  return absl::OkStatus();
}

// --- --set ------------------------------------------------------------------

bool wants_string(const std::string& key) {
  bool wants = false;
  Config defaults;
  visit_settings(
      defaults, [&](const char* name, auto& value, const Limits&, const char*) {
        if (key == name) {
          wants = std::is_same_v<std::decay_t<decltype(value)>, std::string>;
        }
      });
  return wants;
}

// Text that is no TOML value but can only be meant as a string.
bool is_bare(std::string_view text) {
  return !text.empty() &&
         text.find_first_of("\"'[]{},\n\r") == std::string_view::npos;
}

absl::Status read_set(const std::string& text, std::vector<Assignment>& out) {
  const std::string name = "--set " + text;
  const size_t equals = text.find('=');
  if (equals == std::string::npos) {
    return invalid(name + ": needs key=value");
  }
  const std::string key_text = text.substr(0, equals);
  const std::string value_text = text.substr(equals + 1);
  const auto key = parse_toml(key_text + " = 0", name);
  if (!key.ok() || key->size() != 1) {
    return invalid(name + ": '" + key_text + "' is no key");
  }
  if (utf8_error(text) != std::string::npos) {
    return invalid(name + ": is not UTF-8");
  }
  TomlEntry whole = key->front();
  whole.value = Json(value_text);
  std::vector<TomlEntry> entries = {whole};
  const bool quoted =
      value_text.starts_with('"') || value_text.starts_with('\'');
  if (quoted || !wants_string(dotted(whole.path))) {
    auto parsed = parse_toml(key_text + " = " + value_text, name);
    if (parsed.ok()) {
      entries = *std::move(parsed);
    } else if (!is_bare(value_text)) {
      return parsed.status();
    }
  }
  for (TomlEntry& entry : entries) {
    const bool below =
        entry.path.size() >= whole.path.size() &&
        std::equal(whole.path.begin(), whole.path.end(), entry.path.begin());
    if (!below) return invalid(name + ": sets more than one key");
    out.push_back({std::move(entry), name + ": ", "--set"});
  }
  return absl::OkStatus();
}

// --- the whole --------------------------------------------------------------

// A name that is one folder, here and in any shell.
bool is_plain_name(const std::string& name) {
  return !name.empty() && name.size() <= 64 && name[0] != '.' &&
         name.find_first_not_of(
             "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
             "-_.") == std::string::npos;
}

absl::Status check_whole(const Config& c) {
  const Json* type = c.model.keys.find("model_type");
  if (c.model.path.empty() && type == nullptr) {
    return invalid(
        "no model: set model.path to a Hugging Face folder, or model_type and "
        "the other keys of its config.json under [model]");
  }
  if (c.run.name.empty()) return invalid("run.name is empty; name the run");
  if (!is_plain_name(c.run.name)) {
    return invalid("run.name is " + Json(c.run.name).dump() +
                   "; use at most 64 letters, digits and -_. that do not begin "
                   "with a dot");
  }
  // Counts of tokens stay far from overflow.
  if (c.train.steps > std::numeric_limits<int64_t>::max() / 4 /
                          (c.train.micro_batches * c.train.seq_len)) {
    return invalid(
        "train.steps is " + std::to_string(c.train.steps) +
        ": with train.micro_batches and train.seq_len more tokens than can be "
        "counted; lower train.steps");
  }
  if (c.data.train.empty()) {
    return invalid("data.train is empty; set it to king_james:train or a file");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Config> load_config(const std::string& path,
                                   const std::vector<std::string>& sets) {
  std::vector<Assignment> assignments;
  if (!path.empty()) {
    std::vector<std::string> open_files;
    RETURN_IF_ERROR(read_chain(path, open_files, assignments));
  }
  for (const std::string& text : sets) {
    RETURN_IF_ERROR(read_set(text, assignments));
  }
  Config config;
  for (const Assignment& assignment : assignments) {
    RETURN_IF_ERROR(apply(assignment, config));
  }
  RETURN_IF_ERROR(check_whole(config));
  return config;
}

}  // namespace tapeline
