#include "tools/parity/compare.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tapeline {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double floor_of(ValueKind kind) {
  switch (kind) {
    case ValueKind::kScalar:
      return 2e-6;
    case ValueKind::kActivation:
    case ValueKind::kExpertWeights:
      return 1e-5;
    case ValueKind::kGradient:
      return 3e-5;
    case ValueKind::kAuxiliary:
      return 1e-4;
    case ValueKind::kExact:
    case ValueKind::kIdSets:
    case ValueKind::kExperts:
      return 0;
  }
  return 0;
}

double median(std::vector<double> v) {
  if (v.empty()) return 0;
  std::sort(v.begin(), v.end());
  const size_t half = v.size() / 2;
  return v.size() % 2 == 1 ? v[half] : (v[half - 1] + v[half]) / 2;
}

// Rows of the last dimension.
size_t row_length(const Values& x) {
  const int64_t n = x.shape.rank() == 0 ? 1 : x.shape[x.shape.rank() - 1];
  return std::max<size_t>(1, static_cast<size_t>(n));
}

// Ids of a row in ascending order, without what stands for "none".
std::vector<double> row_set(const Values& x, size_t row) {
  const size_t n = row_length(x);
  std::vector<double> ids;
  for (size_t i = row * n; i < (row + 1) * n; ++i) {
    if (x.v[i] >= 0) ids.push_back(x.v[i]);
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

// Rows may be padded to different lengths.
void compare_sets(const Values& got, const Values& want, Comparison& c) {
  const size_t rows = got.v.size() / row_length(got);
  if (rows != want.v.size() / row_length(want)) {
    c.note = "another number of rows";
    return;
  }
  size_t differ = 0;
  for (size_t row = 0; row < rows; ++row) {
    differ += row_set(got, row) != row_set(want, row);
  }
  c.error = static_cast<double>(differ) / static_cast<double>(rows);
  if (differ > 0) {
    c.note = absl::StrCat(differ, " of ", rows, " rows hold other ids");
  }
}

// The weights of each row by ascending expert.
std::vector<double> by_expert(const Values& weights, const Values& ids) {
  const size_t n = row_length(ids);
  std::vector<double> out;
  for (size_t row = 0; row < ids.v.size() / n; ++row) {
    std::vector<std::pair<double, double>> pairs;
    for (size_t i = row * n; i < (row + 1) * n; ++i) {
      pairs.emplace_back(ids.v[i], weights.v[i]);
    }
    std::sort(pairs.begin(), pairs.end());
    for (const auto& [id, weight] : pairs) out.push_back(weight);
  }
  return out;
}

void compare_numbers(const std::vector<double>& got,
                     const std::vector<double>& want, Comparison& c) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(want[i]) || !std::isfinite(got[i])) {
      if (want[i] == got[i]) continue;
      c.error = kInfinity;
      c.note = absl::StrCat("element ", i, " is ", got[i], ", not ", want[i]);
      return;
    }
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  c.error = difference == 0 ? 0
            : norm == 0     ? kInfinity
                            : std::sqrt(difference / norm);
  if (norm == 0 && difference != 0) c.note = "the golden is all zero";
}

}  // namespace

absl::StatusOr<Tolerances> Tolerances::from_meta(const Json& meta, DType dtype,
                                                 double loss) {
  Tolerances t;
  t.dtype_ = dtype;
  std::map<ValueKind, std::vector<double>> by_kind;
  const auto add = [&](const std::string& name, ValueKind kind,
                       const Json* value, double unit) {
    if (value == nullptr || !value->is_number()) return;
    const double noise = value->number() / unit;
    t.own_[name] = noise;
    t.kind_of_[name] = kind;
    by_kind[kind].push_back(noise);
  };
  const Json* noise = meta.find("noise_vs_fp64");
  if (noise != nullptr && noise->is_object()) {
    add("loss", ValueKind::kScalar, noise->find("loss"), std::abs(loss));
    add("logits", ValueKind::kActivation, noise->find("logits"), 1);
    const auto add_all = [&](const char* key, const std::string& prefix,
                             ValueKind kind) {
      const Json* group = noise->find(key);
      if (group == nullptr || !group->is_object()) return;
      for (const auto& [name, value] : group->object()) {
        add(prefix + name, kind, &value, 1);
      }
    };
    add_all("hidden", "", ValueKind::kActivation);
    add_all("grads", "grad.", ValueKind::kGradient);
  } else if (dtype == DType::kBf16) {
    return absl::InvalidArgumentError(
        "meta.json has no noise_vs_fp64, from which bf16 tolerances follow");
  }
  for (auto& [kind, values] : by_kind) t.median_[kind] = median(values);
  return t;
}

