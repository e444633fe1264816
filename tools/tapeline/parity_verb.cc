// tapeline parity: does a model compute what another implementation recorded?

#include <cstdint>
#include <iomanip>
#include <iostream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tools/parity/parity.h"
#include "tools/tapeline/verbs.h"

namespace tapeline {
namespace {

struct ParityFlags {
  std::string model, golden, dtype, device = "cpu";
  int64_t threads = kAllThreads;
  bool inject_choices = false, json = false;
};

Flags make_flags(ParityFlags& f) {
  Flags flags("parity");
  flags.add("model", &f.model, "DIR", "Hugging Face folder (required)");
  flags.add("golden", &f.golden, "F",
            "safetensors file of another implementation's results (required)");
  flags.add("dtype", &f.dtype, "f32|bf16", "of weights (config.json's)");
  flags.add("inject_choices", &f.inject_choices, "",
            "use the golden's selected keys and experts");
  flags.add("device", &f.device, "auto|cpu|cuda", "where the model runs (cpu)");
  flags.add("threads", &f.threads, "N", "processors to use (all)");
  flags.add("json", &f.json, "", "print the report as JSON");
  return flags;
}

std::string check(const ParityFlags& f) {
  if (f.model.empty()) return "--model is missing; give a folder";
  if (f.golden.empty()) return "--golden is missing; give a file";
  if (!f.dtype.empty() && f.dtype != "f32" && f.dtype != "bf16") {
    return absl::StrCat("--dtype is '", f.dtype, "'; use f32 or bf16");
  }
  if (std::string wrong = check_device(f.device); !wrong.empty()) {
    return wrong;
  }
  return std::string(check_threads(f.threads));
}

Json strings_json(const std::vector<std::string>& strings) {
  Json::Array array;
  for (const std::string& s : strings) array.emplace_back(s);
  return array;
}

Json to_json(const ParityFlags& f, const ParityReport& report) {
  Json out;
  out["schema"] = 1;
  out["model"] = f.model;
  out["golden"] = f.golden;
  out["kind"] = report.kind;
  out["dtype"] = name_of(report.dtype);
  out["forms"] = strings_json(report.forms);
  out["pass"] = report.pass();
  out["in_golden"] = report.in_golden;
  out["inputs"] = report.inputs;
  out["compared"] = report.compared;
  out["rows_tied"] = report.rows_tied;
  Json::Array quantities;
  for (const QuantityReport& q : report.quantities) {
    Json item;
    item["name"] = q.name;
    item["tensors"] = q.tensors;
    item["worst"]["tensor"] = q.worst.tensor;
    item["worst"]["error"] = q.worst.error;
    item["worst"]["tolerance"] = q.worst.tolerance;
    item["worst"]["form"] = q.worst.form;
    if (!q.worst.note.empty()) item["worst"]["note"] = q.worst.note;
    item["pass"] = q.failed.empty();
    Json::Array failed;
    for (const Comparison& c : q.failed) failed.emplace_back(c.tensor);
    item["failed"] = std::move(failed);
    quantities.push_back(std::move(item));
  }
  out["quantities"] = std::move(quantities);
  out["unknown"] = strings_json(report.unknown);
  return out;
}

void print(const ParityFlags& f, const ParityReport& report) {
  std::cout << f.golden << ": " << report.kind << ", " << name_of(report.dtype)
            << ", " << report.compared << " tensors compared of "
            << report.in_golden << " (" << report.inputs << " are inputs)\n"
            << std::scientific << std::setprecision(1);
  for (const QuantityReport& q : report.quantities) {
    std::cout << (q.failed.empty() ? "  ok    " : "  FAIL  ") << std::left
              << std::setw(24) << q.name << std::right << std::setw(5)
              << q.tensors << "  worst " << q.worst.error << " of "
              << q.worst.tolerance << "  " << q.worst.tensor << "\n";
    for (const Comparison& c : q.failed) {
      std::cout << "        " << c.tensor << ": error " << c.error
                << ", tolerance " << c.tolerance << ", form " << c.form
                << (c.note.empty() ? "" : "; ") << c.note << "\n";
    }
  }
  if (!report.noise_known) {
    std::cout << "  no noise_vs_fp64 in a meta.json beside it: tolerances are "
                 "their floors\n";
  }
  if (report.rows_tied > 0) {
    std::cout << "  " << report.rows_tied
              << " rows of selected keys tie and were taken from the golden\n";
  }
  for (const std::string& name : report.unknown) {
    std::cout << "  FAIL  " << name << "\n";
  }
  std::cout << (report.pass() ? "equal\n" : "not equal\n");
}

}  // namespace

int parity_verb(const Arguments& arguments) {
  ParityFlags f;
  Flags flags = make_flags(f);
  const absl::StatusOr<bool> parsed = parse_or_help(flags, arguments);
  if (!parsed.ok()) return fail(kExitUsage, parsed.status());
  if (!*parsed) return end_output();
  if (const std::string wrong = check(f); !wrong.empty()) {
    return fail(kExitUsage, wrong);
  }
  if (const absl::Status status = use_device(f.device, f.threads);
      !status.ok()) {
    return fail(kExitBadInput, status);
  }
  ParityOptions options{user_path(f.model), user_path(f.golden), std::nullopt,
                        f.inject_choices};
  if (!f.dtype.empty()) {
    options.dtype = f.dtype == "bf16" ? DType::kBf16 : DType::kF32;
  }
  const absl::StatusOr<ParityReport> report = check_parity(options);
  if (!report.ok()) return fail(kExitBadInput, report.status());
  if (f.json) {
    std::cout << to_json(f, *report).dump() << "\n";
  } else {
    print(f, *report);
  }
  const int written = end_output();
  if (written != kExitDone) return written;
  return report->pass() ? kExitDone : kExitDiffers;
}

}  // namespace tapeline
