#include "tools/train/pipeline_connect.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "dist/nccl_communicator.h"
#include "runtime/check.h"
#include "tools/train/exit_code.h"
#ifndef TAPELINE_CUDA
#include "dist/gloo_communicator.h"
#endif

namespace tapeline {
namespace {

constexpr absl::Duration kLeastToConnect = absl::Seconds(5);

// One process: nobody to talk to, whatever its device.
class SoleProcess : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  bool sends_wait() const override { return false; }
  absl::StatusOr<Ticket> send(const Envelope&, const std::vector<TensorSpec>&,
                              std::vector<Tensor>) override {
    return nobody();
  }
  absl::StatusOr<Ticket> receive(const Envelope&, int,
                                 const std::vector<TensorSpec>&) override {
    return nobody();
  }
  absl::StatusOr<std::vector<Tensor>> wait(Ticket, absl::Duration) override {
    return nobody();
  }
  bool done(Ticket) override { return true; }
  absl::Status all_reduce(const Collective&, const Tensor&,
                          absl::Duration) override {
    return ended_;
  }
  absl::Status barrier(absl::Duration) override { return ended_; }
  void abort(const absl::Status& why) override {
    if (ended_.ok()) ended_ = why;
  }
  void set_position(int64_t position) override { position_ = position; }
  std::vector<int64_t> positions() const override { return {position_}; }

 private:
  static absl::Status nobody() {
    CHECK(false) << "[communicator] one process has no peer";
    return absl::InternalError("no peer");
  }
  absl::Status ended_;
  int64_t position_ = -1;
};

void end_process(const absl::Status& status) {
  std::string line(status.message());
  std::replace(line.begin(), line.end(), '\n', ' ');
  std::cerr << "tapeline: " << line << std::endl;
  std::_Exit(kExitCommunication);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> connect_processes(
    const Launched& launch, const PipelinePlan& plan, DeviceKind device,
    absl::Duration connect_timeout, absl::Duration deadline,
    const std::vector<Setting>& settings, TcpStore::Stop stop) {
  if (launch.world == 1) return std::make_unique<SoleProcess>();
#ifdef TAPELINE_CUDA
  if (device != DeviceKind::kCuda) {
    return absl::UnimplementedError(
        "this build has no communicator for CPU processes, since hosts with "
        "GPUs may lack its library; use a build without CUDA");
  }
#endif
  const absl::Time end = absl::Now() + connect_timeout;
  if (const absl::Status same = compare_settings(launch, settings, end, stop);
      !same.ok()) {
    const bool mine = absl::IsInvalidArgument(same) || absl::IsCancelled(same);
    return mine ? same : ending(kExitCommunication, same);
  }
  // All are there; who came last has time to connect.
  connect_timeout = std::max(end - absl::Now(), kLeastToConnect);
  if (device == DeviceKind::kCuda) {
    absl::StatusOr<std::unique_ptr<Communicator>> made =
        connect_nccl(launch, {.routes = routes_of(plan),
                              .groups = groups_of(plan),
                              .connect_timeout = connect_timeout,
                              .deadline = deadline,
                              .last_resort = end_process});
    // A library that is missing is found before anybody is missed.
    const bool lacks = absl::IsNotFound(made.status()) ||
                       absl::IsFailedPrecondition(made.status());
    if (!made.ok() && !lacks) return ending(kExitCommunication, made.status());
    return made;
  }
#ifdef TAPELINE_CUDA
  return absl::InternalError("no GPU");
#else
  absl::StatusOr<std::unique_ptr<GlooCommunicator>> made =
      GlooCommunicator::connect(launch, {.connect_timeout = connect_timeout});
  if (!made.ok()) return ending(kExitCommunication, made.status());
  return std::unique_ptr<Communicator>(*std::move(made));
#endif
}

}  // namespace tapeline
