#include "runtime/cuda_monitor.h"

#include <cupti.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "runtime/cuda_check.h"

namespace tapeline {
namespace {

// What is used of the library.
struct Cupti {
  decltype(&cuptiSubscribe) subscribe;
  decltype(&cuptiUnsubscribe) unsubscribe;
  decltype(&cuptiEnableDomain) enable_domain;
  decltype(&cuptiActivityRegisterCallbacks) register_callbacks;
  decltype(&cuptiActivityEnable) enable;
  decltype(&cuptiActivityDisable) disable;
  decltype(&cuptiActivityFlushAll) flush;
  decltype(&cuptiActivityGetNextRecord) next_record;
  decltype(&cuptiGetResultString) text;
};

void* open_library() {
  const std::string name = absl::StrCat("libcupti.so.", CUDART_VERSION / 1000);
  const char* home = std::getenv("CUDA_HOME");
  const std::string root = home != nullptr ? home : "/usr/local/cuda";
  for (const std::string& path :
       {name, root + "/lib64/" + name, root + "/extras/CUPTI/lib64/" + name}) {
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      return library;
    }
  }
  return nullptr;
}

absl::StatusOr<const Cupti*> cupti() {
  static const Cupti* const loaded = []() -> const Cupti* {
    void* library = open_library();  // stays
    if (library == nullptr) return nullptr;
    auto* c = new Cupti;
    bool all = true;
    const auto find = [&](auto& function, const char* name) {
      void* symbol = dlsym(library, name);
      all &= symbol != nullptr;
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    };
    find(c->subscribe, "cuptiSubscribe");
    find(c->unsubscribe, "cuptiUnsubscribe");
    find(c->enable_domain, "cuptiEnableDomain");
    find(c->register_callbacks, "cuptiActivityRegisterCallbacks");
    find(c->enable, "cuptiActivityEnable");
    find(c->disable, "cuptiActivityDisable");
    find(c->flush, "cuptiActivityFlushAll");
    find(c->next_record, "cuptiActivityGetNextRecord");
    find(c->text, "cuptiGetResultString");
    return all ? c : nullptr;
  }();
  if (loaded == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "no libcupti.so.", CUDART_VERSION / 1000,
        " found, which watching CUDA's calls needs: install the CUDA toolkit, "
        "or set CUDA_HOME to where it is"));
  }
  return loaded;
}

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// A call's name without the suffixes of its versions.
std::string_view plain_name(std::string_view name) {
  for (std::string_view suffix : {"_ptsz", "_ptds"}) {
    if (name.ends_with(suffix)) name.remove_suffix(suffix.size());
  }
  const size_t version = name.rfind("_v");
  if (version != std::string_view::npos && version + 2 < name.size() &&
      name[version + 2] >= '0' && name[version + 2] <= '9') {
    name = name.substr(0, version);
  }
  return name;
}

// The counter that a call belongs to; null for one that is not counted.
int64_t* counter_of(std::string_view name, CudaReport& report) {
  name.remove_prefix(name.starts_with("cuda") ? 4 : 2);  // or "cu"
  if (has(name, "Synchronize")) return &report.synchronizations;
  if (name.starts_with("Malloc") || name.starts_with("HostAlloc") ||
      name.starts_with("HostRegister") || name.starts_with("MemAlloc") ||
      name.starts_with("MemHostAlloc") || name.starts_with("MemHostRegister") ||
      name.starts_with("MemCreate") || name.starts_with("ArrayCreate")) {
    return &report.allocations;
  }
  if (name.starts_with("Free") || name.starts_with("MemFree") ||
      name.starts_with("HostUnregister") || name.starts_with("MemRelease")) {
    return &report.frees;
  }
  if (name.starts_with("EventCreate") || name.starts_with("StreamCreate")) {
    return &report.creations;
  }
  if (name.starts_with("Launch")) return &report.launches;
  if (name.starts_with("Memcpy")) {
    return has(name, "Async") ? &report.copies : &report.synchronizations;
  }
  return nullptr;
}

// "tapeline::cuda::rms_norm<float>" of a whole signature.
std::string kernel_name(const char* mangled) {
  if (mangled == nullptr) return "kernel";
  int status = 0;
  char* demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = demangled != nullptr ? demangled : mangled;
  std::free(demangled);
  if (name.starts_with("void ")) name.erase(0, 5);
  // The parameter list is the last pair of parentheses.
  if (name.ends_with(')')) {
    int depth = 0;
    for (size_t i = name.size(); i-- > 0;) {
      depth += name[i] == ')' ? 1 : name[i] == '(' ? -1 : 0;
      if (depth == 0) {
        name.resize(i);
        break;
      }
    }
  }
  for (std::string_view noise :
       {"tapeline::cuda::", "tapeline::", "(anonymous namespace)::"}) {
    for (size_t at; (at = name.find(noise)) != std::string::npos;) {
      name.erase(at, noise.size());
    }
  }
  return name;
}

const char* copy_name(uint8_t kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD:
      return "copy to device";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH:
      return "copy to host";
    default:
      return "copy";
  }
}

class Monitor;
std::atomic<Monitor*> running = nullptr;
thread_local int runtime_depth = 0;  // calls of the runtime under way

class Monitor : public CudaMonitor {
 public:
  explicit Monitor(const Cupti& cupti) : cupti_(cupti) {}
  ~Monitor() override {
    if (subscribed_) stop();
  }

