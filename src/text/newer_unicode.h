// Characters that joined a general category after Unicode 14, which is what PCRE2 10.42 knows.
#pragma once

#include <string_view>

namespace basin::text {

/// Ranges for the inside of a PCRE2 character class, e.g. "\x{1e4f0}-\x{1e4f9}", that make \p{category} agree with
/// the tokenizers package; empty for categories without such characters. "numeric" is what its Digits splits on.
std::string_view newer_members(std::string_view category);

}  // namespace basin::text
