#include "runtime/fake_device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sstream>
#include <utility>

#include "runtime/check.h"

namespace tapeline {

void FakeWorld::step() {
  if (timing == Timing::kSoon) {
    for (CheckedStream* stream : streams) stream->complete(stream->issued_);
  }
  if (timing != Timing::kRandom) return;
  CheckedStream& stream = *streams[random() % streams.size()];
  const uint64_t count = random() % 4;
  if (random() % 2 == 0) {
    stream.run(std::min(stream.issued_, stream.ran_ + count));
  } else {
    stream.advance(static_cast<int>(count));
  }
}

void FakeWorld::see(const char* kind, MemoryEvent event, const Block& block) {
  if (event == MemoryEvent::kAllocate) {
    checker.own(block.data, block.bytes, kind);
  } else if (event == MemoryEvent::kFree) {
    checker.disown(block.data);
  } else if (event == MemoryEvent::kGone) {
    checker.forget(block.data, block.bytes);
    for (CheckedStream* stream : streams) {
      stream->leave(block.data, block.bytes);
    }
  }
}

CheckedStream::Counts& CheckedStream::Counts::operator+=(const Counts& other) {
  copies += other.copies;
  bytes += other.bytes;
  uses += other.uses;
  waits += other.waits;
  records += other.records;
  synchronizations += other.synchronizations;
  return *this;
}

CheckedStream::CheckedStream(std::string name, FakeWorld& world, bool eager)
    : Stream(name),
      world_(world),
      number_(world.checker.add_stream(std::move(name))),
      eager_(eager) {
  world.streams.push_back(this);
}

CheckedStream& CheckedStream::peer(const Event& event) const {
  for (CheckedStream* stream : world_.streams) {
    if (stream == event.stream) return *stream;
  }
  CHECK(false) << "stream " << name() << " waits for " << event.stream->name()
               << ", which is not of its device";
  std::abort();
}

void CheckedStream::issue(const Operation& operation, uint64_t sequence) {
  CHECK_EQ(sequence, issued_ + 1);
  queue_.push_back(operation);
  issued_ = sequence;
  if (eager_) run(issued_);
  world_.step();
}

void CheckedStream::access(const void* data, size_t bytes, bool write) {
  ++counts_.uses;
  const HappensBefore::Access accesses[] = {{data, bytes, write}};
  issue({}, world_.checker.operation(number_, "kernel", accesses));
}

void CheckedStream::copy(void* to, const void* from, size_t bytes) {
  ++counts_.copies;
  counts_.bytes += static_cast<int64_t>(bytes);
  const HappensBefore::Access accesses[] = {{from, bytes, false},
                                            {to, bytes, true}};
  issue({to, from, bytes}, world_.checker.operation(number_, "copy", accesses));
}

Event CheckedStream::record() {
  ++counts_.records;
  world_.step();
  return {this, issued_};
}

void CheckedStream::wait(const Event& event) {
  if (event.stream == nullptr) return;
  ++counts_.waits;
  issue({nullptr, nullptr, 0, event},
        world_.checker.wait(number_, peer(event).number_, event.sequence));
}

void CheckedStream::synchronize(const Event& event) {
  if (event.stream == nullptr) return;
  ++counts_.synchronizations;
  CheckedStream& stream = peer(event);
  stream.complete(event.sequence);
  world_.checker.observe(stream.number_, event.sequence);
}

bool CheckedStream::done(uint64_t sequence) const {
  world_.step();
  if (completed_ < sequence) return false;
  world_.checker.observe(number_, sequence);
  return true;
}

uint64_t CheckedStream::completed() const {
  world_.step();
  world_.checker.observe(number_, completed_);
  return completed_;
}

// The effects of everything up to the point.
void CheckedStream::run(uint64_t sequence) {
  CHECK_LE(sequence, issued_) << "stream " << name();
  while (ran_ < sequence) {
    const Operation& operation = queue_[ran_ - completed_];
    const Event& event = operation.wait;
    if (event.stream != nullptr) peer(event).run(event.sequence);
    if (operation.bytes > 0) {
      std::memcpy(operation.to, operation.from, operation.bytes);
      bytes_copied_ += static_cast<int64_t>(operation.bytes);
    }
    ++ran_;
  }
}

// The bytes are about to go. What is still queued on them was a race, and must
// not hit other memory as well.
void CheckedStream::leave(const std::byte* data, size_t bytes) {
  const auto inside = [&](const void* at) {
    return std::less_equal<>()(static_cast<const void*>(data), at) &&
           std::less<>()(at, static_cast<const void*>(data + bytes));
  };
  for (uint64_t at = issued_; at > ran_; --at) {
    const Operation& operation = queue_[at - completed_ - 1];
    if (inside(operation.to) || inside(operation.from)) return run(at);
  }
}

void CheckedStream::complete(uint64_t sequence) {
  CHECK_LE(sequence, issued_) << "stream " << name();
  while (completed_ < sequence) {
    const Event event = queue_.front().wait;
    if (event.stream != nullptr) peer(event).complete(event.sequence);
    CHECK_EQ(advance(1), 1) << "stream " << name() << " waits for itself";
  }
}

int CheckedStream::advance(int count) {
  int told = 0;
  for (; told < count && !queue_.empty(); ++told) {
    const Event& event = queue_.front().wait;
    if (event.stream != nullptr && peer(event).completed_ < event.sequence) {
      break;
    }
    run(completed_ + 1);
    queue_.pop_front();
    ++completed_;
  }
  return told;
}

DeviceStreams FakeDevice::make_streams(FakeWorld& world) {
  DeviceStreams streams;
  streams.compute = std::make_unique<CheckedStream>("compute", world, true);
  streams.copy_out = std::make_unique<CheckedStream>("copy_out", world, false);
  streams.copy_in = std::make_unique<CheckedStream>("copy_in", world, false);
  return streams;
}

FakeDevice::FakeDevice(Timing timing, uint64_t seed, int threads)
    : device_(threads, make_streams(world_)) {
  set_timing(timing, seed);
  const auto watch = [this](const char* kind) -> MemoryHook {
    return [this, kind](MemoryEvent event, const Block& block) {
      world_.see(kind, event, block);
    };
  };
  device_.pool().set_hook(watch("block"));
  device_.pinned().set_hook(watch("slot"));
  device_.pool().set_poison(true);
}

void FakeDevice::set_timing(Timing timing, uint64_t seed) {
  world_.timing = timing;
  world_.random.seed(seed);
}

void FakeDevice::finish() {
  for (CheckedStream* stream : world_.streams) {
    stream->synchronize({stream, stream->record().sequence});
  }
}

int64_t FakeDevice::races() const {
  return world_.checker.races() + world_.checker.unowned();
}

std::string FakeDevice::report() const {
  std::ostringstream out;
  out << world_.checker.races() << " races, " << world_.checker.unowned()
      << " accesses to what nobody owns\n";
  for (const std::string& message : world_.checker.messages()) {
    out << "  " << message << "\n";
  }
  for (const CheckedStream* stream : world_.streams) {
    const CheckedStream::Counts& n = stream->counts();
    out << stream->name() << ": " << n.uses << " uses, " << n.copies
        << " copies of " << n.bytes << " bytes, " << n.waits << " waits, "
        << n.records << " records, " << n.synchronizations
        << " synchronizations\n";
  }
  return out.str();
}

CheckedStream::Counts FakeDevice::counts() const {
  CheckedStream::Counts sum;
  for (const CheckedStream* stream : world_.streams) sum += stream->counts();
  return sum;
}

}  // namespace tapeline
