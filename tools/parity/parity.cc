#include "tools/parity/parity.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/file.h"
#include "runtime/status.h"
#include "tools/parity/golden.h"
#include "tools/parity/runs.h"
#include "tools/train/language_model.h"

namespace tapeline {
namespace {

absl::StatusOr<DType> dtype_of(const Json& config, const std::string& path) {
  const Json* value = config.find("dtype");
  if (value == nullptr) value = config.find("torch_dtype");
  if (value == nullptr || value->is_null()) return DType::kF32;
  if (value->is_string() && value->string() == "float32") return DType::kF32;
  if (value->is_string() && value->string() == "bfloat16") return DType::kBf16;
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": dtype is ", value->dump(),
                   "; use float32 or bfloat16, or give --dtype"));
}

bool is_choice(const std::string& name) {
  const std::string quantity = quantity_of(name);
  return quantity == "index_ids" || quantity == "router_ids";
}

// Two scores closer than this may be in the other order after a rounding.
constexpr double kSmallestMargin = 1e-5;

// What meta.json holds of a golden besides its file: the loss curve.
void add_curve(Golden& golden) {
  const Json* adamw = golden.meta.find("adamw");
  const Json* curve = adamw == nullptr ? nullptr : adamw->find("curve");
  if (golden.kind != "adamw_after" || curve == nullptr || !curve->is_array()) {
    return;
  }
  for (size_t step = 0; step < curve->array().size(); ++step) {
    // From a tie on, rounding decides which keys and experts are taken.
    const Json* margin = curve->array()[step].find("min_margin");
    if (margin != nullptr && margin->is_number() &&
        margin->number() < kSmallestMargin) {
      break;
    }
    for (const char* key : {"loss", "grad_norm"}) {
      const Json* value = curve->array()[step].find(key);
      if (value == nullptr || !value->is_number()) continue;
      golden.values[absl::StrCat("curve.", key, ".", step)] = {
          ValueKind::kAuxiliary, {1}, {value->number()}};
    }
  }
}

double badness(const Comparison& c) {
  if (c.pass()) return c.tolerance == 0 ? 0 : c.error / c.tolerance;
  return c.tolerance == 0 ? std::numeric_limits<double>::infinity()
                          : std::max(1.0, c.error / c.tolerance);
}

// Keeps the worse of two comparisons of one tensor.
void merge(std::map<std::string, Comparison>& into, Comparison c) {
  const auto [at, is_new] = into.try_emplace(c.tensor, c);
  if (!is_new && badness(c) > badness(at->second)) at->second = std::move(c);
}

std::map<std::string, double> errors(const NamedValues& got,
                                     const NamedValues& exact,
                                     const Tolerances& tolerances) {
  std::map<std::string, double> errors;
  for (const auto& [name, values] : exact) {
    const auto found = got.find(name);
    if (found == got.end()) continue;
    Values of_kind = found->second;
    of_kind.kind = values.kind;
    errors[name] = compare(name, of_kind, got, exact, tolerances).error;
  }
  return errors;
}

// A mean's noise is that of its terms over the root of their number.
double loss_noise(const NamedValues& ours, const NamedValues& exact) {
  const auto a = ours.find("token_loss"), b = exact.find("token_loss");
  if (a == ours.end() || b == exact.end()) return 0;
  double squares = 0, sum = 0;
  for (size_t t = 0; t < b->second.v.size(); ++t) {
    const double d = a->second.v[t] - b->second.v[t];
    squares += d * d;
    sum += b->second.v[t];
  }
  return sum == 0 ? 0 : std::sqrt(squares) / std::abs(sum);
}

struct FormRun {
  std::string form;
  NamedValues values;
};

// Adds the noise of what meta.json does not list, where it can be measured.
// The golden's form of attention is the plain one.
void measure_noise(const Golden& golden, const std::string& model, DType dtype,
                   const FormRun& ours, Tolerances& tolerances) {
  const absl::StatusOr<Computed> exact = compute(
      golden, {.model = model, .dtype = DType::kF64, .choices = &ours.values});
  if (!exact.ok()) return;
  Tolerances::Measured measured = {
      errors(golden.values, exact->values, tolerances),
      errors(ours.values, exact->values, tolerances), golden.kind == "main",
      ours.form == "absorbed" && dtype == DType::kBf16};
  if (measured.listed) {
    measured.ours["loss"] = loss_noise(ours.values, exact->values);
  } else {
    // meta.json vouches for main alone. A margin is a function of scores that
    // are compared themselves.
    std::erase_if(measured.ours, [](const auto& item) {
      return item.first.find("margin") == std::string::npos;
    });
  }
  tolerances.add_measured(measured);
}

}  // namespace

bool ParityReport::pass() const {
  if (!unknown.empty() || compared == 0) return false;
  return std::all_of(quantities.begin(), quantities.end(),
                     [](const QuantityReport& q) { return q.failed.empty(); });
}

