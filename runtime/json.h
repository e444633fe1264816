// JSON values, read strictly and written so that they read back the same.
//
// Objects keep the order of their keys and every key they came with, so a file
// that was read and changed in one place is otherwise written as it was.
// Integers are int64_t and stay integers; one that does not fit is an error,
// never a rounded double. A number written with '.' or an exponent is a double
// and is printed with the fewest digits that read back the same. NaN and
// infinities have no JSON form and are written as null.
// Reading refuses, with "name:line:column: what; hint": anything that is not
// one JSON value in UTF-8, duplicate keys, nesting beyond the limit, comments,
// trailing commas, NUL bytes.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tapeline {

class Json {
 public:
  using Array = std::vector<Json>;
  using Member = std::pair<std::string, Json>;
  using Object = std::vector<Member>;

  Json() = default;  // null
  Json(std::nullptr_t) {}
  Json(std::same_as<bool> auto value) : value_(value) {}
  Json(std::integral auto value) requires(!std::same_as<decltype(value), bool>)
      : value_(checked_integer(value)) {}
  Json(double value) : value_(value) {}
  Json(float value) : value_(static_cast<double>(value)) {}
  Json(std::string value) : value_(std::move(value)) {}
  Json(std::string_view value) : value_(std::string(value)) {}
  Json(const char* value) : value_(std::string(value)) {}
  Json(Array value) : value_(std::move(value)) {}
  Json(Object value) : value_(std::move(value)) {}

  bool is_null() const { return holds<std::monostate>(); }
  bool is_boolean() const { return holds<bool>(); }
  bool is_integer() const { return holds<int64_t>(); }
  bool is_double() const { return holds<double>(); }
  bool is_number() const { return is_integer() || is_double(); }
  bool is_string() const { return holds<std::string>(); }
  bool is_array() const { return holds<Array>(); }
  bool is_object() const { return holds<Object>(); }
  // "null", "boolean", "integer", "number", "string", "array", "object".
  std::string_view kind() const;

  // Another kind is a CHECK; test first.
  bool boolean() const;
  int64_t integer() const;
  double number() const;  // an integer too
  const std::string& string() const;
  const Array& array() const;
  Array& array();
  const Object& object() const;
  Object& object();

  // The member's value; null when it is absent or this is no object.
  const Json* find(std::string_view key) const;
  Json* find(std::string_view key);
  // The member, appended as null where absent; null becomes an object.
  Json& operator[](std::string_view key);
  // Removes the member; false when it was absent.
  bool erase(std::string_view key);

  // One line without spaces beyond ", " and ": "; or `indent` spaces a level.
  // Bytes of strings that are not UTF-8 are written as U+FFFD.
  std::string dump() const;
  std::string dump(int indent) const;

  friend bool operator==(const Json&, const Json&) = default;

 private:
  template <class T>
  bool holds() const {
    return std::holds_alternative<T>(value_);
  }
  static int64_t checked_integer(std::integral auto value) {
    return checked_fit(std::in_range<int64_t>(value),
                       static_cast<int64_t>(value));
  }
  static int64_t checked_fit(bool fits, int64_t value);

  std::variant<std::monostate, bool, int64_t, double, std::string, Array,
               Object>
      value_;
};

// The shortest text that reads back as the same double, always with a '.' or an
// exponent; "null" for NaN and infinities.
std::string json_number(double value);

// Nesting: 1 for a flat object. Text longer than INT_MAX bytes is refused.
inline constexpr int kJsonDepth = 64;

// `name` stands for the text in errors: a path, or "--flag".
absl::StatusOr<Json> parse_json(std::string_view text, std::string_view name,
                                int max_depth = kJsonDepth);
absl::StatusOr<Json> read_json(const std::string& path,
                               uint64_t max_bytes = 100'000'000);
// `indent` spaces a level and a final newline; atomic (file.h).
absl::Status write_json(const std::string& path, const Json& value,
                        int indent = 2);

// Receives the parts of a document in order, so that a large one needs no tree.
// A status that is not ok stops the reading and comes back with its position.
class JsonHandler {
 public:
  virtual ~JsonHandler() = default;
  virtual absl::Status null() = 0;
  virtual absl::Status boolean(bool value) = 0;
  virtual absl::Status integer(int64_t value) = 0;
  virtual absl::Status number(double value) = 0;
  virtual absl::Status string(std::string& value) = 0;
  virtual absl::Status begin_object() = 0;
  virtual absl::Status key(std::string& key) = 0;
  virtual absl::Status end_object() = 0;
  virtual absl::Status begin_array() = 0;
  virtual absl::Status end_array() = 0;
};
absl::Status parse_json_events(std::string_view text, std::string_view name,
                               JsonHandler& handler,
                               int max_depth = kJsonDepth);

// "name:line:column: " of a byte of the text, both counted from 1, columns in
// bytes.
std::string text_position(std::string_view text, size_t offset,
                          std::string_view name);

}  // namespace tapeline
