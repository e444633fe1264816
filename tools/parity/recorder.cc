#include "tools/parity/recorder.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace tapeline {
namespace {

// Of the largest score of a row: fp32 rounding of sums over heads.
constexpr double kTie = 1e-6;

// Where a value belongs; empty: it has no name in goldens.
std::string golden_name(const std::string& name, const std::string& path) {
  const std::vector<std::string> parts = absl::StrSplit(path, '.');
  const std::string& part = parts[0];
  const std::string number = parts.size() > 1 ? parts[1] : "";
  const bool in_loss = parts.back() == "indexer_loss";
  // The loss's own attention pass is no attention of the model.
  if (in_loss != name.starts_with("index_kl_rows") &&
      in_loss != name.starts_with("index_target")) {
    return "";
  }
  if (part == "layers") return absl::StrCat(name, ".", number);
  if (part == "mtp") {
    if (name == "embed_out") return "";
    return name.starts_with("mtp_") ? absl::StrCat(name, ".", number)
                                    : absl::StrCat("mtp", number, ".", name);
  }
  if (part == "mtp_head") return absl::StrCat("mtp_", name, ".", number);
  return name;
}

ValueKind kind_of(std::string_view name) {
  if (name == "router_weights") return ValueKind::kExpertWeights;
  if (name.starts_with("index_kl") || name == "index_target") {
    return ValueKind::kAuxiliary;
  }
  if (name == "selected_ids") return ValueKind::kIdSets;
  return name == "index_target_ids" ? ValueKind::kExact
                                    : ValueKind::kActivation;
}

// Appends columns: heads that attended one by one.
void append_columns(Values& to, const Values& more) {
  const auto rows = static_cast<size_t>(to.shape[0]);
  const size_t have = to.v.size() / rows, add = more.v.size() / rows;
  std::vector<double> v;
  v.reserve(to.v.size() + more.v.size());
  const auto row = [](const std::vector<double>& from, size_t n, size_t r) {
    return from.begin() + static_cast<std::ptrdiff_t>(r * n);
  };
  for (size_t r = 0; r < rows; ++r) {
    v.insert(v.end(), row(to.v, have, r), row(to.v, have, r + 1));
    v.insert(v.end(), row(more.v, add, r), row(more.v, add, r + 1));
  }
  to.v = std::move(v);
  to.shape = {to.shape[0], static_cast<int64_t>(have + add)};
}

// Row t of ids; of keys without padding, ascending. What is no id becomes an
// id that nothing has.
std::vector<int32_t> row_ids(const Values& ids, size_t t, size_t width,
                             bool keys) {
  std::vector<int32_t> row;
  for (size_t i = t * width; i < (t + 1) * width; ++i) {
    const double id = ids.v[i];
    if (keys && id == -1) continue;
    const bool whole = id >= 0 && id < 1 << 30 && id == std::floor(id);
    row.push_back(whole ? static_cast<int32_t>(id) : 1 << 30);
  }
  if (keys) std::sort(row.begin(), row.end());
  return row;
}

// Are the scores of the two rows' keys the same but for rounding?
bool same_scores(const double* scores, size_t keys,
                 const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  const auto sorted = [&](const std::vector<int32_t>& row) {
    std::vector<double> s;
    for (const int32_t id : row) {
      if (id < 0) continue;
      s.push_back(static_cast<size_t>(id) < keys
                      ? scores[id]
                      : std::numeric_limits<double>::quiet_NaN());
    }
    std::sort(s.begin(), s.end());
    return s;
  };
  if (std::set<int32_t>(a.begin(), a.end()).size() !=
      std::set<int32_t>(b.begin(), b.end()).size()) {
    return false;
  }
  const std::vector<double> of_a = sorted(a), of_b = sorted(b);
  double most = 0;
  for (size_t j = 0; j < keys; ++j) {
    if (std::isfinite(scores[j])) most = std::max(most, std::abs(scores[j]));
  }
  if (of_a.size() != of_b.size()) return false;
  for (size_t i = 0; i < of_a.size(); ++i) {
    if (!(std::abs(of_a[i] - of_b[i]) <= kTie * most)) return false;
  }
  return true;
}

}  // namespace

void Recorder::keep(const std::string& key, Values values) {
  const auto found = values_.find(key);
  if (found == values_.end()) {
    values_[key] = std::move(values);
  } else if (key.find("attn_lse") != std::string::npos) {
    append_columns(found->second, values);
  } else {
    status_ = absl::InternalError(absl::StrCat(key, " was observed twice"));
  }
}