  absl::Status begin() {
    if (const cudaError_t error = cudaDeviceSynchronize();
        error != cudaSuccess) {
      cudaGetLastError();
      return absl::FailedPreconditionError(
          absl::StrCat("no CUDA device to watch: ", cudaGetErrorString(error)));
    }
    Monitor* none = nullptr;
    if (!running.compare_exchange_strong(none, this)) {
      return absl::FailedPreconditionError(
          "CUDA's calls are being watched already");
    }
    subscribed_ = true;
    CUptiResult result = cupti_.subscribe(&subscriber_, on_call, nullptr);
    const auto next = [&](CUptiResult (*function)(CUpti_ActivityKind),
                          CUpti_ActivityKind kind) {
      if (result == CUPTI_SUCCESS) result = function(kind);
    };
    if (result == CUPTI_SUCCESS) {
      result = cupti_.register_callbacks(give_buffer, take_buffer);
    }
    for (CUpti_ActivityKind kind : kKinds) next(cupti_.enable, kind);
    for (CUpti_CallbackDomain domain :
         {CUPTI_CB_DOMAIN_RUNTIME_API, CUPTI_CB_DOMAIN_DRIVER_API}) {
      if (result == CUPTI_SUCCESS) {
        result = cupti_.enable_domain(1, subscriber_, domain);
      }
    }
    if (result == CUPTI_SUCCESS) return absl::OkStatus();
    const char* text = "unknown";
    cupti_.text(result, &text);
    return absl::FailedPreconditionError(
        absl::StrCat("CUPTI cannot watch CUDA's calls: ", text,
                     "; is a profiler attached?"));
  }

  CudaReport stop() override {
    subscribed_ = false;
    if (subscriber_ != nullptr) cupti_.unsubscribe(subscriber_);
    CUDA_CHECK(cudaDeviceSynchronize());
    cupti_.flush(1);
    for (CUpti_ActivityKind kind : kKinds) cupti_.disable(kind);
    running = nullptr;
    const std::lock_guard<std::mutex> hold(lock_);
    std::sort(report_.activities.begin(), report_.activities.end(),
              [](const CudaActivity& a, const CudaActivity& b) {
                return a.begin_ns < b.begin_ns;
              });
    return std::move(report_);
  }

 private:
  static constexpr CUpti_ActivityKind kKinds[] = {
      CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
      CUPTI_ACTIVITY_KIND_MEMSET};
  static constexpr size_t kBuffer = size_t{8} << 20;

  static void CUPTIAPI on_call(void*, CUpti_CallbackDomain domain,
                               CUpti_CallbackId, const void* data) {
    const auto& call = *static_cast<const CUpti_CallbackData*>(data);
    const bool runtime = domain == CUPTI_CB_DOMAIN_RUNTIME_API;
    if (call.callbackSite == CUPTI_API_EXIT) {
      if (runtime && runtime_depth > 0) --runtime_depth;
      return;
    }
    const bool outermost = runtime_depth == 0;
    if (runtime) ++runtime_depth;
    Monitor* monitor = running;
    if (outermost && monitor != nullptr) monitor->count(call.functionName);
  }

  void count(const char* function) {
    const std::string_view name = plain_name(function);
    const std::lock_guard<std::mutex> hold(lock_);
    int64_t* counter = counter_of(name, report_);
    if (counter == nullptr) return;
    ++*counter;
    ++report_.calls[std::string(name)];
  }

  static void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size,
                                   size_t* most) {
    *buffer = static_cast<uint8_t*>(std::aligned_alloc(64, kBuffer));
    *size = kBuffer;
    *most = 0;
  }

  static void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t,
                                   size_t valid) {
    Monitor* monitor = running;
    CUpti_Activity* record = nullptr;
    while (monitor != nullptr && monitor->cupti_.next_record(
                                     buffer, valid, &record) == CUPTI_SUCCESS) {
      monitor->add(*record);
    }
    std::free(buffer);
  }

  void add(const CUpti_Activity& record) {
    const std::lock_guard<std::mutex> hold(lock_);
    CudaActivity a;
    const auto times = [&](const auto& r) {
      a.begin_ns = static_cast<int64_t>(r.start);
      a.end_ns = static_cast<int64_t>(r.end);
      a.stream = static_cast<int>(r.streamId);
    };
    if (record.kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto& r = reinterpret_cast<const CUpti_ActivityMemcpy6&>(record);
      times(r);
      a.name = copy_name(r.copyKind);
      a.bytes = static_cast<int64_t>(r.bytes);
      report_.pageable_copies +=
          r.srcKind == CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE ||
          r.dstKind == CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE;
    } else if (record.kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      const auto& r = reinterpret_cast<const CUpti_ActivityMemset4&>(record);
      times(r);
      a.name = "memset";
      a.bytes = static_cast<int64_t>(r.bytes);
    } else {
      const auto& r = reinterpret_cast<const CUpti_ActivityKernel10&>(record);
      times(r);
      auto [at, fresh] = names_.try_emplace(r.name);
      if (fresh) at->second = kernel_name(r.name);
      a.name = at->second;
      a.grid = {r.gridX, r.gridY, r.gridZ};
      a.block = {r.blockX, r.blockY, r.blockZ};
    }
    report_.activities.push_back(std::move(a));
  }

  const Cupti& cupti_;
  CUpti_SubscriberHandle subscriber_ = nullptr;
  bool subscribed_ = false;
  std::mutex lock_;
  CudaReport report_;
  std::map<const char*, std::string> names_;  // CUPTI's texts stay
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaMonitor>> CudaMonitor::start() {
  const absl::StatusOr<const Cupti*> library = cupti();
  if (!library.ok()) return library.status();
  auto monitor = std::make_unique<Monitor>(**library);
  if (absl::Status status = monitor->begin(); !status.ok()) return status;
  return monitor;
}

}  // namespace tapeline
