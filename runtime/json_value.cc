// The value type of json.h, and how it is written.

#include <charconv>
#include <cmath>

#include "runtime/check.h"
#include "runtime/json.h"
#include "runtime/utf8.h"

namespace tapeline {
namespace {

void write_string(std::string_view text, std::string& out) {
  constexpr char kDigits[] = "0123456789abcdef";
  out += '"';
  for (size_t i = 0; i < text.size();) {
    const size_t length = utf8_length(text, i);
    const unsigned char c = static_cast<unsigned char>(text[i]);
    if (length == 0) {
      out += "\xEF\xBF\xBD";
      ++i;
      continue;
    }
    if (c == '"' || c == '\\') {
      out += '\\';
      out += text[i];
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c < 0x20 || c == 0x7F) {
      out += "\\u00";
      out += kDigits[c >> 4];
      out += kDigits[c & 15];
    } else {
      out += text.substr(i, length);
    }
    i += length;
  }
  out += '"';
}

void new_line(int indent, int level, std::string& out) {
  out += '\n';
  out.append(static_cast<size_t>(indent * level), ' ');
}

void write(const Json& value, int indent, int level, std::string& out);

// Elements between brackets; f writes the i-th.
template <class F>
void write_list(size_t size, char open, char close, int indent, int level,
                std::string& out, F&& f) {
  out += open;
  for (size_t i = 0; i < size; ++i) {
    if (i > 0) out += indent < 0 ? ", " : ",";
    if (indent >= 0) new_line(indent, level + 1, out);
    f(i);
  }
  if (indent >= 0 && size > 0) new_line(indent, level, out);
  out += close;
}

void write(const Json& value, int indent, int level, std::string& out) {
  if (value.is_null()) {
    out += "null";
  } else if (value.is_boolean()) {
    out += value.boolean() ? "true" : "false";
  } else if (value.is_integer()) {
    out += std::to_string(value.integer());
  } else if (value.is_double()) {
    out += json_number(value.number());
  } else if (value.is_string()) {
    write_string(value.string(), out);
  } else if (value.is_array()) {
    const Json::Array& array = value.array();
    write_list(array.size(), '[', ']', indent, level, out,
               [&](size_t i) { write(array[i], indent, level + 1, out); });
  } else {
    const Json::Object& object = value.object();
    write_list(object.size(), '{', '}', indent, level, out, [&](size_t i) {
      write_string(object[i].first, out);
      out += ": ";
      write(object[i].second, indent, level + 1, out);
    });
  }
}

}  // namespace

std::string json_number(double value) {
  if (!std::isfinite(value)) return "null";
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
  std::string text(buffer, end);
  // Without a mark it would read back as an integer.
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string_view Json::kind() const {
  constexpr std::string_view kNames[] = {
      "null", "boolean", "integer", "number", "string", "array", "object"};
  return kNames[value_.index()];
}

int64_t Json::checked_fit(bool fits, int64_t value) {
  CHECK(fits) << "[json] unsigned value above the range of int64";
  return value;
}

bool Json::boolean() const {
  CHECK(is_boolean()) << "[json] " << kind() << " used as boolean";
  return std::get<bool>(value_);
}
int64_t Json::integer() const {
  CHECK(is_integer()) << "[json] " << kind() << " used as integer";
  return std::get<int64_t>(value_);
}
double Json::number() const {
  CHECK(is_number()) << "[json] " << kind() << " used as number";
  return is_integer() ? static_cast<double>(std::get<int64_t>(value_))
                      : std::get<double>(value_);
}
const std::string& Json::string() const {
  CHECK(is_string()) << "[json] " << kind() << " used as string";
  return std::get<std::string>(value_);
}
const Json::Array& Json::array() const {
  CHECK(is_array()) << "[json] " << kind() << " used as array";
  return std::get<Array>(value_);
}
Json::Array& Json::array() {
  return const_cast<Array&>(std::as_const(*this).array());
}
const Json::Object& Json::object() const {
  CHECK(is_object()) << "[json] " << kind() << " used as object";
  return std::get<Object>(value_);
}
Json::Object& Json::object() {
  return const_cast<Object&>(std::as_const(*this).object());
}

const Json* Json::find(std::string_view key) const {
  if (!is_object()) return nullptr;
  for (const Member& member : object()) {
    if (member.first == key) return &member.second;
  }
  return nullptr;
}
Json* Json::find(std::string_view key) {
  return const_cast<Json*>(std::as_const(*this).find(key));
}

Json& Json::operator[](std::string_view key) {
  if (is_null()) value_ = Object();
  if (Json* found = find(key)) return *found;
  object().emplace_back(std::string(key), Json());
  return object().back().second;
}

bool Json::erase(std::string_view key) {
  if (!is_object()) return false;
  return std::erase_if(object(), [&](const Member& member) {
           return member.first == key;
         }) > 0;
}

std::string Json::dump() const { return dump(-1); }

std::string Json::dump(int indent) const {
  std::string out;
  write(*this, indent, 0, out);
  return out;
}

}  // namespace tapeline
