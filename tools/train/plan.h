// The memory plan of a run: its steps run on a dry device (runtime/device.h),
// which has no bytes and runs no kernels. The program is the one that trains,
// so every allocation is there, in order, without a model of it that could be
// wrong.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "autograd/memory_plan.h"
#include "tools/config/config.h"
#include "tools/train/language_model.h"
#include "tools/train/memory_log.h"
#include "tools/train/trainer.h"

namespace tapeline {

struct LayerMemory {
  std::string name;        // layers.3, mtp.0
  std::string policy;      // save, recompute, keep
  int64_t kept = 0;        // bytes that wait for backward on the device
  int64_t recomputed = 0;  // bytes that would, were nothing recomputed
  int64_t offloaded = 0;   // bytes that wait on the host
};

struct RunPlan {
  std::string model_type;
  int64_t tokens = 0, micro_batches = 0;  // of a micro-batch, of a step
  std::vector<LayerMemory> layers;
  std::vector<PlannedWindow> windows;                    // of a micro-batch
  int64_t parameters = 0, gradients = 0, optimizer = 0;  // bytes
  // Of a step: bytes that are copied to the host, less than the windows list
  // where the pinned memory's cap is in the way, and what it takes for that.
  int64_t offload = 0, pinned = 0;
  MemoryProfile step;  // a step after the first
};

// The config has been checked (check_settings). `model_path` as model_config()
// wants it: only its config.json is read.
absl::StatusOr<RunPlan> plan_run(const Config& config,
                                 const std::string& model_path);
// The same of a model that has no values yet and the options of its trainer, on
// the current device, which is dry.
RunPlan plan_training(LanguageModel& model, const TrainerOptions& options,
                      int64_t tokens, DType dtype = DType::kF32);

Json to_json(const RunPlan& plan);
std::string to_text(const RunPlan& plan);

}  // namespace tapeline
