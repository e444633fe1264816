// How a run joins the other processes of its job.
#include <memory>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "runtime/device.h"
#include "tools/train/pipeline_connect.h"
#include "tools/train/pipeline_plan.h"
#include "tools/train/run_class.h"

namespace tapeline {

absl::Status Run::join_job() {
  RETURN_IF_ERROR(check_pipeline_settings(c_));
  if (is_plain(c_, launch_.world)) return absl::OkStatus();
  if (c_.offload.warmup_steps > 0) {
    return absl::InvalidArgumentError(
        "offload.warmup_steps has no effect on the stages of a pipeline yet; "
        "set it to 0");
  }
  const std::string file =
      c_.pipeline.file.empty() ? "" : user_path(c_.pipeline.file);
  ASSIGN_OR_RETURN(PipelinePlan plan,
                   plan_pipeline(c_, *model_, launch_.world, file));
  ASSIGN_OR_RETURN(std::unique_ptr<Communicator> communicator,
                   connect_processes(launch_, plan, Device::current().kind(),
                                     absl::Seconds(c_.pipeline.connect_timeout),
                                     absl::Seconds(c_.pipeline.timeout)));
  job_ = std::make_unique<PipelineJob>(std::move(plan), *model_,
                                       std::move(communicator),
                                       absl::Seconds(c_.pipeline.timeout));
  return absl::OkStatus();
}

}  // namespace tapeline
