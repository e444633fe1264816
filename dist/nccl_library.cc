#include "dist/nccl_library.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

namespace tapeline {

absl::StatusOr<NcclLibrary> load_nccl(const std::string& name) {
  void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::NotFoundError(absl::StrCat(
        "NCCL is not there (", dlerror(),
        "); install NVIDIA's package libnccl2, or add its folder to "
        "LD_LIBRARY_PATH"));
  }
  NcclLibrary out;
  std::string missing;
  const auto find = [&]<class F>(const char* symbol, F& function) {
    function = reinterpret_cast<F>(dlsym(library, symbol));
    if (function == nullptr && missing.empty()) missing = symbol;
  };
  find("ncclGetVersion", out.get_version);
  find("ncclGetUniqueId", out.get_unique_id);
  find("ncclCommInitRankConfig", out.init_rank_config);
  find("ncclCommGetAsyncError", out.get_async_error);
  find("ncclCommAbort", out.abort);
  find("ncclGroupStart", out.group_start);
  find("ncclGroupEnd", out.group_end);
  find("ncclSend", out.send);
  find("ncclRecv", out.receive);
  find("ncclAllGather", out.all_gather);
  find("ncclAllReduce", out.all_reduce);
  find("ncclGetErrorString", out.error_string);
  const bool known =
      out.get_version != nullptr && out.get_version(&out.version) == 0;
  if (!missing.empty() || !known || out.version < kLeastNccl) {
    return absl::FailedPreconditionError(absl::StrCat(
        name,
        known ? absl::StrCat(" has version ", out.version)
              : std::string(" has no version"),
        missing.empty() ? std::string() : absl::StrCat(" and lacks ", missing),
        "; 2.18 or later is needed"));
  }
  return out;
}

}  // namespace tapeline
