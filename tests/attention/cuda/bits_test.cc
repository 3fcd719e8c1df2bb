// A row's bits depend on its own visible keys only: prefill in any chunking, decode over any number of CTAs, any layout, any
// batch.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "attention/cuda/fixture.h"

namespace basin::attention::cuda_tests {
namespace {

class CudaAttentionBits : public CudaTest {
 protected:
  /// The rows of the first `tokens` tokens of sequence 7, in chunks that are sequences of one batch.
  static Bits chunks(const Shape& shape, std::int64_t tokens, std::int64_t chunk, Layout layout = {}) {
    layout.shared_keys = true;
    std::vector<Part> parts;
    for (std::int64_t begin = 0; begin < tokens; begin += chunk) {
      const std::int64_t end = std::min(begin + chunk, tokens);
      parts.push_back({7, end - begin, end});
    }
    return run_bits(shape, parts, layout);
  }

  static std::vector<std::pair<std::string, Shape>> shapes() {
    std::vector<std::pair<std::string, Shape>> result;
    const auto add = [&](const std::string& what) -> Shape& {
      Shape shape;
      shape.spread = 4;
      shape.h_q = 4;
      shape.h_kv = 1;
      return result.emplace_back(what, shape).second;
    };
    add("plain");
    add("f16").dtype = DType::f16;
    Shape& wide = add("d 128");
    wide.d_qk = wide.d_v = 128;
    Shape& odd = add("d_qk 72, d_v 40");
    odd.d_qk = 72;
    odd.d_v = 40;
    Shape& window = add("window and sink logit");
    window.spec.mask.window = 100;
    window.sink_logit = std::vector<float>{0.5f, -1.0f, 2.0f, 0.0f};
    add("window and sink tokens").spec.mask = {.window = 700, .sink_tokens = 70};
    add("few sink tokens").spec.mask = {.window = 1050, .sink_tokens = 4};
    Shape& sinks = add("several tiles of sink tokens, d 128");
    sinks.d_qk = sinks.d_v = 128;
    sinks.spec.mask = {.window = 500, .sink_tokens = 300};
    Shape& wider = add("d_qk 192, d_v 128");
    wider.d_qk = 192;
    wider.d_v = 128;
    Shape& widest = add("d 256");
    widest.d_qk = widest.d_v = 256;
    Shape& streaming = add("window and sink tokens, d 256, f16");
    streaming.d_qk = streaming.d_v = 256;
    streaming.dtype = DType::f16;
    streaming.spec.mask = {.window = 2100, .sink_tokens = 70};
    Shape& wide_cap = add("softcap, d_qk 136, d_v 72");
    wide_cap.d_qk = 136;
    wide_cap.d_v = 72;
    wide_cap.spec.softcap = 2;
    Shape& widest_cap = add("softcap and window, d_qk 200, d_v 248");
    widest_cap.d_qk = 200;
    widest_cap.d_v = 248;
    widest_cap.spec.softcap = 2;
    widest_cap.spec.mask.window = 1500;
    Shape& cap = add("softcap");
    cap.spec.softcap = 2;
    cap.spec.mask.window = 1500;
    Shape& mha = add("one head");
    mha.h_q = 1;
    Shape& group = add("groups of 8");
    group.h_q = 8;
    group.spec.mask.window = 1300;
    Shape& five = add("groups of 5, d 128");
    five.h_q = 5;
    five.d_qk = five.d_v = 128;
    return result;
  }
};

// Rows of the first difference, for the message: the bits themselves would be pages.
std::string first_difference(const Bits& a, const Bits& b) {
  if (a.size() != b.size()) return "different numbers of rows";
  std::size_t differing = 0, first = a.size();
  for (std::size_t row = 0; row < a.size(); ++row) {
    if (a[row] == b[row]) continue;
    first = std::min(first, row);
    ++differing;
  }
  return differing == 0 ? std::string()
                        : fmt::format("{} of {} rows differ, the first is {}", differing, a.size(), first);
}
#define EXPECT_SAME_BITS(a, b) EXPECT_EQ(first_difference(a, b), std::string())

TEST_F(CudaAttentionBits, ChunksAndPages) {
  constexpr std::int64_t kTokens = 2200;  // three segments, two of d 256
  for (const auto& [what, shape] : shapes()) {
    SCOPED_TRACE(what);
    const Bits whole = chunks(shape, kTokens, kTokens);
    ASSERT_EQ(whole.size(), static_cast<std::size_t>(kTokens));
    EXPECT_SAME_BITS(whole, chunks(shape, kTokens, 512, {.page_tokens = 64}));
    EXPECT_SAME_BITS(whole, chunks(shape, kTokens, 64, {.page_tokens = 1}));
    EXPECT_SAME_BITS(whole, chunks(shape, kTokens, 64, {.page_tokens = 256, .loose = true}));
    EXPECT_SAME_BITS(whole, chunks(shape, kTokens, 16));
    EXPECT_SAME_BITS(whole, chunks(shape, kTokens, 7, {.page_tokens = 16}));
    EXPECT_SAME_BITS(whole, chunks(shape, kTokens, 2, {.page_tokens = 128}));
    EXPECT_SAME_BITS(whole, chunks(shape, kTokens, 1, {.page_tokens = 32, .loose = true}));
    EXPECT_SAME_BITS(whole, chunks(shape, kTokens, 1));
  }
}

// One sequence alone spreads over many CTAs; the same rows in a prefill belong to one.
TEST_F(CudaAttentionBits, LongDecodeIsSplitWithoutTrace) {
  for (auto [what, shape] : shapes()) {
    SCOPED_TRACE(what);
    if (shape.spec.mask.window > 0) shape.spec.mask.window = 20000;
    for (const std::int64_t tokens : {9000, 24577}) {
      const Bits one = run_bits(shape, {{3, 1, tokens}}, {.page_tokens = 64});
      const Bits few = run_bits(shape, {{3, 8, tokens}});
      const Bits many = run_bits(shape, {{3, 80, tokens}}, {.page_tokens = 16});
      EXPECT_EQ(one[0], few[7]);
      EXPECT_EQ(one[0], many[79]);
      for (std::size_t row = 0; row < 8; ++row) EXPECT_EQ(few[row], many[72 + row]);
    }
  }
}

// More segments than the fold holds at once.
TEST_F(CudaAttentionBits, VeryLongDecodeIsFoldedInParts) {
  for (const std::int64_t d : {64, 128, 256}) {
    SCOPED_TRACE(d);
    Shape shape;
    shape.h_q = 4;
    shape.h_kv = 1;
    shape.d_qk = shape.d_v = d;
    shape.sink_logit = std::vector<float>{0.5f, -1.0f, 2.0f, 8.0f};
    shape.spec.mask = {.sink_tokens = 4};
    const std::int64_t tokens = 140001;
    const Bits prefill = run_bits(shape, {{3, 80, tokens}});
    const std::vector<Part> long_and_short = {
        {4, 1, 100}, {3, 1, tokens}, {5, 0, 7}, {3, 7, tokens}, {6, 2, 9000}};
    const Bits first = run_bits(shape, long_and_short, {.page_tokens = 64});
    EXPECT_EQ(first[1], prefill[79]);
    for (std::size_t row = 0; row < 7; ++row) EXPECT_EQ(first[2 + row], prefill[73 + row]);
    // The counters are as before: a second launch does the same.
    EXPECT_SAME_BITS(run_bits(shape, long_and_short, {.page_tokens = 64}), first);
  }
}

// With more long sequences than CTAs, some are whole in one CTA and some are shared, in one launch.
TEST_F(CudaAttentionBits, LongRowsWholeAndShared) {
  Shape shape;
  shape.h_q = 4;
  shape.h_kv = 1;
  const std::int64_t lengths[] = {66000, 68000, 70000};
  std::vector<Part> parts;
  for (std::size_t i = 0; i < 300; ++i) parts.push_back({1, 1, lengths[i % 3]});
  const Layout layout{.page_tokens = 64, .shared_keys = true};
  const Bits together = run_bits(shape, parts, layout);
  std::vector<Bits> alone;
  for (const std::int64_t tokens : lengths) alone.push_back(run_bits(shape, {{1, 1, tokens}}, layout));
  for (std::size_t i = 0; i < parts.size(); ++i) EXPECT_EQ(together[i], alone[i % 3][0]) << i;
}

// Sequences of all lengths over many gangs: rows that one gang has whole, and rows that several share.
TEST_F(CudaAttentionBits, GangsOfAnyShape) {
  for (const auto& [what, shape] : shapes()) {
    SCOPED_TRACE(what);
    const std::vector<Part> kinds = {{1, 1, 900}, {1, 2, 3333}, {1, 1, 8192}, {1, 2, 40001}};
    const Layout layout{.page_tokens = 64, .shared_keys = true};
    std::vector<Bits> alone;
    for (const Part& kind : kinds) alone.push_back(run_bits(shape, {kind}, layout));
    for (const std::size_t batch : {21u, 90u}) {
      std::vector<Part> parts;
      for (std::size_t i = 0; i < batch; ++i) parts.push_back(kinds[i * (i + 1) / 2 % kinds.size()]);
      const Bits together = run_bits(shape, parts, layout);
      auto row = together.begin();
      for (std::size_t i = 0; i < batch; ++i) {
        const Bits& want = alone[i * (i + 1) / 2 % kinds.size()];
        const auto count = static_cast<std::ptrdiff_t>(want.size());
        ASSERT_EQ(first_difference(want, Bits(row, row + count)), std::string())
            << "sequence " << i << " of " << batch;
        row += count;
      }
    }
  }
}

TEST_F(CudaAttentionBits, AloneOrInABatch) {
  const std::vector<Part> decode = {{1, 3, 200}, {2, 1, 3300}, {3, 0, 50},  {4, 8, 90},
                                    {5, 2, 0},   {6, 4, 2},    {8, 1, 1024}};
  std::vector<Part> prefill = decode;
  prefill.push_back({9, 190, 1190});
  for (const auto& [what, shape] : shapes()) {
    SCOPED_TRACE(what);
    std::vector<Bits> alone;
    for (const Part& part : prefill) alone.push_back(run_bits(shape, {part}));
    for (const std::vector<Part>& parts : {decode, prefill}) {
      const Bits rows = run_bits(shape, parts, {.page_tokens = 16});
      const Bits backwards =
          run_bits(shape, {parts.rbegin(), parts.rend()}, {.page_tokens = 64, .loose = true});
      auto row = rows.begin();
      auto end = backwards.end();
      for (std::size_t s = 0; s < parts.size(); ++s) {
        const auto count = static_cast<std::ptrdiff_t>(alone[s].size());
        EXPECT_SAME_BITS(alone[s], Bits(row, row + count));
        EXPECT_SAME_BITS(alone[s], Bits(end - count, end));
        row += count;
        end -= count;
      }
    }
  }
}

// Copies of one sequence fill the device in very different ways.
TEST_F(CudaAttentionBits, BatchesOfAnySize) {
  Shape shape;
  shape.spec.mask = {.window = 3000, .sink_tokens = 4};
  const Bits alone = run_bits(shape, {{1, 1, 4500}});
  for (const std::size_t batch : {2u, 3u, 7u, 31u, 64u, 133u, 500u}) {
    const std::vector<Part> parts(batch, Part{1, 1, 4500});
    for (const auto& row : run_bits(shape, parts, {.page_tokens = 64, .shared_keys = true}))
      ASSERT_EQ(row, alone[0]);
  }
}

TEST_F(CudaAttentionBits, DenseAndRagged) {
  for (const auto& [what, shape] : shapes()) {
    SCOPED_TRACE(what);
    for (const std::int64_t q_tokens : {2, 70}) {
      const std::vector<Part> parts = {{1, q_tokens, 1300}, {2, q_tokens, 1300}, {3, q_tokens, 1300}};
      const Bits ragged = run_bits(shape, parts);
      EXPECT_SAME_BITS(ragged, run_bits(shape, parts, {.dense = true}));
      EXPECT_SAME_BITS(ragged, run_bits(shape, parts, {.dense = true, .loose = true}));
      EXPECT_SAME_BITS(ragged, run_bits(shape, parts, {.page_tokens = 32, .dense = true}));
    }
  }
}

TEST_F(CudaAttentionBits, AWindowThatReachesEverythingIsNoWindow) {
  for (const std::int64_t chunk : {300, 2}) {
    for (auto [what, shape] : shapes()) {
      SCOPED_TRACE(what);
      shape.spec.mask = {};
      const Bits none = chunks(shape, 300, chunk);
      for (const std::int64_t window :
           {std::int64_t{300}, std::int64_t{1000}, std::numeric_limits<std::int64_t>::max()}) {
        shape.spec.mask = {.window = window};
        EXPECT_SAME_BITS(none, chunks(shape, 300, chunk)) << window;
        for (const std::int64_t sink_tokens : {std::int64_t{9}, std::numeric_limits<std::int64_t>::max()}) {
          shape.spec.mask.sink_tokens = sink_tokens;
          EXPECT_SAME_BITS(none, chunks(shape, 300, chunk)) << window;
        }
      }
      shape.spec.mask = {.window_right = 0};  // causal already ends there
      EXPECT_SAME_BITS(none, chunks(shape, 300, chunk));
      shape.spec.mask = {.window_right = std::numeric_limits<std::int64_t>::max()};
      EXPECT_SAME_BITS(none, chunks(shape, 300, chunk));
      shape.sink_logit.assign(static_cast<std::size_t>(shape.h_q), -std::numeric_limits<float>::infinity());
      if (what != "window and sink logit") {
        EXPECT_SAME_BITS(none, chunks(shape, 300, chunk));  // -inf is no sink
      }
    }
  }
}

TEST_F(CudaAttentionBits, HeadsDoNotDependOnTheirGroup) {
  for (const std::int64_t group : {2, 4, 5, 8, 16, 64}) {
    for (const std::int64_t q_tokens : {1, 70}) {
      Shape grouped;
      grouped.h_q = group;
      grouped.h_kv = 1;
      Shape single = grouped;
      single.h_q = 1;
      const Bits many = run_bits(grouped, {{2, q_tokens, 1100}}),
                 one = run_bits(single, {{2, q_tokens, 1100}});
      for (std::size_t row = 0; row < one.size(); ++row)
        ASSERT_TRUE(std::equal(one[row].begin(), one[row].end(), many[row].begin())) << group;
    }
  }
}

TEST_F(CudaAttentionBits, AnAbsentLseChangesNothing) {
  for (const std::int64_t q_tokens : {2, 70}) {
    Shape shape;
    shape.sink_logit.assign(8, 0.5f);
    const Problem problem(shape, {{1, q_tokens, 1300}, {2, 1, 0}});
    OnDevice device(problem);
    device.launch();
    const Bits all = device.bits();
    for (const bool lse : {false, true}) {
      for (const bool lse_with_sink : {false, true}) {
        device.reset();
        device.forward.lse = lse ? static_cast<float*>(device.lse.data()) : nullptr;
        device.forward.lse_with_sink =
            lse_with_sink ? static_cast<float*>(device.lse_with_sink.data()) : nullptr;
        device.launch();
        Bits some = device.bits();
        for (std::size_t row = 0; row < some.size(); ++row) {
          for (std::size_t i = 64; i < some[row].size(); i += 66) {
            if (!lse) {
              EXPECT_EQ(some[row][i], 0x5a5a5a5au);
              some[row][i] = all[row][i];
            }
            if (!lse_with_sink) {
              EXPECT_EQ(some[row][i + 1], 0x5a5a5a5au);
              some[row][i + 1] = all[row][i + 1];
            }
          }
        }
        EXPECT_SAME_BITS(all, some);
      }
    }
  }
}

TEST_F(CudaAttentionBits, TwentyIdenticalLaunches) {
  for (const auto& [what, shape] : shapes()) {
    SCOPED_TRACE(what);
    for (const std::int64_t q_tokens : {1, 300}) {
      const Problem problem(shape, {{1, q_tokens, 9000}, {2, 1, 300}, {3, q_tokens, 4000}},
                            {.page_tokens = 64});
      OnDevice device(problem);
      device.launch();
      const Bits first = device.bits();
      for (int n = 0; n < 19; ++n) {
        device.reset();
        device.launch();
        EXPECT_SAME_BITS(first, device.bits());
      }
    }
  }
}

}  // namespace
}  // namespace basin::attention::cuda_tests
