// Random damage to a good file, for the readers of every format.
#pragma once

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>  // needs gtest.h before it

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "weights/files.h"

namespace basin::test {

/// Some bytes of `bytes` change, and it may end early: `read` either loads it, with every byte of every tensor readable, or
/// throws one Error that names the file.
template <typename Read>
void damage_never_crashes(std::string bytes, const Read& read) {
  static const TemporaryDirectory directory;
  for (const auto& [position, value] : *rc::gen::arbitrary<std::vector<std::pair<std::uint32_t, char>>>())
    bytes[position % bytes.size()] = value;
  if (*rc::gen::arbitrary<bool>()) bytes.resize(*rc::gen::inRange<std::size_t>(0, bytes.size() + 1));
  const auto path = directory.file("damaged", bytes);
  try {
    unsigned sum = 0;
    for (const auto& [key, t] : read(path).tensors) {
      for (std::uint64_t i = 0; i < t.bytes; ++i) sum += std::to_integer<unsigned>(t.data[i]);
    }
    RC_CLASSIFY(sum > 0, "loads");
  } catch (const Error& error) {
    RC_ASSERT(std::string(error.what()).find(path.string()) != std::string::npos);
  }
}

}  // namespace basin::test
