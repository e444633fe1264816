#include "dist/nccl_communicator.h"

#include <cuda_runtime.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "dist/message_gates.h"
#include "dist/nccl_library.h"
#include "dist/tcp_store.h"
#include "kernels/elementwise/elementwise.h"
#include "runtime/access.h"
#include "runtime/check.h"
#include "runtime/cuda_stream.h"
#include "runtime/device.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

constexpr absl::Duration kStoreTimeout = absl::Seconds(2);
constexpr absl::Duration kLook = absl::Milliseconds(100);
// Between looks at what is ready: short against a pass, long against asking.
constexpr absl::Duration kPause = absl::Microseconds(20);
constexpr absl::Duration kGrace = absl::Seconds(8);  // last_resort
constexpr size_t kReported = 8;                      // last operations

// Errors of a device are sticky: whoever meets one stops.
void cuda_check(cudaError_t error) {
  CHECK(error == cudaSuccess) << "[nccl] " << cudaGetErrorString(error);
}

struct Operation;

bool reached(cudaEvent_t event) {
  const cudaError_t state = cudaEventQuery(event);
  if (state == cudaSuccess) return true;
  // It counts as an error, for the next who asks.
  if (state == cudaErrorNotReady) cudaGetLastError();
  return false;
}

// An NCCL communicator and the stream that its operations are queued on.
struct Line {
  NcclComm* comm = nullptr;
  int ranks = 0, rank = 0;  // in it
  std::unique_ptr<CudaStream> stream;
  // Of a line of messages: where those wait for what makes or frees their
  // bytes, and others for them. Messages themselves wait for nothing on the
  // device: the next one's wait would hold up this one.
  std::unique_ptr<CudaStream> gate;
  // Its number among routes, messages so far, and those that have not begun, in
  // order.
  int route = -1;
  uint32_t count = 0;
  std::deque<Operation*> waiting;
};

