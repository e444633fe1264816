// schedule_fuzz --cases N --seed S [--json]: exit code 1 if validator and
// interpreter disagree.
#include <charconv>
#include <cstdint>
#include <iostream>
#include <string>
#include <string_view>

#include "dist/pipeline/testing/mutants.h"
#include "runtime/json.h"

namespace tapeline {
namespace {

struct Options {
  int64_t cases = 10000, seed = 1;
  bool json = false;
};

bool parse_number(std::string_view text, int64_t* out) {
  const auto parsed =
      std::from_chars(text.data(), text.data() + text.size(), *out);
  return parsed.ec == std::errc() && parsed.ptr == text.data() + text.size() &&
         *out >= 0;
}

// What is wrong, or empty.
std::string parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    std::string_view flag = argv[i];
    if (flag == "--json") {
      options.json = true;
      continue;
    }
    const size_t equals = flag.find('=');
    std::string_view value;
    if (equals != std::string_view::npos) {
      value = flag.substr(equals + 1);
      flag = flag.substr(0, equals);
    } else if (i + 1 < argc) {
      value = argv[++i];
    }
    int64_t* target = flag == "--cases"  ? &options.cases
                      : flag == "--seed" ? &options.seed
                                         : nullptr;
    if (target == nullptr || !parse_number(value, target)) {
      return std::string(flag) + ": use --cases N --seed S --json";
    }
  }
  return "";
}

int run(int argc, char** argv) {
  Options options;
  if (const std::string wrong = parse(argc, argv, options); !wrong.empty()) {
    std::cerr << "schedule_fuzz: " << wrong << "\n";
    return 64;
  }
  const FuzzCounts counts =
      fuzz_schedules(options.cases, options.seed, std::cerr);
  Json out;
  out["schema"] = 1;
  out["cases"] = counts.cases;
  out["accepted"] = counts.accepted;
  out["accepted_reordered"] = counts.accepted_reordered;
  out["rejected"] = Json::Object{};
  for (const auto& [check, n] : counts.rejected) out["rejected"][check] = n;
  out["hung"] = counts.hung;
  out["wrong_gradients"] = counts.wrong_gradients;
  out["over_budget"] = counts.over_budget;
  out["rejected_but_ran"] = counts.rejected_but_ran;
  std::cout << (options.json ? out.dump() : out.dump(2)) << "\n";
  return counts.hung + counts.wrong_gradients + counts.over_budget +
             counts.rejected_but_ran >
         0;
}

}  // namespace
}  // namespace tapeline

int main(int argc, char** argv) { return tapeline::run(argc, argv); }
