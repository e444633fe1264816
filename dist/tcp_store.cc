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

// For one address of a host, which may drop packets to it and answer at the
// next; who connects tries again.
constexpr absl::Duration kOneAddress = absl::Seconds(4);

constexpr uint32_t kMostBytes = 1 << 20;

constexpr char kStopped[] = "stopped by a signal";

int milliseconds_until(absl::Time end) {
  const int64_t left = absl::ToInt64Milliseconds(end - absl::Now());
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

// Until the socket is ready; an empty message is success.
std::string wait_for(int socket, short event, absl::Time end,
                     TcpStore::Stop stop) {
  for (;;) {
    if (stop != nullptr && stop()) return kStopped;
    // A signal may come just before the wait.
    const int most = stop != nullptr ? 100 : 1 << 30;
    const int left = milliseconds_until(end);
    pollfd at = {socket, event, 0};
    const int ready = poll(&at, 1, std::min(left, most));
    if (ready > 0) return "";
    if (ready < 0 && errno != EINTR) return std::strerror(errno);
    if (ready == 0 && left <= most) return "no answer in time";
  }
}

// Moves all bytes before `end`; an empty message is success.
template <class Move>
std::string move_all(int socket, short event, char* data, size_t bytes,
                     absl::Time end, TcpStore::Stop stop, const Move& move) {
  while (bytes > 0) {
    const std::string error = wait_for(socket, event, end, stop);
    if (!error.empty()) return error;
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

std::string send_all(int socket, std::string text, absl::Time end,
                     TcpStore::Stop stop) {
  return move_all(socket, POLLOUT, text.data(), text.size(), end, stop,
                  [&](char* data, size_t bytes) {
                    return send(socket, data, bytes,
                                MSG_NOSIGNAL | MSG_DONTWAIT);
                  });
}

std::string receive_all(int socket, std::string& text, size_t bytes,
                        absl::Time end, TcpStore::Stop stop) {
  text.resize(bytes);
  return move_all(socket, POLLIN, text.data(), bytes, end, stop,
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
std::string receive_text(int socket, std::string& text, absl::Time end,
                         TcpStore::Stop stop) {
  std::string head;
  std::string error = receive_all(socket, head, sizeof(uint32_t), end, stop);
  if (!error.empty()) return error;
  uint32_t size = 0;
  std::memcpy(&size, head.data(), sizeof(size));
  if (size > kMostBytes) return "a message of more than a MiB";
  return receive_all(socket, text, size, end, stop);
}

// Takes such a text from `at` on, which it moves behind it: false if it is not
// all there, nothing if it is too long.
std::optional<bool> take_text(const std::string& from, size_t& at,
                              std::string& text) {
  uint32_t size = 0;
  if (from.size() < at + sizeof(size)) return false;
  std::memcpy(&size, from.data() + at, sizeof(size));
  if (size > kMostBytes) return std::nullopt;
  if (from.size() < at + sizeof(size) + size) return false;
  text = from.substr(at + sizeof(size), size);
  at += sizeof(size) + size;
  return true;
}

}  // namespace

// One thread serves everybody and waits for nobody: a client has what it has
// sent of a request, and what it has not taken of an answer. A request is kind,
// key and value, an answer a text: '+' and the value, or '-'.
struct TcpStoreServer::State {
  struct Client {
    int socket = -1;
    std::string in, out;
  };
  int listener = -1, stop = -1, port = 0;
  std::thread thread;
  std::map<std::string, std::string> values;

  void serve() {
    std::list<Client> clients;
    for (;;) {
      std::vector<pollfd> all = {{stop, POLLIN, 0}, {listener, POLLIN, 0}};
      for (const Client& client : clients) {
        const short event = client.out.empty() ? POLLIN : POLLOUT;
        all.push_back({client.socket, event, 0});
      }
      if (poll(all.data(), all.size(), -1) < 0) {
        if (errno == EINTR) continue;
        break;
      }
      if (all[0].revents != 0) break;
      auto client = clients.begin();
      for (size_t i = 2; i < all.size(); ++i) {
        const auto at = client++;
        if (all[i].revents == 0 || go_on(*at)) continue;
        close(at->socket);
        clients.erase(at);
      }
      if (all[1].revents != 0) {
        const int socket =
            accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (socket >= 0) clients.push_back({socket, "", ""});
      }
    }
    close(listener);
    for (const Client& client : clients) close(client.socket);
  }

  // False: the client is gone, or speaks another language.
  bool go_on(Client& client) {
    if (client.out.empty()) {
      char bytes[4096];
      const ssize_t n = recv(client.socket, bytes, sizeof(bytes), 0);
      if (n < 0) return errno == EAGAIN || errno == EINTR;
      if (n == 0) return false;
      client.in.append(bytes, static_cast<size_t>(n));
      if (!answer(client)) return false;
    }
    while (!client.out.empty()) {
      const ssize_t n = send(client.socket, client.out.data(),
                             client.out.size(), MSG_NOSIGNAL);
      if (n < 0) return errno == EAGAIN || errno == EINTR;
      client.out.erase(0, static_cast<size_t>(n));
    }
    return true;
  }

  // What is complete.
  bool answer(Client& client) {
    for (;;) {
      if (client.in.empty()) return true;
      const char kind = client.in[0];
      if (kind != 'S' && kind != 'N' && kind != 'G') return false;
      size_t at = 1;
      std::string key, value;
      std::optional<bool> whole = take_text(client.in, at, key);
      if (whole == true) whole = take_text(client.in, at, value);
      if (!whole) return false;
      if (!*whole) return true;
      client.in.erase(0, at);
      const auto found = values.find(key);
      std::string out = "+";
      if (kind == 'G') {
        out = found == values.end() ? "-" : "+" + found->second;
      } else if (kind == 'S' || found == values.end()) {
        values[key] = value;
      } else {
        out = "-";
      }
      client.out += with_length(out);
    }
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
  // IPv4 and IPv6, where the host has that.
  const int yes = 1, no = 0;
  sockaddr_in6 at = {};
  at.sin6_family = AF_INET6;
  at.sin6_port = htons(static_cast<uint16_t>(port));
  sockaddr_in at4 = {};
  at4.sin_family = AF_INET;
  at4.sin_addr.s_addr = htonl(INADDR_ANY);
  at4.sin_port = at.sin6_port;
  state->listener = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool both = state->listener >= 0;
  if (!both) state->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (state->listener < 0) return failed("open");
  setsockopt(state->listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  if (both) {
    setsockopt(state->listener, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no));
  }
  if (both ? bind(state->listener, reinterpret_cast<sockaddr*>(&at),
                  sizeof(at)) != 0
           : bind(state->listener, reinterpret_cast<sockaddr*>(&at4),
                  sizeof(at4)) != 0) {
    return failed("bind");
  }
  if (listen(state->listener, 1024) != 0) return failed("listen on");
  socklen_t size = sizeof(at);
  getsockname(state->listener, reinterpret_cast<sockaddr*>(&at), &size);
  state->port = ntohs(at.sin6_port);  // where sockaddr_in has it
  state->stop = eventfd(0, EFD_CLOEXEC);
  State* const s = state.get();
  state->thread = std::thread([s] { s->serve(); });
  return std::unique_ptr<TcpStoreServer>(new TcpStoreServer(std::move(state)));
}

TcpStoreServer::~TcpStoreServer() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(state_->stop, &one, sizeof(one));
  state_->thread.join();
  close(state_->stop);
}

int TcpStoreServer::port() const { return state_->port; }

absl::StatusOr<std::unique_ptr<TcpStore>> TcpStore::connect(
    const std::string& host, int port, absl::Duration timeout, Stop stop) {
  std::unique_ptr<TcpStore> store(new TcpStore(host, port, stop));
  const absl::Time end = absl::Now() + timeout;
  for (;;) {
    const std::string why = store->try_to_connect(end);
    if (why.empty()) return store;
    if (why == kStopped) return absl::CancelledError(why);
    if (absl::Now() >= end) {
      return absl::UnavailableError(
          absl::StrCat("no store at ", store->where(), " after ",
                       absl::FormatDuration(timeout), ": ", why,
                       "; is rank 0 running, and MASTER_ADDR its host?"));
    }
    absl::SleepFor(absl::Milliseconds(50));
  }
}

TcpStore::~TcpStore() { disconnect(); }

std::string TcpStore::where() const { return absl::StrCat(host_, ":", port_); }

void TcpStore::disconnect() {
  if (socket_ >= 0) close(socket_);
  socket_ = -1;
}

std::string TcpStore::try_to_connect(absl::Time end) {
  if (stop_ != nullptr && stop_()) return kStopped;
  addrinfo hints = {}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  const int error = getaddrinfo(node_of(host_), std::to_string(port_).c_str(),
                                &hints, &found);
  if (error != 0) return gai_strerror(error);
  std::string why = "no address";
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    socket_ =
        socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (socket_ < 0) {
      why = std::strerror(errno);
      continue;
    }
    int result = 0;
    if (::connect(socket_, at->ai_addr, at->ai_addrlen) != 0) result = errno;
    why.clear();
    if (result == EINPROGRESS || result == EINTR) {
      why = wait_for(socket_, POLLOUT, std::min(end, absl::Now() + kOneAddress),
                     stop_);
      socklen_t size = sizeof(result);
      if (why.empty()) {
        getsockopt(socket_, SOL_SOCKET, SO_ERROR, &result, &size);
      }
    }
    if (why.empty() && result != 0) why = std::strerror(result);
    if (why.empty()) break;
    disconnect();
    if (why == kStopped) break;
  }
  freeaddrinfo(found);
  return why;
}

absl::StatusOr<std::string> TcpStore::ask(char what, const std::string& key,
                                          const std::string& value,
                                          absl::Duration timeout) {
  const absl::Time end = absl::Now() + timeout;
  std::string answer, error;
  if (socket_ < 0) error = try_to_connect(end);
  if (error.empty()) {
    error = send_all(
        socket_, std::string(1, what) + with_length(key) + with_length(value),
        end, stop_);
  }
  if (error.empty()) error = receive_text(socket_, answer, end, stop_);
  if (error.empty() && answer.empty()) error = "an empty answer";
  if (error.empty()) return answer;
  disconnect();  // an answer that comes late belongs to no request
  if (error == kStopped) return absl::CancelledError(error);
  return absl::UnavailableError(
      absl::StrCat("the store at ", where(), ": key '", key, "': ", error));
}

absl::StatusOr<bool> TcpStore::set_new(const std::string& key,
                                       const std::string& value,
                                       absl::Duration timeout) {
  ASSIGN_OR_RETURN(const std::string answer, ask('N', key, value, timeout));
  return answer[0] == '+';
}

absl::Status TcpStore::wait_for_end(absl::Duration timeout) {
  const absl::Time end = absl::Now() + timeout;
  if (socket_ < 0) return absl::OkStatus();
  const std::string error = wait_for(socket_, POLLIN, end, stop_);
  disconnect();
  if (error == kStopped) return absl::CancelledError(error);
  if (error.empty()) return absl::OkStatus();
  return absl::DeadlineExceededError(
      absl::StrCat("the store at ", where(), ": ", error));
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
          absl::StrCat("the store at ", where(), " has no '", key, "' after ",
                       absl::FormatDuration(timeout)));
    }
    absl::SleepFor(absl::Milliseconds(10));
  }
}

}  // namespace tapeline
