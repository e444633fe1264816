#include "dist/gloo_communicator.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "dist/tcp_store.h"
#include "gloo/rendezvous/context.h"
#include "gloo/rendezvous/store.h"
#include "gloo/transport/tcp/device.h"
#include "gloo/transport/unbound_buffer.h"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/hash.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

constexpr uint32_t kMagic = 0x54415045;
constexpr std::chrono::hours kForever(24 * 365);
constexpr absl::Duration kStoreTimeout = absl::Seconds(2);
// Behind those of stages and groups.
constexpr int kToRoot = 1 << 24, kFromRoot = kToRoot + 1;

struct Header {
  uint32_t magic = kMagic;
  int32_t channel = 0, micro_batch = 0, parts = 0;
  std::array<uint64_t, 4> present = {};  // a bit per part
  uint64_t bytes = 0;                    // that follow
  uint64_t what = 0;  // hash of what both ends say that it is
  uint64_t hash = 0;  // of the bytes

  bool has(size_t part) const {
    return (present[part / 64] >> part % 64 & 1) != 0;
  }
  void set(size_t part) { present[part / 64] |= uint64_t{1} << part % 64; }
};
constexpr size_t kMostParts = 256;

uint64_t hash_of(const void* data, size_t bytes) {
  return hash_bytes(data, bytes).low;
}

// Gloo's view of the store; failures are exceptions, as it expects them.
class GlooStore : public gloo::rendezvous::Store {
 public:
  GlooStore(TcpStore& store, absl::Time end) : store_(store), end_(end) {}
  void set(const std::string& key, const std::vector<char>& data) override {
    const absl::Status status =
        store_.set(key, std::string(data.begin(), data.end()), left());
    if (!status.ok()) throw std::runtime_error(std::string(status.message()));
  }
  std::vector<char> get(const std::string& key) override {
    const absl::StatusOr<std::string> value = store_.get(key, left());
    if (!value.ok()) {
      throw std::runtime_error(std::string(value.status().message()));
    }
    return {value->begin(), value->end()};
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) get(key);
  }

 private:
  absl::Duration left() const {
    return std::max(end_ - absl::Now(), absl::ZeroDuration());
  }
  TcpStore& store_;
  const absl::Time end_;
};

// The address of this host on the way to another one; IPv4 if there is one, so
// that all hosts choose alike.
absl::StatusOr<std::string> address_towards(const std::string& host) {
  std::string why;
  for (const int family : {AF_INET, AF_INET6}) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_family = family;
    hints.ai_socktype = SOCK_DGRAM;
    if (const int error = getaddrinfo(node_of(host), "9", &hints, &found)) {
      if (why.empty()) why = gai_strerror(error);
      continue;
    }
    const absl::Cleanup free_found = [&] { freeaddrinfo(found); };
    const int s = socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    const absl::Cleanup close_socket = [&] { close(s); };
    sockaddr_storage mine = {};
    auto* const at = reinterpret_cast<sockaddr*>(&mine);
    socklen_t size = sizeof(mine);
    char text[NI_MAXHOST];
    if (connect(s, found->ai_addr, found->ai_addrlen) == 0 &&
        getsockname(s, at, &size) == 0 &&
        getnameinfo(at, size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) ==
            0) {
      return std::string(text);
    }
    why = "no way there";
  }
  return absl::UnavailableError(
      absl::StrCat("MASTER_ADDR '", host, "': ", why));
}

// One end of a message. `bytes` is the worker's until it is done.
struct End {
  bool sends = false;
  Envelope envelope;
  int slot = -1;
  std::vector<TensorSpec> specs;
  std::string what;
  Header header;
  std::vector<char> bytes;
  bool done = false;

  std::string text(int rank) const {
    return absl::StrCat("rank ", rank, ": ", sends ? "send to" : "receive from",
                        " rank ", envelope.peer, ", channel ", envelope.channel,
                        ", micro-batch ", envelope.micro_batch,
                        envelope.channel >= kToRoot ? ", " + what : "");
  }
};
using EndPtr = std::shared_ptr<End>;

uint64_t bytes_of(const TensorSpec& spec) {
  return static_cast<uint64_t>(spec.shape.elements()) * size_of(spec.dtype);
}

