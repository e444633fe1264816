// Names, initial values and files of a model's tensors.
//
// The canonical name of a tensor is its Hugging Face name with one key per
// expert: random streams, saved state and exports use it. A parameter may hold
// several canonical tensors (stacked experts, gate above up); each is a
// contiguous block of its rows. A rule maps a path inside a module to these
// names: with {e} in a name the first dimension is the expert; several names
// are equal blocks of the rows in order.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "autograd/optimizer.h"
#include "runtime/safetensors.h"
#include "runtime/tree.h"

namespace tapeline {

struct NameRule {
  std::string_view path;
  std::vector<std::string_view> names;
};

// Rules under a path prefix, which becomes a name prefix.
class NameTable {
 public:
  void add(std::string path_prefix, std::string name_prefix,
           const std::vector<NameRule>& rules);
  // Names of the tensor at `path`; CHECKs that there are some.
  std::vector<std::string> find(const std::string& path) const;

 private:
  std::map<std::string, std::vector<std::string>> entries_;
};

// One canonical tensor: a contiguous block of a parameter or buffer.
struct NamedTensor {
  std::string name;
  Shape shape;
  int64_t offset = 0;              // elements into the owner
  Parameter* parameter = nullptr;  // or
  Buffer* buffer = nullptr;

  int64_t elements() const { return shape.elements(); }
  const Tensor& owner() const {
    return parameter != nullptr ? parameter->value() : buffer->value();
  }
  // The block as a tensor of `shape`, sharing the owner's bytes.
  Tensor block(const Tensor& of) const;
  Tensor value() const { return block(owner()); }
};

namespace internal {
void append_named(const std::string& path,
                  const std::vector<std::string>& names, const Shape& shape,
                  Parameter* parameter, Buffer* buffer,
                  std::vector<NamedTensor>& out);
}  // namespace internal

// All tensors of a module, in visit order.
template <class M>
std::vector<NamedTensor> name_tensors(M& module, const NameTable& names) {
  std::vector<NamedTensor> out;
  visit(module, [&](const std::string& path, auto& leaf) {
    if constexpr (std::is_same_v<decltype(leaf), Parameter&>) {
      internal::append_named(path, names.find(path), leaf.shape, &leaf, nullptr,
                             out);
    } else if constexpr (std::is_same_v<decltype(leaf), Buffer&>) {
      internal::append_named(path, names.find(path), leaf.shape, nullptr, &leaf,
                             out);
    }
  });
  return out;
}

// The same with module paths as names: for models without a file format.
template <class M>
std::vector<NamedTensor> name_tensors(M& module) {
  std::vector<NamedTensor> out;
  visit(module, [&](const std::string& path, auto& leaf) {
    if constexpr (std::is_same_v<decltype(leaf), Parameter&>) {
      internal::append_named(path, {path}, leaf.shape, &leaf, nullptr, out);
    } else if constexpr (std::is_same_v<decltype(leaf), Buffer&>) {
      internal::append_named(path, {path}, leaf.shape, nullptr, &leaf, out);
    }
  });
  return out;
}

// Gives every tensor memory and its initial value: normal values are a function
// of (seed, canonical name, element) alone. Buffers are fp32. A negative
// normal_std keeps the standard deviations of the initializers.
void initialize(const std::vector<NamedTensor>& tensors, DType dtype,
                uint64_t seed, double normal_std = -1);

// Reads every tensor from a file or sharded folder; keys beyond them are fine.
// Experts may be stacked there: X.experts.gate_up_proj and X.experts.down_proj.
// A missing key, another shape or a value that is not finite is an error that
// names the tensor (and the element). Converts between float dtypes.
absl::Status load(const std::vector<NamedTensor>& tensors, DType dtype,
                  const SafetensorsReader& reader);

// A tensor that files may hold although it is another one: a tied head, the
// embedding and head that DeepSeek-V3 repeats in its prediction layer.
struct TensorCopy {
  std::string name, of;
  std::string why;  // the config key that makes them one
};
// The copies that the file holds; one that differs is an error naming both.
absl::StatusOr<std::vector<TensorCopy>> find_copies(
    const std::vector<TensorCopy>& possible, const SafetensorsReader& reader);

// Names in the file that are neither the model's tensors, stacked or not, nor
// copies: what an export of the model would lose. Tables that older files keep
// of rotary frequencies are none.
std::vector<std::string> unknown_tensors(
    const std::vector<NamedTensor>& tensors,
    const std::vector<TensorCopy>& copies, const SafetensorsReader& reader);

// Tensors in name order: state hashes and files do not depend on a module's
// layout.
std::vector<NamedTensor> sorted_by_name(std::vector<NamedTensor> tensors);

// What an optimizer updates: the parameters that are trained. Muon's row blocks
// are left empty, so AdamW updates them all.
std::vector<OptimizedTensor> optimized_tensors(
    const std::vector<NamedTensor>& tensors);

int64_t parameter_count(const std::vector<NamedTensor>& tensors);

}  // namespace tapeline
