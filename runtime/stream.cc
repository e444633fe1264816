#include "runtime/stream.h"

#include <cstring>

namespace tapeline {

void CpuStream::copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && !dry_) std::memcpy(to, from, bytes);
}

void CpuStream::wait(const Event& event) {
  if (event.done()) return;
  // The caller's own thread executes CPU work, so waiting means finishing the
  // other stream here.
  const_cast<Stream*>(event.stream)->synchronize(event);
}

}  // namespace tapeline
