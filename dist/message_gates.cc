#include "dist/message_gates.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "runtime/check.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

// A line of memory for each count.
constexpr size_t kStride = 64;
constexpr absl::Duration kStoreTimeout = absl::Seconds(5);

size_t place(int route, bool sends) {
  return 2 * static_cast<size_t>(route) + (sends ? 0 : 1);
}
std::string key(size_t place) { return absl::StrCat("gate/", place); }

std::atomic_ref<uint32_t> count_at(void* memory, size_t place) {
  return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(
      static_cast<std::byte*>(memory) + place * kStride));
}

// Shared memory of this name, or null. It goes with the last process that has
// it, once its name has been taken away.
void* open_memory(const std::string& name, size_t bytes, bool make) {
  const int flags = make ? O_RDWR | O_CREAT | O_EXCL : O_RDWR;
  const int file = shm_open(name.c_str(), flags, 0600);
  if (file < 0) return nullptr;
  void* memory = MAP_FAILED;
  if (!make || ftruncate(file, static_cast<off_t>(bytes)) == 0) {
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  close(file);
  return memory == MAP_FAILED ? nullptr : memory;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MessageGates>> MessageGates::make(
    int routes, const Launched& launch, absl::Duration timeout, bool share) {
  const size_t places = 2 * static_cast<size_t>(routes);
  std::unique_ptr<MessageGates> made(new MessageGates(places));
  ASSIGN_OR_RETURN(made->store_, TcpStore::connect(launch.master,
                                                   launch.store_port, timeout));
  TcpStore& store = *made->store_;
  made->bytes_ = kStride * places + kStride;
  std::string name;
  // Whoever has it open keeps it; nobody else is to find it.
  const absl::Cleanup unlink = [&] {
    if (launch.rank == 0) shm_unlink(name.c_str());
  };
  if (launch.rank == 0) {
    name = absl::StrCat("/tapeline-", getpid(), "-", launch.store_port);
    if (share) made->memory_ = open_memory(name, made->bytes_, /*make=*/true);
    RETURN_IF_ERROR(store.set("gates", name, timeout));
  } else {
    ASSIGN_OR_RETURN(name, store.get("gates", timeout));
    if (share) made->memory_ = open_memory(name, made->bytes_, /*make=*/false);
  }
  // All of them or none: both ends of a route must look at the same place.
  RETURN_IF_ERROR(store.set(absl::StrCat("gates/", launch.rank),
                            made->memory_ != nullptr ? "yes" : "no", timeout));
  bool all = true;
  for (int r = 0; r < launch.world; ++r) {
    ASSIGN_OR_RETURN(const std::string has,
                     store.get(absl::StrCat("gates/", r), timeout));
    all = all && has == "yes";
  }
  if (!all && made->memory_ != nullptr) {
    munmap(made->memory_, made->bytes_);
    made->memory_ = nullptr;
  }
  return made;
}

MessageGates::~MessageGates() {
  if (memory_ != nullptr) munmap(memory_, bytes_);
}

absl::Status MessageGates::come(int route, bool sends, uint32_t count) {
  const size_t at = place(route, sends);
  CHECK_LT(at, known_.size());
  if (memory_ == nullptr) {
    return store_->set(key(at), absl::StrCat(count), kStoreTimeout);
  }
  count_at(memory_, at).store(count, std::memory_order_release);
  return absl::OkStatus();
}

absl::StatusOr<bool> MessageGates::came(int route, bool sends, uint32_t count) {
  const size_t at = place(route, sends);
  CHECK_LT(at, known_.size());
  if (memory_ != nullptr) {
    return count_at(memory_, at).load(std::memory_order_acquire) >= count;
  }
  if (known_[at] < count) {
    ASSIGN_OR_RETURN(const auto text, store_->peek(key(at), kStoreTimeout));
    if (text) CHECK(absl::SimpleAtoi(*text, &known_[at])) << *text;
  }
  return known_[at] >= count;
}

}  // namespace tapeline
