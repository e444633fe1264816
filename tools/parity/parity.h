// Parity: does a model compute what another implementation recorded?
//
// A golden is a safetensors file with inputs and results of one kind:
//
//   main                forward, loss and gradients
//   mtp_pre, mtp_post   prediction depths beyond the next token
//   indexer_kl          the indexer's loss, over selected and over all keys
//   router_aux          balance and z losses, expert counts, bias update
//   adamw_after         weights after AdamW steps on the batch of main
//
// The trainer's own functions run on its inputs; every tensor of the golden is
// an input, a choice that was injected, or compared. Latent attention runs in
// both forms, plain and absorbed, and both must agree (over all keys in bf16:
// plain alone).
// docs/parity.md lists names and tolerances.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/dtype.h"
#include "tools/parity/compare.h"

namespace tapeline {

struct ParityOptions {
  std::string model;            // Hugging Face folder
  std::string golden;           // file; meta.json lies beside it
  std::optional<DType> dtype;   // f32 or bf16; not given: config.json's
  bool inject_choices = false;  // use the golden's index_ids and router_ids
};

struct QuantityReport {
  std::string name;
  int64_t tensors = 0;
  Comparison worst;  // by error / tolerance
  std::vector<Comparison> failed;
};

struct ParityReport {
  std::string kind;
  DType dtype = DType::kF32;
  std::vector<std::string> forms;  // of attention, that were run
  int64_t in_golden = 0, inputs = 0, compared = 0;
  // Rows whose selection is a tie, resolved as in the golden; most of a form.
  int64_t rows_tied = 0;
  bool noise_known = true;  // meta.json has noise_vs_fp64, else floors alone
  std::vector<QuantityReport> quantities;  // by name
  // Tensors of the golden that nothing here computes, and gradients here that
  // it lacks.
  std::vector<std::string> unknown;

  bool pass() const;
};

absl::StatusOr<ParityReport> check_parity(const ParityOptions& options);

}  // namespace tapeline
