// The device against the reference, over both paths: batches whose longest sequence has few rows decode, others prefill.
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "attention/cuda/fixture.h"

namespace basin::attention::cuda_tests {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

const std::vector<Part> kPrefill = {{0, 140, 300}, {1, 1, 70}, {2, 9, 4}, {3, 64, 64}, {4, 0, 20}};
const std::vector<Part> kDecode = {{0, 1, 300}, {1, 5, 1030}, {2, 8, 4}, {3, 3, 3}, {4, 0, 20}};

class CudaAttentionAccuracy : public CudaTest {
 protected:
  static void on_both_paths(const Shape& shape, const Layout& layout, const std::string& what) {
    expect_accurate(shape, kPrefill, layout, what + ", prefill");
    expect_accurate(shape, kDecode, layout, what + ", decode");
  }
};

TEST_F(CudaAttentionAccuracy, EveryFeature) {
  for (const DType dtype : kStorages) {
    for (const Heads& heads : kHeads) {
      SCOPED_TRACE(fmt::format("{} {}", name(dtype), text(heads)));
      Shape shape;
      shape.dtype = dtype;
      shape.d_qk = heads.d_qk;
      shape.d_v = heads.d_v;
      on_both_paths(shape, {}, "causal");
      on_both_paths(shape, {.page_tokens = 16, .loose = true}, "causal, pages of 16, loose");

      shape.spec.mask = {.causal = false};
      on_both_paths(shape, {}, "full");

      shape.sink_logit = std::vector<float>{0.5f, -1.0f, 2.0f, 0.0f, 1.0f, -0.25f, 3.0f, 8.0f};
      shape.spec.mask = {.window = 33};
      on_both_paths(shape, {}, "window and sink logit");
      on_both_paths(shape, {.page_tokens = 64}, "window and sink logit, pages of 64");

      shape.spec.mask = {.causal = false, .window = 20, .window_right = 7};
      on_both_paths(shape, {.page_tokens = 32, .loose = true}, "two-sided window, pages of 32");
      shape.spec.mask = {.causal = false, .window_right = 3};
      on_both_paths(shape, {}, "window to the right only");
      shape.spec.mask = {.causal = false, .window = 20, .window_right = 7, .sink_tokens = 9};
      on_both_paths(shape, {}, "two-sided window and sink tokens");

      shape.spec.mask = {.window = 40, .sink_tokens = 4};
      on_both_paths(shape, {.page_tokens = 1, .loose = true},
                    "sink tokens, window and sink logit, pages of 1");
      shape.spec.mask = {.window = 150, .sink_tokens = 130};
      on_both_paths(shape, {.page_tokens = 256}, "many sink tokens, pages of 256");
      shape.spec.mask = {.sink_tokens = 5};
      on_both_paths(shape, {}, "sink tokens without a window");

      shape.spec.mask = {};
      shape.spec.softcap = 3;
      shape.spread = 8;
      on_both_paths(shape, {}, "softcap");
      shape.spec.softcap = 50;
      shape.spec.mask = {.window = 100, .sink_tokens = 4};
      on_both_paths(shape, {.page_tokens = 128}, "softcap, window, sink tokens, pages of 128");
    }
  }
}

TEST_F(CudaAttentionAccuracy, DenseBatches) {
  for (const bool loose : {false, true}) {
    for (const std::int64_t page_tokens : {0, 64}) {
      const Layout layout{.page_tokens = page_tokens, .dense = true, .loose = loose};
      SCOPED_TRACE(fmt::format("loose {}, pages of {}", loose, page_tokens));
      Shape shape;
      shape.spec.mask = {.window = 77, .sink_tokens = 3};
      expect_accurate(shape, {{0, 70, 140}, {1, 70, 140}, {2, 70, 140}}, layout, "prefill");
      expect_accurate(shape, {{0, 70, 10}, {1, 70, 200}, {2, 70, 0}}, layout, "prefill, different lengths");
      expect_accurate(shape, {{0, 2, 300}, {1, 2, 300}}, layout, "decode");
      expect_accurate(shape, {{0, 2, 300}, {1, 2, 1}, {2, 2, 1100}}, layout, "decode, different lengths");
    }
  }
}

TEST_F(CudaAttentionAccuracy, EveryHeadSize) {
  const std::pair<std::int64_t, std::int64_t> sizes[] = {
      {8, 8},     {40, 64},  {64, 40},  {64, 64},   {16, 56},   {72, 64},  {64, 128},  {128, 64},
      {8, 128},   {128, 72}, {120, 8},  {128, 128}, {136, 128}, {192, 8},  {168, 120}, {192, 128},
      {192, 136}, {64, 256}, {256, 40}, {8, 136},   {200, 200}, {256, 256}};
  for (const DType dtype : kStorages) {
    for (const auto& [d_qk, d_v] : sizes) {
      Shape shape;
      shape.dtype = dtype;
      shape.d_qk = d_qk;
      shape.d_v = d_v;
      shape.h_q = 4;
      shape.sink_logit = std::vector<float>{0.5f, -1.0f, 2.0f, 0.0f};
      on_both_paths(shape, {.loose = true}, fmt::format("{} d_qk {} d_v {}", name(dtype), d_qk, d_v));
      shape.spec.softcap = 4;
      expect_accurate(shape, kDecode, {.page_tokens = 16}, fmt::format("softcap, d_qk {} d_v {}", d_qk, d_v));
    }
  }
}

TEST_F(CudaAttentionAccuracy, EveryGroupSize) {
  for (const Heads& heads : kHeads) {
    for (const std::int64_t group : {1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 40, 64, 65}) {
      Shape shape;
      shape.d_qk = heads.d_qk;
      shape.d_v = heads.d_v;
      shape.h_kv = group > 16 ? 1 : 2;
      shape.h_q = shape.h_kv * group;
      shape.spec.mask.window = 150;
      const std::string what = fmt::format("{}, groups of {}", text(heads), group);
      expect_accurate(shape, {{0, 1, 200}, {1, 1, 90}, {2, 1, 1500}}, {.page_tokens = 16}, what);
      if (group <= 32)
        expect_accurate(shape, {{0, 64 / group, 200}, {1, 1, 90}}, {}, what + ", several tokens");
      expect_accurate(shape, {{0, 66, 130}, {1, 1, 90}}, {}, what + ", prefill");
    }
  }
}

TEST_F(CudaAttentionAccuracy, LengthsAroundTilesAndSegments) {
  for (const Heads& heads : kHeads) {
    for (const std::int64_t kv :
         {std::int64_t{0}, std::int64_t{1}, heads.tile - 1, heads.tile, heads.tile + 1, heads.segment - 1,
          heads.segment, heads.segment + 1, std::int64_t{5000}}) {
      for (const bool streaming : {false, true}) {
        Shape shape;
        shape.h_q = 2;
        shape.h_kv = 1;
        shape.d_qk = heads.d_qk;
        shape.d_v = heads.d_v;
        if (streaming) shape.spec.mask = {.window = 1024, .sink_tokens = 4};
        const Layout layout{.page_tokens = streaming ? 64 : 0};
        const std::string what =
            fmt::format("{}, {} keys, {}", text(heads), kv, streaming ? "streaming" : "all");
        std::vector<Part> parts;
        for (const std::int64_t q : {0, 1, 2, 7, 63, 64, 65, 191, 193, 300})
          parts.push_back({static_cast<std::int64_t>(parts.size()), q, kv});
        expect_accurate(shape, parts, layout, what + ", prefill");
        parts.resize(4);
        expect_accurate(shape, parts, layout, what + ", decode");
      }
    }
  }
}

TEST_F(CudaAttentionAccuracy, WindowsAroundTilesAndSegments) {
  for (const Heads& heads : {kHeads[0], kHeads[3]}) {
    const std::int64_t tile = heads.tile, segment = heads.segment;
    for (const std::int64_t window : {std::int64_t{1}, std::int64_t{2}, std::int64_t{16}, tile - 1, tile,
                                      tile + 1, segment - 1, segment, segment + 1}) {
      for (const std::int64_t sink_tokens :
           {std::int64_t{0}, std::int64_t{1}, std::int64_t{16}, tile - 1, tile, tile + 1, segment + 6}) {
        Shape shape;
        shape.h_q = 2;
        shape.h_kv = 1;
        shape.d_qk = heads.d_qk;
        shape.d_v = heads.d_v;
        shape.spec.mask = {.window = window, .sink_tokens = sink_tokens};
        const std::string what =
            fmt::format("{}, window {}, {} sink tokens", text(heads), window, sink_tokens);
        expect_accurate(shape, {{0, 66, segment + 176}, {1, 80, 80}}, {.page_tokens = 16}, what);
        expect_accurate(shape, {{0, 1, 2 * segment + 52}, {1, 2, segment + 276}, {2, 1, 130}},
                        {.page_tokens = 16}, what);
      }
    }
  }
}

// The warpgroups of a block may begin their windows one tile apart: the later one skips a tile while the last tile of sink
// tokens still waits for its values.
TEST_F(CudaAttentionAccuracy, SeveralTilesOfSinkTokensBeforeAWindow) {
  for (const Heads& heads : kHeads) {
    for (const std::int64_t sink_tokens : {129, 300, 1030}) {
      for (const std::int64_t window : {86, 150, 214}) {
        Shape shape;
        shape.h_q = 2;
        shape.h_kv = 1;
        shape.d_qk = heads.d_qk;
        shape.d_v = heads.d_v;
        shape.spec.mask = {.window = window, .sink_tokens = sink_tokens};
        expect_accurate(shape, {{0, 200, 1600}, {1, 400, 2000}}, {.page_tokens = 16},
                        fmt::format("{}, window {}, {} sink tokens", text(heads), window, sink_tokens));
      }
    }
  }
}

TEST_F(CudaAttentionAccuracy, LargeAndSmallScores) {
  for (const DType dtype : kStorages) {
    Shape shape;
    shape.dtype = dtype;
    shape.spec.scale = 3;
    shape.spread = 20;
    // Scores reach 600, and tensor cores truncate where the yardstick rounds: some 2^-22 of a score, so as much of P.
    constexpr double kScoreFloor = 0x1p-13;
    expect_accurate(shape, kPrefill, {}, "one key takes nearly everything, prefill", kScoreFloor);
    expect_accurate(shape, kDecode, {}, "one key takes nearly everything, decode", kScoreFloor);
    shape.spec.scale = 0.0001;
    on_both_paths(shape, {}, "all keys count the same");
  }
}

TEST_F(CudaAttentionAccuracy, ExtremeSinkLogits) {
  Shape shape;
  shape.sink_logit = std::vector<float>{300.0f, -300.0f, kInf, -kInf, 3e38f, 30.0f, -3e38f, 1e30f};
  for (const DType dtype : kStorages) {
    shape.dtype = dtype;
    on_both_paths(shape, {.page_tokens = 16}, std::string(name(dtype)));
  }
}

TEST_F(CudaAttentionAccuracy, ManySequences) {
  Shape shape;
  shape.h_q = 4;
  shape.sink_logit = std::vector<float>{0.5f, -1.0f, 2.0f, 0.0f};
  std::vector<Part> prefill, decode;
  for (std::int64_t s = 0; s < 150; ++s) {
    prefill.push_back({s, s % 3 == 0 ? 0 : s % 70, s * 7 % 200});
    decode.push_back({s, s % 4, s % 10 == 0 ? 1500 : s * 7 % 300});
  }
  expect_accurate(shape, prefill, {.page_tokens = 16}, "prefill");
  expect_accurate(shape, decode, {.page_tokens = 16}, "decode");
}

// With q = 0 and v = 1 the output is n / (n + e^sink), whatever the maths: 1 means a dropped sink, n / (n + 2 e^s) one
// that counted twice, n / (n + e^(s scale)) a scaled one.
TEST_F(CudaAttentionAccuracy, ProbeOfTheSinkLogit) {
  for (const DType dtype : kStorages) {
    for (const std::int64_t q_tokens : {1, 16, 40}) {
      for (const std::int64_t n : {40, 128, 2500}) {
        Shape shape;
        shape.dtype = dtype;
        shape.spec.mask.causal = false;
        shape.sink_logit = std::vector<float>{2.0f, 0.0f, -3.0f, 5.0f, 1.0f, 7.0f, -7.0f, 4.0f};
        shape.source = [](Kind kind, std::int64_t s, std::int64_t p, std::int64_t h, std::int64_t d) {
          return kind == Kind::q ? 0.0 : kind == Kind::v ? 1.0 : noise(kind, s, p, h, d);
        };
        const Result got = run(Problem(shape, {{0, q_tokens, n}}));
        const double rounding = dtype == DType::bf16 ? 0x1p-9 : 0x1p-12;  // of an output below 1
        for (std::int64_t at = 0; at < q_tokens * shape.h_q; ++at) {
          const auto keys = static_cast<double>(n);
          const double e =
              std::exp(static_cast<double>(shape.sink_logit[static_cast<std::size_t>(at % shape.h_q)]));
          const auto i = static_cast<std::size_t>(at);
          ASSERT_NEAR(got.out[i * 64 + 11], keys / (keys + e), rounding + 1e-6);
          ASSERT_NEAR(got.lse[i], std::log(keys), 1e-5);
          ASSERT_NEAR(got.lse_with_sink[i], std::log(keys + e), 1e-5);
        }
      }
    }
  }
}

TEST_F(CudaAttentionAccuracy, EveryOptionChangesTheOutput) {
  Shape plain;
  plain.spec.scale = 0.125;
  plain.spread = 4;
  plain.sink_logit = std::vector<float>{-1.0f, -1.0f, -1.0f, -1.0f, -1.0f, -1.0f, -1.0f, -1.0f};
  const auto variants = [&] {
    std::vector<std::pair<std::string, Shape>> result(9, {"", plain});
    const auto name = [&](std::size_t i, const char* text) -> Shape& {
      result[i].first = text;
      return result[i].second;
    };
    name(0, "causal").spec.mask.causal = false;
    name(1, "window").spec.mask.window = 50;
    name(2, "scale").spec.scale = 0.126;
    name(3, "softcap").spec.softcap = 5;
    name(4, "no sink_logit").sink_logit.clear();
    name(5, "one sink_logit").sink_logit[5] = 0.0f;
    name(6, "sink_tokens").spec.mask = {.window = 50, .sink_tokens = 2};
    name(7, "more sink_tokens").spec.mask = {.window = 50, .sink_tokens = 3};
    name(8, "window_right").spec.mask = {.causal = false, .window_right = 2};
    return result;
  }();
  for (const std::vector<Part>& parts : {std::vector<Part>{{0, 70, 90}}, std::vector<Part>{{0, 4, 90}}}) {
    std::vector<Bits> all = {run_bits(plain, parts)};
    for (const auto& [what, shape] : variants) all.push_back(run_bits(shape, parts));
    for (std::size_t a = 0; a < all.size(); ++a) {
      for (std::size_t b = 0; b < a; ++b) EXPECT_NE(all[a], all[b]) << variants[a - 1].first << " is ignored";
    }
  }
}

}  // namespace
}  // namespace basin::attention::cuda_tests
