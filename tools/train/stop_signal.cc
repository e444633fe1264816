#include "tools/train/stop_signal.h"

#include <unistd.h>

#include <csignal>

namespace tapeline {
namespace {

volatile std::sig_atomic_t received = 0;

void on_signal(int number) {
  if (received != 0) _exit(128 + number);
  received = number;
}

}  // namespace

void install_stop_signals() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

int stop_signal() { return received; }

}  // namespace tapeline
