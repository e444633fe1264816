#include "absl/status/status.h"
#include "dist/nccl_communicator.h"

namespace tapeline {

absl::StatusOr<std::unique_ptr<Communicator>> connect_nccl(const Launched&,
                                                           const NcclOptions&) {
  return absl::UnimplementedError(
      "this build has no communicator for GPUs; build with --config=cuda");
}

}  // namespace tapeline
