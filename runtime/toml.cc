#include "runtime/toml.h"

#include <algorithm>
#include <cmath>

#include "runtime/check.h"
#include "runtime/file.h"
#include "runtime/status.h"

// toml++ 3.3 asserts what malformed text can make false ("[=x"), and with
// NDEBUG has the compiler assume it; the code behind reports the error by
// itself.
#undef NDEBUG
#define TOML_ASSERT(expression) static_cast<void>(0)
#define TOML_EXCEPTIONS 0
#define TOML_MAX_NESTED_VALUES 16
#include "toml++/toml.h"

namespace tapeline {
namespace {

constexpr size_t kMaxBytes = 1 << 20;
constexpr int kMaxParts = 16;

std::string at(std::string_view name, const toml::source_position& position) {
  return std::string(name) + ":" + std::to_string(position.line) + ":" +
         std::to_string(position.column) + ": ";
}

// Finds, before the parser sees the text, what would hurt it: characters beyond
// ASCII where toml++ 3.3 asks whether they are blank, which is undefined
// behaviour for most (is_non_ascii_horizontal_whitespace): outside strings and
// comments, where TOML allows none, and behind backslashes; and keys of so many
// parts that freeing their nested tables overflows the stack.
class Scanner {
 public:
  Scanner(std::string_view text, std::string_view name)
      : text_(text), name_(name) {}

  absl::Status run() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '#') {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (c == '"' || c == '\'') {
        RETURN_IF_ERROR(skip_string(c));
      } else if (beyond_ascii()) {
        return fail("character beyond ASCII; quote it");
      } else if (c == '.' && ++dots_ >= kMaxParts) {
        return fail("key with more than " + std::to_string(kMaxParts) +
                    " parts");
      } else {
        if (std::string_view("\n,=[]{}").find(c) != std::string_view::npos) {
          dots_ = 0;
        }
        ++at_;
      }
    }
    return absl::OkStatus();
  }

 private:
  absl::Status fail(const std::string& what) const {
    return absl::InvalidArgumentError(text_position(text_, at_, name_) + what);
  }

  bool beyond_ascii() const {
    return at_ < text_.size() && static_cast<unsigned char>(text_[at_]) >= 0x80;
  }

  absl::Status skip_string(char quote) {
    const std::string triple(3, quote);
    const bool many = text_.substr(at_).starts_with(triple);
    at_ += many ? 3 : 1;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '\\' && quote == '"') {
        RETURN_IF_ERROR(skip_escape());
      } else if (c == '\n' && !many) {
        break;  // the parser says that it is not closed
      } else if (c != quote ||
                 (many && !text_.substr(at_).starts_with(triple))) {
        ++at_;
      } else {
        at_ += many ? 3 : 1;
        // The string itself may end in one or two quotes.
        for (int i = 0; many && i < 2 && at_ < text_.size(); ++i) {
          at_ += text_[at_] == quote;
        }
        break;
      }
    }
    return absl::OkStatus();
  }

  // The character behind a backslash, or behind the blanks that a backslash at
  // the end of a line swallows, is asked whether it is blank.
  absl::Status skip_escape() {
    ++at_;
    const size_t first = text_.find_first_not_of(" \t\r\n", at_);
    const bool swallows = first != at_;
    at_ = std::min(first, text_.size());
    if (beyond_ascii()) {
      return fail("character beyond ASCII behind a backslash; join the lines");
    }
    if (!swallows && at_ < text_.size()) ++at_;
    return absl::OkStatus();
  }

  std::string_view text_, name_;
  size_t at_ = 0;
  int dots_ = 0;
};

class Flattener {
 public:
  explicit Flattener(std::string_view name) : name_(name) {}

  absl::Status table(const toml::table& table) {
    // toml++ sorts keys; the file's order is in the positions.
    std::vector<std::pair<const toml::key*, const toml::node*>> members;
    for (const auto& [key, node] : table) members.emplace_back(&key, &node);
    std::stable_sort(members.begin(), members.end(),
                     [](const auto& a, const auto& b) {
                       return position(*a.first) < position(*b.first);
                     });
    for (const auto& [key, node] : members) {
      if (path_.size() == kMaxParts) {
        return absl::InvalidArgumentError(at(name_, key->source().begin) +
                                          "key with more than " +
                                          std::to_string(kMaxParts) + " parts");
      }
      path_.emplace_back(key->str());
      RETURN_IF_ERROR(member(*key, *node));
      path_.pop_back();
    }
    return absl::OkStatus();
  }