void Recorder::value(const char* name, const std::string& path,
                     const Tensor& x) {
  std::string key = golden_name(name, path);
  if (key.empty()) return;
  if (const size_t at = key.find("selected_ids"); at != std::string::npos) {
    key.replace(at, 12, "index_ids");
  }
  keep(key, values_of(x, kind_of(name)));
}

void Recorder::gradient(const char* name, const std::string& path,
                        const Tensor& dx) {
  const std::string key = golden_name(name, path);
  if (!key.empty() && dx) {
    keep("grad_" + key, values_of(dx, ValueKind::kGradient));
  }
}

// Rows of the golden's ids; of keys ascending and padded at the end, as the
// model has them.
Tensor Recorder::injected(const std::string& key, bool keys,
                          const Tensor& ids) {
  const auto found = choices_->find(key);
  if (found == choices_->end()) {
    status_ = absl::NotFoundError(
        absl::StrCat("the golden holds no ", key, " to inject"));
    return ids;
  }
  const auto tokens = static_cast<size_t>(ids.size(0));
  const auto width = static_cast<size_t>(ids.size(1));
  const size_t given = tokens == 0 ? 0 : found->second.v.size() / tokens;
  if (given * tokens != found->second.v.size()) {
    status_ = absl::InvalidArgumentError(absl::StrCat(
        key, " has ", found->second.v.size(), " ids for ", tokens, " tokens"));
    return ids;
  }
  // What the choice was made from: keys a token may see have a finite score.
  std::string from = key;
  from.replace(key.find(keys ? "index_ids" : "router_ids"), keys ? 9 : 10,
               keys ? "index_scores" : "router_logits");
  const auto scores = values_.find(from);
  std::vector<int32_t> all;
  for (size_t t = 0; t < tokens; ++t) {
    std::vector<int32_t> row = row_ids(found->second, t, given, keys);
    if (scores != values_.end()) {
      const size_t n = scores->second.v.size() / tokens;
      const double* of = scores->second.v.data() + t * n;
      std::set<int32_t> seen;
      for (const int32_t id : row) {
        if (id >= 0 && static_cast<size_t>(id) < n && std::isfinite(of[id]) &&
            seen.insert(id).second) {
          continue;
        }
        status_ = absl::InvalidArgumentError(
            absl::StrCat(key, " row ", t, " holds an id that is no whole ",
                         "number, not a choice, or there twice"));
        return ids;
      }
    }
    if (row.size() > width || (!keys && row.size() != width)) {
      status_ = absl::InvalidArgumentError(
          absl::StrCat(key, " has ", row.size(), " ids in row ", t,
                       ", the model uses ", width));
      return ids;
    }
    row.resize(width, -1);
    all.insert(all.end(), row.begin(), row.end());
  }
  return Tensor::from(all, ids.shape());
}

Tensor Recorder::tie_broken(const std::string& key, const Tensor& ids) {
  std::string scores_key = key;
  scores_key.replace(key.find("index_ids"), 9, "index_scores");
  const auto golden = ties_.find(key);
  const auto scores = values_.find(scores_key);
  const auto tokens = static_cast<size_t>(ids.size(0));
  const auto width = static_cast<size_t>(ids.size(1));
  if (golden == ties_.end() || scores == values_.end() || tokens == 0 ||
      golden->second.v.size() != tokens * width) {
    return ids;
  }
  std::vector<int32_t> all = ids.to_vector<int32_t>();
  const size_t keys = scores->second.v.size() / tokens;
  for (size_t t = 0; t < tokens; ++t) {
    std::vector<int32_t> row = row_ids(golden->second, t, width, true);
    row.resize(width, -1);
    const auto own = all.begin() + static_cast<std::ptrdiff_t>(t * width);
    if (std::equal(row.begin(), row.end(), own)) continue;
    if (!same_scores(scores->second.v.data() + t * keys, keys, row,
                     {own, own + static_cast<std::ptrdiff_t>(width)})) {
      continue;
    }
    std::copy(row.begin(), row.end(), own);
    ++rows_tied_;
  }
  return Tensor::from(all, ids.shape());
}

Tensor Recorder::choice(const char* name, const std::string& path,
                        const Tensor& ids) {
  const std::string key = golden_name(name, path);
  const bool keys = std::string_view(name) == "index_ids";
  Tensor used = ids;
  if (choices_ != nullptr) {
    used = injected(key, keys, ids);
  } else if (keys) {
    used = tie_broken(key, ids);
  }
  if (!keys) keep(key, values_of(used, ValueKind::kExperts));
  return used;
}

}  // namespace tapeline
