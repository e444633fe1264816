#include "kernels/bench/options.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string_view>

namespace tapeline::bench {
namespace {

std::optional<std::vector<int64_t>> parse_shape(std::string text) {
  std::vector<int64_t> dims;
  std::replace(text.begin(), text.end(), 'x', ' ');
  std::istringstream in(text);
  for (int64_t d; in >> d;) {
    if (d < 0) return std::nullopt;
    dims.push_back(d);
  }
  if (dims.empty() || !in.eof()) return std::nullopt;
  return dims;
}

}  // namespace

std::string parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    const size_t equals = flag.find('=');
    const std::string_view name = flag.substr(0, equals);
    const std::string value(equals == flag.npos ? "" : flag.substr(equals + 1));
    if (flag.substr(0, 2) != "--") {
      options.op = flag;
    } else if (name == "--op") {
      options.op = value;
    } else if (name == "--all") {
      options.all = true;
    } else if (name == "--list") {
      options.list = true;
    } else if (name == "--json") {
      options.json = true;
    } else if (name == "--profile_once") {
      options.profile_once = true;
    } else if (name == "--baseline") {
      options.baseline = value;
    } else if (name == "--shape") {
      const auto dims = parse_shape(value);
      if (!dims) return "--shape=" + value + ": want numbers, as in 512x128";
      options.shape = *dims;
    } else if (name == "--threads") {
      options.threads = std::atoi(value.c_str());
      if (options.threads < 1) return "--threads=" + value + ": want >= 1";
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
