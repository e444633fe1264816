// That the processes which meet are of one job and have the same settings.
//
// They meet at rank 0's store, which is there for that time alone, before they
// connect: ranks with other numbers would train without a word, or wait for
// each other for ever. What may differ is left out by the caller.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "dist/launch.h"
#include "dist/tcp_store.h"

namespace tapeline {

struct Setting {
  std::string key, value;
};

// Waits for all ranks, at most until `end` and a few seconds more.
// InvalidArgument on every rank: which rank differs from rank 0, in which key;
// on one alone: it is there twice. Unavailable: a rank was not there in time.
// Cancelled: `stop` said so. Afterwards the store's port is free.
absl::Status compare_settings(const Launched& launch,
                              const std::vector<Setting>& settings,
                              absl::Time end, TcpStore::Stop stop = nullptr);

}  // namespace tapeline