// A message, or something queued with nobody to wait for it.
struct Operation {
  std::string what;
  std::vector<Tensor> parts;
  cudaEvent_t done = nullptr;  // recorded when it has begun
  absl::Time begun;
  // Of a message.
  Line* line = nullptr;
  std::vector<std::byte*> bytes;
  cudaEvent_t ready = nullptr;  // its bytes, or their place
  uint32_t number = 0;          // of the line's, from 1 on
  bool receives = false, told = false, has_begun = false;
  int slot = -1;
  DeviceMarks* marks = nullptr;
  Travel travel;
};

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(const Launched& launch, const NcclOptions& options,
                   const NcclLibrary& nccl)
      : launch_(launch), options_(options), nccl_(nccl) {
    cuda_check(cudaGetDevice(&gpu_));
  }

  ~NcclCommunicator() override {
    stop_moving();
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    if (watching_.joinable()) watching_.join();
    // What is under way ends first; after an error it has been aborted.
    for (auto& [key, line] : lines_) {
      if (ended_.ok()) cuda_check(cudaStreamSynchronize(stream_of(line)));
    }
    abort_lines();
    for (auto& [ticket, operation] : operations_) give_back(operation);
    for (Operation& operation : unfinished_) recycle(operation);
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
    // Tensors and free blocks that messages went through name these streams as
    // long as the device lives.
    static auto& streams = *new std::vector<std::unique_ptr<CudaStream>>();
    for (auto& [key, line] : lines_) {
      streams.push_back(std::move(line.stream));
      if (line.gate) streams.push_back(std::move(line.gate));
    }
  }

  absl::Status connect() {
    if (launch_.rank == 0) {
      ASSIGN_OR_RETURN(server_, TcpStoreServer::start(launch_.store_port));
      launch_.store_port = server_->port();
    }
    ASSIGN_OR_RETURN(store_,
                     TcpStore::connect(launch_.master, launch_.store_port,
                                       options_.connect_timeout));
    ASSIGN_OR_RETURN(teller_,
                     TcpStore::connect(launch_.master, launch_.store_port,
                                       options_.connect_timeout));
    ASSIGN_OR_RETURN(
        gates_, MessageGates::make(static_cast<int>(options_.routes.size()),
                                   launch_, options_.connect_timeout));
    int number = 0, route = 0;
    for (const std::vector<int>& group : options_.groups) {
      RETURN_IF_ERROR(add_line(number++, group, {-1, -1, group_key(group)}));
    }
    for (const NcclRoute& r : options_.routes) {
      std::vector<int> pair = {r.from, r.to};
      std::sort(pair.begin(), pair.end());
      const Key key = {r.from, r.to, absl::StrCat(r.channel)};
      RETURN_IF_ERROR(add_line(number++, pair, key));
      if (const auto line = lines_.find(key); line != lines_.end()) {
        line->second.route = route;
        line->second.gate = std::make_unique<CudaStream>(
            absl::StrCat("gate/", route), Marks::kAtOnce);
        lines_with_messages_.push_back(&line->second);
      }
      ++route;
    }
    watching_ = std::thread([this] { watch(); });
    moving_ = std::thread([this] { move_messages(); });
    // Once each, in the same order: nothing is set up later.
    for (const std::vector<int>& group : options_.groups) {
      if (!belongs(group)) continue;
      const Tensor one = Tensor::full({1}, DType::kF32, 1);
      RETURN_IF_ERROR(all_reduce({"warm-up", group}, one, options_.deadline));
      if (one.to_vector<float>()[0] != static_cast<float>(group.size())) {
        return ended_or("the ranks of a group do not add up");
      }
    }
    for (const NcclRoute& r : options_.routes) {
      const std::vector<TensorSpec> spec = {{DType::kF32, {1}}};
      if (r.from == rank()) {
        ASSIGN_OR_RETURN(const Ticket ticket,
                         send({r.to, r.channel, 0}, spec,
                              {Tensor::full({1}, DType::kF32, r.channel)}));
        RETURN_IF_ERROR(wait(ticket, options_.deadline).status());
      } else if (r.to == rank()) {
        ASSIGN_OR_RETURN(const Ticket ticket,
                         receive({r.from, r.channel, 0}, 0, spec));
        ASSIGN_OR_RETURN(const std::vector<Tensor> got,
                         wait(ticket, options_.deadline));
        if (got[0].to_vector<float>()[0] != static_cast<float>(r.channel)) {
          return ended_or(absl::StrCat("channel ", r.channel, " from rank ",
                                       r.from, " brings another's message"));
        }
      }
    }
    return absl::OkStatus();
  }

  int rank() const override { return launch_.rank; }
  int size() const override { return launch_.world; }
  bool sends_wait() const override { return false; }

  absl::StatusOr<Ticket> send(const Envelope& to,
                              const std::vector<TensorSpec>& specs,
                              std::vector<Tensor> parts) override {
    CHECK_EQ(specs.size(), parts.size());
    const std::string what =
        absl::StrCat("rank ", rank(), ": send to rank ", to.peer, ", channel ",
                     to.channel, ", micro-batch ", to.micro_batch);
    ASSIGN_OR_RETURN(Line * line,
                     find({rank(), to.peer, absl::StrCat(to.channel)}, what));
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!parts[i]) parts[i] = Tensor::zeros(specs[i].shape, specs[i].dtype);
      const Tensor& x = parts[i];
      CHECK(x.contiguous() && x.dtype() == specs[i].dtype &&
            x.shape() == specs[i].shape)
          << "[send] " << x << " is no contiguous " << to_string({specs[i]});
    }
    return queue(*line, what, std::move(parts), /*receives=*/false, -1);
  }

  absl::StatusOr<Ticket> receive(
      const Envelope& from, int slot,
      const std::vector<TensorSpec>& specs) override {
    CHECK(!slots_[slot]) << "[receive] slot " << slot << " is in use";
    const std::string what = absl::StrCat(
        "rank ", rank(), ": receive from rank ", from.peer, ", channel ",
        from.channel, ", micro-batch ", from.micro_batch);
    ASSIGN_OR_RETURN(
        Line * line,
        find({from.peer, rank(), absl::StrCat(from.channel)}, what));
    std::vector<Tensor> parts;
    for (const TensorSpec& spec : specs) {
      parts.push_back(Tensor::empty(spec.shape, spec.dtype));
    }
    slots_[slot] = true;
    return queue(*line, what, std::move(parts), /*receives=*/true, slot);
  }

  // Until the message has begun. Storages know on which stream they were
  // written: who reads one waits there.
  absl::StatusOr<std::vector<Tensor>> wait(Ticket ticket,
                                           absl::Duration timeout) override {
    std::unique_lock lock(mutex_);
    const auto found = operations_.find(ticket);
    CHECK(found != operations_.end()) << "[wait] no ticket " << ticket;
    Operation& operation = found->second;
    const bool in_time =
        begun_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                        [&] { return operation.has_begun || !ended_.ok(); });
    if (!ended_.ok()) return ended_;
    if (!in_time) {
      return absl::DeadlineExceededError(
          absl::StrCat(operation.what, " has not begun"));
    }
    last_travel_.reset();
    std::vector<Tensor> parts;
    give_back(operation);
    if (operation.receives) {
      // Their memory waits for the line as who has them next does.
      parts = std::exchange(operation.parts, {});
      slots_[operation.slot] = false;
      if (operation.marks != nullptr) last_travel_ = operation.travel;
    }
    // Watched until the device has done it.
    unfinished_.push_back(std::move(operation));
    operations_.erase(found);
    retire();
    return parts;
  }

  bool done(Ticket ticket) override {
    const std::lock_guard lock(mutex_);
    const Operation& operation = operations_.at(ticket);
    return !ended_.ok() || (operation.has_begun && reached(operation.done));
  }

  void time_messages(DeviceMarks* marks) override { marks_ = marks; }
  std::optional<Travel> travel() const override { return last_travel_; }

  absl::Status all_reduce(const Collective& c, const Tensor& x,
                          absl::Duration) override {
    const std::string what =
        absl::StrCat("rank ", rank(), ": collective '", c.name, "' of ranks ",
                     absl::StrJoin(c.ranks, " "));
    CHECK(x.contiguous());
    if (c.ranks == std::vector<int>{rank()}) return status();
    ASSIGN_OR_RETURN(Line * line, find({-1, -1, group_key(c.ranks)}, what));
    if (x.elements() == 0) return status();
    if (x.dtype() == DType::kI64) {
      std::byte* bytes = address(x, *line->stream, /*write=*/true);
      const NcclResult result =
          nccl_.all_reduce(bytes, bytes, static_cast<size_t>(x.elements()),
                           kNcclI64, kNcclSum, line->comm, stream_of(*line));
      const absl::Status queued = settle(*line, result, what);
      x.storage()->release(*line->stream, true);
      RETURN_IF_ERROR(queued);
      return hand_over(*line, what, {x});
    }
    const Tensor all = Tensor::empty({line->ranks, x.elements()}, x.dtype());
    const std::byte* from = address(x, *line->stream, /*write=*/false);
    std::byte* to = address(all, *line->stream, /*write=*/true);
    const NcclResult result =
        nccl_.all_gather(from, to, static_cast<size_t>(x.bytes()), kNcclBytes,
                         line->comm, stream_of(*line));
    const absl::Status queued = settle(*line, result, what);
    x.storage()->release(*line->stream, false);
    all.storage()->release(*line->stream, true);
    RETURN_IF_ERROR(queued);
    RETURN_IF_ERROR(hand_over(*line, what, {x, all}));
    const auto add = [&]<class T>() {
      const Tensor sum = x.view_as({x.elements()});
      for (int r = 0; r < line->ranks; ++r) {
        const Tensor one = all.slice(0, r, r + 1).view_as({x.elements()});
        if (r == 0) {
          copy<T>(launch(), read<T>(one), write<T>(sum));
        } else {
          accumulate<T>(launch(), read<T>(one), write<T>(sum));
        }
      }
    };
    CHECK(x.dtype() == DType::kF32 || x.dtype() == DType::kF64)
        << "[all_reduce] of " << x;
    if (x.dtype() == DType::kF32) {
      add.template operator()<float>();
    } else {
      add.template operator()<double>();
    }
    return status();
  }

  absl::Status barrier(absl::Duration timeout) override {
    std::vector<int> all;
    for (int r = 0; r < size(); ++r) all.push_back(r);
    const Tensor one = Tensor::full({1}, DType::kF32, 1);
    RETURN_IF_ERROR(all_reduce({"barrier", all}, one, timeout));
    one.to_vector<float>();
    return status();
  }

  void abort(const absl::Status& why) override {
    {
      const std::lock_guard lock(mutex_);
      end(why.ok() ? absl::AbortedError("aborted") : why);
    }
    stop_moving();
    abort_lines();
  }

  void set_position(int64_t position) override { position_ = position; }
  std::vector<int64_t> positions() const override {
    std::vector<int64_t> out(static_cast<size_t>(size()), -1);
    const std::lock_guard lock(store_mutex_);
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) {
        out[r] = position_;
        continue;
      }
      const auto value =
          store_->peek(absl::StrCat("position/", r), kStoreTimeout);
      int64_t at = -1;
      if (value.ok() && *value && absl::SimpleAtoi(**value, &at)) out[r] = at;
    }
    return out;
  }

 private:
  // From, to, channel of a route; -1, -1, ranks of a group.
  using Key = std::tuple<int, int, std::string>;

  static std::string group_key(const std::vector<int>& ranks) {
    return absl::StrJoin(ranks, " ");
  }
  static cudaStream_t stream_of(const Line& line) {
    return static_cast<cudaStream_t>(line.stream->native());
  }
  bool belongs(const std::vector<int>& ranks) const {
    return std::binary_search(ranks.begin(), ranks.end(), rank());
  }
  static std::byte* address(const Tensor& x, Stream& stream, bool write) {
    if (write) x.storage()->bump_version();
    return x.storage()->acquire(stream, write) +
           x.offset() * static_cast<int64_t>(size_of(x.dtype()));
  }

  absl::Status status() const {
    const std::lock_guard lock(mutex_);
    return ended_;
  }
  absl::Status ended_or(const std::string& what) const {
    const absl::Status now = status();
    return now.ok()
               ? absl::InternalError(absl::StrCat("rank ", rank(), ": ", what))
               : now;
  }
  // With the mutex held.
  void end(const absl::Status& why) {
    if (!ended_.ok()) return;
    std::string last;
    for (const std::string& what : last_) absl::StrAppend(&last, "\n  ", what);
    ended_ = absl::Status(
        why.code(),
        absl::StrCat(why.message(),
                     last.empty() ? "" : "\nlast operations:", last));
    if (!options_.last_resort) return;
    std::thread([status = ended_, f = options_.last_resort] {
      absl::SleepFor(kGrace);
      f(status);
    }).detach();
  }

  // Every rank comes by every line, in one order; members make it.
  absl::Status add_line(int number, const std::vector<int>& ranks,
                        const Key& key) {
    if (!belongs(ranks)) return absl::OkStatus();
    const std::string name = absl::StrCat("nccl/", number);
    NcclId id = {};
    if (ranks.front() == rank()) {
      if (nccl_.get_unique_id(&id) != kNcclSuccess) {
        return absl::UnavailableError("NCCL gives no id");
      }
      RETURN_IF_ERROR(store_->set(name, std::string(id.bytes, sizeof(id)),
                                  options_.connect_timeout));
    } else {
      ASSIGN_OR_RETURN(const std::string text,
                       store_->get(name, options_.connect_timeout));
      CHECK_EQ(text.size(), sizeof(id));
      std::memcpy(id.bytes, text.data(), sizeof(id));
    }
    Line line;
    line.ranks = static_cast<int>(ranks.size());
    line.rank = static_cast<int>(
        std::lower_bound(ranks.begin(), ranks.end(), rank()) - ranks.begin());
    line.stream = std::make_unique<CudaStream>(name, Marks::kAtOnce);
    NcclConfig config;
    const NcclResult result =
        nccl_.init_rank_config(&line.comm, line.ranks, id, line.rank, &config);
    const std::string what =
        absl::StrCat("rank ", rank(), ": make communicator ", number,
                     " of ranks ", absl::StrJoin(ranks, " "));
    const absl::Status made =
        settle(line, result, what, options_.connect_timeout);
    if (!made.ok()) {
      if (line.comm != nullptr) nccl_.abort(line.comm);
      return made;
    }
    const bool fresh = lines_.emplace(key, std::move(line)).second;
    CHECK(fresh) << "[nccl] a route or group twice";
    return absl::OkStatus();
  }

  // --- The thread that begins messages

  void move_messages() {
    cuda_check(cudaSetDevice(gpu_));
    // Pauses are as short as asked for.
    prctl(PR_SET_TIMERSLACK, 1000UL);
    for (;;) {
      std::vector<Operation*> heads;
      {
        std::unique_lock lock(mutex_);
        queued_.wait(lock, [&] {
          if (still_ || !ended_.ok()) return true;
          heads.clear();
          for (Line* line : lines_with_messages_) {
            if (!line->waiting.empty()) heads.push_back(line->waiting.front());
          }
          return !heads.empty();
        });
        if (still_ || !ended_.ok()) return;
      }
      bool any = false;
      for (Operation* head : heads) {
        const absl::StatusOr<bool> moved = advance(*head);
        if (moved.ok()) {
          any = any || *moved;
          continue;
        }
        {
          const std::lock_guard lock(mutex_);
          end(moved.status());
        }
        begun_.notify_all();
        return;
      }
      if (!any) absl::SleepFor(kPause);
    }
  }

  // A step of the message, the first of its line: it is announced when its
  // bytes are ready, and begun when the other end is.
  absl::StatusOr<bool> advance(Operation& o) {
    Line& line = *o.line;
    if (!o.told) {
      if (!reached(o.ready)) return false;
      RETURN_IF_ERROR(gates_->come(line.route, !o.receives, o.number));
      o.told = true;
    }
    ASSIGN_OR_RETURN(const bool met,
                     gates_->came(line.route, o.receives, o.number));
    if (!met) return false;
    if (o.marks != nullptr) o.travel.begin = o.marks->mark(*line.stream);
    NcclResult result = nccl_.group_start();
    for (size_t i = 0; i < o.parts.size() && result == kNcclSuccess; ++i) {
      const auto size = static_cast<size_t>(o.parts[i].bytes());
      result = o.receives
                   ? nccl_.receive(o.bytes[i], size, kNcclBytes, 1 - line.rank,
                                   line.comm, stream_of(line))
                   : nccl_.send(o.bytes[i], size, kNcclBytes, 1 - line.rank,
                                line.comm, stream_of(line));
      // In a group nothing is begun before its end.
      if (result == kNcclInProgress) result = kNcclSuccess;
    }
    if (const NcclResult end = nccl_.group_end(); result == kNcclSuccess) {
      result = end;
    }
    RETURN_IF_ERROR(settle(line, result, o.what));
    if (o.marks != nullptr) o.travel.end = o.marks->mark(*line.stream);
    // Not under the lock: it may wait for the device, and who aborts that needs
    // the lock.
    cuda_check(cudaEventRecord(o.done, stream_of(line)));
    {
      const std::lock_guard lock(mutex_);
      line.waiting.pop_front();
      o.begun = absl::Now();
      o.has_begun = true;
    }
    begun_.notify_all();
    return true;
  }

  // Nothing is begun any more. By any thread but that one.
  void stop_moving() {
    const std::lock_guard stopping(stop_mutex_);
    {
      const std::lock_guard lock(mutex_);
      still_ = true;
    }
    queued_.notify_all();
    begun_.notify_all();
    if (moving_.joinable()) moving_.join();
  }

  absl::StatusOr<Line*> find(const Key& key, const std::string& what) {
    RETURN_IF_ERROR(status());
    const auto found = lines_.find(key);
    if (found == lines_.end()) {
      return absl::InternalError(
          absl::StrCat(what, ": no such channel was made at the start"));
    }
    return &found->second;
  }

  // Until NCCL has taken the call: it returns before it is done.
  absl::Status settle(const Line& line, NcclResult result,
                      const std::string& what) {
    return settle(line, result, what, options_.deadline);
  }
  absl::Status settle(const Line& line, NcclResult result,
                      const std::string& what, absl::Duration timeout) {
    const absl::Time end_at = absl::Now() + timeout;
    while (result == kNcclInProgress) {
      if (absl::Now() > end_at) {
        return absl::DeadlineExceededError(absl::StrCat(
            what, " has not begun after ", absl::FormatDuration(timeout)));
      }
      if (const absl::Status now = status(); !now.ok()) return now;
      absl::SleepFor(absl::Microseconds(20));
      if (nccl_.get_async_error(line.comm, &result) != kNcclSuccess) break;
    }
    if (result == kNcclSuccess) return absl::OkStatus();
    return absl::UnavailableError(
        absl::StrCat(what, ": ", nccl_.error_string(result)));
  }

  cudaEvent_t event() {
    const std::lock_guard lock(mutex_);
    if (!events_.empty()) {
      const cudaEvent_t event = events_.back();
      events_.pop_back();
      return event;
    }
    cudaEvent_t event = nullptr;
    cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }
  void recycle(Operation& operation) {
    for (cudaEvent_t* e : {&operation.ready, &operation.done}) {
      if (*e != nullptr) events_.push_back(*e);
      *e = nullptr;
    }
  }

  void note(const std::string& what) {
    last_.push_back(what);
    if (last_.size() > kReported) last_.pop_front();
  }
  absl::StatusOr<Ticket> queue(Line& line, const std::string& what,
                               std::vector<Tensor> parts, bool receives,
                               int slot) {
    Operation made{.what = what, .parts = std::move(parts), .line = &line};
    for (const Tensor& x : made.parts) {
      made.bytes.push_back(address(x, *line.gate, /*write=*/receives));
    }
    made.ready = event();
    made.done = event();
    cuda_check(cudaEventRecord(made.ready,
                               static_cast<cudaStream_t>(line.gate->native())));
    made.number = ++line.count;
    made.receives = receives;
    made.slot = slot;
    if (receives) made.marks = marks_;
    Ticket ticket = 0;
    {
      const std::lock_guard lock(mutex_);
      note(what);
      ticket = ++last_ticket_;
      Operation& kept =
          operations_.emplace(ticket, std::move(made)).first->second;
      line.waiting.push_back(&kept);
    }
    queued_.notify_one();
    return ticket;
  }
  // The leases of a message's parts, when it has begun.
  static void give_back(Operation& operation) {
    CudaStream& gate = *operation.line->gate;
    const auto stream = static_cast<cudaStream_t>(gate.native());
    if (operation.has_begun) {
      cuda_check(cudaStreamWaitEvent(stream, operation.done, 0));
    }
    for (const Tensor& x : operation.parts) {
      x.storage()->release(gate, operation.receives);
    }
    operation.bytes.clear();
  }
  // Watched, with nobody to wait for it.
  absl::Status hand_over(const Line& line, const std::string& what,
                         std::vector<Tensor> parts) {
    Operation made{.what = what,
                   .parts = std::move(parts),
                   .done = event(),
                   .begun = absl::Now(),
                   .has_begun = true};
    cuda_check(cudaEventRecord(made.done, stream_of(line)));
    const std::lock_guard lock(mutex_);
    note(what);
    unfinished_.push_back(std::move(made));
    retire();
    return ended_;
  }
  // With the mutex held, by the device's thread: tensors go here alone.
  void retire() {
    while (!unfinished_.empty() && reached(unfinished_.front().done)) {
      recycle(unfinished_.front());
      unfinished_.pop_front();
    }
  }

  // What NCCL found by itself. No line has been aborted.
  absl::Status errors_of_lines() const {
    for (const auto& [key, line] : lines_) {
      NcclResult result = kNcclSuccess;
      if (nccl_.get_async_error(line.comm, &result) == kNcclSuccess &&
          result != kNcclSuccess && result != kNcclInProgress) {
        return absl::UnavailableError(absl::StrCat(
            "rank ", rank(), ": NCCL: ", nccl_.error_string(result)));
      }
    }
    return absl::OkStatus();
  }

  void watch() {
    cuda_check(cudaSetDevice(gpu_));
    int64_t told = -2;
    for (;;) {
      absl::SleepFor(kLook);
      absl::Status found;
      {
        const std::lock_guard lock(mutex_);
        if (stopping_) return;
        // Whoever met the error does not abort what has begun.
        found = ended_;
        const absl::Time now = absl::Now();
        const auto look = [&](const Operation& operation) {
          if (!operation.has_begun ||
              now - operation.begun <= options_.deadline || !found.ok() ||
              reached(operation.done)) {
            return;
          }
          found = absl::DeadlineExceededError(
              absl::StrCat(operation.what, " has not ended after ",
                           absl::FormatDuration(options_.deadline)));
        };
        for (const Operation& operation : unfinished_) look(operation);
        for (const auto& [ticket, operation] : operations_) look(operation);
      }
      {
        const std::lock_guard lock(abort_mutex_);
        if (!aborted_) found.Update(errors_of_lines());
      }
      if (!found.ok()) {
        {
          const std::lock_guard lock(mutex_);
          end(found);
        }
        begun_.notify_all();
        stop_moving();
        abort_lines();
        return;
      }
      const int64_t position = position_;
      if (position == told) continue;
      if (!teller_
               ->set(absl::StrCat("position/", rank()), absl::StrCat(position),
                     kStoreTimeout)
               .ok()) {
        continue;  // reports say that it is not known
      }
      told = position;
    }
  }

  // Ends what the device waits for. After an error all at once: who aborts one
  // then waits for all of the device, and so for the others.
  void abort_lines() {
    const std::lock_guard lock(abort_mutex_);
    if (std::exchange(aborted_, true)) return;
    if (status().ok()) {
      for (auto& [key, line] : lines_) nccl_.abort(line.comm);
      return;
    }
    std::vector<std::thread> threads;
    for (auto& [key, line] : lines_) {
      threads.emplace_back([this, comm = line.comm] {
        cuda_check(cudaSetDevice(gpu_));
        nccl_.abort(comm);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  Launched launch_;
  const NcclOptions options_;
  const NcclLibrary nccl_;
  int gpu_ = 0;
  std::unique_ptr<TcpStoreServer> server_;
  std::unique_ptr<TcpStore> store_, teller_;
  std::unique_ptr<MessageGates> gates_;
  DeviceMarks* marks_ = nullptr;
  std::optional<Travel> last_travel_;
  std::map<Key, Line> lines_;  // made by connect()
  std::map<int, bool> slots_;

  mutable std::mutex mutex_;  // of what the side threads see
  std::condition_variable queued_, begun_;
  std::vector<Line*> lines_with_messages_;
  bool still_ = false;
  absl::Status ended_;
  bool stopping_ = false;
  std::map<Ticket, Operation> operations_;  // not waited for
  std::deque<Operation> unfinished_;        // waited for, maybe not done
  std::deque<std::string> last_;
  std::vector<cudaEvent_t> events_;  // free
  Ticket last_ticket_ = 0;

  std::mutex abort_mutex_, stop_mutex_;
  bool aborted_ = false;
  mutable std::mutex store_mutex_;
  std::atomic<int64_t> position_ = -1;
  std::thread watching_, moving_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> connect_nccl(
    const Launched& launch, const NcclOptions& options) {
  CHECK(Device::current().kind() == DeviceKind::kCuda);
  ASSIGN_OR_RETURN(const NcclLibrary nccl, load_nccl());
  auto made = std::make_unique<NcclCommunicator>(launch, options, nccl);
  RETURN_IF_ERROR(made->connect());
  return std::unique_ptr<Communicator>(std::move(made));
}

}  // namespace tapeline
