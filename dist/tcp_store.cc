#include "dist/tcp_store.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

constexpr uint32_t kMostBytes = 1 << 20;

int milliseconds_until(absl::Time end) {
  const int64_t left = absl::ToInt64Milliseconds(end - absl::Now());
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

// Moves all bytes before `end`; an empty message is success.
template <class Move>
std::string move_all(int socket, short event, char* data, size_t bytes,
                     absl::Time end, const Move& move) {
  while (bytes > 0) {
    pollfd at = {socket, event, 0};
    const int ready = poll(&at, 1, milliseconds_until(end));
    if (ready == 0) return "no answer in time";
    if (ready < 0) {
      if (errno == EINTR) continue;
      return std::strerror(errno);
    }
    const ssize_t moved = move(data, bytes);
    if (moved == 0) return "the connection was closed";
    if (moved < 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      return std::strerror(errno);
    }
    data += moved;
    bytes -= static_cast<size_t>(moved);
  }
  return "";
}

std::string send_all(int socket, const std::string& text, absl::Time end) {
  std::string copy = text;
  return move_all(socket, POLLOUT, copy.data(), copy.size(), end,
                  [&](char* data, size_t bytes) {
                    return send(socket, data, bytes,
                                MSG_NOSIGNAL | MSG_DONTWAIT);
                  });
}

std::string receive_all(int socket, std::string& text, size_t bytes,
                        absl::Time end) {
  text.resize(bytes);
  return move_all(socket, POLLIN, text.data(), bytes, end,
                  [&](char* data, size_t n) {
                    return recv(socket, data, n, MSG_DONTWAIT);
                  });
}

std::string with_length(const std::string& text) {
  const auto size = static_cast<uint32_t>(text.size());
  std::string out(reinterpret_cast<const char*>(&size), sizeof(size));
  return out + text;
}

// A length and so many bytes.
std::string receive_text(int socket, std::string& text, absl::Time end) {
  std::string head;
  std::string error = receive_all(socket, head, sizeof(uint32_t), end);
  if (!error.empty()) return error;
  uint32_t size = 0;
  std::memcpy(&size, head.data(), sizeof(size));
  if (size > kMostBytes) return "a message of more than a MiB";
  return receive_all(socket, text, size, end);
}

}  // namespace

// One thread serves everybody; a request is kind, key and value, an answer a
// text: '+' and the value, or '-'.
struct TcpStoreServer::State {
  int listener = -1, stop = -1, port = 0;
  std::thread thread;
  std::map<std::string, std::string> values;

  void serve() {
    std::list<int> clients;
    for (;;) {
      std::vector<pollfd> all = {{stop, POLLIN, 0}, {listener, POLLIN, 0}};
      for (const int client : clients) all.push_back({client, POLLIN, 0});
      if (poll(all.data(), all.size(), -1) < 0) {
        if (errno == EINTR) continue;
        break;
      }
      if (all[0].revents != 0) break;
      for (size_t i = 2; i < all.size(); ++i) {
        if (all[i].revents != 0 && !answer(all[i].fd)) {
          close(all[i].fd);
          clients.remove(all[i].fd);
        }
      }
      if (all[1].revents != 0) {
        const int client = accept(listener, nullptr, nullptr);
        if (client >= 0) clients.push_back(client);
      }
    }
    for (const int client : clients) close(client);
  }

  bool answer(int client) {
    // Who sends a part of a request and no more does not hold up the others.
    const absl::Time end = absl::Now() + absl::Seconds(5);
    std::string kind, key, value;
    if (!receive_all(client, kind, 1, end).empty() ||
        !receive_text(client, key, end).empty() ||
        !receive_text(client, value, end).empty()) {
      return false;
    }
    std::string out = "-";
    if (kind == "S") {
      values[key] = value;
      out = "+";
    } else if (const auto found = values.find(key); found != values.end()) {
      out = "+" + found->second;
    }
    return send_all(client, with_length(out), end).empty();
  }
};

TcpStoreServer::TcpStoreServer(std::unique_ptr<State> state)
    : state_(std::move(state)) {}

