// The plan is a pure function of upper bounds, and fits the kernels that are compiled. Needs no device.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "attention/cuda/sm90/backward/arguments.h"
#include "attention/cuda/sm90/backward/instances.h"
#include "attention/cuda/sm90/choose.h"
#include "attention/cuda/sm90/instances.h"

namespace basin::attention::sm90 {
namespace {

constexpr int kMultiprocessors = 132;
constexpr int kSharedBytesOfAnSm = 227 * 1024;

Shape shape(std::int64_t batch, std::int64_t h_q, std::int64_t h_kv, std::int64_t d, std::int64_t max_q,
            std::int64_t max_kv) {
  return {DType::bf16, batch, h_q, h_kv, d, d, max_q, max_kv, false};
}

TEST(AttentionCudaPlan, FewRowsDecodeAndManyPrefill) {
  // A group's rows: query tokens times query heads on one key head.
  const auto path_and_rows = [](std::int64_t group, std::int64_t q_tokens, std::int64_t d) {
    const Plan p = plan(shape(1, 2 * group, 2, d, q_tokens, 1000), kMultiprocessors);
    return fmt::format("{}{}", p.path == Path::decode ? "decode" : "prefill", p.rows);
  };
  EXPECT_EQ(path_and_rows(1, 1, 64), "decode8");
  EXPECT_EQ(path_and_rows(8, 1, 64), "decode8");
  EXPECT_EQ(path_and_rows(9, 1, 64), "decode16");
  EXPECT_EQ(path_and_rows(8, 2, 64), "decode16");
  EXPECT_EQ(path_and_rows(1, 17, 64), "decode32");
  EXPECT_EQ(path_and_rows(5, 12, 64), "decode64");
  EXPECT_EQ(path_and_rows(5, 13, 64), "prefill192");
  EXPECT_EQ(path_and_rows(64, 1, 64), "decode64");
  EXPECT_EQ(path_and_rows(65, 1, 64), "prefill192");
  EXPECT_EQ(path_and_rows(8, 4, 128), "decode32");
  EXPECT_EQ(path_and_rows(8, 5, 128), "prefill128");
  EXPECT_EQ(path_and_rows(8, 4, 192), "decode32");
  EXPECT_EQ(path_and_rows(8, 5, 192), "prefill128");
  EXPECT_EQ(path_and_rows(8, 2, 256), "decode16");
  EXPECT_EQ(path_and_rows(8, 4, 256), "decode32");
  EXPECT_EQ(path_and_rows(33, 1, 256), "prefill128");
  EXPECT_EQ(path_and_rows(8, std::int64_t{1} << 29, 64), "prefill192");
  EXPECT_EQ(path_and_rows(8, 0, 64), "decode8");
}

TEST(AttentionCudaPlan, FewSegmentsHaveAMultiprocessorEach) {
  const auto alone = [](std::int64_t batch, std::int64_t h_kv, std::int64_t d, std::int64_t max_kv) {
    return plan(shape(batch, 4 * h_kv, h_kv, d, 1, max_kv), kMultiprocessors).alone;
  };
  EXPECT_TRUE(alone(1, 8, 64, 16 * 1024));       // 128 segments
  EXPECT_FALSE(alone(1, 8, 64, 16 * 1024 + 1));  // 136
  EXPECT_TRUE(alone(132, 1, 128, 1024));
  EXPECT_FALSE(alone(133, 1, 128, 1024));
  EXPECT_FALSE(alone(1, 1, 192, 1024));  // these have one CTA a multiprocessor anyway
  EXPECT_FALSE(plan(shape(1, 9, 1, 64, 1, 1024), kMultiprocessors).alone);

  const Plan few = plan(shape(1, 32, 8, 128, 1, 8192), kMultiprocessors);
  const Plan many = plan(shape(64, 32, 8, 128, 1, 8192), kMultiprocessors);
  EXPECT_EQ(few.ctas, 64);
  EXPECT_EQ(many.ctas, 264);
  EXPECT_GT(find_instance(few, DType::bf16, false).shared_bytes,
            find_instance(many, DType::bf16, false).shared_bytes);
}

TEST(AttentionCudaPlan, ASecondQueryWithManyRowsExtends) {
  Shape s = shape(2, 16, 2, 64, 100, 5000);
  s.second_query = true;
  Plan p = plan(s, kMultiprocessors);
  EXPECT_EQ(p.path, Path::extend);
  EXPECT_EQ(p.block_tokens, 8);
  EXPECT_EQ(p.rows, 64);
  EXPECT_EQ(p.blocks, 13);
  EXPECT_EQ(p.segments, 5);
  EXPECT_EQ(p.units, 2 * 2 * 13 * 5);
  EXPECT_EQ(p.workspace_bytes, 512u * 1024 + 2 * 2 * 13 * 5 * 64 * 66 * 4);
  s.max_q_tokens = 3;
  p = plan(s, kMultiprocessors);
  EXPECT_EQ(p.path, Path::extend);
  EXPECT_EQ(p.rows, 24);
  s.max_q_tokens = 2;
  EXPECT_EQ(plan(s, kMultiprocessors).path, Path::decode);
  s = shape(1, 65, 1, 64, 1, 5000);
  s.second_query = true;
  EXPECT_EQ(plan(s, kMultiprocessors).path, Path::prefill) << "support refuses it";
}

TEST(AttentionCudaPlan, HeadSizesRunOnTheNextLargerInstance) {
  const auto sizes = [](std::int64_t d_qk, std::int64_t d_v) {
    const HeadSizes* found = find_head_sizes(d_qk, d_v);
    return found == nullptr ? std::string("none") : fmt::format("{} {}", found->d_qk, found->d_v);
  };
  EXPECT_EQ(sizes(8, 8), "64 64");
  EXPECT_EQ(sizes(64, 64), "64 64");
  EXPECT_EQ(sizes(72, 8), "128 128");
  EXPECT_EQ(sizes(8, 72), "128 128");
  EXPECT_EQ(sizes(128, 128), "128 128");
  EXPECT_EQ(sizes(136, 8), "192 128");
  EXPECT_EQ(sizes(192, 128), "192 128");
  EXPECT_EQ(sizes(192, 136), "256 256");
  EXPECT_EQ(sizes(8, 136), "256 256");
  EXPECT_EQ(sizes(200, 8), "256 256");
  EXPECT_EQ(sizes(256, 256), "256 256");
  EXPECT_EQ(sizes(264, 8), "none");
  EXPECT_EQ(sizes(8, 264), "none");
}

TEST(AttentionCudaPlan, PrefillHasACtaForEachMultiprocessorAtMost) {
  Plan p = plan(shape(1, 8, 8, 128, 1000, 1000), kMultiprocessors);
  EXPECT_EQ(p.units, 8 * 8);
  EXPECT_EQ(p.ctas, 64);
  EXPECT_EQ(p.workspace_bytes, 512u * 1024);
  p = plan(shape(4, 32, 8, 128, 4096, 4096), kMultiprocessors);
  EXPECT_EQ(p.units, 4 * 32 * 32);
  EXPECT_EQ(p.ctas, kMultiprocessors);
}

// Running totals of wide heads lie in the workspace: those of every CTA, on any device.
TEST(AttentionCudaPlan, TheWorkspaceHoldsTheTotalsOfWideHeads) {
  constexpr std::size_t kCounterBytes = 512 * 1024, kOfOneCta = 128 * 256 * 4;
  EXPECT_EQ(plan(shape(1, 8, 8, 256, 1000, 3000), kMultiprocessors).workspace_bytes,
            kCounterBytes + 64 * kOfOneCta);
  EXPECT_EQ(plan(shape(1, 8, 8, 256, 1000, 2048), kMultiprocessors).workspace_bytes, kCounterBytes)
      << "a single segment is not folded";
  const Shape wide{DType::bf16, 4, 16, 16, 192, 128, 4096, 4096, false};
  for (const int multiprocessors : {1, kMultiprocessors, 200}) {
    const Plan p = plan(wide, multiprocessors);
    EXPECT_EQ(p.ctas, std::min(multiprocessors, 144));
    EXPECT_EQ(p.workspace_bytes, kCounterBytes + 144 * kOfOneCta / 2);
  }
}

TEST(AttentionCudaPlan, DecodeHasGangsOfOneCtaForEachKeyHead) {
  Plan p = plan(shape(1, 64, 8, 64, 1, 8192), kMultiprocessors);
  EXPECT_EQ(p.segments, 8);
  EXPECT_EQ(p.ctas, 64);  // 8 segments of 8 key heads
  p = plan(shape(1, 64, 8, 64, 1, 131072), kMultiprocessors);
  EXPECT_EQ(p.ctas, 2 * kMultiprocessors / 8 * 8);
  p = plan(shape(1, 64, 8, 64, 4, 131072), kMultiprocessors);
  EXPECT_EQ(p.ctas, kMultiprocessors / 8 * 8) << "32 rows need the registers of two";
  p = plan(shape(1, 5, 5, 64, 1, 131072), kMultiprocessors);
  EXPECT_EQ(p.ctas, 2 * kMultiprocessors / 5 * 5);
  p = plan(shape(1, 500, 500, 64, 1, 1), kMultiprocessors);
  EXPECT_EQ(p.ctas, 500);  // each key head needs its own
  p = plan(shape(3, 8, 8, 64, 1, 0), kMultiprocessors);
  EXPECT_EQ(p.segments, 1);  // rows without keys are written, too
  EXPECT_EQ(p.ctas, 24);
}

TEST(AttentionCudaPlan, TheWorkspaceHoldsEverySegmentOfEveryRow) {
  for (const std::int64_t max_kv : {1, 1024, 1025, 100000}) {
    for (const std::int64_t d : {64, 128, 256}) {
      const Plan p = plan(shape(3, 16, 2, d, 2, max_kv), kMultiprocessors);
      const std::int64_t segment = d == 256 ? 2048 : 1024;
      const auto floats = static_cast<std::size_t>(3 * 2 * ((max_kv + segment - 1) / segment) * 16 * (d + 2));
      EXPECT_EQ(p.workspace_bytes, 512u * 1024 + floats * 4);
      EXPECT_EQ(p.counter_bytes, 512u * 1024);
      EXPECT_EQ(p.workspace_bytes, plan(shape(3, 16, 2, d, 2, max_kv), 1).workspace_bytes)
          << "not of the device";
    }
  }
}

// Against the rows themselves: the segments that hold a tile of a key that some row sees.
TEST(AttentionCudaPlan, HiddenSegmentsNeedNoRoom) {
  std::int64_t most_equal = 0;
  for (const std::int64_t d : {64, 256}) {
    const std::int64_t segment = d == 256 ? 2048 : 1024;
    for (const std::int64_t window : {0, 1, 2, 1000, 1024, 1025, 2048, 2049, 3000, 7168, 100000}) {
      for (const std::int64_t sinks : {0, 1, 1024, 1025, 3000}) {
        for (const std::int64_t q_tokens : {1, 2, 4}) {
          Shape s = shape(1, 8, 8, d, q_tokens, 20000);
          s.window = window;
          s.sink_tokens = sinks;
          const std::int64_t room = plan(s, kMultiprocessors).segments;
          for (std::int64_t kv = 1; kv <= 20000; kv += kv < 9 ? 1 : 97) {
            const std::int64_t first_row = std::max<std::int64_t>(kv - q_tokens, 0);
            const std::int64_t begin = window == 0 ? 0 : std::max<std::int64_t>(first_row - window + 1, 0);
            std::int64_t seen = 0;
            for (std::int64_t from = 0; from < kv; from += segment)
              seen += from < sinks || from + segment > begin ? 1 : 0;
            ASSERT_LE(seen, room) << "window " << window << ", sinks " << sinks << ", keys " << kv;
            most_equal += seen == room ? 1 : 0;
          }
        }
      }
    }
  }
  EXPECT_GT(most_equal, 1000) << "room for no more than that";
  Shape streaming = shape(1, 64, 8, 64, 1, 1 << 20);
  streaming.window = 7168;
  streaming.sink_tokens = 1024;
  EXPECT_EQ(plan(streaming, kMultiprocessors).segments, 9);
  EXPECT_TRUE(plan(streaming, kMultiprocessors).alone) << "as 8,192 keys";
}

TEST(AttentionCudaPlan, EverySequenceThatGangsShareIsFolded) {
  const auto fold = [](std::int64_t batch, std::int64_t q_tokens, std::int64_t max_kv) {
    return plan(shape(batch, 64, 8, 64, q_tokens, max_kv), kMultiprocessors);
  };
  EXPECT_EQ(fold(1, 1, 1024).fold_ctas, 0) << "one segment";
  EXPECT_EQ(fold(500, 1, 1024).fold_ctas, 0);
  EXPECT_EQ(fold(1, 1, 8192).fold_ctas, 64 / 4) << "a warp folds few segments";
  EXPECT_EQ(fold(1, 1, 131072).fold_ctas, 64);
  EXPECT_EQ(fold(8, 1, 131072).fold_ctas, 8 * 64);
  EXPECT_EQ(fold(500, 1, 131072).fold_ctas, 32 * 64) << "33 gangs have 32 borders";
  EXPECT_EQ(fold(500, 8, 131072).fold_ctas, 500 * 64 * 8) << "64 rows are always saved";
  EXPECT_EQ(fold(500, 8, 1000).fold_ctas, 500 * 64 * 8 / 4);
  EXPECT_EQ(fold(0, 8, 131072).fold_ctas, 0) << "no rows";
  EXPECT_EQ(fold(1, 1, 131072).fold_bytes, 200 * 1024) << "a multiprocessor for each";
  EXPECT_EQ(fold(3, 1, 131072).fold_bytes, 100 * 1024);
  for (const std::int64_t d : {64, 128, 192, 256}) {
    for (const std::int64_t max_kv : {2000, 20000, 200000}) {
      const Plan p = plan(shape(500, 8, 8, d, 1, max_kv), kMultiprocessors);
      if (p.segments == 1) continue;
      const int rows = kFoldThreads / p.fold_threads;
      EXPECT_GE(p.fold_bytes, rows * fold_bytes(p.d_v, p.fold_segments));
      EXPECT_LE(p.fold_bytes, kFoldMemory);
      EXPECT_LE(p.fold_segments, p.fold_threads) << "no thread has two";
      EXPECT_EQ(p.fold_threads == 32, p.segments <= 32);
    }
  }
}

TEST(AttentionCudaPlan, AbsurdBoundsDoNotWrap) {
  constexpr std::int64_t kMost = (std::int64_t{1} << 30) - 1;
  const Plan prefill = plan(shape(kMost, kMost, 1, 64, kMost, kMost), kMultiprocessors);
  EXPECT_GT(prefill.units, std::int64_t{1} << 31);
  EXPECT_EQ(prefill.ctas, kMultiprocessors);
  const Plan decode = plan(shape(kMost, 64, 64, 64, 1, kMost), kMultiprocessors);
  EXPECT_GT(decode.workspace_bytes, std::size_t{1} << 50);
  EXPECT_GE(decode.ctas, 1);
}

// Every plan finds a kernel that was compiled for it.
TEST(AttentionCudaPlan, EveryPlanHasItsKernel) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const bool softcap : {false, true}) {
      for (const HeadSizes& sizes : kHeadSizes) {
        std::vector<const void*> kernels;
        for (const std::int64_t q_tokens : {1, 9, 17, 33, 1000}) {
          Shape s = shape(1, 1, 1, 8, q_tokens, 5000);
          s.d_qk = sizes.d_qk;
          s.d_v = sizes.d_v;
          const Plan p = plan(s, kMultiprocessors);
          EXPECT_EQ(p.d_qk, sizes.d_qk);
          EXPECT_EQ(p.d_v, sizes.d_v);
          EXPECT_EQ(p.tile_keys, sizes.tile_keys);
          const Instance instance = find_instance(p, dtype, softcap);
          EXPECT_NE(instance.kernel, nullptr);
          EXPECT_EQ(instance.rows, p.rows);
          EXPECT_LE(instance.shared_bytes, kSharedBytesOfAnSm);
          EXPECT_GT(instance.shared_bytes, 0);
          EXPECT_EQ(instance.threads % 32, 0);
          EXPECT_LE(instance.threads, 1024);
          EXPECT_EQ(instance.fold != nullptr, p.path == Path::decode);
          if (std::find(kernels.begin(), kernels.end(), instance.kernel) == kernels.end())
            kernels.push_back(instance.kernel);
        }
        EXPECT_EQ(kernels.size(), sizes.decode_rows > 32 ? 5u : 4u);
        Shape second = shape(1, 8, 1, 8, 1000, 5000);
        second.d_qk = sizes.d_qk;
        second.d_v = sizes.d_v;
        second.second_query = true;
        const Plan p = plan(second, kMultiprocessors);
        const Instance extend = find_instance(p, dtype, softcap);
        EXPECT_EQ(std::count(kernels.begin(), kernels.end(), extend.kernel), 0);
        EXPECT_GE(extend.rows, p.rows);
        EXPECT_LE(extend.shared_bytes, kSharedBytesOfAnSm);
      }
    }
  }
}

