// One case of golden_dir()/ops, in the words of Basin.
#pragma once

#include <gtest/gtest.h>

#include <cctype>
#include <filesystem>
#include <string>
#include <vector>

#include "basin/attention/spec.h"
#include "support/golden.h"

namespace basin::test {

struct GoldenCase {
  GoldenFile file;
  std::int64_t b, t_q, t_kv, h_q, h_kv, d_qk, d_v;
  attention::Spec spec;
  std::vector<attention::Sequence> sequences;

  explicit GoldenCase(const std::filesystem::path& path)
      : file(read_golden(path)),
        b(file.meta_int("B")),
        t_q(file.meta_int("Tq")),
        t_kv(file.meta_int("Tk")),
        h_q(file.meta_int("H")),
        h_kv(file.meta_int("KV")),
        d_qk(file.meta_int("D")),
        d_v(file.meta_int("Dv")) {
    const std::int64_t left = file.meta_int("window_left");
    spec.mask.causal = file.meta("causal") == "True";
    spec.mask.window = left < 0 ? 0 : left + 1;  // the file counts keys besides self
    spec.mask.window_right = file.meta_int("window_right");
    spec.mask.sink_tokens = file.meta_int("sink_tokens");
    spec.scale = file.meta_double("softmax_scale");
    spec.softcap = file.meta_double("softcap");
    for (std::int64_t s = 0; s < b; ++s) sequences.push_back({s * t_q, t_q, s * t_kv, t_kv, nullptr});
  }
  bool sink() const { return file.meta("sink") == "True"; }

  // [b, heads, t_q] of the file from [heads, b * t_q] of Basin.
  std::vector<double> per_sequence(const std::vector<double>& lse) const {
    std::vector<double> result(lse.size());
    for (std::int64_t s = 0; s < b; ++s) {
      for (std::int64_t h = 0; h < h_q; ++h) {
        for (std::int64_t i = 0; i < t_q; ++i)
          result[static_cast<std::size_t>((s * h_q + h) * t_q + i)] =
              lse[static_cast<std::size_t>(h * b * t_q + s * t_q + i)];
      }
    }
    return result;
  }
};

/// The file's name as a name of a test.
inline std::string golden_name(const testing::TestParamInfo<std::filesystem::path>& tested) {
  std::string text = tested.param.stem().string();
  for (char& c : text) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return text;
}

}  // namespace basin::test
