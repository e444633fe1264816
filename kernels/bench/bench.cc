#include "kernels/bench/bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iomanip>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string_view>

#include "kernels/bench/baseline.h"
#include "nlohmann/json.hpp"
#include "runtime/device.h"
#include "tests/support/close.h"

namespace tapeline::bench {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr int kDone = 0, kFailed = 1, kBadFile = 2, kUsage = 64;
constexpr int kBursts = 7;
constexpr double kBurstSeconds = 0.01;

std::vector<Op>& ops() {
  static auto* const list = new std::vector<Op>;
  return *list;
}

struct Options {
  std::vector<int64_t> shape;
  std::string op, baseline;
  DType dtype = DType::kF32;
  int threads = 1;
  bool json = false, profile_once = false;
};

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

// Fills `options` or says what is wrong.
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
      if (value != "cpu") return "--device=" + value + ": this build has cpu";
    } else {
      return std::string(name) + ": unknown flag; see kernels/bench/bench.h";
    }
  }
  return "";
}

// Seconds per launch: of the clock and of the processors.
struct Seconds {
  double wall = 0, processor = 0;
  bool operator<(const Seconds& other) const { return wall < other.wall; }
};

Seconds time_launches(const std::function<void()>& launch, int64_t count) {
  const std::clock_t processor = std::clock();
  const Clock::time_point begin = Clock::now();
  for (int64_t i = 0; i < count; ++i) launch();
  const double n = static_cast<double>(count);
  return {std::chrono::duration<double>(Clock::now() - begin).count() / n,
          static_cast<double>(std::clock() - processor) / CLOCKS_PER_SEC / n};
}

// Bursts by rising wall time.
std::vector<Seconds> time_bursts(const std::function<void()>& launch) {
  int64_t count = 1;
  double took = time_launches(launch, count).wall;  // warm-up as well
  while (took * static_cast<double>(count) < kBurstSeconds) {
    count = std::max(2 * count, static_cast<int64_t>(1.2 * kBurstSeconds /
                                                     std::max(took, 1e-9)));
    took = time_launches(launch, count).wall;
  }
  std::vector<Seconds> bursts;
  for (int i = 0; i < kBursts; ++i) {
    bursts.push_back(time_launches(launch, count));
  }
  std::sort(bursts.begin(), bursts.end());
  return bursts;
}

std::string first_line(const std::string& command) {
  std::string line;
  if (std::FILE* pipe = ::popen(command.c_str(), "r")) {
    char buffer[256];
    if (std::fgets(buffer, sizeof buffer, pipe)) line = buffer;
    ::pclose(pipe);
  }
  while (!line.empty() && std::isspace(line.back())) line.pop_back();
  return line;
}

std::string cpu_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("model name", 0) == 0) {
      return line.substr(line.find(':') + 2);
    }
  }
  return "cpu";
}

Json null_or(const std::string& text) {
  return text.empty() ? Json() : Json(text);
}

// Everything a row of the table and the JSON share.
struct Context {
  Options options;
  Baseline baseline;
  std::string command, commit, device;
};

Json measure(const Context& context, const Op& op, const Arguments& arguments,
             std::ostream& err) {
  Run run = op.make(arguments);
  std::vector<Seconds> bursts;
  if (context.options.profile_once) {
    run.launch();
    bursts = {time_launches(run.launch, 1)};
  } else {
    bursts = time_bursts(run.launch);
  }
  Verifier verifier;
  run.verify(verifier);
  if (!verifier.ok()) {
    err << op.name << ": the timed launch is wrong: " << verifier.failures()
        << "\n";
  }
  const double seconds = bursts[bursts.size() / 2].wall;
  // The least of any burst: other programs on the machine only add.
  double processor = bursts[0].processor;
  for (const Seconds& burst : bursts) {
    processor = std::min(processor, burst.processor);
  }
  Json shape;
  for (size_t i = 0; i < op.keys.size(); ++i) {
    shape[op.keys[i]] = arguments.dims[i];
  }
  Json row;
  row["schema"] = 1;
  row["op"] = op.name;
  row["impl"] = "tapeline";
  row["shape"] = shape;
  row["dtype"] = name_of(arguments.dtype);
  row["threads"] = context.options.threads;
  row["us"] = seconds * 1e6;
  row["us_min"] = bursts.front().wall * 1e6;
  row["us_processor"] = processor * 1e6;
  row["tflops"] = run.cost.flops / seconds * 1e-12;
  row["gbps"] = run.cost.bytes / seconds * 1e-9;
  // Ceilings are measured per device; none is stated for a CPU.
  for (const char* key : {"floor_us", "x_floor", "pct_ceiling",
                          "ceiling_tflops", "ceiling_gbps"}) {
    row[key] = nullptr;
  }
  const Json* base = context.baseline.find(op.name, shape);
  row["baseline_impl"] = base ? (*base)["impl"] : Json();
  row["baseline_us"] = base ? (*base)["us"] : Json();
  row["x_baseline"] =
      base ? Json((*base)["us"].get<double>() / (seconds * 1e6)) : Json();
  row["verified"] = verifier.ok();
  row["max_err"] = verifier.max_err();
  row["rotated_bytes"] = 0;
  row["device"] = context.device;
  row["device_uuid"] = nullptr;
  row["driver"] = nullptr;
  row["commit"] = null_or(context.commit);
  row["command"] = context.command;
  return row;
}

