#include "tools/parity/golden.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "runtime/file.h"
#include "runtime/safetensors.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

constexpr const char* kInputs[] = {"input_ids", "position_ids", "cu_seqlens",
                                   "labels", "labels_shifted"};

std::string kind_of(const Golden& g,
                    const std::map<std::string, std::string>& metadata) {
  const auto any = [&](std::string_view prefix) {
    const auto at = g.values.lower_bound(std::string(prefix));
    return at != g.values.end() && at->first.starts_with(prefix);
  };
  if (any("mtp_in.")) {
    const auto from = metadata.find("hidden_from");
    if (from == metadata.end()) return "";
    return from->second == "post"  ? "mtp_post"
           : from->second == "pre" ? "mtp_pre"
                                   : "";
  }
  if (any("sparse.loss.") || any("dense.loss.")) return "indexer_kl";
  if (any("counts.")) return "router_aux";
  if (any("after.")) return "adamw_after";
  return any("logits") || any("loss") ? "main" : "";
}

absl::StatusOr<std::vector<int32_t>> ids_of(const Golden& g,
                                            const std::string& name) {
  const auto found = g.values.find(name);
  if (found == g.values.end()) {
    return absl::NotFoundError(absl::StrCat(g.path, ": no tensor ", name));
  }
  if (found->second.shape.rank() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(g.path, ": ", name, " is ", to_string(found->second.shape),
                     ", not a list"));
  }
  std::vector<int32_t> ids;
  for (double v : found->second.v) {
    if (!(v >= -2147483648.0 && v <= 2147483647.0 && v == std::floor(v))) {
      return absl::InvalidArgumentError(
          absl::StrCat(g.path, ": ", name, " holds ", v, ", no int32"));
    }
    ids.push_back(static_cast<int32_t>(v));
  }
  return ids;
}

// Python's json writes NaN and infinities bare; as JSON they are null.
absl::StatusOr<Json> read_python_json(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, read_file(path));
  std::string strict;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (quoted && text[i] == '\\') {
      strict.append(text, i++, 2);
      continue;
    }
    if (text[i] == '"') quoted = !quoted;
    size_t length = 0;
    for (const std::string_view bare : {"-Infinity", "Infinity", "NaN"}) {
      if (!quoted && text.compare(i, bare.size(), bare) == 0) {
        length = bare.size();
        break;
      }
    }
    if (length == 0) {
      strict.push_back(text[i]);
    } else {
      strict.append("null");
      i += length - 1;
    }
  }
  return parse_json(strict, path);
}

