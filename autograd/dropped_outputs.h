// DroppedOutputs: cheap outputs that are not kept for backward but made again
// when it reads them.
//
//   DroppedOutputs dropped(on);
//   const Tensor n_TD = dropped(post_attention_norm, h_TD);
//   const Tensor y_TD = (*dense)(n_TD);
//
// At the end of the scope the bytes of every output that a node saved return to
// the pool; the first kernel that reads them calls the function once more, as a
// replay does: what it does once() is not done again. The storage stays the
// same, so every view sees the bytes again and nothing counts as written. `fn`
// is taken by reference and lives until the tape is done; its input is saved
// through the hooks in force and must not be written. Where nothing is
// recorded, and in a checkpoint's replay, nothing is dropped. An output is not
// read after its tape is gone. Per thread, like the tape.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "autograd/saved_tensor.h"
#include "runtime/tensor.h"

namespace tapeline {

// Outputs made again since the process began.
int64_t refills();

class DroppedOutputs {
 public:
  explicit DroppedOutputs(bool on);
  ~DroppedOutputs();
  DroppedOutputs(const DroppedOutputs&) = delete;
  DroppedOutputs& operator=(const DroppedOutputs&) = delete;

  template <class F>
  Tensor operator()(const F& fn, const Tensor& x) {
    Tensor y = fn(x);
    add([&fn](const Tensor& again) { return fn(again); }, x, y);
    return y;
  }

 private:
  using Function = std::function<Tensor(const Tensor&)>;
  void add(Function fn, const Tensor& x, const Tensor& y);

  const bool on_;
  // Each with what makes it again.
  std::vector<std::pair<StoragePtr, std::function<StoragePtr()>>> outputs_;
};

}  // namespace tapeline
