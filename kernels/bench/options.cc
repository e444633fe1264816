#include "kernels/bench/options.h"

#include <charconv>
#include <string_view>

namespace tapeline::bench {
namespace {

constexpr int64_t kMostThreads = 1024;  // as tapeline's --threads

// A whole number of digits alone.
std::optional<int64_t> parse_number(std::string_view text) {
  int64_t number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end || number < 0) return std::nullopt;
  return number;
}

std::optional<std::vector<int64_t>> parse_shape(std::string_view text) {
  std::vector<int64_t> dims;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find('x', at), text.size());
    const auto number = parse_number(text.substr(at, end - at));
    if (!number) return std::nullopt;
    dims.push_back(*number);
    at = end + 1;
  }
  return dims;
}

// The flags that take no value: name and where it is noted.
bool* switch_of(std::string_view name, Options& options) {
  if (name == "--all") return &options.all;
  if (name == "--list") return &options.list;
  if (name == "--json") return &options.json;
  if (name == "--profile_once") return &options.profile_once;
  return nullptr;
}

}  // namespace

std::string parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    const size_t equals = flag.find('=');
    const std::string_view name = flag.substr(0, equals);
    const std::string value(equals == flag.npos ? "" : flag.substr(equals + 1));
    if (flag.substr(0, 2) != "--" || name == "--op") {
      const std::string op(name == "--op" ? value : flag);
      if (op.empty()) return "an empty name of an op; --list names them";
      if (!options.op.empty()) {
        return options.op + " and " + op + ": name one op, or none for all";
      }
      options.op = op;
    } else if (bool* on = switch_of(name, options)) {
      if (equals != flag.npos) return std::string(name) + ": takes no value";
      *on = true;
    } else if (name == "--baseline") {
      if (value.empty()) return "--baseline=: want a file";
      options.baseline = value;
    } else if (name == "--shape") {
      const auto dims = parse_shape(value);
      if (!dims) {
        return "--shape=" + value +
               ": want whole numbers of at least 1, as in 512x128";
      }
      options.shape = *dims;
    } else if (name == "--threads") {
      const int64_t threads = parse_number(value).value_or(0);
      if (threads < 1 || threads > kMostThreads) {
        return "--threads=" + value + ": want from 1 to 1024";
      }
      options.threads = static_cast<int>(threads);
    } else if (name == "--dtype") {
      if (value == "f32")
        options.dtype = DType::kF32;
      else if (value == "bf16")
        options.dtype = DType::kBf16;
      else if (value == "f64")
        options.dtype = DType::kF64;
      else
        return "--dtype=" + value + ": want f32, bf16 or f64";
    } else if (name == "--device") {
      if (value != "cpu" && value != "cuda") {
        return "--device=" + value + ": want cpu or cuda";
      }
      options.device = value;
    } else {
      return std::string(name) + ": unknown flag; see kernels/bench/bench.h";
    }
  }
  if (options.all && (!options.op.empty() || !options.shape.empty())) {
    return "--all: runs every op on its own shapes; name an op without it";
  }
  return "";
}

}  // namespace tapeline::bench
