// NVIDIA's NCCL, found when a job needs it.
//
// Loaded by name: the program that goes to GPU hosts is one file without
// libraries of the build, NCCL belongs to the host's driver stack, and a run on
// one GPU needs none. The few functions that are used are declared here as
// NCCL 2.18 and later have them; the structure of its settings is the one of
// 2.18, which later versions accept by its size and version.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tapeline {

struct NcclComm;  // theirs
struct NcclId {
  char bytes[128];
};
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = 0;
  int cga_cluster_size = kUnset, min_ctas = kUnset, max_ctas = kUnset;
  const char* net_name = nullptr;
  int split_share = kUnset;

  static constexpr int kUnset = -2147483647 - 1;
};
enum NcclResult : int { kNcclSuccess = 0, kNcclInProgress = 7 };
enum NcclType : int { kNcclBytes = 1, kNcclI64 = 4 };
enum NcclOp : int { kNcclSum = 0 };
inline constexpr int kLeastNccl = 21800;

// Streams are cudaStream_t.
struct NcclLibrary {
  int version = 0;
  NcclResult (*get_version)(int*);
  NcclResult (*get_unique_id)(NcclId*);
  NcclResult (*init_rank_config)(NcclComm**, int ranks, NcclId, int rank,
                                 NcclConfig*);
  NcclResult (*get_async_error)(NcclComm*, NcclResult*);
  NcclResult (*abort)(NcclComm*);
  // Of what is sent and received as one operation.
  NcclResult (*group_start)();
  NcclResult (*group_end)();
  NcclResult (*send)(const void*, size_t, NcclType, int peer, NcclComm*,
                     void* stream);
  NcclResult (*receive)(void*, size_t, NcclType, int peer, NcclComm*,
                        void* stream);
  NcclResult (*all_gather)(const void*, void*, size_t, NcclType, NcclComm*,
                           void* stream);
  NcclResult (*all_reduce)(const void*, void*, size_t, NcclType, NcclOp,
                           NcclComm*, void* stream);
  const char* (*error_string)(NcclResult);
};

// Lives as long as the process. NotFound if there is none, FailedPrecondition
// for one that is too old.
absl::StatusOr<NcclLibrary> load_nccl(const std::string& name = "libnccl.so.2");

}  // namespace tapeline
