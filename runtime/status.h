// Status macros: the world is wrong (file, flag, network, device, memory).
//
// Every message says what went wrong, where, and what to do next.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/check.h"

#define TAPELINE_CONCAT_INNER(a, b) a##b
#define TAPELINE_CONCAT(a, b) TAPELINE_CONCAT_INNER(a, b)

#define RETURN_IF_ERROR(expression)              \
  do {                                           \
    absl::Status status_macro = (expression);    \
    if (!status_macro.ok()) return status_macro; \
  } while (false)

#define ASSIGN_OR_RETURN(lhs, expression)                               \
  TAPELINE_ASSIGN_OR_RETURN(TAPELINE_CONCAT(status_or_, __LINE__), lhs, \
                            expression)
#define TAPELINE_ASSIGN_OR_RETURN(name, lhs, expression) \
  auto name = (expression);                              \
  if (!name.ok()) return name.status();                  \
  lhs = std::move(name).value()

#define CHECK_OK(expression)                            \
  do {                                                  \
    const absl::Status status_macro = (expression);     \
    CHECK(status_macro.ok()) << status_macro.message(); \
  } while (false)
