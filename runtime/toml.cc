#include "runtime/toml.h"

#include <algorithm>
#include <cmath>

#include "runtime/check.h"
#include "runtime/file.h"
#include "runtime/status.h"
#include "runtime/utf8.h"

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
constexpr int kMaxDepth = 12;  // of arrays and of tables in them

std::string at(std::string_view name, const toml::source_position& position) {
  return std::string(name) + ":" + std::to_string(position.line) + ":" +
         std::to_string(position.column) + ": ";
}

// The parser builds a table for each part of a dotted key and frees them
// recursively, so a long enough key would overflow the stack. Strings are not
// told apart: a damaged file could make us and the parser disagree about them.
absl::Status check_dots(std::string_view text, std::string_view name) {
  constexpr int kMaxDots = 256;
  int dots = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '.' && ++dots > kMaxDots) {
      return absl::InvalidArgumentError(
          text_position(text, i, name) + "more than " +
          std::to_string(kMaxDots) + " dots in a row of words");
    }
    if (std::string_view("\n,=[]{}").find(text[i]) != std::string_view::npos) {
      dots = 0;
    }
  }
  return absl::OkStatus();
}

// toml++ 3.3 asks of many characters whether they are blank, which is undefined
// behaviour for most beyond ASCII (is_non_ascii_horizontal_whitespace). It sees
// them moved to a plane of private use, where the answer is a plain no, and
// what it returns is moved back. One character stays one, so columns hold.
constexpr char32_t kPlane = 0xF0000;

absl::StatusOr<std::string> move_out(std::string_view text,
                                     std::string_view name) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const size_t length = utf8_length(text, i);
    if (length == 0) {
      return absl::InvalidArgumentError(text_position(text, i, name) +
                                        "is not UTF-8");
    }
    const char32_t c = utf8_decode(text, i);
    if (c >= kPlane && c < kPlane + 0x10000) {
      return absl::InvalidArgumentError(text_position(text, i, name) +
                                        "character of private use");
    }
    utf8_append(out, c >= 0x80 && c < 0x10000 ? kPlane + c : c);
    i += length;
  }
  return out;
}

std::string move_back(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const size_t length = utf8_length(text, i);
    const char32_t c = utf8_decode(text, i);
    utf8_append(out, c >= kPlane && c < kPlane + 0x10000 ? c - kPlane : c);
    i += std::max<size_t>(1, length);
  }
  return out;
}

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
      path_.push_back(move_back(key->str()));
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
                    .value = {},
                    .line = static_cast<int>(where.line),
                    .column = static_cast<int>(where.column)};
    if (const toml::table* inner = node.as_table()) {
      if (!inner->empty()) return table(*inner);
      entry.table = true;
    } else {
      ASSIGN_OR_RETURN(entry.value, value(node, 1));
    }
    entries_.push_back(std::move(entry));
    return absl::OkStatus();
  }

  // Tables in arrays can nest deeper, by dotted keys, than the parser would
  // read back from one line.
  absl::StatusOr<Json> value(const toml::node& node, int depth) const {
    if (depth > kMaxDepth) {
      return absl::InvalidArgumentError(at(name_, node.source().begin) +
                                        "nested deeper than " +
                                        std::to_string(kMaxDepth) + " levels");
    }
    if (const auto* v = node.as_boolean()) return Json(v->get());
    if (const auto* v = node.as_integer()) return Json(v->get());
    if (const auto* v = node.as_floating_point()) return Json(v->get());
    if (const auto* v = node.as_string()) return Json(move_back(v->get()));
    if (const toml::array* array = node.as_array()) {
      Json::Array out;
      for (const toml::node& element : *array) {
        ASSIGN_OR_RETURN(Json inner, value(element, depth + 1));
        out.push_back(std::move(inner));
      }
      return Json(std::move(out));
    }
    if (const toml::table* table = node.as_table()) {
      Json::Object out;
      for (const auto& [key, element] : *table) {
        ASSIGN_OR_RETURN(Json inner, value(element, depth + 1));
        out.emplace_back(move_back(key.str()), std::move(inner));
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
  RETURN_IF_ERROR(check_dots(text, name));
  ASSIGN_OR_RETURN(const std::string moved, move_out(text, name));
  const toml::parse_result parsed =
      toml::parse(std::string_view(moved), std::string(name));
  if (!parsed) {
    const toml::parse_error& error = parsed.error();
    return absl::InvalidArgumentError(at(name, error.source().begin) +
                                      move_back(error.description()));
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
