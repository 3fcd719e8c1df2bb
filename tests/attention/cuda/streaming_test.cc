// Streaming: sink tokens and a window over a ring of pages, at any logical length, with both kinds of positions.
#include <fmt/format.h>

#include <algorithm>

#include "attention/cuda/fixture.h"

namespace basin::attention::cuda_tests {
namespace {

class CudaAttentionStreaming : public CudaTest {};

// The case of SGLang PR #12504. Keys between the sinks and the window are on pages that are gone.
TEST_F(CudaAttentionStreaming, SinksAndWindowAtAnyLength) {
  for (const Heads& heads : kHeads) {
    Shape shape;
    shape.d_qk = heads.d_qk;
    shape.d_v = heads.d_v;
    shape.h_kv = 1;
    shape.spec.mask = {.window = 7168, .sink_tokens = 1024};
    shape.sink_logit = std::vector<float>{0.5f, -1.0f, 2.0f, 0.0f, 1.0f, -0.25f, 3.0f, 8.0f};
    std::vector<Part> decode, prefill;
    for (const std::int64_t length : {8191, 8192, 8193, 16384, 1'000'000}) {
      decode.push_back({static_cast<std::int64_t>(decode.size()), 1, length});
      prefill.push_back({static_cast<std::int64_t>(prefill.size()), 10, length});
    }
    for (const Part& part : decode)
      expect_accurate(shape, {part}, {.page_tokens = 64},
                      fmt::format("{}, {} tokens", text(heads), part.kv_tokens));
    expect_accurate(shape, decode, {.page_tokens = 64}, "a batch of them");
    prefill.push_back({9, 1, 100});
    expect_accurate(shape, prefill, {.page_tokens = 64}, "several tokens each");
  }
}

// Keys below sink_tokens are scored with the second query; one tile can hold both kinds.
TEST_F(CudaAttentionStreaming, InCachePositionsUseTheSecondQuery) {
  for (const DType dtype : kStorages) {
    for (const std::int64_t sink_tokens : {0, 1, 4, 16, 70, 127, 128, 129, 200, 1024, 1100}) {
      const std::pair<std::int64_t, Heads> cases[] = {{1, kHeads[0]},  {4, kHeads[1]},  {5, kHeads[0]},
                                                      {8, kHeads[0]},  {16, kHeads[0]}, {2, kHeads[2]},
                                                      {16, kHeads[2]}, {3, kHeads[3]},  {16, kHeads[3]}};
      for (const auto& [group, heads] : cases) {
        Shape shape;
        shape.d_qk = heads.d_qk;
        shape.d_v = heads.d_v;
        shape.dtype = dtype;
        shape.h_kv = 2;
        shape.h_q = 2 * group;
        shape.q_sink = true;
        shape.spec.mask = {.window = 300, .sink_tokens = sink_tokens};
        if (group == 5 || group == 3) shape.spec.softcap = 3;
        const std::int64_t most = std::max<std::int64_t>(8 / group, 1);
        expect_accurate(
            shape, {{0, 1, 2500}, {1, most, 260}, {2, 1, 1}, {3, most, 1400}, {4, 1, 100}},
            {.page_tokens = 16, .loose = group == 8},
            fmt::format("{} {}, {} sink tokens, groups of {}", name(dtype), text(heads), sink_tokens, group));
      }
    }
  }
}

// A stream reads its prompt in chunks with both queries, too: same rows, same bits as one token at a time.
TEST_F(CudaAttentionStreaming, ChunksWithASecondQuery) {
  for (const DType dtype : kStorages) {
    for (const Heads& heads : kHeads) {
      for (const std::int64_t sink_tokens : {4, 130, 1024}) {
        Shape shape;
        shape.d_qk = heads.d_qk;
        shape.d_v = heads.d_v;
        shape.dtype = dtype;
        shape.h_q = 12;
        shape.h_kv = 2;
        shape.q_sink = true;
        shape.sink_logit = std::vector<float>(12, 0.5f);
        shape.spec.mask = {.window = 700, .sink_tokens = sink_tokens};
        if (sink_tokens == 130) shape.spec.softcap = 3;
        const std::string what = fmt::format("{} {}, {} sink tokens", name(dtype), text(heads), sink_tokens);
        SCOPED_TRACE(what);
        const std::vector<Part> parts = {{0, 40, 2500}, {1, 11, 260}, {2, 70, 70},
                                         {3, 0, 9},     {4, 1, 0},    {5, 12, 5}};
        expect_accurate(shape, parts, {.page_tokens = 16}, what);
        const Bits chunks = run_bits(shape, parts, {.page_tokens = 16});
        const Bits one = run_bits(shape, {{0, 1, 2500}, {1, 1, 260}, {2, 1, 70}}, {.page_tokens = 64});
        EXPECT_EQ(chunks[39], one[0]);
        EXPECT_EQ(chunks[50], one[1]);
        EXPECT_EQ(chunks[120], one[2]);
        EXPECT_TRUE(run_bits(shape, parts, {.page_tokens = 16}) == chunks) << "a second launch";
      }
    }
  }
}

// Many segments: folded at the end, by all CTAs. Equal queries are one query, which prefill takes.
TEST_F(CudaAttentionStreaming, LongChunksWithASecondQuery) {
  for (const std::int64_t d : {64, 128}) {
    Shape shape;
    shape.d_qk = shape.d_v = d;
    shape.h_kv = 1;
    shape.spec.mask = {.sink_tokens = 200};
    shape.source = [](Kind kind, std::int64_t s, std::int64_t p, std::int64_t h, std::int64_t i) {
      return noise(kind == Kind::q_sink ? Kind::q : kind, s, p, h, i);
    };
    Shape second = shape;
    second.q_sink = true;
    const std::vector<Part> parts = {{0, 100, 30000}, {1, 20, 17000}, {2, 9, 900}};
    const Bits want = run_bits(shape, parts);
    EXPECT_TRUE(run_bits(second, parts, {.page_tokens = 64}) == want) << d;
    EXPECT_TRUE(run_bits(second, parts) == want) << d;
  }
}

// More key heads than the chip has multiprocessors, and groups whose states need padding.
TEST_F(CudaAttentionStreaming, ManyHeadsWithASecondQuery) {
  const std::pair<std::int64_t, std::int64_t> heads[] = {{300, 150}, {33, 1}, {63, 1}, {64, 1}};
  for (const auto& [h_q, h_kv] : heads) {
    Shape shape;
    shape.h_q = h_q;
    shape.h_kv = h_kv;
    shape.q_sink = true;
    shape.spec.mask = {.window = 300, .sink_tokens = 70};
    expect_accurate(shape, {{0, 12, 1300}, {1, 3, 40}}, {.page_tokens = 16},
                    fmt::format("{} on {} heads", h_q, h_kv));
  }
}

TEST_F(CudaAttentionStreaming, TheSecondQueryChangesSinkKeysOnly) {
  Shape shape;
  shape.spec.mask = {.window = 300, .sink_tokens = 4};
  Shape second = shape;
  second.q_sink = true;
  EXPECT_NE(run_bits(shape, {{0, 1, 900}}), run_bits(second, {{0, 1, 900}}));
  // Equal queries are one query.
  second.source = [](Kind kind, std::int64_t s, std::int64_t p, std::int64_t h, std::int64_t d) {
    return noise(kind == Kind::q_sink ? Kind::q : kind, s, p, h, d);
  };
  for (const std::int64_t sink_tokens : {0, 4, 128, 150}) {
    shape.spec.mask.sink_tokens = second.spec.mask.sink_tokens = sink_tokens;
    EXPECT_EQ(run_bits(shape, {{0, 2, 1900}, {1, 1, 90}}), run_bits(second, {{0, 2, 1900}, {1, 1, 90}}))
        << sink_tokens;
  }
}

}  // namespace
}  // namespace basin::attention::cuda_tests
