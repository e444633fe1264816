// A table of cases that says how far a test came in it, for who counts.
//
//   for (const RmsNormCase& c : each(rms_norm_cases())) { ... }
//
// With TAPELINE_COUNT_CASES in the environment the loop ends with one line,
// "[  CASES   ] 11 of 11": how many cases were left by the end of the loop's
// body, and how many the table has. One that returns or breaks does not count.
// tools/gpu/run_gpu_tests.py adds the lines up by op.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

namespace tapeline {

template <class Case>
class Each {
 public:
  explicit Each(std::vector<Case> cases) : cases_(std::move(cases)) {}
  ~Each() {
    if (std::getenv("TAPELINE_COUNT_CASES") == nullptr) return;
    std::printf("[  CASES   ] %zu of %zu\n", finished_, cases_.size());
    std::fflush(stdout);
  }
  Each(const Each&) = delete;
  Each& operator=(const Each&) = delete;

  class Iterator {
   public:
    Iterator(Each* table, size_t at) : table_(table), at_(at) {}
    const Case& operator*() const { return table_->cases_[at_]; }
    Iterator& operator++() {
      table_->finished_ = ++at_;
      return *this;
    }
    bool operator!=(const Iterator& other) const { return at_ != other.at_; }

   private:
    Each* table_;
    size_t at_;
  };
  Iterator begin() { return {this, 0}; }
  Iterator end() { return {this, cases_.size()}; }

 private:
  std::vector<Case> cases_;
  size_t finished_ = 0;
};

template <class Case>
Each<Case> each(std::vector<Case> cases) {
  return Each<Case>(std::move(cases));
}

}  // namespace tapeline
