// What pipeline stages of a language model hand on, and what one stage makes.
//
// Shape suffixes: T tokens, D model, K selected keys.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "autograd/ops.h"
#include "models/batch.h"
#include "runtime/tensor.h"

namespace tapeline {

// At a cut between two stages. Where the stage behind it begins on a layer that
// shares its selection the selection travels along.
struct StageState {
  Tensor hidden_TD;  // of the main stack
  // Of the prediction depths that have run, for the head and the next depth.
  std::vector<Tensor> depths_TD;
  std::optional<DsaSelection> selected;
};

// Which of it there is at a cut.
struct StageCut {
  bool hidden = false, selected = false;
  int depths = 0;
};

// `loss` where the stage has the head.
struct StageResult {
  StageState state;
  std::optional<LanguageModelLoss> loss;
};

// The use sites at which stages add to weights that several of them hold.
struct SharedWeights {
  std::vector<int> stages;              // ascending; fewer than two: not shared
  std::vector<std::vector<int>> sites;  // of each
};

}  // namespace tapeline
