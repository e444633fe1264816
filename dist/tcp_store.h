// A small store of strings that all processes of a job share, over TCP.
//
// Rank 0 serves it on a port of its own; the others connect, and go on trying
// until `timeout`. It carries addresses and positions at the start and for
// reports, no tensors. Values are at most 1 MiB. Every call ends within its
// timeout, get() within a second more; an error says which host and port. A
// request that failed ends its connection, and the next one makes another. A
// client is used by one thread at a time.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace tapeline {

// A host as getaddrinfo() takes it: none, which is the loopback interface, for
// localhost, also where no file of hosts names it (RFC 6761, section 6.3).
inline const char* node_of(const std::string& host) {
  return host == "localhost" ? nullptr : host.c_str();
}

class TcpStoreServer {
 public:
  // Port 0: any free one.
  static absl::StatusOr<std::unique_ptr<TcpStoreServer>> start(int port);
  // Clients see the end of their connections when nobody can make one any more.
  ~TcpStoreServer();
  int port() const;

 private:
  struct State;
  explicit TcpStoreServer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

class TcpStore {
 public:
  // A wait of any call ends soon after `stop` says so, if it is not null:
  // Cancelled.
  using Stop = bool (*)();
  static absl::StatusOr<std::unique_ptr<TcpStore>> connect(
      const std::string& host, int port, absl::Duration timeout,
      Stop stop = nullptr);
  ~TcpStore();

  absl::Status set(const std::string& key, const std::string& value,
                   absl::Duration timeout);
  // Whether nobody had set it before.
  absl::StatusOr<bool> set_new(const std::string& key, const std::string& value,
                               absl::Duration timeout);
  // Waits until somebody has set it.
  absl::StatusOr<std::string> get(const std::string& key,
                                  absl::Duration timeout);
  // Nothing if nobody has.
  absl::StatusOr<std::optional<std::string>> peek(const std::string& key,
                                                  absl::Duration timeout);
  // Until the server has ended the connection.
  absl::Status wait_for_end(absl::Duration timeout);

 private:
  TcpStore(std::string host, int port, Stop stop)
      : host_(std::move(host)), port_(port), stop_(stop) {}
  // Tries each address of the host once; an empty message is success.
  std::string try_to_connect(absl::Time end);
  void disconnect();
  std::string where() const;
  absl::StatusOr<std::string> ask(char what, const std::string& key,
                                  const std::string& value,
                                  absl::Duration timeout);

  const std::string host_;
  const int port_;
  const Stop stop_;
  int socket_ = -1;
};

}  // namespace tapeline
