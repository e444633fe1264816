// Tensors as bytes in host memory, to be written to files.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "runtime/safetensors.h"
#include "runtime/tensor.h"

namespace tapeline {

// Holds leases on the tensors' bytes until it is destroyed; the tensors must
// not be written meanwhile. Contiguous CPU tensors are not copied; those of a
// GPU are, when they are added.
class HostTensors {
 public:
  HostTensors() = default;
  HostTensors(const HostTensors&) = delete;
  HostTensors& operator=(const HostTensors&) = delete;
  ~HostTensors();

  void add(std::string name, const Tensor& tensor);
  const std::vector<NamedBytes>& list() const { return list_; }

 private:
  std::vector<NamedBytes> list_;
  std::vector<std::vector<std::byte>> copies_;
  std::vector<StoragePtr> leased_;
};

}  // namespace tapeline