std::byte* bytes_at(const Tensor& x, bool write) {
  if (write) x.storage()->bump_version();
  return x.storage()->acquire(x.storage()->device().compute(), write) +
         x.offset() * static_cast<int64_t>(size_of(x.dtype()));
}
void give_back(const Tensor& x, bool wrote) {
  x.storage()->release(x.storage()->device().compute(), wrote);
}

template <class T>
void add_values(const std::vector<char>& from, std::byte* to) {
  for (size_t i = 0; i < from.size(); i += sizeof(T)) {
    T a, b;
    std::memcpy(&a, to + i, sizeof(T));
    std::memcpy(&b, from.data() + i, sizeof(T));
    a += b;
    std::memcpy(to + i, &a, sizeof(T));
  }
}

}  // namespace

struct GlooCommunicator::State {
  // Of one channel's end: messages in order.
  struct Worker {
    std::deque<EndPtr> queue;
    gloo::transport::UnboundBuffer* waiting = nullptr;
    std::thread thread;
  };

  Launched launch;
  GlooOptions options;
  std::unique_ptr<TcpStoreServer> server;
  std::unique_ptr<TcpStore> store, teller;
  std::shared_ptr<gloo::rendezvous::Context> context;

  mutable std::mutex mutex;
  std::condition_variable changed;
  absl::Status ended;
  bool stopping = false;
  std::map<std::tuple<int, int, bool>, Worker> workers;
  std::map<Ticket, EndPtr> tickets;
  std::map<int, bool> slots;
  Ticket last = 0;
  int64_t messages = 0;  // sent

  std::atomic<int64_t> position = -1;
  std::thread telling;
  mutable std::mutex store_mutex;

  ~State() { stop(); }

  // With the mutex held.
  void fail(const absl::Status& why) {
    if (ended.ok()) ended = why;
    changed.notify_all();
  }

  Ticket post(const EndPtr& end) {
    const std::lock_guard lock(mutex);
    tickets[++last] = end;
    if (!ended.ok() || stopping) return last;
    Worker& worker =
        workers[{end->envelope.peer, end->envelope.channel, end->sends}];
    worker.queue.push_back(end);
    if (!worker.thread.joinable()) {
      worker.thread = std::thread([this, &worker] { work(worker); });
    }
    changed.notify_all();
    return last;
  }