TEST(AttentionCudaBackwardPlan, RowBlocksHoldAnySplitOfTheRows) {
  // Blocks of a sequence start at first_row / 128 + its number: see row_blocks.cuh.
  for (const std::vector<std::int64_t>& lengths :
       {std::vector<std::int64_t>{1}, {0, 0, 0}, {128, 128}, {127, 1, 0, 129, 300}, {1, 1, 1, 1, 1000}}) {
    std::int64_t row = 0, used = 0;
    for (std::size_t s = 0; s < lengths.size(); ++s) {
      const std::int64_t first = row / kSumRows + static_cast<std::int64_t>(s);
      EXPECT_GE(first, used) << "blocks of two sequences overlap";
      used = first + (lengths[s] + kSumRows - 1) / kSumRows;
      row += lengths[s];
    }
    const auto batch = static_cast<std::int64_t>(lengths.size());
    BackwardShape ragged{shape(batch, 8, 2, 64, 1000, 1000)};
    ragged.total_q = row;
    EXPECT_LE(used, backward_plan(ragged).row_blocks);
  }
}

TEST(AttentionCudaBackwardPlan, BuffersLieApart) {
  for (const std::int64_t d : {8, 64, 72, 128, 136, 200, 256}) {
    for (const bool window : {false, true}) {
      BackwardShape s{shape(3, 8, 2, d, 1000, 3000)};
      if (window) s.window = 100, s.sink_tokens = 200;
      const BackwardPlan p = backward_plan(s);
      EXPECT_EQ(p.sums, d <= 128 && !window);
      std::size_t end = 0;
      for (const Buffer& buffer :
           {p.ticket, p.dsink_parts, p.lse2, p.big_d, p.dq_turns, p.dq_sums, p.strip_shares}) {
        if (buffer.bytes == 0) continue;
        EXPECT_GE(buffer.offset, end);
        EXPECT_EQ(buffer.offset % 256, 0u);
        end = buffer.offset + buffer.bytes;
      }
      EXPECT_GE(p.workspace_bytes, end);
      EXPECT_EQ(p.lse2.bytes, 8u * 3 * 8 * 128 * 4);
      EXPECT_EQ(p.dq_sums.bytes,
                window || d > 128 ? 0 : 8u * 3 * 8 * 128 * 4 * static_cast<std::size_t>(p.d_qk));
    }
  }
  EXPECT_GT(backward_plan(BackwardShape{shape(1 << 29, 8, 2, 64, 1 << 29, 1 << 29)}).workspace_bytes,
            std::size_t{1} << 62)
      << "absurd bounds must not wrap";
}

TEST(AttentionCudaBackwardPlan, EveryPlanHasKernels) {
  for (const HeadSizes& sizes : kHeadSizes) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const bool softcap : {false, true}) {
        for (const bool window : {false, true}) {
          BackwardShape s{shape(1, 8, 2, sizes.d_qk, 1000, 1000)};
          s.d_v = sizes.d_v;
          s.softcap = softcap;
          s.window = window ? 100 : 0;
          const BackwardPlan p = backward_plan(s);
          const BackwardInstances found = find_backward_instances(p, dtype, softcap);
          EXPECT_NE(found.keys.kernel, nullptr);
          EXPECT_LE(found.keys.shared_bytes, kSharedBytesOfAnSm);
          EXPECT_EQ(found.queries.kernel == nullptr, p.sums);
          EXPECT_LE(found.queries.shared_bytes, kSharedBytesOfAnSm);
        }
      }
    }
  }
}

}  // namespace
}  // namespace basin::attention::sm90
