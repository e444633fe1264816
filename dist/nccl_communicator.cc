#include "dist/nccl_communicator.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
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
constexpr size_t kReported = 8;  // last operations

// Errors of a device are sticky: whoever meets one stops.
void cuda_check(cudaError_t error) {
  CHECK(error == cudaSuccess) << "[nccl] " << cudaGetErrorString(error);
}

// An NCCL communicator and the stream that its operations are queued on.
struct Line {
  NcclComm* comm = nullptr;
  int ranks = 0, rank = 0;  // in it
  std::unique_ptr<CudaStream> stream;
};

// Something queued, until the device has done it.
struct Operation {
  std::string what;
  absl::Time queued;
  cudaEvent_t done = nullptr;
  std::vector<Tensor> parts;
  bool receives = false;
  int slot = -1;
};

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(const Launched& launch, const NcclOptions& options,
                   const NcclLibrary& nccl)
      : launch_(launch), options_(options), nccl_(nccl) {
    cuda_check(cudaGetDevice(&gpu_));
  }

  ~NcclCommunicator() override {
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
    for (auto& [ticket, operation] : operations_) recycle(operation);
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
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
    int number = 0;
    for (const std::vector<int>& group : options_.groups) {
      RETURN_IF_ERROR(add_line(number++, group, {-1, -1, group_key(group)}));
    }
    for (const NcclRoute& r : options_.routes) {
      std::vector<int> pair = {r.from, r.to};
      std::sort(pair.begin(), pair.end());
      RETURN_IF_ERROR(
          add_line(number++, pair, {r.from, r.to, absl::StrCat(r.channel)}));
    }
    watching_ = std::thread([this] { watch(); });
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
      const std::byte* bytes = address(x, *line, /*write=*/false);
      const NcclResult result =
          nccl_.send(bytes, static_cast<size_t>(x.bytes()), kNcclBytes,
                     1 - line->rank, line->comm, stream_of(*line));
      x.storage()->release(*line->stream, false);
      RETURN_IF_ERROR(settle(*line, result, what));
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
      const Tensor& x = parts.back();
      std::byte* bytes = address(x, *line, /*write=*/true);
      const NcclResult result =
          nccl_.receive(bytes, static_cast<size_t>(x.bytes()), kNcclBytes,
                        1 - line->rank, line->comm, stream_of(*line));
      x.storage()->release(*line->stream, true);
      RETURN_IF_ERROR(settle(*line, result, what));
    }
    slots_[slot] = true;
    return queue(*line, what, std::move(parts), /*receives=*/true, slot);
  }

  // Storages know on which stream they were written: who reads one waits there.
  absl::StatusOr<std::vector<Tensor>> wait(Ticket ticket,
                                           absl::Duration) override {
    const std::lock_guard lock(mutex_);
    const auto found = operations_.find(ticket);
    CHECK(found != operations_.end()) << "[wait] no ticket " << ticket;
    if (!ended_.ok()) return ended_;
    Operation& operation = found->second;
    std::vector<Tensor> parts;
    if (operation.receives) {
      parts = operation.parts;
      slots_[operation.slot] = false;
    }
    // Watched until the device has done it.
    unfinished_.push_back(std::move(operation));
    operations_.erase(found);
    retire();
    return parts;
  }

  bool done(Ticket ticket) override {
    const std::lock_guard lock(mutex_);
    return !ended_.ok() ||
           cudaEventQuery(operations_.at(ticket).done) == cudaSuccess;
  }

  absl::Status all_reduce(const Collective& c, const Tensor& x,
                          absl::Duration) override {
    const std::string what =
        absl::StrCat("rank ", rank(), ": collective '", c.name, "' of ranks ",
                     absl::StrJoin(c.ranks, " "));
    CHECK(x.contiguous());
    ASSIGN_OR_RETURN(Line * line, find({-1, -1, group_key(c.ranks)}, what));
    if (x.elements() == 0 || line->ranks == 1) return status();
    if (x.dtype() == DType::kI64) {
      std::byte* bytes = address(x, *line, /*write=*/true);
      const NcclResult result =
          nccl_.all_reduce(bytes, bytes, static_cast<size_t>(x.elements()),
                           kNcclI64, kNcclSum, line->comm, stream_of(*line));
      x.storage()->release(*line->stream, true);
      RETURN_IF_ERROR(settle(*line, result, what));
      return hand_over(*line, what, {x});
    }
    const Tensor all = Tensor::empty({line->ranks, x.elements()}, x.dtype());
    const std::byte* from = address(x, *line, /*write=*/false);
    std::byte* to = address(all, *line, /*write=*/true);
    const NcclResult result =
        nccl_.all_gather(from, to, static_cast<size_t>(x.bytes()), kNcclBytes,
                         line->comm, stream_of(*line));
    x.storage()->release(*line->stream, false);
    all.storage()->release(*line->stream, true);
    RETURN_IF_ERROR(settle(*line, result, what));
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
  std::byte* address(const Tensor& x, const Line& line, bool write) {
    if (write) x.storage()->bump_version();
    return x.storage()->acquire(*line.stream, write) +
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
    line.stream = std::make_unique<CudaStream>(name);
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
    if (operation.done != nullptr) events_.push_back(operation.done);
    operation.done = nullptr;
  }

  Operation operation(const Line& line, const std::string& what,
                      std::vector<Tensor> parts) {
    Operation out{what, absl::Now(), event(), std::move(parts), false, -1};
    cuda_check(cudaEventRecord(out.done, stream_of(line)));
    return out;
  }
  void note(const std::string& what) {
    last_.push_back(what);
    if (last_.size() > kReported) last_.pop_front();
  }
  absl::StatusOr<Ticket> queue(const Line& line, const std::string& what,
                               std::vector<Tensor> parts, bool receives,
                               int slot) {
    Operation made = operation(line, what, std::move(parts));
    made.receives = receives;
    made.slot = slot;
    const std::lock_guard lock(mutex_);
    note(what);
    operations_.emplace(++last_ticket_, std::move(made));
    return last_ticket_;
  }
  // Watched, with nobody to wait for it.
  absl::Status hand_over(const Line& line, const std::string& what,
                         std::vector<Tensor> parts) {
    Operation made = operation(line, what, std::move(parts));
    const std::lock_guard lock(mutex_);
    note(what);
    unfinished_.push_back(std::move(made));
    retire();
    return ended_;
  }
  // With the mutex held, by the device's thread: tensors go here alone.
  void retire() {
    while (!unfinished_.empty() &&
           cudaEventQuery(unfinished_.front().done) == cudaSuccess) {
      recycle(unfinished_.front());
      unfinished_.pop_front();
    }
  }

  void watch() {
    cuda_check(cudaSetDevice(gpu_));
    int64_t told = -2;
    for (;;) {
      absl::SleepFor(kLook);
      absl::Status found;
      {
        const std::lock_guard lock(mutex_);
        if (stopping_ || !ended_.ok()) return;
        const absl::Time now = absl::Now();
        const auto look = [&](const Operation& operation) {
          if (now - operation.queued <= options_.deadline || !found.ok() ||
              cudaEventQuery(operation.done) == cudaSuccess) {
            return;
          }
          found = absl::DeadlineExceededError(
              absl::StrCat(operation.what, " has not ended after ",
                           absl::FormatDuration(options_.deadline)));
        };
        for (const Operation& operation : unfinished_) look(operation);
        for (const auto& [ticket, operation] : operations_) look(operation);
      }
      for (const auto& [key, line] : lines_) {
        NcclResult result = kNcclSuccess;
        if (nccl_.get_async_error(line.comm, &result) == kNcclSuccess &&
            result != kNcclSuccess && result != kNcclInProgress) {
          found = absl::UnavailableError(absl::StrCat(
              "rank ", rank(), ": NCCL: ", nccl_.error_string(result)));
        }
      }
      if (!found.ok()) {
        {
          const std::lock_guard lock(mutex_);
          end(found);
        }
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

  // Ends what the device waits for.
  void abort_lines() {
    const std::lock_guard lock(abort_mutex_);
    for (auto& [key, line] : lines_) {
      if (!std::exchange(aborted_[&line], true)) nccl_.abort(line.comm);
    }
  }

  Launched launch_;
  const NcclOptions options_;
  const NcclLibrary nccl_;
  int gpu_ = 0;
  std::unique_ptr<TcpStoreServer> server_;
  std::unique_ptr<TcpStore> store_, teller_;
  std::map<Key, Line> lines_;  // made by connect()
  std::map<int, bool> slots_;

  mutable std::mutex mutex_;  // of what the side thread sees
  absl::Status ended_;
  bool stopping_ = false;
  std::map<Ticket, Operation> operations_;  // not waited for
  std::deque<Operation> unfinished_;        // waited for, maybe not done
  std::deque<std::string> last_;
  std::vector<cudaEvent_t> events_;  // free
  Ticket last_ticket_ = 0;

  std::mutex abort_mutex_;
  std::map<const Line*, bool> aborted_;
  mutable std::mutex store_mutex_;
  std::atomic<int64_t> position_ = -1;
  std::thread watching_;
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
