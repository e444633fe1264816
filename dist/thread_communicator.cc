#include "dist/thread_communicator.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

using Clock = std::chrono::steady_clock;
// from, to, channel
using ChannelKey = std::tuple<int, int, int>;

// Bytes under a lease that the owner's thread took and returns.
struct Span {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

// One end of a message.
struct End {
  Envelope envelope;
  int slot = -1;  // of a receiver
  std::vector<TensorSpec> specs;
  std::vector<Tensor> parts;  // touched by the owner's thread alone
  std::vector<Span> spans;
  std::vector<bool> present;
  // Of a sender: the message, once it lies in the channel.
  std::vector<std::vector<std::byte>> copies;
  bool buffered = false, done = false;
};
using EndPtr = std::shared_ptr<End>;

struct Channel {
  std::deque<EndPtr> sends, receives;
  int held = 0;  // messages in the channel
};

struct Match {
  EndPtr send, receive;
  ChannelKey channel;
  Clock::time_point due;
};

struct Entered {
  Collective collective;
  TensorSpec spec;
  std::map<int, std::vector<std::byte>> values;  // by rank, until all are there
  std::vector<std::byte> sum;
  size_t left = 0;  // members that have not taken the sum
};

void fill_nan(Span span) {
  constexpr uint16_t kWord = 0x7fff;
  for (size_t i = 0; i + 1 < span.bytes; i += 2) {
    std::memcpy(span.data + i, &kWord, 2);
  }
}

template <class T>
void add_values(const std::vector<std::byte>& from,
                std::vector<std::byte>& to) {
  for (size_t i = 0; i < to.size(); i += sizeof(T)) {
    T a, b;
    std::memcpy(&a, to.data() + i, sizeof(T));
    std::memcpy(&b, from.data() + i, sizeof(T));
    a += b;
    std::memcpy(to.data() + i, &a, sizeof(T));
  }
}

std::byte* address(const Tensor& x, bool write) {
  Stream& stream = x.storage()->device().compute();
  if (write) x.storage()->bump_version();
  return x.storage()->acquire(stream, write) +
         x.offset() * static_cast<int64_t>(size_of(x.dtype()));
}

void give_back(const Tensor& x, bool wrote) {
  x.storage()->release(x.storage()->device().compute(), wrote);
}

std::string text(const char* what, const char* preposition, int rank,
                 const Envelope& e) {
  return absl::StrCat("rank ", rank, ": ", what, " ", preposition, " rank ",
                      e.peer, ", channel ", e.channel, ", micro-batch ",
                      e.micro_batch);
}

}  // namespace

struct ThreadGroup::State {
  class Rank;

  State(int ranks, const ThreadOptions& o)
      : options(o), random(o.seed), position(ranks, -1) {}

  // All below with the mutex held.
  void fail(const absl::Status& why) {
    if (!ended.ok()) return;
    ended = why;
    matches.clear();
    changed.notify_all();
  }

  bool has_room(const Channel& channel) const {
    return options.capacity && channel.held < *options.capacity;
  }

  // Copies what fits into the channel, and pairs what has met.
  void advance(const ChannelKey& key) {
    Channel& channel = channels[key];
    while (!channel.sends.empty() && !channel.receives.empty()) {
      const EndPtr send = channel.sends.front();
      const EndPtr receive = channel.receives.front();
      channel.sends.pop_front();
      channel.receives.pop_front();
      if (!compare(key, *send, *receive)) return;
      const auto delay = absl::ToInt64Microseconds(options.max_delay);
      matches.push_back(
          {send, receive, key,
           Clock::now() + std::chrono::microseconds(
                              delay > 0
                                  ? std::uniform_int_distribution<int64_t>(
                                        0, delay)(random)
                                  : 0)});
    }
    for (const EndPtr& send : channel.sends) {
      if (send->buffered) continue;
      if (!has_room(channel)) break;
      buffer(channel, *send);
    }
    changed.notify_all();
  }

  void buffer(Channel& channel, End& send) {
    for (const Span& span : send.spans) {
      send.copies.emplace_back(span.data, span.data + span.bytes);
    }
    send.buffered = send.done = true;
    ++channel.held;
  }

