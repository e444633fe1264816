#include "tools/parity/recorder.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace tapeline {
namespace {

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

Tensor Recorder::choice(const char* name, const std::string& path,
                        const Tensor& ids) {
  const std::string key = golden_name(name, path);
  const auto tokens = static_cast<size_t>(ids.size(0));
  Tensor used = ids;
  if (choices_ != nullptr) {
    const auto found = choices_->find(key);
    if (found == choices_->end()) {
      status_ = absl::NotFoundError(
          absl::StrCat("the golden holds no ", key, " to inject"));
      return ids;
    }
    // Key ids ascend and are padded at the end, whatever the golden's order.
    const bool keys = std::string_view(name) == "index_ids";
    const size_t width = static_cast<size_t>(ids.size(1));
    const size_t given = found->second.v.size() / tokens;
    std::vector<int32_t> all;
    for (size_t t = 0; t < tokens; ++t) {
      std::vector<int32_t> row;
      for (size_t i = 0; i < given; ++i) {
        const double id = found->second.v[t * given + i];
        if (id >= 0 || !keys) row.push_back(static_cast<int32_t>(id));
      }
      if (keys) std::sort(row.begin(), row.end());
      if (row.size() > width || (!keys && row.size() != width)) {
        status_ = absl::InvalidArgumentError(
            absl::StrCat(key, " has ", row.size(), " ids in row ", t,
                         ", the model uses ", width));
        return ids;
      }
      row.resize(width, -1);
      all.insert(all.end(), row.begin(), row.end());
    }
    used = Tensor::from(all, ids.shape());
    ++choices_used_;
  }
  if (std::string_view(name) == "router_ids") {
    keep(key, values_of(used, ValueKind::kExperts));
  }
  return used;
}

}  // namespace tapeline
