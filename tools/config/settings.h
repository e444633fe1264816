// The table of settings: each line is a key, its place in Config, what it may
// be and what it means. Reading, checking, printing and docs come from it.
//
//   visit_settings(config, [](const char* key, auto& value, const Limits&
//   limits,
//                             const char* meaning) { ... });
//
// `value` is an int64_t, double, bool, std::string or std::vector<std::string>;
// its default is what a new Config holds.
#pragma once

#include <limits>
#include <string_view>
#include <vector>

#include "tools/config/config.h"

namespace tapeline {

struct Limits {
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  bool open_least = false;  // `least` itself is not allowed
  bool open_most = false;
  // A string must be one of these, unless there are none.
  std::vector<std::string_view> choices = {};
};

inline Limits at_least(double least) { return {.least = least}; }
inline Limits above(double least) {
  return {.least = least, .open_least = true};
}
inline Limits between(double least, double most) {
  return {.least = least, .most = most};
}
// least <= value < most
inline Limits below(double least, double most) {
  return {.least = least, .most = most, .open_most = true};
}
inline Limits one_of(std::vector<std::string_view> choices) {
  return {.choices = std::move(choices)};
}
inline Limits any() { return {}; }

// C is Config or const Config.
template <class C, class F>
void visit_settings(C& c, F&& f) {
  f("seed", c.seed, at_least(0), "of weights, data order and samples");
  f("device", c.device, one_of({"auto", "cpu", "cuda"}),
    "where the run computes; auto: a GPU where there is one");
  f("compute_dtype", c.compute_dtype, one_of({"f32", "bf16"}),
    "of activations and weights in use; masters and sums are f32");

  f("run.dir", c.run.dir, any(), "folder of all runs");
  f("run.name", c.run.name, any(),
    "folder of this run, inside run.dir: at most 64 letters, digits, -_.");

  f("train.steps", c.train.steps, at_least(1), "optimizer steps");
  f("train.seq_len", c.train.seq_len, between(1, 1048576),
    "tokens of a micro-batch");
  f("train.micro_batches", c.train.micro_batches, between(1, 65536),
    "per step");
  f("train.max_norm", c.train.max_norm, at_least(0),
    "gradients are scaled down to this norm; 0: never");
  f("train.threads", c.train.threads, between(0, 1024),
    "CPU threads; 0: all processors; never changes a result");
  f("train.max_skipped", c.train.max_skipped, at_least(0),
    "steps skipped as not finite before the run ends with code 71");
  f("train.log_every", c.train.log_every, at_least(1),
    "steps between lines on the console; metrics.jsonl has every step");
  f("train.eval_every", c.train.eval_every, at_least(0),
    "steps between evaluations of data.val; 0: at the end only");
  f("train.sample_every", c.train.sample_every, at_least(0),
    "steps between samples of text; 0: at the end only");
  f("train.snapshot_every", c.train.snapshot_every, at_least(0),
    "steps between snapshots; 0: at the end only");
  f("train.keep_snapshots", c.train.keep_snapshots, at_least(2),
    "newest snapshots kept");
  f("train.save", c.train.save, any(),
    "snapshots and the exported model; without: a measurement, which leaves "
    "its metrics alone");

  f("sample.prompt", c.sample.prompt, any(), "text that samples go on from");
  f("sample.max_tokens", c.sample.max_tokens, at_least(1), "of a sample");
  f("sample.temperature", c.sample.temperature, at_least(0),
    "0: the likeliest token");
  f("sample.top_p", c.sample.top_p, {.least = 0, .most = 1, .open_least = true},
    "tokens are drawn from the likeliest that make up this probability");

  f("data.train", c.data.train, any(),
    "king_james:train, or the path of a text file");
  f("data.val", c.data.val, any(),
    "king_james:val, or the path of a text file");

  f("model.path", c.model.path, any(),
    "Hugging Face folder to start from; empty: new weights from [model] keys");

  f("optimizer.name", c.optimizer.name, one_of({"adamw", "muon"}),
    "muon: for matrices inside layers, AdamW for the rest");
  f("optimizer.lr", c.optimizer.lr, at_least(0), "peak learning rate");
  f("optimizer.beta1", c.optimizer.beta1, below(0, 1), "of AdamW");
  f("optimizer.beta2", c.optimizer.beta2, below(0, 1), "of AdamW");
  f("optimizer.eps", c.optimizer.eps, above(0), "of AdamW");
  f("optimizer.weight_decay", c.optimizer.weight_decay, at_least(0),
    "decoupled; of matrices only");
  f("optimizer.muon_lr", c.optimizer.muon_lr, at_least(0),
    "peak learning rate of Muon's matrices; 0: optimizer.lr");
  f("optimizer.muon_momentum", c.optimizer.muon_momentum, below(0, 1),
    "of Muon");
  f("optimizer.muon_nesterov", c.optimizer.muon_nesterov, any(), "of Muon");
  f("optimizer.muon_iterations", c.optimizer.muon_iterations, between(1, 20),
    "Newton-Schulz iterations of Muon");

  f("schedule.name", c.schedule.name,
    one_of({"constant", "linear", "cosine", "wsd"}),
    "learning rate after warm-up");
  f("schedule.warmup_steps", c.schedule.warmup_steps, at_least(0),
    "steps of linear rise");
  f("schedule.decay_steps", c.schedule.decay_steps, at_least(0),
    "of wsd: last steps, in which the rate falls");
  f("schedule.min_lr", c.schedule.min_lr, at_least(0), "at the last step");

  f("loss.mtp_weight", c.loss.mtp_weight, at_least(0),
    "of the mean loss of multi-token prediction");
  f("loss.mtp_depths", c.loss.mtp_depths, between(-1, 64),
    "tokens predicted beyond the next; -1: one per MTP layer");
  f("loss.mtp_after_norm", c.loss.mtp_after_norm, any(),
    "MTP starts from the hidden state behind the final norm");
  f("loss.balance_coefficient", c.loss.balance_coefficient, at_least(0),
    "of the load balancing loss");
  f("loss.balance_rule", c.loss.balance_rule,
    one_of({"sigmoid", "sigmoid_biased", "softmax"}),
    "router scores that the balancing loss uses");
  f("loss.z_coefficient", c.loss.z_coefficient, at_least(0),
    "of the router's z loss");
  f("loss.indexer_coefficient", c.loss.indexer_coefficient, at_least(0),
    "of the indexer's KL loss; 0: the indexer is frozen");
  f("loss.router_bias_rate", c.loss.router_bias_rate, at_least(0),
    "step of the router's selection bias; 0: fixed");

  f("recompute.policy", c.recompute.policy,
    one_of({"none", "full", "every_n", "ratio", "keep"}),
    "which layers are recomputed in the backward pass");
  f("recompute.every", c.recompute.every, at_least(1), "n of every_n");
  f("recompute.ratio", c.recompute.ratio, between(0, 1),
    "share of layers recomputed under ratio");
  f("recompute.keep", c.recompute.keep, any(),
    "operations whose outputs are kept under keep");
  f("recompute.drop_norms", c.recompute.drop_norms, any(),
    "outputs of norms are made again in the backward pass of layers that are "
    "not recomputed");

  f("offload.activations", c.offload.activations, any(),
    "inputs of layers wait for their backward pass in pinned host memory");
  f("offload.ids", c.offload.ids, any(), "DSA selections wait there too");
  f("offload.strict", c.offload.strict, any(),
    "an unplanned reload, or bytes moved that differ from the plan, are an "
    "error");
  f("offload.pinned_cap_mib", c.offload.pinned_cap_mib, between(0, 1 << 30),
    "limit of pinned memory in MiB; 0: none");
  f("offload.warmup_steps", c.offload.warmup_steps, at_least(0),
    "steps after which only copies that hide behind the work are made, as "
    "measured by then, at least 2; 0: all are made");

  f("pipeline.schedule", c.pipeline.schedule, any(), "name of a schedule");
  f("pipeline.ranks", c.pipeline.ranks, at_least(0),
    "pipeline ranks, of which the number of processes is a multiple; 0: all "
    "processes");
  f("pipeline.chunks", c.pipeline.chunks, at_least(0),
    "stages of a rank; 0: as few as the schedule can have");
  f("pipeline.layout", c.pipeline.layout, any(),
    "which layers each stage holds; empty: even");
  f("pipeline.file", c.pipeline.file, any(),
    "schedule file to run instead; pipeline.schedule and pipeline.chunks are "
    "then left out");
  f("pipeline.timeout", c.pipeline.timeout, at_least(1),
    "seconds that a rank waits for another before the run ends with code 72");
  f("pipeline.connect_timeout", c.pipeline.connect_timeout, at_least(1),
    "seconds that processes wait for each other at the start");

  f("debug.hash_every", c.debug.hash_every, at_least(0),
    "steps between fingerprints of gradients and parameters; 0: never");
  f("debug.anomaly", c.debug.anomaly, any(),
    "look for the operation that made the first value not finite");
  f("debug.trace", c.debug.trace, any(),
    "write trace/rankN.json, N the number of the process");
  f("debug.memory", c.debug.memory, at_least(0),
    "first steps whose memory events are written to memory.jsonl and "
    "trace/memory.json");
  f("debug.cuda_first", c.debug.cuda_first, at_least(0),
    "first step whose calls of CUDA are counted, and whose work of the GPU is "
    "traced, in cuda.json and trace/cuda.json; 0: none");
  f("debug.cuda_last", c.debug.cuda_last, at_least(0),
    "last such step; 0: debug.cuda_first alone");
  f("debug.nan_poison", c.debug.nan_poison, any(),
    "fill memory with NaN before and after use");
  f("debug.profile", c.debug.profile, any(),
    "print where the time went at the end");
}

}  // namespace tapeline