absl::StatusOr<ParityReport> check_parity(const ParityOptions& options) {
  const std::string config_path = join_path(options.model, "config.json");
  ASSIGN_OR_RETURN(const Json config, read_json(config_path));
  ParityReport report;
  if (options.dtype) {
    report.dtype = *options.dtype;
  } else {
    ASSIGN_OR_RETURN(report.dtype, dtype_of(config, config_path));
  }
  ASSIGN_OR_RETURN(Golden golden, read_golden(options.golden));
  report.kind = golden.kind;
  report.in_golden = static_cast<int64_t>(golden.values.size());
  add_curve(golden);
  if (options.inject_choices && golden.kind != "main") {
    return absl::InvalidArgumentError(
        absl::StrCat("--inject_choices is for goldens of kind main; ",
                     golden.path, " is ", golden.kind));
  }
  auto loss = golden.values.find("loss_fp64");
  if (loss == golden.values.end()) loss = golden.values.find("loss");
  if (loss != golden.values.end() && loss->second.v.size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(golden.path, ": ", loss->first, " is not one number"));
  }
  report.noise_known = golden.meta.find("noise_vs_fp64") != nullptr;
  ASSIGN_OR_RETURN(Tolerances tolerances,
                   Tolerances::from_meta(
                       golden.meta, report.dtype,
                       loss == golden.values.end() ? 1 : loss->second.v.at(0)));
  std::set<std::string> inputs(golden.inputs.begin(), golden.inputs.end());
  if (options.inject_choices) {
    for (const auto& [name, values] : golden.values) {
      if (is_choice(name)) inputs.insert(name);
    }
  }
  report.inputs = static_cast<int64_t>(inputs.size());

  const absl::StatusOr<std::unique_ptr<LanguageModel>> made =
      make_language_model(config, {});
  if (!made.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(config_path, ": ", made.status().message()));
  }
  const std::unique_ptr<LanguageModel>& model = *made;
  // Attention over selected keys is computed in both forms. Over all keys it is
  // trained in plain form; the absorbed one, which decodes, rounds elsewhere
  // and is compared in f32.
  report.forms = {"plain"};
  if (model->latent_attention() &&
      (model->index_top_k() > 0 || report.dtype == DType::kF32)) {
    report.forms.push_back("absorbed");
  }
  std::vector<FormRun> runs;
  std::map<std::string, Comparison> compared;
  std::set<std::string> unknown;
  const auto compare_run = [&](const FormRun& run, const Tolerances& t) {
    for (const auto& [name, values] : golden.values) {
      const auto got = run.values.find(name);
      if (inputs.contains(name) || got == run.values.end()) continue;
      Comparison c = compare(name, got->second, run.values, golden.values, t);
      c.form = run.form;
      merge(compared, std::move(c));
    }
  };
  for (const std::string& form : report.forms) {
    ASSIGN_OR_RETURN(
        Computed computed,
        compute(golden, {.model = options.model,
                         .dtype = report.dtype,
                         .absorbed = form == "absorbed",
                         .choices = options.inject_choices ? &golden.values
                                                           : nullptr}));
    for (const auto& [name, values] : golden.values) {
      if (!inputs.contains(name) && !computed.values.contains(name)) {
        unknown.insert(absl::StrCat(name, " (nothing here computes it)"));
      }
    }
    for (const std::string& name : computed.extra_gradients) {
      unknown.insert(absl::StrCat(name, " (not zero here, not in the golden)"));
    }
    report.rows_tied = std::max(report.rows_tied, computed.rows_tied);
    runs.push_back({form, std::move(computed.values)});
    compare_run(runs.back(), tolerances);
  }
  // What meta.json does not say is measured only where it decides.
  const bool wanted =
      std::any_of(compared.begin(), compared.end(), [&](const auto& item) {
        const Comparison& c = item.second;
        return !c.pass() && c.note.empty();
      });
  if (wanted && (golden.kind == "main" || golden.kind.starts_with("mtp"))) {
    compared.clear();
    for (const FormRun& run : runs) {
      Tolerances measured = tolerances;
      measure_noise(golden, options.model, report.dtype, run, measured);
      compare_run(run, measured);
    }
  }
  report.unknown.assign(unknown.begin(), unknown.end());
  std::map<std::string, QuantityReport> quantities;
  for (const auto& [name, c] : compared) {
    QuantityReport& q = quantities[c.quantity];
    q.name = c.quantity;
    ++q.tensors;
    if (q.tensors == 1 || badness(c) > badness(q.worst)) q.worst = c;
    if (!c.pass()) q.failed.push_back(c);
    report.compared += name.starts_with("curve.") ? 0 : 1;
  }
  for (auto& [name, q] : quantities) report.quantities.push_back(std::move(q));
  return report;
}

}  // namespace tapeline