  void work(Worker& worker) {
    for (;;) {
      EndPtr end;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] {
          return stopping || !ended.ok() || !worker.queue.empty();
        });
        if (stopping || !ended.ok()) return;
        end = worker.queue.front();
      }
      absl::Status status;
      try {
        status = end->sends ? push(worker, *end) : pull(worker, *end);
      } catch (const std::exception& error) {
        status = absl::UnavailableError(
            absl::StrCat(end->text(launch.rank), ": ", error.what()));
      }
      const std::lock_guard lock(mutex);
      worker.waiting = nullptr;
      worker.queue.pop_front();
      if (!status.ok()) {
        fail(status);
        return;
      }
      end->done = true;
      changed.notify_all();
    }
  }

  // Whether the buffer may be waited for: nobody has stopped meanwhile.
  bool begin(Worker& worker, gloo::transport::UnboundBuffer* buffer) {
    const std::lock_guard lock(mutex);
    worker.waiting = buffer;
    return !stopping && ended.ok();
  }
  absl::Status stopped() const { return absl::CancelledError("stopped"); }

  absl::Status move(Worker& worker, const End& end, int part, void* data,
                    size_t bytes) {
    const std::unique_ptr<gloo::transport::UnboundBuffer> buffer =
        context->createUnboundBuffer(data, bytes);
    // The worker forgets the buffer before it goes.
    const absl::Cleanup forget = [&] {
      const std::lock_guard lock(mutex);
      worker.waiting = nullptr;
    };
    const auto slot = static_cast<uint64_t>(end.envelope.channel) * 2 +
                      static_cast<uint64_t>(part);
    if (end.sends) {
      buffer->send(end.envelope.peer, slot);
    } else {
      buffer->recv(end.envelope.peer, slot);
    }
    if (!begin(worker, buffer.get())) return stopped();
    const bool moved =
        end.sends ? buffer->waitSend(kForever) : buffer->waitRecv(kForever);
    return moved ? absl::OkStatus() : stopped();
  }

  absl::Status push(Worker& worker, End& end) {
    RETURN_IF_ERROR(move(worker, end, 0, &end.header, sizeof(Header)));
    if (end.bytes.empty()) return absl::OkStatus();
    return move(worker, end, 1, end.bytes.data(), end.bytes.size());
  }

  absl::Status pull(Worker& worker, End& end) {
    Header got;
    RETURN_IF_ERROR(move(worker, end, 0, &got, sizeof(Header)));
    uint64_t bytes = 0;
    for (size_t i = 0; i < end.specs.size(); ++i) {
      if (got.has(i)) bytes += bytes_of(end.specs[i]);
    }
    const Header& want = end.header;
    if (got.magic != kMagic || got.channel != want.channel ||
        got.micro_batch != want.micro_batch || got.parts != want.parts ||
        got.what != want.what || got.bytes != bytes) {
      return absl::InternalError(
          absl::StrCat(end.text(launch.rank), " expects ", end.what,
                       ", but was sent ", got.bytes, " bytes in ", got.parts,
                       " parts for micro-batch ", got.micro_batch));
    }
    end.header = got;
    end.bytes.assign(bytes, 0);
    if (bytes == 0) return absl::OkStatus();
    RETURN_IF_ERROR(move(worker, end, 1, end.bytes.data(), bytes));
    if (hash_of(end.bytes.data(), end.bytes.size()) != got.hash) {
      return absl::DataLossError(absl::StrCat(
          end.text(launch.rank), ": the message is damaged or was cut short"));
    }
    return absl::OkStatus();
  }

  template <class What>
  absl::Status until(const End& end, absl::Duration timeout, const What& what) {
    std::unique_lock lock(mutex);
    const bool over = changed.wait_for(
        lock,
        absl::ToChronoMilliseconds(std::min(timeout, absl::Hours(24 * 365))),
        [&] { return end.done || !ended.ok(); });
    if (end.done) return absl::OkStatus();
    if (!ended.ok()) return ended;
    CHECK(!over);
    return absl::DeadlineExceededError(absl::StrCat(what(), " has not ended"));
  }

  // Ends the workers; what they do is cut off.
  void stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
      for (auto& [key, worker] : workers) {
        if (worker.waiting == nullptr) continue;
        worker.waiting->abortWaitSend();
        worker.waiting->abortWaitRecv();
      }
      changed.notify_all();
    }
    for (auto& [key, worker] : workers) {
      if (worker.thread.joinable()) worker.thread.join();
    }
    workers.clear();
    if (telling.joinable()) telling.join();
  }

  void tell() {
    int64_t told = -2;
    for (;;) {
      {
        std::unique_lock lock(mutex);
        if (changed.wait_for(lock, std::chrono::milliseconds(200),
                             [&] { return stopping; })) {
          return;
        }
      }
      const int64_t now = position;
      if (now == told) continue;
      // Tried again later: until then reports say what was told before.
      if (teller
              ->set(absl::StrCat("position/", launch.rank), absl::StrCat(now),
                    kStoreTimeout)
              .ok()) {
        told = now;
      }
    }
  }

  EndPtr make_end(bool sends, const Envelope& envelope, std::string what,
                  std::vector<TensorSpec> specs) {
    CHECK_LE(specs.size(), kMostParts) << "[message] has too many parts";
    auto end = std::make_shared<End>();
    end->sends = sends;
    end->envelope = envelope;
    end->specs = std::move(specs);
    end->what = std::move(what);
    end->header.channel = envelope.channel;
    end->header.micro_batch = envelope.micro_batch;
    end->header.parts = static_cast<int32_t>(end->specs.size());
    end->header.what = hash_of(end->what.data(), end->what.size());
    return end;
  }

  void seal(End& end) {
    end.header.bytes = end.bytes.size();
    end.header.hash = hash_of(end.bytes.data(), end.bytes.size());
    if (messages++ == options.truncate && !end.bytes.empty()) {
      end.bytes.resize(end.bytes.size() - (end.bytes.size() + 1) / 2);
      if (end.bytes.empty()) end.bytes.push_back(0);
    }
  }
};

GlooCommunicator::GlooCommunicator(std::unique_ptr<State> state)
    : state_(std::move(state)) {}
GlooCommunicator::~GlooCommunicator() = default;

