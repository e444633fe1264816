#include "tools/tapeline/flags.h"

#include <charconv>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/edit_distance.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

template <class T>
bool parse_number(const std::string& text, T* out) {
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, *out);
  return parsed.ec == std::errc() && parsed.ptr == end;
}

absl::Status error(std::string_view what) {
  return absl::InvalidArgumentError(
      absl::string_view(what.data(), what.size()));
}

}  // namespace

void Flags::add(std::string name, Target target, std::string value,
                std::string help) {
  flags_.push_back(
      {std::move(name), target, std::move(value), std::move(help)});
}

void Flags::set_positions(std::vector<std::string>* positions,
                          std::string description) {
  positions_ = positions;
  positions_help_ = std::move(description);
}

absl::Status Flags::set(const Flag& flag,
                        const std::optional<std::string>& text) {
  const std::string shown = absl::StrCat("--", flag.name);
  if (bool* const* to = std::get_if<bool*>(&flag.target)) {
    if (!text || *text == "true") {
      **to = true;
    } else if (*text == "false") {
      **to = false;
    } else {
      return error(
          absl::StrCat(shown, " takes true or false, not '", *text, "'"));
    }
    return absl::OkStatus();
  }
  if (OptionalText* const* to = std::get_if<OptionalText*>(&flag.target)) {
    **to = {true, text.value_or("")};
    return absl::OkStatus();
  }
  if (std::string* const* to = std::get_if<std::string*>(&flag.target)) {
    **to = *text;
  } else if (auto* const* to =
                 std::get_if<std::vector<std::string>*>(&flag.target)) {
    (*to)->push_back(*text);
  } else if (int64_t* const* to = std::get_if<int64_t*>(&flag.target)) {
    if (!parse_number(*text, *to)) {
      return error(
          absl::StrCat(shown, " takes a whole number, not '", *text, "'"));
    }
  } else if (double* const* to = std::get_if<double*>(&flag.target)) {
    if (!parse_number(*text, *to) || !std::isfinite(**to)) {
      return error(absl::StrCat(shown, " takes a number, not '", *text, "'"));
    }
  }
  return absl::OkStatus();
}

absl::Status Flags::parse(const std::vector<std::string>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& word = arguments[i];
    if (!word.starts_with("--") || word == "--") {
      if (positions_ != nullptr && word != "--" && !word.starts_with("-")) {
        positions_->push_back(word);
        continue;
      }
      return error(absl::StrCat("tapeline ", verb_, " takes no argument '",
                                word, "'; flags begin with --"));
    }
    const size_t equals = word.find('=');
    const std::string name = word.substr(
        2, equals == std::string::npos ? std::string::npos : equals - 2);
    const Flag* flag = nullptr;
    std::vector<std::string> known;
    for (const Flag& f : flags_) {
      known.push_back(f.name);
      if (f.name == name) flag = &f;
    }
    if (flag == nullptr) {
      return error(absl::StrCat("tapeline ", verb_, " has no flag --", name,
                                suggestion(name, known), "; see tapeline ",
                                verb_, " --help"));
    }
    std::optional<std::string> text;
    if (equals != std::string::npos) text = word.substr(equals + 1);
    const bool wants = !std::holds_alternative<bool*>(flag->target) &&
                       !std::holds_alternative<OptionalText*>(flag->target);
    if (wants && !text) {
      if (i + 1 == arguments.size()) {
        return error(absl::StrCat("--", name, " needs a value: --", name, "=",
                                  flag->value));
      }
      text = arguments[++i];
    }
    RETURN_IF_ERROR(set(*flag, text));
  }
  return absl::OkStatus();
}

std::string Flags::help() const {
  std::string out = absl::StrCat("usage: tapeline ", verb_);
  if (positions_ != nullptr) absl::StrAppend(&out, " ", positions_help_);
  absl::StrAppend(&out, " [flags]\n");
  for (const Flag& f : flags_) {
    std::string left = absl::StrCat("  --", f.name);
    if (std::holds_alternative<OptionalText*>(f.target)) {
      absl::StrAppend(&left, "[=", f.value, "]");
    } else if (!f.value.empty()) {
      absl::StrAppend(&left, " ", f.value);
    }
    if (left.size() < 24) left.resize(24, ' ');
    absl::StrAppend(&out, left, "  ", f.help, "\n");
  }
  return out;
}

}  // namespace tapeline
