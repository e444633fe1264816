#include "kernels/bench/memory.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <limits>
#include <new>

#include "runtime/pool.h"

namespace tapeline::bench {
namespace {

// The kB of a line of /proc, or nothing.
int64_t kilobytes(const char* file, const std::string& key) {
  std::ifstream in(file);
  for (std::string word; in >> word;) {
    int64_t count = 0;
    if (word == key && in >> count) return count;
  }
  return 0;
}

[[noreturn]] void end(const std::string& what) {
  std::cout << std::flush;
  std::_Exit(fail_for_memory(what, std::cerr));
}

}  // namespace

bool countable(std::vector<int64_t> shape) {
  std::sort(shape.rbegin(), shape.rend());
  shape.resize(std::min<size_t>(3, shape.size()));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 64;
  int64_t elements = 1;
  for (int64_t extent : shape) {
    if (extent > kMost / elements) return false;
    elements *= std::max<int64_t>(1, extent);
  }
  return true;
}

void limit_memory() {
  const int64_t free = kilobytes("/proc/meminfo", "MemAvailable:");
  rlimit limit;
  if (free == 0 || getrlimit(RLIMIT_DATA, &limit) != 0) return;
  const int64_t own = kilobytes("/proc/self/status", "VmData:");
  limit.rlim_cur =
      std::min(limit.rlim_cur, static_cast<rlim_t>(free + own) << 10);
  setrlimit(RLIMIT_DATA, &limit);
}

int fail_for_memory(const std::string& what, std::ostream& err) {
  err << what.substr(0, what.find('\n'))
      << "; choose a smaller --shape, or a machine with more memory"
      << std::endl;
  return kOutOfMemory;
}

void end_where_memory_does() {
  out_of_memory = [](const std::string& report) { end(report); };
  std::set_new_handler([] { end("out of memory"); });
}

}  // namespace tapeline::bench