absl::StatusOr<std::unique_ptr<GlooCommunicator>> GlooCommunicator::connect(
    const Launched& launch, const GlooOptions& options) {
  auto state = std::make_unique<State>();
  state->launch = launch;
  state->options = options;
  if (launch.rank == 0) {
    ASSIGN_OR_RETURN(state->server, TcpStoreServer::start(launch.store_port));
    state->launch.store_port = state->server->port();
  }
  const absl::Time end = absl::Now() + options.connect_timeout;
  const auto join = [&] {
    return TcpStore::connect(launch.master, state->launch.store_port,
                             end - absl::Now());
  };
  ASSIGN_OR_RETURN(state->store, join());
  ASSIGN_OR_RETURN(state->teller, join());
  ASSIGN_OR_RETURN(const std::string address, address_towards(launch.master));
  try {
    GlooStore store(*state->store, end);
    std::shared_ptr<gloo::transport::Device> device =
        gloo::transport::tcp::CreateDevice(address.c_str());
    state->context =
        std::make_shared<gloo::rendezvous::Context>(launch.rank, launch.world);
    // It waits five times as long for each peer's first connection.
    const absl::Duration left = (end - absl::Now()) / 5;
    state->context->setTimeout(std::chrono::milliseconds(
        std::max<int64_t>(1, absl::ToInt64Milliseconds(left))));
    state->context->connectFullMesh(store, device);
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("rank ", launch.rank, ": connect to all ", launch.world,
                     " ranks: ", error.what()));
  }
  State* const s = state.get();
  s->telling = std::thread([s] { s->tell(); });
  return std::unique_ptr<GlooCommunicator>(
      new GlooCommunicator(std::move(state)));
}

int GlooCommunicator::rank() const { return state_->launch.rank; }
int GlooCommunicator::size() const { return state_->launch.world; }

absl::StatusOr<Communicator::Ticket> GlooCommunicator::send(
    const Envelope& to, const std::vector<TensorSpec>& specs,
    std::vector<Tensor> parts) {
  CHECK_EQ(specs.size(), parts.size());
  const EndPtr end = state_->make_end(true, to, to_string(specs), specs);
  for (size_t i = 0; i < parts.size(); ++i) {
    const Tensor& x = parts[i];
    if (!x) continue;
    CHECK(x.contiguous() && x.dtype() == specs[i].dtype &&
          x.shape() == specs[i].shape)
        << "[send] " << x << " is no contiguous " << to_string({specs[i]});
    end->header.set(i);
    const auto* data = reinterpret_cast<const char*>(bytes_at(x, false));
    end->bytes.insert(end->bytes.end(), data, data + x.bytes());
    give_back(x, false);
  }
  state_->seal(*end);
  const Ticket ticket = state_->post(end);
  const std::lock_guard lock(state_->mutex);
  if (!state_->ended.ok()) return state_->ended;
  return ticket;
}

absl::StatusOr<Communicator::Ticket> GlooCommunicator::receive(
    const Envelope& from, int slot, const std::vector<TensorSpec>& specs) {
  CHECK(!state_->slots[slot]) << "[receive] slot " << slot << " is in use";
  const EndPtr end = state_->make_end(false, from, to_string(specs), specs);
  end->slot = slot;
  state_->slots[slot] = true;
  const Ticket ticket = state_->post(end);
  const std::lock_guard lock(state_->mutex);
  if (!state_->ended.ok()) return state_->ended;
  return ticket;
}

absl::StatusOr<std::vector<Tensor>> GlooCommunicator::wait(
    Ticket ticket, absl::Duration timeout) {
  EndPtr end;
  {
    const std::lock_guard lock(state_->mutex);
    const auto found = state_->tickets.find(ticket);
    if (found == state_->tickets.end()) {
      CHECK(!state_->ended.ok()) << "[wait] ticket " << ticket << " is unknown";
      return state_->ended;
    }
    end = found->second;
  }
  RETURN_IF_ERROR(state_->until(
      *end, timeout, [&] { return end->text(state_->launch.rank); }));
  {
    const std::lock_guard lock(state_->mutex);
    state_->tickets.erase(ticket);
  }
  std::vector<Tensor> parts;
  if (end->sends) return parts;
  state_->slots[end->slot] = false;
  const char* data = end->bytes.data();
  for (size_t i = 0; i < end->specs.size(); ++i) {
    parts.emplace_back();
    if (!end->header.has(i)) continue;
    parts.back() = Tensor::empty(end->specs[i].shape, end->specs[i].dtype);
    std::byte* to = bytes_at(parts.back(), true);
    const auto bytes = static_cast<size_t>(parts.back().bytes());
    if (bytes > 0) std::memcpy(to, data, bytes);
    give_back(parts.back(), true);
    data += bytes;
  }
  return parts;
}