double Tolerances::of(const std::string& tensor, ValueKind kind) const {
  const double floor = floor_of(kind);
  if (floor == 0) return 0;
  const auto found = own_.find(tensor == "loss_fp64" ? "loss" : tensor);
  const double own = found == own_.end() ? 0 : found->second;
  if (dtype_ != DType::kBf16) return std::max(10 * own, floor);
  const auto typical = median_.find(
      kind == ValueKind::kExpertWeights ? ValueKind::kActivation : kind);
  return std::max(2 * own,
                  typical == median_.end() ? floor : 2 * typical->second);
}

bool Tolerances::add_measured(const Measured& measured) {
  const double most = dtype_ == DType::kBf16 ? 1.1 : 2.0;
  int64_t agree = 0, differ = 0;
  for (const auto& [name, own] : own_) {
    const auto theirs = measured.golden.find(name);
    const auto mine = measured.ours.find(name);
    if (theirs == measured.golden.end() || mine == measured.ours.end() ||
        own == 0 || name == "loss") {
      continue;
    }
    const double ratio = theirs->second / own;
    const bool vouched =
        ratio <= most && ratio >= 1 / most &&
        mine->second <= std::max(2 * own, median_[kind_of_[name]]);
    ++(vouched ? agree : differ);
  }
  if (measured.listed && agree < 9 * differ + 1) return false;
  for (const auto& [name, noise] : measured.ours) {
    if (!std::isfinite(noise)) continue;
    double& own = own_.try_emplace(name, noise).first->second;
    if (name == "loss" || measured.other_form) own = std::max(own, noise);
  }
  return true;
}

Comparison compare(const std::string& name, const Values& got,
                   const NamedValues& all, const NamedValues& golden,
                   const Tolerances& tolerances) {
  const Values& want = golden.at(name);
  Comparison c{
      quantity_of(name), name, 0, tolerances.of(name, got.kind), "", ""};
  if (got.kind == ValueKind::kIdSets || got.kind == ValueKind::kExperts) {
    compare_sets(got, want, c);
    return c;
  }
  // One number may be a scalar or a list of one.
  const bool number = got.v.size() == 1 && want.v.size() == 1;
  if (!number && !(got.shape == want.shape)) {
    c.error = kInfinity;
    c.note = absl::StrCat("its shape is ", to_string(got.shape), ", not ",
                          to_string(want.shape));
    return c;
  }
  if (got.kind == ValueKind::kExpertWeights) {
    std::string ids = name;
    ids.replace(ids.find("weights"), 7, "ids");
    const auto ours = all.find(ids), theirs = golden.find(ids);
    if (ours == all.end() || theirs == golden.end() ||
        ours->second.v.size() != got.v.size() ||
        theirs->second.v.size() != want.v.size()) {
      c.error = kInfinity;
      c.note = absl::StrCat("no ", ids, " beside it");
      return c;
    }
    compare_numbers(by_expert(got, ours->second),
                    by_expert(want, theirs->second), c);
    return c;
  }
  compare_numbers(got.v, want.v, c);
  return c;
}

std::string quantity_of(const std::string& tensor) {
  std::string name = tensor;
  // A prediction depth in front: "mtp0.".
  if (name.starts_with("mtp") && name.size() > 4 &&
      std::isdigit(static_cast<unsigned char>(name[3]))) {
    name.erase(0, name.find('.') + 1);
  }
  const size_t grad = name.find("grad.");
  if (grad != std::string::npos) return name.substr(0, grad + 4);
  if (name.starts_with("after.")) return "after";
  // A layer or depth behind: ".3".
  const size_t dot = name.rfind('.');
  if (dot != std::string::npos &&
      std::all_of(name.begin() + static_cast<std::ptrdiff_t>(dot) + 1,
                  name.end(),
                  [](unsigned char ch) { return std::isdigit(ch); })) {
    name.erase(dot);
  }
  return name;
}

}  // namespace tapeline
