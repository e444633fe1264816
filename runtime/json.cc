#include "runtime/json.h"

#include <algorithm>
#include <climits>
#include <iterator>

#include "absl/container/flat_hash_set.h"
#include "nlohmann/json.hpp"
#include "runtime/check.h"
#include "runtime/file.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

// Tells how far the lexer has read when an event fires; nlohmann's events carry
// no position.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, const char** furthest)
      : at_(at), furthest_(furthest) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    *furthest_ = ++at_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const CountingIterator& other) const {
    return at_ == other.at_;
  }
  bool operator!=(const CountingIterator& other) const {
    return at_ != other.at_;
  }

 private:
  const char* at_;
  const char** furthest_;
};

// Checks what nlohmann leaves open and hands events on.
class Checker {
 public:
  Checker(std::string_view text, std::string_view name, JsonHandler& handler,
          int max_depth)
      : text_(text), name_(name), handler_(handler), max_depth_(max_depth) {}

  const char** furthest() { return &furthest_; }
  const absl::Status& status() const { return status_; }

  bool null() { return take(handler_.null()); }
  bool boolean(bool value) { return take(handler_.boolean(value)); }
  bool number_integer(int64_t value) { return take(handler_.integer(value)); }
  bool number_unsigned(uint64_t value) {
    if (value > static_cast<uint64_t>(INT64_MAX)) return refuse_integer();
    return take(handler_.integer(static_cast<int64_t>(value)));
  }
  bool number_float(double value, const std::string& raw) {
    // Integers beyond 64 bits arrive here, already rounded.
    if (raw.find_first_of(".eE") == std::string::npos) return refuse_integer();
    return take(handler_.number(value));
  }
  bool string(std::string& value) { return take(handler_.string(value)); }
  bool binary(std::vector<uint8_t>&) { return false; }

  bool start_object(size_t) {
    keys_.emplace_back();
    return deeper() && take(handler_.begin_object());
  }
  bool key(std::string& key) {
    if (!keys_.back().insert(key).second) {
      return fail("key '" + key + "' appears twice; keep one", key_offset(key));
    }
    return take(handler_.key(key));
  }
  bool end_object() {
    keys_.pop_back();
    --depth_;
    return take(handler_.end_object());
  }
  bool start_array(size_t) { return deeper() && take(handler_.begin_array()); }
  bool end_array() {
    --depth_;
    return take(handler_.end_array());
  }
  template <class Exception>
  bool parse_error(size_t position, const std::string&,
                   const Exception& error) {
    // "[json.exception.x] parse error at line 1, column 2: what": the position
    // is said in our own way.
    std::string what = error.what();
    const size_t tag = what.find("] ");
    if (tag != std::string::npos) what.erase(0, tag + 2);
    if (what.starts_with("parse error at")) {
      what.erase(0, std::min(what.find(": "), what.size() - 2) + 2);
    }
    return fail(what, position > 0 ? position - 1 : here());
  }

 private:
  size_t here() const {
    const size_t read = static_cast<size_t>(furthest_ - text_.data());
    return read > 0 ? read - 1 : 0;
  }
  // Where the key just read begins, if it has no escapes; else its end.
  size_t key_offset(const std::string& key) const {
    const size_t end = here();
    const size_t quoted = key.size() + 1;
    return end >= quoted && text_[end - quoted] == '"' ? end - quoted : end;
  }
  bool fail(const std::string& what, size_t offset) {
    status_ =
        absl::InvalidArgumentError(text_position(text_, offset, name_) + what);
    return false;
  }
  bool refuse_integer() {
    return fail("integer does not fit 64 bits; write a smaller one", here());
  }
  bool deeper() {
    if (++depth_ <= max_depth_) return true;
    return fail("nested deeper than " + std::to_string(max_depth_) + " levels",
                here());
  }
  bool take(const absl::Status& status) {
    if (status.ok()) return true;
    status_ = absl::Status(status.code(), text_position(text_, here(), name_) +
                                              std::string(status.message()));
    return false;
  }

