#include "dist/pipeline/schedule.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace tapeline {

char letter(PassKind kind) { return "FIWB"[static_cast<int>(kind)]; }

Needs needs(const Pass& pass, int stages) {
  Needs out;
  const auto add = [&](bool output, int stage) {
    out.values[out.count++] = {output, stage};
  };
  if (pass.is_forward()) {
    if (pass.stage > 0) add(true, pass.stage - 1);
  } else if (pass.kind == PassKind::kWeight) {
    add(false, pass.stage);
  } else {
    add(true, pass.stage);
    if (pass.stage + 1 < stages) add(false, pass.stage + 1);
  }
  return out;
}

int Schedule::chunks() const {
  std::vector<int> owned(ranks.size(), 0);
  for (const int rank : placement) ++owned[rank];
  return owned.empty() ? 0 : *std::max_element(owned.begin(), owned.end());
}

std::vector<int> loop_placement(int ranks, int chunks) {
  std::vector<int> placement;
  for (int s = 0; s < ranks * chunks; ++s) placement.push_back(s % ranks);
  return placement;
}

std::vector<int> v_placement(int ranks) {
  std::vector<int> placement;
  for (int s = 0; s < 2 * ranks; ++s) {
    placement.push_back(std::min(s, 2 * ranks - 1 - s));
  }
  return placement;
}

std::string to_string(const Pass& pass) {
  const char kind[] = {letter(pass.kind), '\0'};
  return absl::StrCat(pass.stage, kind, pass.micro_batch,
                      pass.recompute ? "r" : "", pass.offload ? "o" : "");
}

std::string to_string(const Action& action) {
  const std::span<const Pass> passes = action.passes();
  if (!action.overlapped()) return to_string(passes[0]);
  return absl::StrCat("OV(", to_string(passes[0]), ";", to_string(passes[1]),
                      ")");
}

}  // namespace tapeline
