#include "runtime/happens_before.h"

#include <algorithm>
#include <iterator>
#include <sstream>
#include <utility>

#include "runtime/check.h"

namespace tapeline {
namespace {

constexpr size_t kMessages = 100;

uintptr_t address_of(const void* data) {
  return reinterpret_cast<uintptr_t>(data);
}

}  // namespace

HappensBefore::HappensBefore() { add_stream("host"); }

int HappensBefore::add_stream(std::string name) {
  CHECK_LT(names_.size(), size_t{kMaxStreams}) << "a stream too many: " << name;
  clocks_[names_.size()].push_back({});
  names_.push_back(std::move(name));
  return static_cast<int>(names_.size()) - 1;
}

// The next point of the stream, which follows what the host knows.
uint64_t HappensBefore::advance(int stream) {
  Clock clock = clocks_[at(stream)].back();
  const Clock& host = clocks_[kHost].back();
  for (size_t s = 0; s < clock.size(); ++s) {
    clock[s] = std::max(clock[s], host[s]);
  }
  ++clock[at(stream)];
  clocks_[at(stream)].push_back(clock);
  return point(stream);
}

uint64_t HappensBefore::operation(int stream, std::string_view name,
                                  std::span<const Access> accesses) {
  const uint64_t now = advance(stream);
  const std::string* what = intern(name);
  for (const Access& access : accesses) {
    if (access.bytes == 0) continue;
    Mark mark{stream, now, what, access.write};
    mark.begin = address_of(access.data);
    mark.end = mark.begin + access.bytes;
    auto owner = owners_.upper_bound(mark.begin);
    if (owner != owners_.begin() && std::prev(owner)->second.end >= mark.end) {
      mark.owner = std::prev(owner)->second;
    } else {
      report(unowned_, describe(mark) + ", which nobody owns");
    }
    touch(mark);
  }
  return now;
}

uint64_t HappensBefore::wait(int stream, int other, uint64_t point_of_other) {
  CHECK_LE(point_of_other, point(other)) << names_[at(other)];
  const uint64_t now = advance(stream);
  Clock& clock = clocks_[at(stream)].back();
  const Clock& known = clocks_[at(other)][point_of_other];
  for (size_t s = 0; s < clock.size(); ++s) {
    clock[s] = std::max(clock[s], known[s]);
  }
  return now;
}

void HappensBefore::observe(int stream, uint64_t point) {
  if (clocks_[kHost].back()[at(stream)] < point) wait(kHost, stream, point);
}

void HappensBefore::own(const void* data, size_t bytes, std::string_view kind) {
  const Address begin = address_of(data), end = begin + bytes;
  const auto next = owners_.lower_bound(begin);
  CHECK(next == owners_.end() || next->first >= end) << kind << " owned twice";
  CHECK(next == owners_.begin() || std::prev(next)->second.end <= begin)
      << kind << " owned twice";
  owners_[begin] = {begin, end, intern(kind), ++last_owner_};
}

void HappensBefore::disown(const void* data) {
  CHECK_EQ(owners_.erase(address_of(data)), 1u) << "bytes that nobody owns";
}

void HappensBefore::forget(const void* data, size_t bytes) {
  Mark mark{kHost, advance(kHost), intern("frees"), true};
  mark.begin = address_of(data);
  mark.end = mark.begin + bytes;
  touch(mark);
  segments_.erase(split(mark.begin), split(mark.end));
}

const std::string* HappensBefore::intern(std::string_view text) {
  auto found = interned_.find(text);
  if (found == interned_.end()) found = interned_.emplace(text).first;
  return &*found;
}

// The first segment at or after the address, where none crosses it.
HappensBefore::Segments::iterator HappensBefore::split(Address address) {
  const auto next = segments_.lower_bound(address);
  if (next == segments_.begin()) return next;
  Segment& before = std::prev(next)->second;
  if (before.end <= address) return next;
  Segment rest = before;
  before.end = address;
  return segments_.emplace_hint(next, address, std::move(rest));
}

void HappensBefore::touch(const Mark& mark) {
  split(mark.end);
  auto segment = split(mark.begin);
  for (Address begin = mark.begin; begin < mark.end;) {
    if (segment == segments_.end() || segment->first > begin) {
      // Bytes without a history, up to the next that have one.
      const Address end = segment == segments_.end()
                              ? mark.end
                              : std::min(mark.end, segment->first);
      segment = segments_.emplace_hint(segment, begin, Segment{end, {}, {}});
    }
    touch(segment->second, mark);
    begin = segment->second.end;
    ++segment;
  }
}

void HappensBefore::touch(Segment& segment, const Mark& mark) {
  check(segment.write, mark);
  if (mark.write) {
    for (const Mark& read : segment.reads) check(read, mark);
    segment.reads.clear();
    segment.write = mark;
    return;
  }
  std::erase_if(segment.reads,
                [&](const Mark& read) { return read.stream == mark.stream; });
  segment.reads.push_back(mark);
}

void HappensBefore::check(const Mark& before, const Mark& mark) {
  const Clock& clock = clocks_[at(mark.stream)][mark.point];
  if (clock[at(before.stream)] >= before.point) return;
  report(races_, describe(mark) + " without waiting until " + describe(before));
}

void HappensBefore::report(int64_t& count, std::string message) {
  // A range cut in pieces says the same of each.
  if (message == last_message_) return;
  ++count;
  if (messages_.size() < kMessages) messages_.push_back(message);
  last_message_ = std::move(message);
}

// "copy_out #5 copy reads block 3 [0, 100)"
std::string HappensBefore::describe(const Mark& mark) const {
  std::ostringstream out;
  out << names_[at(mark.stream)] << " #" << mark.point << " " << *mark.operation
      << (mark.write ? " writes " : " reads ");
  const Owner& owner = mark.owner;
  if (owner.kind == nullptr) {
    out << mark.end - mark.begin << " bytes at 0x" << std::hex << mark.begin;
  } else {
    out << *owner.kind << " " << owner.number << " ["
        << mark.begin - owner.begin << ", " << mark.end - owner.begin << ")";
  }
  return out.str();
}

}  // namespace tapeline