  std::string_view text_, name_;
  JsonHandler& handler_;
  int max_depth_;
  int depth_ = 0;
  const char* furthest_ = text_.data();
  std::vector<absl::flat_hash_set<std::string>> keys_;
  absl::Status status_;
};

class TreeBuilder : public JsonHandler {
 public:
  Json take() { return std::move(root_); }

  absl::Status null() override { return add(Json()); }
  absl::Status boolean(bool value) override { return add(Json(value)); }
  absl::Status integer(int64_t value) override { return add(Json(value)); }
  absl::Status number(double value) override { return add(Json(value)); }
  absl::Status string(std::string& value) override {
    return add(Json(std::move(value)));
  }
  absl::Status begin_object() override { return open(Json(Json::Object())); }
  absl::Status key(std::string& key) override {
    open_.back()->object().emplace_back(std::move(key), Json());
    return absl::OkStatus();
  }
  absl::Status end_object() override { return close(); }
  absl::Status begin_array() override { return open(Json(Json::Array())); }
  absl::Status end_array() override { return close(); }

 private:
  // A pointer to an open container stays valid: its parent grows only after
  // the container is closed.
  Json* place(Json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Json& parent = *open_.back();
    if (parent.is_object()) {
      parent.object().back().second = std::move(value);
      return &parent.object().back().second;
    }
    parent.array().push_back(std::move(value));
    return &parent.array().back();
  }
  absl::Status add(Json value) {
    place(std::move(value));
    return absl::OkStatus();
  }
  absl::Status open(Json value) {
    open_.push_back(place(std::move(value)));
    return absl::OkStatus();
  }
  absl::Status close() {
    open_.pop_back();
    return absl::OkStatus();
  }

  Json root_;
  std::vector<Json*> open_;
};

}  // namespace

std::string text_position(std::string_view text, size_t offset,
                          std::string_view name) {
  const std::string_view before = text.substr(0, offset);
  const auto lines = std::count(before.begin(), before.end(), '\n');
  const size_t column = offset - (before.rfind('\n') + 1);
  return std::string(name) + ":" + std::to_string(lines + 1) + ":" +
         std::to_string(column + 1) + ": ";
}

absl::Status parse_json_events(std::string_view text, std::string_view name,
                               JsonHandler& handler, int max_depth) {
  if (text.size() > INT_MAX) {
    return absl::InvalidArgumentError(std::string(name) + ": " +
                                      std::to_string(text.size()) +
                                      " bytes of JSON are not read");
  }
  // The lexer takes NUL for the end of the text and skips a byte order mark.
  const size_t nul = text.find('\0');
  if (nul != std::string_view::npos) {
    return absl::InvalidArgumentError(text_position(text, nul, name) +
                                      "NUL byte; this is not a text file");
  }
  if (text.starts_with("\xEF\xBB\xBF")) {
    return absl::InvalidArgumentError(
        text_position(text, 0, name) +
        "byte order mark; save the file as UTF-8 without one");
  }
  Checker checker(text, name, handler, max_depth);
  const bool ok = nlohmann::json::sax_parse(
      CountingIterator(text.data(), checker.furthest()),
      CountingIterator(text.data() + text.size(), checker.furthest()),
      &checker);
  if (!checker.status().ok()) return checker.status();
  CHECK(ok) << "JSON reader stopped without a reason";
  return absl::OkStatus();
}

absl::StatusOr<Json> parse_json(std::string_view text, std::string_view name,
                                int max_depth) {
  TreeBuilder builder;
  RETURN_IF_ERROR(parse_json_events(text, name, builder, max_depth));
  return builder.take();
}

absl::StatusOr<Json> read_json(const std::string& path, uint64_t max_bytes) {
  ASSIGN_OR_RETURN(const std::string text, read_file(path, max_bytes));
  return parse_json(text, path);
}

absl::Status write_json(const std::string& path, const Json& value,
                        int indent) {
  return write_file_atomic(path, value.dump(indent) + "\n");
}

}  // namespace tapeline