absl::Status read_batch(Golden& g) {
  ASSIGN_OR_RETURN(g.batch.ids, ids_of(g, "input_ids"));
  ASSIGN_OR_RETURN(g.batch.labels, ids_of(g, "labels_shifted"));
  ASSIGN_OR_RETURN(g.batch.cu_seqlens, ids_of(g, "cu_seqlens"));
  const std::vector<int32_t>& cu = g.batch.cu_seqlens;
  const auto tokens = static_cast<int32_t>(g.batch.ids.size());
  bool rising = !cu.empty() && cu[0] == 0 && cu.back() == tokens;
  for (size_t s = 1; s < cu.size(); ++s) rising &= cu[s] >= cu[s - 1];
  if (!rising || tokens == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(g.path, ": cu_seqlens does not rise from 0 to the ",
                     tokens, " tokens of input_ids"));
  }
  if (g.batch.labels.size() != g.batch.ids.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(g.path, ": labels_shifted has ", g.batch.labels.size(),
                     " entries, input_ids ", tokens));
  }
  // What a file holds besides must say the same.
  std::vector<int32_t> labels, positions;
  if (g.has("labels")) {
    ASSIGN_OR_RETURN(labels, ids_of(g, "labels"));
  }
  if (g.has("position_ids")) {
    ASSIGN_OR_RETURN(positions, ids_of(g, "position_ids"));
  }
  for (size_t s = 1; s < cu.size(); ++s) {
    for (int32_t t = cu[s - 1]; t < cu[s]; ++t) {
      const auto at = static_cast<size_t>(t);
      const int32_t next = t + 1 < cu[s] ? 1 : 0;
      if (!labels.empty() &&
          (labels.size() != g.batch.ids.size() ||
           g.batch.labels[at] != (next ? labels[at + 1] : -100))) {
        return absl::InvalidArgumentError(
            absl::StrCat(g.path, ": labels_shifted[", t,
                         "] is not the label after it in labels"));
      }
      if (!positions.empty() && (positions.size() != g.batch.ids.size() ||
                                 positions[at] != t - cu[s - 1])) {
        return absl::InvalidArgumentError(absl::StrCat(
            g.path, ": position_ids[", t,
            "] does not count from 0 in its sequence; other positions are not "
            "supported"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status check_labels(const Golden& g) {
  if (std::any_of(g.batch.labels.begin(), g.batch.labels.end(),
                  [](int32_t label) { return label >= 0; })) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(g.path, ": no label of labels_shifted counts"));
}

}  // namespace

absl::StatusOr<Golden> read_golden(const std::string& path) {
  Golden g;
  g.path = path;
  ASSIGN_OR_RETURN(const SafetensorsReader reader,
                   SafetensorsReader::open(path));
  for (const std::string& name : reader.names()) {
    ASSIGN_OR_RETURN(const Tensor tensor, reader.read_tensor(name));
    g.values[name] = values_of(tensor, ValueKind::kActivation);
  }
  g.meta = Json(Json::Object{});
  const std::string meta = join_path(parent_path(path), "meta.json");
  if (path_exists(meta)) {
    ASSIGN_OR_RETURN(g.meta, read_python_json(meta));
    if (!g.meta.is_object()) {
      return absl::InvalidArgumentError(
          absl::StrCat(meta, " is no JSON object"));
    }
  }
  const auto& metadata = reader.metadata();
  g.kind = kind_of(g, metadata);
  if (g.kind.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path,
                     ": no kind of golden is known that holds these tensors; "
                     "see docs/parity.md"));
  }
  const auto number = [&](const char* key, double& to) {
    const auto found = metadata.find(key);
    if (found == metadata.end()) return absl::OkStatus();
    if (absl::SimpleAtod(found->second, &to)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": metadata ", key, " is '", found->second, "', no number"));
  };
  double depths = 0;
  RETURN_IF_ERROR(number("depths", depths));
  RETURN_IF_ERROR(number("mtp_loss_scaling_factor", g.mtp_weight));
  RETURN_IF_ERROR(number("bias_update_rate", g.router_bias_rate));
  if (g.kind.starts_with("mtp")) {
    if (!(depths >= 1 && depths <= 64 && depths == std::floor(depths))) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": metadata depths is ", depths,
                       ", no whole number from 1 to 64"));
    }
    g.mtp_depths = static_cast<int>(depths);
    g.mtp_after_norm = g.kind == "mtp_post";
  }
  if (g.kind == "adamw_after") {
    // Its batch is main's.
    Golden main;
    main.path = join_path(parent_path(path), "main.safetensors");
    ASSIGN_OR_RETURN(const SafetensorsReader batch,
                     SafetensorsReader::open(main.path));
    for (const char* name : kInputs) {
      if (batch.find(name) == nullptr) continue;
      ASSIGN_OR_RETURN(const Tensor tensor, batch.read_tensor(name));
      main.values[name] = values_of(tensor, ValueKind::kExact);
    }
    RETURN_IF_ERROR(read_batch(main));
    RETURN_IF_ERROR(check_labels(main));
    g.batch = main.batch;
    return g;
  }
  RETURN_IF_ERROR(read_batch(g));
  if (g.kind == "main" || g.kind.starts_with("mtp")) {
    RETURN_IF_ERROR(check_labels(g));
  }
  for (const char* name : kInputs) {
    if (g.has(name)) g.inputs.push_back(name);
  }
  return g;
}

}  // namespace tapeline
