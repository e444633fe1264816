// The settings of a run: one struct, one table, read from TOML.
//
// A file may say `extends = "base.toml"`, relative to itself. Later wins:
// defaults, then the chain of bases from its far end, then the file, then each
// --set in order. Arrays are replaced whole. Every key is known (settings.h
// lists them with default, range and meaning) except those below [model],
// which are the keys of a Hugging Face config.json and are checked by the
// model. Errors read "file:line:column: what; what to do".
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/json.h"

namespace tapeline {

struct RunSettings {
  std::string dir = "runs";
  std::string name = "default";
};

struct TrainSettings {
  int64_t steps = 1000;
  int64_t seq_len = 256;
  int64_t micro_batches = 1;
  double max_norm = 1.0;
  int64_t threads = 0;
  int64_t max_skipped = 10;
  int64_t log_every = 1;
  int64_t eval_every = 0;
  int64_t sample_every = 0;
  int64_t snapshot_every = 0;
  int64_t keep_snapshots = 2;
  bool save = true;
};

struct SampleSettings {
  std::string prompt = "And ";
  int64_t max_tokens = 200;
  double temperature = 0.8;
  double top_p = 0.95;
};

struct DataSettings {
  std::string train = "king_james:train";
  std::string val = "king_james:val";
};

struct ModelSettings {
  std::string path;
  // An object of Hugging Face keys; with a path they override its config.json.
  Json keys = Json::Object();
};

struct OptimizerSettings {
  std::string name = "adamw";
  double lr = 3e-4;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  double muon_lr = 0;
  double muon_momentum = 0.95;
  bool muon_nesterov = true;
  int64_t muon_iterations = 5;
};

struct ScheduleSettings {
  std::string name = "constant";
  int64_t warmup_steps = 0;
  int64_t decay_steps = 0;
  double min_lr = 0;
};

struct LossSettings {
  double mtp_weight = 0.1;
  int64_t mtp_depths = -1;
  bool mtp_after_norm = false;
  double balance_coefficient = 0;
  std::string balance_rule = "sigmoid";
  double z_coefficient = 0;
  double indexer_coefficient = 0;
  double router_bias_rate = 0;
};

struct RecomputeSettings {
  std::string policy = "none";
  int64_t every = 1;
  double ratio = 1.0;
  std::vector<std::string> keep;
  bool drop_norms = false;
};

struct OffloadSettings {
  bool activations = false;
  bool ids = false;
  bool strict = false;
  int64_t pinned_cap_mib = 0;
  int64_t warmup_steps = 0;
};

struct PipelineSettings {
  std::string schedule = "1f1b";
  int64_t ranks = 0;
  int64_t chunks = 0;
  std::string layout;
  std::string file;
  int64_t timeout = 600;
  int64_t connect_timeout = 60;
};

struct DebugSettings {
  int64_t hash_every = 0;
  bool anomaly = false;
  bool trace = false;
  bool nan_poison = false;
  bool profile = false;
  int64_t memory = 0;
  int64_t cuda_first = 0;
  int64_t cuda_last = 0;
};

struct Config {
  int64_t seed = 1;
  std::string device = "auto";
  std::string compute_dtype = "f32";
  RunSettings run;
  TrainSettings train;
  SampleSettings sample;
  DataSettings data;
  ModelSettings model;
  OptimizerSettings optimizer;
  ScheduleSettings schedule;
  LossSettings loss;
  RecomputeSettings recompute;
  OffloadSettings offload;
  PipelineSettings pipeline;
  DebugSettings debug;

  // Dotted key -> where its value came from: "configs/tiny.toml:12", "--set".
  // Absent: the default.
  std::map<std::string, std::string> origins;
};

// `path` empty: defaults and `sets` alone. `sets` are the texts of --set, such
// as "train.steps=20" and "data.val=verses.txt": the value is TOML, or a string
// where it is none. Relative paths in values stay as they are written.
absl::StatusOr<Config> load_config(const std::string& path,
                                   const std::vector<std::string>& sets);

// All settings as TOML with each value's origin behind it; load_config of this
// text gives the same settings.
std::string print_config(const Config& config);

// docs/config.md: every key with type, default, range and meaning.
std::string config_markdown();

}  // namespace tapeline
