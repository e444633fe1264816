// A small store of strings that all processes of a job share, over TCP.
//
// Rank 0 serves it on a port of its own; the others connect, and go on trying
// until `timeout`. It carries addresses and positions at the start and for
// reports, no tensors. Values are at most 1 MiB. Every call ends within its
// timeout, get() within a second more; an error says which host and port. A
// client is used by one thread at a time.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace tapeline {

class TcpStoreServer {
 public:
  // Port 0: any free one.
  static absl::StatusOr<std::unique_ptr<TcpStoreServer>> start(int port);
  ~TcpStoreServer();
  int port() const;

 private:
  struct State;
  explicit TcpStoreServer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

class TcpStore {
 public:
  static absl::StatusOr<std::unique_ptr<TcpStore>> connect(
      const std::string& host, int port, absl::Duration timeout);
  ~TcpStore();

  absl::Status set(const std::string& key, const std::string& value,
                   absl::Duration timeout);
  // Waits until somebody has set it.
  absl::StatusOr<std::string> get(const std::string& key,
                                  absl::Duration timeout);
  // Nothing if nobody has.
  absl::StatusOr<std::optional<std::string>> peek(const std::string& key,
                                                  absl::Duration timeout);

 private:
  TcpStore(int socket, std::string where)
      : socket_(socket), where_(std::move(where)) {}
  absl::StatusOr<std::string> ask(char what, const std::string& key,
                                  const std::string& value,
                                  absl::Duration timeout);

  const int socket_;
  const std::string where_;
  bool broken_ = false;
};

}  // namespace tapeline
