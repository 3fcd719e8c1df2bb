#include "cli/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "basin/base/error.h"
#include "text/tokenizer.h"

namespace basin::cli {
namespace {

// false with errno set when `descriptor` did not take everything
bool write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      return false;
    }
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

// Control characters but those of `kept`, and bytes that are not UTF-8, as \xNN.
std::string without_controls(std::string_view text, std::string_view kept) {
  std::string line;
  while (!text.empty()) {
    const std::size_t valid = text::first_invalid_utf8(text).value_or(text.size());
    for (std::size_t i = 0; i < valid; ++i) {
      const auto byte = static_cast<unsigned char>(text[i]);
      if ((byte < 0x20 || byte == 0x7f) && kept.find(text[i]) == std::string_view::npos) {
        line += fmt::format("\\x{:02x}", byte);
      } else if (byte == 0xc2 && static_cast<unsigned char>(text[i + 1]) < 0xa0) {  // U+0080 to U+009F
        line += fmt::format("\\xc2\\x{:02x}", static_cast<unsigned char>(text[++i]));
      } else {
        line += text[i];
      }
    }
    text.remove_prefix(valid);
    if (!text.empty()) {
      line += fmt::format("\\x{:02x}", static_cast<unsigned char>(text.front()));
      text.remove_prefix(1);
    }
  }
  return line;
}

}  // namespace

void hold_standard_streams() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) != -1) continue;
    // Open for the other direction: reads and writes give EBADF, as of a closed one. The lowest free number is this one.
    static_cast<void>(::open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY));
  }
}

void write_stdout(std::string_view text) {
  if (!write_all(STDOUT_FILENO, text)) {
    throw Error(ErrorCode::io, fmt::format("cannot write to standard output: {}", std::strerror(errno)));
  }
}

void write_json(const nlohmann::ordered_json& object) {
  write_stdout(object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

std::string one_line(std::string_view text) {
  return without_controls(text, "");
}

void write_answer(std::string_view text) {
  isatty(STDOUT_FILENO) == 1 ? write_stdout(without_controls(text, "\n\t")) : write_stdout(text);
}

void print_thought(std::string_view text) {
  if (text.empty()) return;
  const bool terminal = isatty(STDERR_FILENO) == 1;  // there it looks different from an answer
  const std::string shown =
      terminal ? "\033[2m" + without_controls(text, "\n\t") + "\033[0m" : std::string(text);
  static_cast<void>(write_all(STDERR_FILENO, shown));
}

void print_error(std::string_view message, std::string_view hint) {
  std::string lines = "error: " + one_line(message) + "\n";
  if (!hint.empty()) lines += "hint: " + one_line(hint) + "\n";
  static_cast<void>(write_all(STDERR_FILENO, lines));  // nowhere left to complain to
}

void print_note(std::string_view line) {
  static_cast<void>(write_all(STDERR_FILENO, one_line(line) + "\n"));
}

std::string human_bytes(double bytes) {
  if (bytes < 1e3) return fmt::format("{:.0f} B", bytes);
  if (bytes < 1e6) return fmt::format("{:.1f} kB", bytes / 1e3);
  if (bytes < 1e9) return fmt::format("{:.1f} MB", bytes / 1e6);
  return fmt::format("{:.2f} GB", bytes / 1e9);
}

}  // namespace basin::cli
