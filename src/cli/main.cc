// basin: parse, run one sub-command, turn what was thrown into an exit code.
#include <exception>
#include <new>
#include <variant>

#include "basin/base/error.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/usage_error.h"

int main(int argc, char** argv) {
  using namespace basin;
  cli::hold_standard_streams();
  cli::install_signal_handlers();
  try {
    const cli::Command command = cli::parse(argc, argv);
    return std::visit([](const auto& args) { return cli::run(args); }, command);
  } catch (const cli::UsageError& error) {
    cli::print_error(error.what(), error.hint());
    return 2;
  } catch (const Error& error) {
    cli::print_error(error.what(), error.hint());
    return error.code() == ErrorCode::cancelled ? cli::interrupted_exit_code() : 1;
  } catch (const std::bad_alloc&) {
    cli::print_error("out of memory", "a smaller --chunk-tokens or --window needs less");
    return 1;
  } catch (const std::exception& error) {
    cli::print_error(error.what(), {});
    return 1;
  }
}
