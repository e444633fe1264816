// Which weights of glm_moe_dsa Muon updates, and as which matrices.
//
// Heads do not mix, nor do the parts of a head with different roles: q_b is cut
// into [nope | rope] rows per head, kv_b into [nope | value], the indexer's
// query projection into [rope | nope], kv_a into [latent | rope]. Experts, gate
// and up are canonical tensors of their own. AdamW keeps embedding, head,
// norms, biases, router and the indexer's head weights, which gate.
#pragma once

#include <cstdint>
#include <vector>

#include "models/mla_lm_config.h"
#include "models/weights.h"

namespace tapeline {

// Heights of the row blocks, repeated to the end of the tensor; empty: AdamW.
std::vector<int64_t> muon_rows(const MlaLmConfig& config,
                               const NamedTensor& tensor);

}  // namespace tapeline
