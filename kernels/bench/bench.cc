#include "kernels/bench/bench.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <map>
#include <memory>
#include <new>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "kernels/bench/baseline.h"
#include "kernels/bench/memory.h"
#include "kernels/bench/options.h"
#include "kernels/bench/timing.h"
#include "nlohmann/json.hpp"
#include "runtime/cuda_device.h"
#include "runtime/device.h"

namespace tapeline::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kDone = 0, kFailed = 1, kBadFile = 2, kUsage = 64;

// On a GPU: sets of inputs are made until they are together this large, four
// times the L2 of an H200, but not more than so many.
constexpr int64_t kRotatedBytes = int64_t{256} << 20;
constexpr int64_t kMostSets = 64;
constexpr int64_t kSquare = 8192;

struct Registered : Op {
  Limits limits;
};

std::vector<Registered>& ops() {
  static auto* const list = new std::vector<Registered>;
  return *list;
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

// 580.159, as the driver calls itself.
std::string driver_version() {
  std::ifstream in("/proc/driver/nvidia/version");
  for (std::string word; in >> word;) {
    if (word.find_first_not_of("0123456789.") == word.npos &&
        word.find('.') != word.npos) {
      return word;
    }
  }
  return "";
}

Json null_or(const std::string& text) {
  return text.empty() ? Json() : Json(text);
}

// Everything a row of the table and the JSON share.
struct Context {
  Options options;
  Baseline baseline;
  std::string command, commit, device, uuid, driver;
  Launch launch;
  // Of a GPU; 0: not measured.
  double gbps = 0, tflops = 0;
  std::map<std::array<int64_t, 3>, double> product_tflops;
};

// One set of inputs on the CPU; on a GPU as many as are larger than its L2.
Turns make_turns(const Op& op, const Arguments& arguments,
                 int64_t* rotated_bytes) {
  Pool& pool = Device::current().pool();
  const int64_t before = pool.stats().live;
  use_set(0);
  Turns turns;
  turns.runs.push_back(op.make(arguments));
  *rotated_bytes = 0;
  if (!arguments.launch.on_cuda()) return turns;
  const int64_t bytes = std::max<int64_t>(1, pool.stats().live - before);
  const int64_t sets =
      std::clamp<int64_t>(ceil_div(kRotatedBytes, bytes), 1, kMostSets);
  for (int64_t set = 1; set < sets; ++set) {
    use_set(static_cast<int>(set));
    turns.runs.push_back(op.make(arguments));
  }
  *rotated_bytes = sets * bytes;
  return turns;
}

// Floor and what follows from it, at the ceilings of this device.
void add_ceilings(Context& context, const Run& run, double seconds, Json& row) {
  for (const char* key : {"floor_us", "x_floor", "pct_ceiling",
                          "ceiling_tflops", "ceiling_gbps"}) {
    row[key] = nullptr;  // none is stated for a CPU
  }
  if (context.gbps == 0 || !run.on_device) return;
  double tflops = context.tflops;
  if (const Product& p = run.same_product; p.m > 0) {
    double& same = context.product_tflops[{p.m, p.n, p.k}];
    if (same == 0) same = product_tflops(context.launch, p);
    tflops = std::max(tflops, same);
  }
  const double floor = std::max(run.cost.flops / tflops * 1e-12,
                                run.cost.bytes / context.gbps * 1e-9);
  row["floor_us"] = floor * 1e6;
  row["x_floor"] = seconds / floor;
  row["pct_ceiling"] = 100 * floor / seconds;
  row["ceiling_tflops"] = tflops;
  row["ceiling_gbps"] = context.gbps;
}

Json measure(Context& context, const Registered& op, const Arguments& arguments,
             std::ostream& err) {
  int64_t rotated_bytes = 0;
  Turns turns = make_turns(op, arguments, &rotated_bytes);
  const Launch l = arguments.launch;
  const std::vector<Seconds> bursts = context.options.profile_once
                                          ? time_once(l, turns)
                                          : time_bursts(l, turns);
  const Run& run = turns.last();
  Verifier verifier;
  run.verify(verifier);
  if (!verifier.ok()) {
    err << op.name << ": the timed launch is wrong: " << verifier.failures()
        << "\n";
  }
  const double seconds = bursts[bursts.size() / 2].wall;
  Json shape;
  for (size_t i = 0; i < op.keys.size(); ++i) {
    shape[op.keys[i]] = arguments.dims[i];
  }
  Json row;
  row["schema"] = 1;
  row["op"] = op.name;
  row["impl"] = "tapeline";
  row["shape"] = shape;
  row["dtype"] = op.limits.dtypes.empty() ? Json() : name_of(arguments.dtype);
  row["threads"] = context.options.threads;
  row["us"] = seconds * 1e6;
  row["us_min"] = bursts.front().wall * 1e6;
  row["us_processor"] = nullptr;
  if (!l.on_cuda()) {
    // The least of any burst: other programs on the machine only add.
    double processor = bursts[0].processor;
    for (const Seconds& burst : bursts) {
      processor = std::min(processor, burst.processor);
    }
    row["us_processor"] = processor * 1e6;
  }
  row["tflops"] = run.cost.flops / seconds * 1e-12;
  row["gbps"] = run.cost.bytes / seconds * 1e-9;
  add_ceilings(context, run, seconds, row);
  const Json* base = context.baseline.find(op.name, shape);
  row["baseline_impl"] = base ? (*base)["impl"] : Json();
  row["baseline_us"] = base ? (*base)["us"] : Json();
  row["x_baseline"] =
      base ? Json((*base)["us"].get<double>() / (seconds * 1e6)) : Json();
  row["verified"] = verifier.ok();
  row["max_err"] = verifier.max_err();
  row["rotated_bytes"] = rotated_bytes;
  row["device"] = context.device;
  row["device_uuid"] = null_or(context.uuid);
  row["driver"] = null_or(context.driver);
  row["commit"] = null_or(context.commit);
  row["command"] = context.command;
  return row;
}

void print_number(const Json& value, int width, int digits, double factor,
                  std::ostream& out) {
  out << " | " << std::setw(width);
  if (value.is_null())
    out << "";
  else
    out << std::setprecision(digits) << value.get<double>() * factor;
}

void print_row(const Json& row, std::ostream& out) {
  std::ostringstream shape;
  for (const auto& [key, value] : row["shape"].items()) {
    shape << (shape.tellp() ? " " : "") << key << "=" << value;
  }
  out << std::left << std::setw(20) << row["op"].get<std::string>() << " | "
      << std::setw(46) << shape.str() << std::right << std::fixed;
  print_number(row["us"], 10, 1, 1, out);
  print_number(row["us_processor"], 10, 1, 1, out);
  print_number(row["tflops"], 9, 1, 1e3, out);
  print_number(row["gbps"], 7, 1, 1, out);
  print_number(row["pct_ceiling"], 9, 1, 1, out);
  print_number(row["x_baseline"], 7, 2, 1, out);
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
  if (const char* given = std::getenv("TAPELINE_COMMIT")) return given;
  const char* workspace = std::getenv("BUILD_WORKSPACE_DIRECTORY");
  const std::string where = workspace ? workspace : ".";
  return first_line("git -C '" + where + "' rev-parse HEAD 2>/dev/null");
}

// Which rule of the op --shape or --dtype breaks; or nothing.
std::string broken_rule(const Registered& op, const Options& options) {
  const Limits& limits = op.limits;
  std::string broken;
  if (options.shape.size() == op.keys.size()) {
    for (size_t i = 0; i < op.keys.size(); ++i) {
      if (options.shape[i] == 0 && op.keys[i] != op.may_be_zero) {
        return "--shape: " + op.keys[i] + " of " + op.name + " is at least 1";
      }
    }
    if (limits.broken) broken = limits.broken(options.shape);
  }
  if (!broken.empty()) return "--shape: " + broken + " for " + op.name;
  if (!options.dtype || std::find(limits.dtypes.begin(), limits.dtypes.end(),
                                  *options.dtype) != limits.dtypes.end()) {
    return "";
  }
  std::string taken;
  for (DType dtype : limits.dtypes) {
    taken += (taken.empty() ? "" : " or ") + std::string(name_of(dtype));
  }
  return "--dtype=" + std::string(name_of(*options.dtype)) + ": " + op.name +
         (taken.empty() ? " has no type" : " takes " + taken);
}

bool is_named(const Op& op, const Options& options) {
  return options.op.empty() || options.op == op.name || options.op == op.kernel;
}

// The ops and shapes that the options choose.
struct Chosen {
  const Registered* op;
  std::vector<std::vector<int64_t>> shapes;
};
std::vector<Chosen> choose(const Options& options, bool on_cuda,
                           bool& left_out) {
  std::vector<Chosen> chosen;
  for (const Registered& op : ops()) {
    if (!is_named(op, options)) continue;
    // Of several ops, those that take what is asked for.
    if (options.op != op.name && !broken_rule(op, options).empty()) {
      left_out = true;
      continue;
    }
    if (options.shape.empty()) {
      chosen.push_back({&op, on_cuda ? op.gpu_shapes : op.shapes});
    } else if (options.shape.size() == op.keys.size()) {
      chosen.push_back({&op, {options.shape}});
    }
  }
  return chosen;
}

std::string joined(const std::vector<std::string>& keys) {
  std::string all;
  for (const std::string& key : keys) all += (all.empty() ? "" : "x") + key;
  return all;
}

// What is wrong with the name and the shape, given what they choose; or
// nothing.
std::string wrong_choice(const Options& options,
                         const std::vector<Chosen>& chosen) {
  if (chosen.empty()) {
    const Registered* first = nullptr;
    for (const Registered& op : ops()) {
      if (!is_named(op, options)) continue;
      if (first == nullptr) first = &op;
      const bool fits =
          options.shape.empty() || options.shape.size() == op.keys.size();
      const std::string broken = broken_rule(op, options);
      if (fits && !broken.empty()) return broken;
    }
    if (first == nullptr) {
      return "no op is called " + options.op + "; --list names them";
    }
    const std::string got =
        "got " + std::to_string(options.shape.size()) +
        (options.shape.size() == 1 ? " number" : " numbers");
    if (options.op.empty()) return "no op takes such a --shape, " + got;
    return first->name + " takes " + joined(first->keys) + ", " + got;
  }
  for (const Chosen& c : chosen) {
    const std::string broken = broken_rule(*c.op, options);
    if (!broken.empty()) return broken;
  }
  return "";
}

void list(const std::vector<Chosen>& chosen, std::ostream& out) {
  for (const Chosen& c : chosen) {
    for (const std::vector<int64_t>& dims : c.shapes) {
      out << c.op->name << " --shape=";
      for (size_t i = 0; i < dims.size(); ++i) {
        out << (i ? "x" : "") << dims[i];
      }
      out << "\n";
    }
  }
}

// The device that the options choose; or the exit code, after one line.
int open_device(Context& context, std::unique_ptr<Device>& device,
                std::ostream& err) {
  const Options& options = context.options;
  if (options.device == "cuda" ||
      (options.device.empty() && cuda_devices() > 0)) {
    auto made = make_cuda_device(0, options.threads);
    if (!made.ok()) {
      err << made.status().message() << "\n";
      return kBadFile;
    }
    device = *std::move(made);
    const auto properties = cuda_properties();
    if (properties.ok()) {
      context.device = properties->name;
      context.uuid = properties->uuid;
    }
    context.driver = driver_version();
  } else {
    limit_memory();
    device = std::make_unique<Device>(options.threads);
    context.device = cpu_name();
  }
  return kDone;
}

}  // namespace

