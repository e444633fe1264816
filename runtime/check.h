// CHECK and friends: the program is wrong, so stop and print the values.
//
// Use for shape, dtype and call-order errors inside the program. Errors of the
// outside world (files, flags, devices) are absl::Status instead (status.h).
// A failed CHECK writes one line to stderr and aborts. Thread-safe.
#pragma once

#include <cstdlib>
#include <iostream>
#include <sstream>

namespace tapeline::internal {

class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* what) {
    stream_ << file << ":" << line << ": check failed: " << what << " ";
  }
  [[noreturn]] ~CheckFailure() {
    stream_ << "\n";
    std::cerr << stream_.str() << std::flush;
    std::abort();
  }
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

struct Voidify {
  void operator&(std::ostream&) {}
};

}  // namespace tapeline::internal

#define CHECK(condition)                                                       \
  (condition)                                                                  \
      ? (void)0                                                                \
      : ::tapeline::internal::Voidify() &                                      \
            ::tapeline::internal::CheckFailure(__FILE__, __LINE__, #condition) \
                .stream()

#define TAPELINE_CHECK_OP(a, op, b) \
  CHECK((a)op(b)) << "(" << (a) << " vs " << (b) << ") "

#define CHECK_EQ(a, b) TAPELINE_CHECK_OP(a, ==, b)
#define CHECK_NE(a, b) TAPELINE_CHECK_OP(a, !=, b)
#define CHECK_LT(a, b) TAPELINE_CHECK_OP(a, <, b)
#define CHECK_LE(a, b) TAPELINE_CHECK_OP(a, <=, b)
#define CHECK_GT(a, b) TAPELINE_CHECK_OP(a, >, b)
#define CHECK_GE(a, b) TAPELINE_CHECK_OP(a, >=, b)

// Off in hot loops unless TAPELINE_DEBUG is defined.
#ifdef TAPELINE_DEBUG
#define DCHECK(condition) CHECK(condition)
#else
#define DCHECK(condition) \
  while (false) CHECK(condition)
#endif
