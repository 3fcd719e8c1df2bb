#include "cli/interrupt.h"

#include <csignal>

#include "basin/base/error.h"

namespace basin::cli {
namespace {

std::atomic<bool> interrupted{false};
std::atomic<int> signal_number{0};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

void on_signal(int number) {
  signal_number.store(number);
  interrupted.store(true);
}

}  // namespace

void install_signal_handlers() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction before = {};
    sigaction(number, nullptr, &before);
    if (number == SIGHUP && before.sa_handler == SIG_IGN) continue;  // nohup
    sigaction(number, &action, nullptr);
  }
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

const std::atomic<bool>* interrupt_flag() {
  return &interrupted;
}

void throw_if_interrupted() {
  if (interrupted.load()) throw Error(ErrorCode::cancelled, "interrupted");
}

int interrupted_exit_code() {
  const int number = signal_number.load();
  return 128 + (number == 0 ? SIGINT : number);
}

}  // namespace basin::cli