bool GlooCommunicator::done(Ticket ticket) {
  const std::lock_guard lock(state_->mutex);
  return !state_->ended.ok() || state_->tickets.at(ticket)->done;
}

// All to the first member, which adds in their order, and back.
absl::Status GlooCommunicator::all_reduce(const Collective& c, const Tensor& x,
                                          absl::Duration timeout) {
  State& s = *state_;
  const int me = rank();
  if (!std::binary_search(c.ranks.begin(), c.ranks.end(), me)) {
    return absl::InternalError(absl::StrCat(
        "rank ", me, ": collective '", c.name, "' of ranks ",
        absl::StrJoin(c.ranks, " "), ": this rank is none of them"));
  }
  CHECK(x.contiguous());
  const TensorSpec spec = {x.dtype(), x.shape()};
  const std::string what =
      absl::StrCat("collective '", c.name, "' of ranks ",
                   absl::StrJoin(c.ranks, " "), ", ", to_string({spec}));
  std::byte* data = bytes_at(x, /*write=*/true);
  const absl::Cleanup leave = [&] { give_back(x, /*wrote=*/true); };
  const auto bytes = static_cast<size_t>(x.bytes());
  const absl::Time deadline = absl::Now() + timeout;
  const auto exchange = [&](bool sends, int peer,
                            int channel) -> absl::StatusOr<EndPtr> {
    const EndPtr end = s.make_end(sends, {peer, channel, 0}, what, {spec});
    if (sends) {
      const auto* from = reinterpret_cast<const char*>(data);
      end->header.set(0);
      end->bytes.assign(from, from + bytes);
      s.seal(*end);
    }
    const Ticket ticket = s.post(end);
    RETURN_IF_ERROR(
        s.until(*end, std::max(deadline - absl::Now(), absl::ZeroDuration()),
                [&] { return absl::StrCat(end->text(me), ","); }));
    const std::lock_guard lock(s.mutex);
    s.tickets.erase(ticket);
    return end;
  };
  const int root = c.ranks.front();
  if (me != root) {
    RETURN_IF_ERROR(exchange(true, root, kToRoot).status());
    ASSIGN_OR_RETURN(const EndPtr sum, exchange(false, root, kFromRoot));
    if (bytes > 0) std::memcpy(data, sum->bytes.data(), bytes);
    return absl::OkStatus();
  }
  for (size_t i = 1; i < c.ranks.size(); ++i) {
    ASSIGN_OR_RETURN(const EndPtr one, exchange(false, c.ranks[i], kToRoot));
    switch (x.dtype()) {
      case DType::kF32:
        add_values<float>(one->bytes, data);
        break;
      case DType::kF64:
        add_values<double>(one->bytes, data);
        break;
      case DType::kI64:
        add_values<int64_t>(one->bytes, data);
        break;
      default:
        CHECK(false) << "[all_reduce] of " << x;
    }
  }
  for (size_t i = 1; i < c.ranks.size(); ++i) {
    RETURN_IF_ERROR(exchange(true, c.ranks[i], kFromRoot).status());
  }
  return absl::OkStatus();
}

absl::Status GlooCommunicator::barrier(absl::Duration timeout) {
  Collective all{"barrier", {}};
  for (int r = 0; r < size(); ++r) all.ranks.push_back(r);
  return all_reduce(all, Tensor::empty({0}, DType::kF32), timeout);
}

void GlooCommunicator::abort(const absl::Status& why) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->fail(why.ok() ? absl::AbortedError("aborted") : why);
  }
  state_->stop();
  state_->tickets.clear();
  state_->slots.clear();
  try {
    state_->context->closeConnections();
  } catch (const std::exception&) {
    // They are gone already.
  }
}

void GlooCommunicator::set_position(int64_t position) {
  state_->position = position;
}

std::vector<int64_t> GlooCommunicator::positions() const {
  std::vector<int64_t> out(static_cast<size_t>(size()), -1);
  const std::lock_guard lock(state_->store_mutex);
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) {
      out[r] = state_->position;
      continue;
    }
    const auto value =
        state_->store->peek(absl::StrCat("position/", r), kStoreTimeout);
    int64_t at = -1;
    if (value.ok() && *value && absl::SimpleAtoi(**value, &at)) out[r] = at;
  }
  return out;
}

}  // namespace tapeline