  std::vector<TomlEntry> take() { return std::move(entries_); }

 private:
  static std::pair<uint32_t, uint32_t> position(const toml::key& key) {
    return {key.source().begin.line, key.source().begin.column};
  }

  absl::Status member(const toml::key& key, const toml::node& node) {
    const toml::source_position& where = key.source().begin;
    TomlEntry entry{.path = path_,
                    .line = static_cast<int>(where.line),
                    .column = static_cast<int>(where.column)};
    if (const toml::table* inner = node.as_table()) {
      if (!inner->empty()) return table(*inner);
      entry.table = true;
    } else {
      ASSIGN_OR_RETURN(entry.value, value(node));
    }
    entries_.push_back(std::move(entry));
    return absl::OkStatus();
  }

  absl::StatusOr<Json> value(const toml::node& node) const {
    if (const auto* v = node.as_boolean()) return Json(v->get());
    if (const auto* v = node.as_integer()) return Json(v->get());
    if (const auto* v = node.as_floating_point()) return Json(v->get());
    if (const auto* v = node.as_string()) return Json(v->get());
    if (const toml::array* array = node.as_array()) {
      Json::Array out;
      for (const toml::node& element : *array) {
        ASSIGN_OR_RETURN(Json inner, value(element));
        out.push_back(std::move(inner));
      }
      return Json(std::move(out));
    }
    if (const toml::table* table = node.as_table()) {
      Json::Object out;
      for (const auto& [key, element] : *table) {
        ASSIGN_OR_RETURN(Json inner, value(element));
        out.emplace_back(std::string(key.str()), std::move(inner));
      }
      return Json(std::move(out));
    }
    return absl::InvalidArgumentError(
        at(name_, node.source().begin) +
        "dates and times are not used here; quote it to make it a string");
  }

  std::string_view name_;
  std::vector<std::string> path_;
  std::vector<TomlEntry> entries_;
};

std::string quoted(std::string_view text) {
  // JSON's escapes are TOML's too.
  return Json(text).dump();
}

std::string key_part(const std::string& part) {
  const bool bare =
      !part.empty() && std::all_of(part.begin(), part.end(), [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
               (c >= '0' && c <= '9') || c == '_' || c == '-';
      });
  return bare ? part : quoted(part);
}

}  // namespace

absl::StatusOr<std::vector<TomlEntry>> parse_toml(std::string_view text,
                                                  std::string_view name) {
  if (text.size() > kMaxBytes) {
    return absl::InvalidArgumentError(std::string(name) + ": " +
                                      std::to_string(text.size()) +
                                      " bytes; a TOML file has at most 1 MiB");
  }
  RETURN_IF_ERROR(Scanner(text, name).run());
  const toml::parse_result parsed = toml::parse(text, std::string(name));
  if (!parsed) {
    const toml::parse_error& error = parsed.error();
    return absl::InvalidArgumentError(at(name, error.source().begin) +
                                      std::string(error.description()));
  }
  Flattener flattener(name);
  RETURN_IF_ERROR(flattener.table(parsed.table()));
  return flattener.take();
}

absl::StatusOr<std::vector<TomlEntry>> read_toml(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, read_file(path, kMaxBytes));
  return parse_toml(text, path);
}

std::string toml_value(const Json& value) {
  CHECK(!value.is_null()) << "[toml] null has no TOML form";
  if (value.is_string()) return quoted(value.string());
  if (value.is_double()) {
    if (std::isnan(value.number())) return "nan";
    if (std::isinf(value.number())) return value.number() > 0 ? "inf" : "-inf";
  }
  std::string out;
  if (value.is_array()) {
    for (const Json& element : value.array()) {
      out += (out.empty() ? "" : ", ") + toml_value(element);
    }
    return "[" + out + "]";
  }
  if (value.is_object()) {
    for (const auto& [key, element] : value.object()) {
      out += (out.empty() ? "" : ", ") + key_part(key) + " = " +
             toml_value(element);
    }
    return "{" + out + "}";
  }
  return value.dump();
}

std::string toml_key(const std::vector<std::string>& path) {
  std::string out;
  for (const std::string& part : path) {
    out += (out.empty() ? "" : ".") + key_part(part);
  }
  return out;
}

}  // namespace tapeline
