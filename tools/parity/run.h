// One run of a model on a golden, for the files of this folder.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "autograd/gradients.h"
#include "models/batch.h"
#include "models/context.h"
#include "tools/parity/golden.h"
#include "tools/parity/recorder.h"
#include "tools/parity/runs.h"
#include "tools/train/language_model.h"

namespace tapeline::internal {

using Model = std::unique_ptr<LanguageModel>;

struct Run {
  const Golden& golden;
  const ComputeOptions& options;
  NamedValues out = {};
  int64_t rows_tied = 0;
  std::vector<std::string> extra_gradients = {};

  absl::StatusOr<Model> load(IndexerTraining indexer) const;

 private:
  absl::Status check_ids(const LanguageModel& model) const;
};

// The trainer's loss on the golden's batch, and what it leaves.
struct Pass {
  LanguageModelLoss loss;
  Context ctx;
  ParameterGradients grads;
};
absl::Status run_pass(Run& run, LanguageModel& model, double indexer_weight,
                      Pass& pass, Recorder& recorder);

// Gradients under `prefix` for each of the golden's tensors that starts with
// it; those the golden lacks, if they are not zero, go to `extra`.
void add_gradients(Run& run, LanguageModel& model, ParameterGradients& grads,
                   const std::string& prefix, std::vector<std::string>* extra);

double number(const Tensor& x);
Values scalars(std::vector<double> v, ValueKind kind = ValueKind::kScalar);

// By kind of golden.
absl::Status run_main(Run& run);
absl::Status run_indexer(Run& run);
absl::Status run_router(Run& run);
absl::Status run_adamw(Run& run);

}  // namespace tapeline::internal
