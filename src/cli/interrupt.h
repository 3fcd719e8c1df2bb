// Ctrl-C and its relatives: a handler that only sets atomics, polled between passes.
#pragma once

#include <atomic>

namespace basin::cli {

/// SIGINT, SIGTERM and SIGHUP ask for a clean end; a second one of the same kind ends the process at once.
/// SIGPIPE and SIGXFSZ are ignored, so that a closed pipe and a limit on file sizes are write errors like any other.
void install_signal_handlers();

const std::atomic<bool>* interrupt_flag();  // never null

/// Throws Error(cancelled) when a signal came.
void throw_if_interrupted();

/// 128 + the signal's number: 130 for Ctrl-C.
int interrupted_exit_code();

}  // namespace basin::cli
