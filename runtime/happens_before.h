// Finds memory accesses that nothing orders.
//
// The host issues operations on streams. An operation follows the earlier ones
// of its stream, what its stream has waited for, and what the host had seen
// done when it issued it; nothing else. Two operations that touch the same
// bytes, one of them to write, and of which neither follows the other are a
// race, whatever the clock says. The history of bytes outlives their owner:
// who gets a freed block must follow its last users.
//
// Bytes may be touched while somebody owns them (own). An access outside, or
// beyond the end, is a failure too.
//
// Order is kept as vector clocks: a point p of stream s has happened before an
// operation whose clock reads p or more at s. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tapeline {

class HappensBefore {
 public:
  static constexpr int kHost = 0;
  static constexpr int kMaxStreams = 6;  // the host among them

  struct Access {
    const void* data = nullptr;
    size_t bytes = 0;
    bool write = false;
  };

  HappensBefore();

  // Its number.
  int add_stream(std::string name);

  // Issues an operation; the name is for messages. Returns the point of the
  // stream after it.
  uint64_t operation(int stream, std::string_view name,
                     std::span<const Access> accesses);
  // What `stream` does later follows the point of the other stream.
  uint64_t wait(int stream, int other, uint64_t point);
  // What the host issues later follows the point.
  void observe(int stream, uint64_t point);
  // After everything issued so far; the first operation makes it 1.
  uint64_t point(int stream) const { return clocks_[at(stream)].size() - 1; }

  // The bytes get an owner: `kind` and a number name it in messages.
  void own(const void* data, size_t bytes, std::string_view kind);
  void disown(const void* data);
  // The bytes leave for good: the host must have seen all their users done.
  void forget(const void* data, size_t bytes);

  // Bad accesses of both kinds, and what they were: the first hundred.
  int64_t races() const { return races_; }
  int64_t unowned() const { return unowned_; }
  const std::vector<std::string>& messages() const { return messages_; }

 private:
  using Address = uintptr_t;
  using Clock = std::array<uint64_t, kMaxStreams>;
  struct Owner {
    Address begin = 0, end = 0;
    const std::string* kind = nullptr;
    int64_t number = 0;
  };
  // One access of an operation.
  struct Mark {
    int stream = 0;
    uint64_t point = 0;  // 0: none
    const std::string* operation = nullptr;
    bool write = false;
    Address begin = 0, end = 0;
    Owner owner;
  };
  // Bytes with one history: the last write, and the last read of each stream
  // since then.
  struct Segment {
    Address end = 0;
    Mark write;
    std::vector<Mark> reads;
  };
  using Segments = std::map<Address, Segment>;

  static size_t at(int stream) { return static_cast<size_t>(stream); }
  uint64_t advance(int stream);
  const std::string* intern(std::string_view text);
  Segments::iterator split(Address address);
  void touch(const Mark& mark);
  void touch(Segment& segment, const Mark& mark);
  void check(const Mark& before, const Mark& mark);
  void report(int64_t& count, std::string message);
  std::string describe(const Mark& mark) const;

  std::vector<std::string> names_;  // of streams
  // Of every point of every stream; point 0 is before all operations.
  std::array<std::vector<Clock>, kMaxStreams> clocks_;
  std::map<Address, Owner> owners_;
  int64_t last_owner_ = 0;
  Segments segments_;
  std::set<std::string, std::less<>> interned_;
  int64_t races_ = 0, unowned_ = 0;
  std::vector<std::string> messages_;
  std::string last_message_;
};

}  // namespace tapeline