absl::StatusOr<std::unique_ptr<TcpStoreServer>> TcpStoreServer::start(
    int port) {
  auto state = std::make_unique<State>();
  const auto failed = [&](const char* what) {
    const std::string why = std::strerror(errno);
    if (state->listener >= 0) close(state->listener);
    return absl::UnavailableError(
        absl::StrCat("the store cannot ", what, " port ", port, ": ", why,
                     "; choose another one with TAPELINE_STORE_PORT"));
  };
  state->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (state->listener < 0) return failed("open");
  const int yes = 1;
  setsockopt(state->listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_ANY);
  at.sin_port = htons(static_cast<uint16_t>(port));
  if (bind(state->listener, reinterpret_cast<sockaddr*>(&at), sizeof(at)) !=
      0) {
    return failed("bind");
  }
  if (listen(state->listener, 1024) != 0) return failed("listen on");
  socklen_t size = sizeof(at);
  getsockname(state->listener, reinterpret_cast<sockaddr*>(&at), &size);
  state->port = ntohs(at.sin_port);
  state->stop = eventfd(0, EFD_CLOEXEC);
  State* const s = state.get();
  state->thread = std::thread([s] { s->serve(); });
  return std::unique_ptr<TcpStoreServer>(new TcpStoreServer(std::move(state)));
}

TcpStoreServer::~TcpStoreServer() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(state_->stop, &one, sizeof(one));
  state_->thread.join();
  close(state_->listener);
  close(state_->stop);
}

int TcpStoreServer::port() const { return state_->port; }

absl::StatusOr<std::unique_ptr<TcpStore>> TcpStore::connect(
    const std::string& host, int port, absl::Duration timeout) {
  const std::string where = absl::StrCat(host, ":", port);
  const absl::Time end = absl::Now() + timeout;
  std::string why;
  do {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    const int error =
        getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (error != 0) {
      why = gai_strerror(error);
    } else {
      const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      const bool connected =
          s >= 0 && ::connect(s, found->ai_addr, found->ai_addrlen) == 0;
      why = std::strerror(errno);
      freeaddrinfo(found);
      if (connected) return std::unique_ptr<TcpStore>(new TcpStore(s, where));
      if (s >= 0) close(s);
    }
    absl::SleepFor(absl::Milliseconds(50));
  } while (absl::Now() < end);
  return absl::UnavailableError(absl::StrCat(
      "no store at ", where, " after ", absl::FormatDuration(timeout), ": ",
      why, "; is rank 0 running, and MASTER_ADDR its host?"));
}

TcpStore::~TcpStore() { close(socket_); }

absl::StatusOr<std::string> TcpStore::ask(char what, const std::string& key,
                                          const std::string& value,
                                          absl::Duration timeout) {
  const absl::Time end = absl::Now() + timeout;
  std::string answer;
  std::string error = broken_ ? "an earlier request failed" : "";
  if (error.empty()) {
    error = send_all(
        socket_, std::string(1, what) + with_length(key) + with_length(value),
        end);
  }
  if (error.empty()) error = receive_text(socket_, answer, end);
  if (error.empty() && answer.empty()) error = "an empty answer";
  if (error.empty()) return answer;
  broken_ = true;  // an answer that comes late belongs to no request
  return absl::UnavailableError(
      absl::StrCat("the store at ", where_, ": key '", key, "': ", error));
}

absl::Status TcpStore::set(const std::string& key, const std::string& value,
                           absl::Duration timeout) {
  return ask('S', key, value, timeout).status();
}

absl::StatusOr<std::optional<std::string>> TcpStore::peek(
    const std::string& key, absl::Duration timeout) {
  ASSIGN_OR_RETURN(const std::string answer, ask('G', key, "", timeout));
  if (answer[0] == '-') return std::optional<std::string>();
  return std::optional<std::string>(answer.substr(1));
}

absl::StatusOr<std::string> TcpStore::get(const std::string& key,
                                          absl::Duration timeout) {
  const absl::Time end = absl::Now() + timeout;
  for (;;) {
    // An answer is on its way even where the key's time is nearly over.
    ASSIGN_OR_RETURN(const std::optional<std::string> value,
                     peek(key, std::max(end - absl::Now(), absl::Seconds(1))));
    if (value) return *value;
    if (absl::Now() >= end) {
      return absl::DeadlineExceededError(
          absl::StrCat("the store at ", where_, " has no '", key, "' after ",
                       absl::FormatDuration(timeout)));
    }
    absl::SleepFor(absl::Milliseconds(10));
  }
}

}  // namespace tapeline
