// A schedule as what each rank does, message by message.
//
// Pure: a function of the schedule and of the costs by which slots are planned.
// A rank runs its instructions in order:
//
//   ask     give a slot to a message that will come
//   take    wait for it; the slot is free, its tensors belong to the pass
//   run     a pass; OV is F, then B, so each half's results leave early
//   hand    a value stays on the rank, for another stage
//   send    a value goes to another rank
//   free    what the stage kept of the micro-batch
//   reduce  the stage's gradients are complete: add up those of its copies
//   offer   send the rank's sums for weights of a group, after the last pass
//           that adds to them; nobody waits
//   collect take the others' sums, at the end
//
// Slots are receive buffers shared by all channels of a rank. Which message
// uses which is found by colouring the intervals from arrival to use in a
// simulation. A message is asked for as soon as its slot is free and those
// before it in its channel have been, which is before its take: no rank waits
// for a slot, so a schedule that cannot hang still cannot.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dist/pipeline/schedule.h"
#include "dist/pipeline/simulator.h"

namespace tapeline {

struct Instruction {
  enum Kind : uint8_t {
    kAsk,
    kTake,
    kRun,
    kHand,
    kSend,
    kFree,
    kReduce,
    kOffer,
    kCollect,
  };
  Kind kind = kRun;
  int action = 0;  // of the rank's list, for which this is done
  Pass pass = {};  // kRun
  // kAsk, kTake, kHand, kSend: what, for `stage` on rank `peer`'s side or here.
  Value value = {};
  int stage = 0;  // that uses the value; kFree, kReduce: the stage
  int micro_batch = 0;
  int peer = -1, slot = -1;  // kAsk, kTake; kSend: peer
  int group = -1;            // kOffer, kCollect
  friend bool operator==(const Instruction&, const Instruction&) = default;
};

struct RankProgram {
  std::vector<Instruction> instructions;
  int slots = 0;
};

// One direction of one stage edge: the outputs of a stage, or the gradients of
// its inputs. Those of groups follow.
int channel_of(const Value& value);
int group_channel(const Schedule& schedule, int group);

// By rank. InvalidArgument, as the validator has it, if the schedule cannot
// run.
absl::StatusOr<std::vector<RankProgram>> lower(const Schedule& schedule,
                                               const Costs& costs = {});

// "send output 2.0 to rank 3", "take gradient 3.0 of rank 1 slot 2": stage,
// then micro-batch.
std::string to_string(const Instruction& instruction);
std::string program_text(const RankProgram& program);

}  // namespace tapeline
