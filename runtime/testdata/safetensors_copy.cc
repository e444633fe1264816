// safetensors_copy FROM TO: reads every tensor of FROM and writes TO anew.
// For comparing with the Python reader and writer beside it.
#include <iostream>
#include <vector>

#include "runtime/access.h"
#include "runtime/safetensors.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

absl::Status copy(const std::string& from, const std::string& to) {
  ASSIGN_OR_RETURN(const SafetensorsReader reader,
                   SafetensorsReader::open(from));
  std::vector<Tensor> tensors;
  std::vector<NamedBytes> named;
  for (const std::string& name : reader.names()) {
    ASSIGN_OR_RETURN(const Tensor tensor, reader.read_tensor(name));
    // On the CPU the address outlives the lease as long as the tensor does.
    Stream& stream = Device::current().compute();
    const std::byte* bytes = tensor.storage()->acquire(stream);
    tensor.storage()->release(stream, false);
    tensors.push_back(tensor);
    named.push_back({name, tensor.dtype(), tensor.shape(), bytes});
  }
  return write_safetensors(to, named, reader.metadata());
}

}  // namespace
}  // namespace tapeline

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: safetensors_copy FROM TO\n";
    return 64;
  }
  const absl::Status status = tapeline::copy(argv[1], argv[2]);
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 2;
}