bool add(Op op, Limits limits) {
  ops().push_back({std::move(op), std::move(limits)});
  return true;
}

int run(int argc, char** argv, std::ostream& out, std::ostream& err) {
  Context context;
  const std::string wrong = parse(argc, argv, context.options);
  if (!wrong.empty()) {
    err << wrong << "\n";
    return kUsage;
  }
  const Options& options = context.options;
  const bool gpu =
      options.device.empty() ? cuda_devices() > 0 : options.device == "cuda";
  bool left_out = false;  // by a type or a shape
  const std::vector<Chosen> chosen = choose(options, gpu, left_out);
  const std::string bad_choice = wrong_choice(options, chosen);
  if (!bad_choice.empty()) {
    err << bad_choice << "\n";
    return kUsage;
  }
  if (left_out) {
    err << "ops that do not take this --shape or --dtype are left out\n";
  }
  if (options.list) {
    list(chosen, out);
    return kDone;
  }
  if (!countable(options.shape)) return fail_for_memory("out of memory", err);
  context.command = command_line(argc, argv);
  context.commit = commit();
  std::unique_ptr<Device> device;
  if (const int code = open_device(context, device, err)) return code;
  if (!options.baseline.empty()) {
    const std::string bad =
        context.baseline.read(options.baseline, context.device, err);
    if (!bad.empty()) {
      err << bad << "\n";
      return kBadFile;
    }
  }
  DeviceScope scope(*device);
  const Launch l = context.launch = launch();
  if (l.on_cuda() && !options.profile_once) {
    context.gbps = copy_gbps(l);
    context.tflops = product_tflops(l, {kSquare, kSquare, kSquare});
  }
  if (!options.json) {
    out << "# " << context.device << ", " << options.threads << " thread(s)";
    if (context.gbps > 0) {
      out << ", copy " << context.gbps << " GB/s, cuBLASLt " << context.tflops
          << " TFLOP/s";
    }
    out << "\n"
        << std::left << std::setw(20) << "op"
        << " | " << std::setw(46) << "shape"
        << " |         us | cpu min us |   GFLOP/s |    GB/s | % ceiling |"
           "  x base | max err\n";
  }
  bool ok = true;
  for (const Chosen& c : chosen) {
    const DType own = l.on_cuda() ? c.op->gpu_dtype : DType::kF32;
    for (const std::vector<int64_t>& dims : c.shapes) {
      const Json row =
          measure(context, *c.op, {dims, options.dtype.value_or(own), l}, err);
      ok = ok && row["verified"].get<bool>();
      if (options.json)
        out << row.dump() << std::endl;
      else
        print_row(row, out);
    }
  }
  return ok ? kDone : kFailed;
}

int run_process(int argc, char** argv) {
  end_where_memory_does();
  // Our own code throws nothing; libraries do.
  try {
    return run(argc, argv, std::cout, std::cerr);
  } catch (const std::bad_alloc&) {
    return fail_for_memory("out of memory", std::cerr);
  } catch (const std::length_error&) {
    return fail_for_memory("out of memory", std::cerr);
  } catch (const std::system_error& e) {
    std::cerr << "the system refused a resource: " << e.what()
              << "; lower --threads\n";
    return kOutOfMemory;
  }
}

}  // namespace tapeline::bench