void print_row(const Json& row, std::ostream& out) {
  std::ostringstream shape;
  for (const auto& [key, value] : row["shape"].items()) {
    shape << (shape.tellp() ? " " : "") << key << "=" << value;
  }
  out << std::left << std::setw(16) << row["op"].get<std::string>() << " | "
      << std::setw(30) << shape.str() << " | " << std::right << std::fixed
      << std::setprecision(1) << std::setw(10) << row["us"].get<double>()
      << " | " << std::setw(10) << row["us_processor"].get<double>() << " | "
      << std::setw(9) << row["tflops"].get<double>() * 1e3 << " | "
      << std::setw(7) << row["gbps"].get<double>() << " | " << std::setw(7);
  if (row["x_baseline"].is_null())
    out << "";
  else
    out << std::setprecision(2) << row["x_baseline"].get<double>();
  out << " | " << std::scientific << std::setprecision(1)
      << row["max_err"].get<double>()
      << (row["verified"].get<bool>() ? "" : "  WRONG") << std::defaultfloat
      << std::endl;
}

std::string command_line(int argc, char** argv) {
  std::string command;
  for (int i = 0; i < argc; ++i) {
    command += (i ? " " : "") + std::string(argv[i]);
  }
  return command;
}

std::string commit() {
  const char* workspace = std::getenv("BUILD_WORKSPACE_DIRECTORY");
  const std::string where = workspace ? workspace : ".";
  return first_line("git -C '" + where + "' rev-parse HEAD 2>/dev/null");
}

}  // namespace

bool add(Op op) {
  ops().push_back(std::move(op));
  return true;
}

template <class T>
void Verifier::row(View<const T> got, const std::vector<double>& expected,
                   int64_t sum_length) {
  ++rows_;
  double squares = 0;
  for (double y : expected) squares += y * y;
  const double rms = std::sqrt(squares / static_cast<double>(expected.size()));
  for (size_t i = 0; i < expected.size(); ++i) {
    const double x = static_cast<double>(got(static_cast<int64_t>(i)));
    const double error = std::abs(x - expected[i]) / (rms > 0 ? rms : 1);
    if (!(error <= max_err_)) max_err_ = error;
  }
  const auto result =
      Close(got, view_of(expected, got.shape), {.sum_length = sum_length});
  if (!result && failures_.empty()) failures_ = result.message();
}
template void Verifier::row(View<const float>, const std::vector<double>&,
                            int64_t);
template void Verifier::row(View<const bf16>, const std::vector<double>&,
                            int64_t);
template void Verifier::row(View<const double>, const std::vector<double>&,
                            int64_t);

template <class T>
std::vector<T> normal(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw;
  std::vector<T> values(n);
  for (T& v : values) v = T(float{bf16(draw(random))});
  return values;
}
template std::vector<float> normal(int64_t, uint32_t);
template std::vector<bf16> normal(int64_t, uint32_t);
template std::vector<double> normal(int64_t, uint32_t);

std::vector<int64_t> sampled_rows(int64_t n) {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < 8; ++i) {
    const int64_t row = i * (n - 1) / 7;
    if (n > 0 && (rows.empty() || rows.back() != row)) rows.push_back(row);
  }
  return rows;
}

int run(int argc, char** argv, std::ostream& out, std::ostream& err) {
  Context context;
  const std::string wrong = parse(argc, argv, context.options);
  if (!wrong.empty()) {
    err << wrong << "\n";
    return kUsage;
  }
  const Options& options = context.options;
  context.command = command_line(argc, argv);
  context.commit = commit();
  context.device = cpu_name();
  if (!options.baseline.empty()) {
    const std::string bad =
        context.baseline.read(options.baseline, context.device, err);
    if (!bad.empty()) {
      err << bad << "\n";
      return kBadFile;
    }
  }
  Device device(options.threads);
  DeviceScope scope(device);
  if (!options.json) {
    out << "# " << context.device << ", " << options.threads << " thread(s), "
        << options.dtype << "\n"
        << "op               | shape                          |         us |"
           " cpu min us |   GFLOP/s |    GB/s | x base  | max err\n";
  }
  bool ran = false, ok = true;
  for (const Op& op : ops()) {
    if (!options.op.empty() && options.op != op.name &&
        options.op != op.kernel) {
      continue;
    }
    auto shapes = op.shapes;
    if (!options.shape.empty()) {
      if (options.shape.size() != op.keys.size()) continue;
      shapes = {options.shape};
    }
    for (const std::vector<int64_t>& dims : shapes) {
      const Json row =
          measure(context, op, {dims, options.dtype, launch()}, err);
      ran = true;
      ok = ok && row["verified"].get<bool>();
      if (options.json)
        out << row.dump() << std::endl;
      else
        print_row(row, out);
    }
  }
  if (!ran) {
    err << "no op matches; there are:\n";
    for (const Op& op : ops()) {
      err << "  " << op.name << " --shape=";
      for (size_t i = 0; i < op.keys.size(); ++i) {
        err << (i ? "x" : "") << op.keys[i];
      }
      err << "\n";
    }
    return kUsage;
  }
  return ok ? kDone : kFailed;
}

}  // namespace tapeline::bench
