// Schedules as text.
//
//   schedule v1 ranks 2 stages 2 micro_batches 3 placement 0 1
//   group tied 0 1
//   rank 0: 0F0r 0F1r 0B0 0F2r 0B1 0B2
//   rank 1: 1F0 1I0 1W0 1F1 1B1 1F2 1B2
//
// A pass is <stage><F|I|W|B><micro-batch>, F followed by r (recomputed) and o
// (offloaded); OV(0F3;1B1) overlaps two passes. Placement lists the rank of
// each stage, a group the stages that hold the same weights, two or more in any
// order. Lines end with LF or CR LF; those of blanks and those that begin with
// # are skipped; rank lines come in order, each once. Numbers are plain digits
// below kMaxCount. Whatever is not of this form is an error "name:line:column:
// what"; whether the schedule makes sense is for the validator. Printing gives
// one form, which reads back the same value.
//
// The second form is torch's compute-only CSV: one row a rank, one action a
// cell, empty cells where the rank idles, (0F3;1B1)OVERLAP_F_B. It has no
// header, so counts and placement follow from the actions: a stage lives on the
// first rank that mentions it.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "dist/pipeline/schedule.h"

namespace tapeline {

// Ranks, stages and micro-batches are at most so many.
inline constexpr int kMaxCount = 1 << 16;

std::string schedule_text(const Schedule& schedule);
// Groups have no place in it and are left out.
std::string schedule_csv(const Schedule& schedule);

// `name` stands for the text in errors: a path, or "--flag".
absl::StatusOr<Schedule> parse_schedule(std::string_view text,
                                        std::string_view name);
absl::StatusOr<Schedule> parse_schedule_csv(std::string_view text,
                                            std::string_view name);
// Either form: a file whose first line that counts begins with "schedule" is
// text.
absl::StatusOr<Schedule> read_schedule(const std::string& path);
absl::StatusOr<Schedule> parse_any_schedule(std::string_view text,
                                            std::string_view name);

}  // namespace tapeline
