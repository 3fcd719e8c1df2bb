// Results on stdout, checked; errors on stderr in the one shape that the contracts allow.
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace basin::cli {

/// Takes the numbers of standard streams that are closed, so that no file or socket gets them: what is written to such a stream
/// fails as before. Before anything else is opened.
void hold_standard_streams();

/// Writes and flushes. Throws Error(io) when stdout is closed or full.
void write_stdout(std::string_view text);

/// One object on one line. Strings that are not UTF-8 (file names) get U+FFFD.
void write_json(const nlohmann::ordered_json& object);

/// `error: MESSAGE` and, when `hint` is not empty, `hint: HINT`, each on one line whatever they contain.
void print_error(std::string_view message, std::string_view hint);

/// One line of information on stderr.
void print_note(std::string_view line);

/// A piece of what a model says, in whole characters, on stdout: to a file as it is, to a terminal without control characters
/// that would steer it. Throws as write_stdout().
void write_answer(std::string_view text);

/// A piece of what a model thinks on stderr, likewise, for a person who reads along.
void print_thought(std::string_view text);

/// Control characters and bytes that are not UTF-8 as \xNN, so that the text stays on one line.
std::string one_line(std::string_view text);

/// "12.3 MB": powers of 1000.
std::string human_bytes(double bytes);

}  // namespace basin::cli