  bool compare(const ChannelKey& key, const End& send, const End& receive) {
    const auto [from, to, channel] = key;
    if (send.envelope.micro_batch == receive.envelope.micro_batch &&
        send.specs == receive.specs) {
      return true;
    }
    fail(absl::InternalError(absl::StrCat(
        text("receive", "from", to, receive.envelope), " expects ",
        to_string(receive.specs), ", but rank ", from, " sent micro-batch ",
        send.envelope.micro_batch, ", ", to_string(send.specs))));
    return false;
  }

  // Lets one message arrive, if one is due. Otherwise says when one will be.
  std::optional<Clock::time_point> deliver() {
    const Clock::time_point now = Clock::now();
    std::vector<size_t> due;
    std::optional<Clock::time_point> next;
    for (size_t i = 0; i < matches.size(); ++i) {
      if (matches[i].due <= now) {
        due.push_back(i);
      } else if (!next || matches[i].due < *next) {
        next = matches[i].due;
      }
    }
    if (due.empty()) return next;
    size_t which = due.front();
    if (options.order == ArrivalOrder::kNewestFirst) which = due.back();
    if (options.order == ArrivalOrder::kRandom)
      which = due[random() % due.size()];
    const Match match = matches[which];
    matches.erase(matches.begin() + static_cast<std::ptrdiff_t>(which));
    arrive(match);
    return now;
  }

  void arrive(const Match& match) {
    End& send = *match.send;
    End& receive = *match.receive;
    receive.present = send.present;
    for (size_t i = 0; i < receive.spans.size(); ++i) {
      if (!send.present[i] || receive.spans[i].bytes == 0) continue;
      const std::byte* from =
          send.buffered ? send.copies[i].data() : send.spans[i].data;
      std::memcpy(receive.spans[i].data, from, receive.spans[i].bytes);
    }
    if (send.buffered) --channels[match.channel].held;
    send.done = receive.done = true;
    advance(match.channel);
  }

  const ThreadOptions options;
  std::mutex mutex;
  std::condition_variable changed;
  std::mt19937_64 random;
  absl::Status ended;
  std::map<ChannelKey, Channel> channels;
  std::vector<Match> matches;
  std::map<std::string, Entered> collectives;
  std::vector<int64_t> position;
  std::vector<std::unique_ptr<Rank>> ranks;
};

