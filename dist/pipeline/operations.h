// A schedule with its messages, in the plainest order: each action receives
// what it needs just before it runs, and sends what it made just after.
//
// A channel is a FIFO queue for one direction of one stage edge: the outputs of
// a stage, or the gradients of its inputs. Stages on one rank hand values over
// without one. This order is what capacities and deadlocks are judged by; a
// lowering may post receives earlier.
#pragma once

#include <vector>

#include "dist/pipeline/schedule.h"

namespace tapeline {

struct Operation {
  enum Kind { kReceive, kRun, kSend };
  Kind kind = kRun;
  int action = 0;  // index in the rank's list
  // kRun: the passes [first, first + count) of the action.
  int first = 0, count = 1;
  // kReceive, kSend: the message.
  Value value;
  int micro_batch = 0, peer = 0;
};

// By rank. With kEarly the halves of OV run one after the other.
std::vector<std::vector<Operation>> operations(const Schedule& schedule,
                                               OvRelease release);

std::vector<int> messages_sent(const Schedule& schedule);

}  // namespace tapeline