class ThreadGroup::State::Rank : public Communicator {
 public:
  Rank(State& state, int rank) : s_(state), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(s_.position.size()); }
  bool sends_wait() const override { return s_.options.capacity.has_value(); }

  absl::StatusOr<Ticket> send(const Envelope& to,
                              const std::vector<TensorSpec>& specs,
                              std::vector<Tensor> parts) override {
    CHECK_EQ(specs.size(), parts.size());
    const auto end = std::make_shared<End>();
    end->envelope = to;
    end->specs = specs;
    for (size_t i = 0; i < parts.size(); ++i) {
      const Tensor& x = parts[i];
      end->present.push_back(static_cast<bool>(x));
      end->spans.emplace_back();
      if (!x) continue;
      CHECK(x.contiguous() && x.dtype() == specs[i].dtype &&
            x.shape() == specs[i].shape)
          << "[send] " << x << " is no contiguous " << to_string({specs[i]});
      std::byte* data = address(x, /*write=*/false);
      if (x.storage()->device().dry()) data = nullptr;
      end->spans.back() = {
          data, data == nullptr ? 0 : static_cast<size_t>(x.bytes())};
    }
    end->parts = std::move(parts);
    return post(end, {rank_, to.peer, to.channel}, /*sends=*/true);
  }

  absl::StatusOr<Ticket> receive(
      const Envelope& from, int slot,
      const std::vector<TensorSpec>& specs) override {
    CHECK(!slots_[slot]) << text("receive", "from", rank_, from)
                         << " into slot " << slot << ", which is in use";
    const auto end = std::make_shared<End>();
    end->envelope = from;
    end->slot = slot;
    end->specs = specs;
    for (const TensorSpec& spec : specs) {
      end->parts.push_back(Tensor::empty(spec.shape, spec.dtype));
      const Tensor& x = end->parts.back();
      std::byte* data = address(x, /*write=*/true);
      if (x.storage()->device().dry()) data = nullptr;
      end->spans.push_back(
          {data, data == nullptr ? 0 : static_cast<size_t>(x.bytes())});
    }
    slots_[slot] = true;
    return post(end, {from.peer, rank_, from.channel}, /*sends=*/false);
  }

  absl::StatusOr<std::vector<Tensor>> wait(Ticket ticket,
                                           absl::Duration timeout) override {
    const auto found = tickets_.find(ticket);
    CHECK(found != tickets_.end()) << "[wait] no ticket " << ticket;
    const EndPtr end = found->second;
    std::unique_lock lock(s_.mutex);
    const absl::Status status = until(
        lock, timeout, [&] { return end->done; },
        [&] {
          return end->slot < 0 ? text("send", "to", rank_, end->envelope)
                               : text("receive", "from", rank_, end->envelope);
        });
    lock.unlock();
    if (!status.ok()) return status;
    tickets_.erase(found);
    return finish(*end);
  }

  bool done(Ticket ticket) override {
    const std::unique_lock lock(s_.mutex);
    return !s_.ended.ok() || tickets_.at(ticket)->done;
  }

  absl::Status all_reduce(const Collective& collective, const Tensor& x,
                          absl::Duration timeout) override {
    CHECK(x.contiguous());
    const auto n = static_cast<size_t>(x.bytes());
    std::vector<std::byte> bytes(n);
    const bool dry = x.storage()->device().dry();
    std::byte* data = address(x, /*write=*/true);
    if (!dry && n > 0) std::memcpy(bytes.data(), data, n);
    absl::Status status = enter(collective, {x.dtype(), x.shape()},
                                std::move(bytes), timeout, bytes);
    if (status.ok() && !dry && n > 0) std::memcpy(data, bytes.data(), n);
    give_back(x, /*wrote=*/true);
    return status;
  }

  absl::Status barrier(absl::Duration timeout) override {
    Collective all{"barrier", {}};
    for (int r = 0; r < size(); ++r) all.ranks.push_back(r);
    std::vector<std::byte> nothing;
    return enter(all, {DType::kF32, {0}}, {}, timeout, nothing);
  }

  void abort(const absl::Status& why) override {
    {
      const std::unique_lock lock(s_.mutex);
      s_.fail(why.ok() ? absl::AbortedError("aborted") : why);
      // Nothing is copied from or to this rank any more.
      for (auto& [ticket, end] : tickets_) end->done = true;
    }
    for (auto& [ticket, end] : tickets_) finish(*end);
    tickets_.clear();
  }

  void set_position(int64_t position) override {
    const std::unique_lock lock(s_.mutex);
    s_.position[rank_] = position;
  }
  std::vector<int64_t> positions() const override {
    const std::unique_lock lock(s_.mutex);
    return s_.position;
  }

 private:
  absl::StatusOr<Ticket> post(const EndPtr& end, const ChannelKey& key,
                              bool sends) {
    const std::unique_lock lock(s_.mutex);
    tickets_[++last_] = end;
    if (!s_.ended.ok()) return s_.ended;
    Channel& channel = s_.channels[key];
    (sends ? channel.sends : channel.receives).push_back(end);
    s_.advance(key);
    if (!s_.ended.ok()) return s_.ended;
    return last_;
  }

  // Moves messages until the condition holds, the group ends or time is up.
  template <class Condition, class What>
  absl::Status until(std::unique_lock<std::mutex>& lock, absl::Duration timeout,
                     const Condition& condition, const What& what) {
    const Clock::time_point end =
        Clock::now() +
        absl::ToChronoNanoseconds(std::min(timeout, absl::Hours(24 * 365)));
    for (;;) {
      if (!s_.ended.ok()) return s_.ended;
      if (condition()) return absl::OkStatus();
      const Clock::time_point now = Clock::now();
      const std::optional<Clock::time_point> next = s_.deliver();
      if (next && *next <= Clock::now()) continue;
      if (now >= end) {
        return absl::DeadlineExceededError(
            absl::StrCat(what(), " has not ended"));
      }
      s_.changed.wait_until(lock, next ? std::min(*next, end) : end);
    }
  }

  // Ends the leases; a message sent is poisoned, one received is returned.
  std::vector<Tensor> finish(End& end) {
    const bool received = end.slot >= 0;
    for (size_t i = 0; i < end.parts.size(); ++i) {
      Tensor& x = end.parts[i];
      if (!x) continue;
      const bool last = x.storage().use_count() == 1;
      if (!received && s_.options.poison && last) fill_nan(end.spans[i]);
      give_back(x, received);
      if (received && !end.present.empty() && !end.present[i]) x = Tensor();
    }
    end.spans.clear();
    if (received) slots_[end.slot] = false;
    std::vector<Tensor> parts = std::move(end.parts);
    end.parts.clear();
    if (!received) parts.clear();
    return parts;
  }

  absl::Status trap(const Collective& c, const std::string& what) {
    s_.fail(absl::InternalError(
        absl::StrCat("rank ", rank_, ": collective '", c.name, "' of ranks ",
                     absl::StrJoin(c.ranks, " "), ": ", what)));
    return s_.ended;
  }

  absl::Status enter(const Collective& c, const TensorSpec& spec,
                     std::vector<std::byte> mine, absl::Duration timeout,
                     std::vector<std::byte>& sum) {
    std::unique_lock lock(s_.mutex);
    if (!s_.ended.ok()) return s_.ended;
    if (!std::binary_search(c.ranks.begin(), c.ranks.end(), rank_)) {
      return trap(c, "this rank is none of them");
    }
    // The last one of this name may not be over for the others yet.
    RETURN_IF_ERROR(until(
        lock, timeout,
        [&] {
          const auto last = s_.collectives.find(c.name);
          return last == s_.collectives.end() || last->second.left == 0;
        },
        [&] {
          return absl::StrCat("rank ", rank_, ": collective '", c.name,
                              "' before others left the last one");
        }));
    Entered& at = s_.collectives[c.name];
    if (at.values.empty()) {
      at.collective = c;
      at.spec = spec;
    }
    if (at.collective.ranks != c.ranks) {
      return trap(c, absl::StrCat("others entered it with ranks ",
                                  absl::StrJoin(at.collective.ranks, " ")));
    }
    if (!(at.spec == spec)) {
      return trap(c,
                  absl::StrCat("others entered it with ", to_string({at.spec}),
                               ", this rank with ", to_string({spec})));
    }
    at.values[rank_] = std::move(mine);
    if (at.values.size() == c.ranks.size()) {
      at.sum = add_up(at);
      at.left = c.ranks.size();
      s_.changed.notify_all();
    }
    const absl::Status status = until(
        lock, timeout, [&] { return at.left > 0; },
        [&] {
          std::vector<int> missing;
          for (const int r : c.ranks) {
            if (at.values.count(r) == 0) missing.push_back(r);
          }
          return absl::StrCat("rank ", rank_, ": collective '", c.name,
                              "', without rank ", absl::StrJoin(missing, " "),
                              ",");
        });
    if (!status.ok()) return status;
    sum = at.sum;
    if (--at.left == 0) {
      s_.collectives.erase(c.name);
      s_.changed.notify_all();
    }
    return absl::OkStatus();
  }

  static std::vector<std::byte> add_up(const Entered& entered) {
    std::vector<std::byte> sum;
    for (const auto& [rank, bytes] : entered.values) {
      if (sum.empty()) {
        sum = bytes;
        continue;
      }
      switch (entered.spec.dtype) {
        case DType::kF32:
          add_values<float>(bytes, sum);
          break;
        case DType::kF64:
          add_values<double>(bytes, sum);
          break;
        case DType::kI64:
          add_values<int64_t>(bytes, sum);
          break;
        default:
          CHECK(false) << "[all_reduce] of " << entered.spec.dtype;
      }
    }
    return sum;
  }

  State& s_;
  const int rank_;
  Ticket last_ = 0;
  std::map<Ticket, EndPtr> tickets_;
  std::map<int, bool> slots_;
};

ThreadGroup::ThreadGroup(int ranks, const ThreadOptions& options)
    : state_(std::make_unique<State>(ranks, options)) {
  for (int r = 0; r < ranks; ++r) {
    state_->ranks.push_back(std::make_unique<State::Rank>(*state_, r));
  }
}
ThreadGroup::~ThreadGroup() = default;

Communicator& ThreadGroup::rank(int rank) { return *state_->ranks.at(rank); }

absl::Status ThreadGroup::status() const {
  const std::unique_lock lock(state_->mutex);
  return state_->ended;
}

}  // namespace tapeline
