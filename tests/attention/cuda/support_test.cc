// What the device refuses, and in which words. Looks at host data only, so it needs no device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

#include "basin/attention/cuda.h"
#include "basin/base/error.h"

namespace basin::attention::cuda {
namespace {

using testing::HasSubstr;

// Never read: only host data counts.
template <typename T>
T* somewhere(std::uintptr_t address = 0x10000) {
  return reinterpret_cast<T*>(address);
}

Forward dense() {
  Forward p;
  p.spec.scale = 0.125;
  p.batch = 2;
  p.max_q_tokens = 5;
  p.max_kv_tokens = 100;
  p.q = contiguous<const void*>(somewhere<const void>(), DType::bf16, {2, 5, 8, 64});
  p.k = contiguous<const void*>(somewhere<const void>(), DType::bf16, {2, 100, 2, 64});
  p.v = contiguous<const void*>(somewhere<const void>(), DType::bf16, {2, 100, 2, 64});
  p.out = contiguous<void*>(somewhere<void>(), DType::bf16, {2, 5, 8, 64});
  return p;
}

Forward ragged() {
  Forward p = dense();
  p.q = contiguous<const void*>(somewhere<const void>(), DType::bf16, {10, 8, 64});
  p.out = contiguous<void*>(somewhere<void>(), DType::bf16, {10, 8, 64});
  p.k = p.v = contiguous<const void*>(somewhere<const void>(), DType::bf16, {200, 2, 64});
  p.q_begin = p.kv_begin = somewhere<const std::int32_t>();
  return p;
}

Forward paged(std::int64_t page_tokens = 16) {
  Forward p = ragged();
  p.kv_begin = nullptr;
  p.kv_tokens = p.page_table = somewhere<const std::int32_t>();
  p.page_table_stride = 100;
  p.k = p.v = contiguous<const void*>(somewhere<const void>(), DType::bf16, {50, page_tokens, 2, 64});
  return p;
}

void set_dtypes(Forward& p, DType dtype) {
  p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = dtype;
}

void set_heads(Forward& p, std::int64_t d_qk, std::int64_t d_v) {
  const auto with = [](auto view, std::int64_t d) {
    auto result = view;
    result.shape[static_cast<std::size_t>(view.rank - 1)] = d;
    std::int64_t stride = 1;
    for (int i = view.rank - 1; i >= 0; --i) {
      result.stride[static_cast<std::size_t>(i)] = stride;
      stride *= result.shape[static_cast<std::size_t>(i)];
    }
    return result;
  };
  p.q = with(p.q, d_qk);
  p.k = with(p.k, d_qk);
  p.v = with(p.v, d_v);
  p.out = with(p.out, d_v);
}

TEST(AttentionCudaSupport, TakesWhatExists) {
  for (const Forward& start : {dense(), ragged(), paged()}) {
    EXPECT_EQ(supported(start), "");
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const std::int64_t d_qk : {8, 40, 64, 72, 128, 136, 192, 200, 256}) {
        for (const std::int64_t d_v : {8, 64, 128, 136, 256}) {
          Forward p = start;
          set_dtypes(p, dtype);
          set_heads(p, d_qk, d_v);
          EXPECT_EQ(supported(p), "");
          EXPECT_GE(workspace_bytes(p), 256u * 1024);
        }
      }
    }
    Forward p = start;
    p.spec.mask = {.causal = false,
                   .window = std::numeric_limits<std::int64_t>::max(),
                   .window_right = 5,
                   .sink_tokens = std::numeric_limits<std::int64_t>::max()};
    p.spec.softcap = 30;
    EXPECT_EQ(supported(p), "");
  }
  for (const std::int64_t page_tokens : {1, 2, 8, 16, 32, 64, 128, 256, 1024})
    EXPECT_EQ(supported(paged(page_tokens)), "");
}

TEST(AttentionCudaSupport, TakesEmptyTensorsAndOddStridesOfSingleElements) {
  Forward p = ragged();
  p.max_kv_tokens = 0;
  p.k = p.v = contiguous<const void*>(nullptr, DType::bf16, {0, 2, 64});
  EXPECT_EQ(supported(p), "");
  p = dense();  // contiguous tensors without tokens have stride 0 between sequences
  p.max_q_tokens = p.max_kv_tokens = 0;
  p.q = contiguous<const void*>(nullptr, DType::bf16, {2, 0, 8, 64});
  p.k = p.v = contiguous<const void*>(nullptr, DType::bf16, {2, 0, 2, 64});
  p.out = contiguous<void*>(nullptr, DType::bf16, {2, 0, 8, 64});
  EXPECT_EQ(supported(p), "");
  p = dense();
  p.batch = 1;
  p.q.shape[0] = p.k.shape[0] = p.v.shape[0] = p.out.shape[0] = 1;
  p.q.stride[0] = p.k.stride[0] = p.v.stride[0] = p.out.stride[0] = 3;
  EXPECT_EQ(supported(p), "");
}

struct Refusal {
  std::string words;
  std::function<void(Forward&)> change;
};

TEST(AttentionCudaSupport, RefusesByName) {
  const Refusal refusals[] = {
      {"q is f32; the sm_90 kernels have bf16 and f16", [](Forward& p) { set_dtypes(p, DType::f32); }},
      {"k is i8; the sm_90 kernels have bf16 and f16", [](Forward& p) { p.k.dtype = DType::i8; }},
      {"v is f16 and q is bf16", [](Forward& p) { p.v.dtype = DType::f16; }},
      {"out is f32; the sm_90 kernels have", [](Forward& p) { p.out.dtype = DType::f32; }},
      {"head sizes (d_qk, d_v) are (264, 64); the sm_90 kernels have (64, 64), (128, 128), (192, 128), (256, "
       "256)",
       [](Forward& p) { set_heads(p, 264, 64); }},
      {"are (64, 512)", [](Forward& p) { set_heads(p, 64, 512); }},
      {"are (60, 64); the sm_90 kernels have (64, 64), (128, 128), (192, 128), (256, 256) and multiples of 8",
       [](Forward& p) { set_heads(p, 60, 64); }},
      {"are (196, 128)", [](Forward& p) { set_heads(p, 196, 128); }},
      {"are (64, 1)", [](Forward& p) { set_heads(p, 64, 1); }},
      {"scale is 0; the sm_90 kernels need a positive one", [](Forward& p) { p.spec.scale = 0; }},
      {"scale is -0.5", [](Forward& p) { p.spec.scale = -0.5; }},
      {"scale 1e-60", [](Forward& p) { p.spec.scale = 1e-60; }},
      {"scale 1e+60", [](Forward& p) { p.spec.scale = 1e60; }},
      {"with softcap 1e+60", [](Forward& p) { p.spec.softcap = 1e60; }},
      {"with softcap 1e-60", [](Forward& p) { p.spec.softcap = 1e-60; }},
      {"q starts at address", [](Forward& p) { p.q.data = somewhere<const void>(0x10008); }},
      {"v starts at address", [](Forward& p) { p.v.data = somewhere<const void>(0x10002); }},
      {"out starts at address", [](Forward& p) { p.out.data = somewhere<void>(0x10004); }},
      {"q has stride 4 in dimension 1; the sm_90 kernels need multiples of 8 elements",
       [](Forward& p) { p.q.stride[1] = 4; }},
      {"k has stride 0 in dimension 0", [](Forward& p) { p.k.stride[0] = 0; }},
      {"out has stride 65 in dimension 1", [](Forward& p) { p.out.stride[1] = 65; }},
      {"v has stride 1099511627776 in dimension 0",
       [](Forward& p) { p.v.stride[0] = std::int64_t{1} << 40; }},
      {"q has extent 1073741824 in dimension 0", [](Forward& p) { p.q.shape[0] = p.out.shape[0] = 1 << 30; }},
      {"max_kv_tokens is 1073741824; the sm_90 kernels have up to 1073741823",
       [](Forward& p) { p.max_kv_tokens = 1 << 30; }},
      {"max_q_tokens is 1073741824", [](Forward& p) { p.max_q_tokens = 1 << 30; }},
      {"batch is 1073741824", [](Forward& p) { p.batch = 1 << 30; }},
      {"32768 sequences with 2 key heads are more than the 65534 pairs", [](Forward& p) { p.batch = 32768; }},
      {"q_sink with 30000 sequences of 20 query tokens and 2 key heads is 2 blocks of 64 rows for each",
       [](Forward& p) {
         p.q_sink = p.q;
         p.batch = 30000;
         p.max_q_tokens = 20;
       }},
      {"q_sink with 2 sequences of up to 1073741823 keys",
       [](Forward& p) {
         p.q_sink = p.q;
         p.max_q_tokens = 10000;
         p.max_kv_tokens = (1 << 30) - 1;
       }},
      {"blocks of 192 rows",
       [](Forward& p) {
         p.batch = 1000000;
         p.max_q_tokens = 1000000;
       }},
  };
  for (const Refusal& refusal : refusals) {
    Forward p = ragged();
    refusal.change(p);
    EXPECT_THAT(supported(p), HasSubstr(refusal.words));
    try {
      workspace_bytes(p);
      ADD_FAILURE() << "not refused: " << refusal.words;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported);
      EXPECT_THAT(error.what(), HasSubstr(refusal.words));
    }
  }
  for (const std::int64_t page_tokens : {3, 24, 48, 100, 384})
    EXPECT_THAT(supported(paged(page_tokens)), HasSubstr("page_tokens is " + std::to_string(page_tokens)));
}

TEST(AttentionCudaSupport, TheSecondQueryExistsForAnyTokens) {
  Forward p = ragged();
  p.q_sink = p.q;
  for (const std::int64_t tokens : {1, 4, 5, 5000}) {
    p.max_q_tokens = tokens;
    EXPECT_EQ(supported(p), "");
  }
  p.q_sink.dtype = DType::f16;
  EXPECT_THAT(supported(p), HasSubstr("q_sink is f16 and q is bf16"));
  p = ragged();
  p.q = p.q_sink = contiguous<const void*>(somewhere<const void>(), DType::bf16, {10, 130, 64});
  p.out = contiguous<void*>(somewhere<void>(), DType::bf16, {10, 130, 64});
  EXPECT_THAT(supported(p), HasSubstr("q_sink with 65 query heads on each key head"));
}

void expect_invalid(const Forward& p, const std::string& words) {
  for (const auto& call :
       {std::function<void()>([&] { supported(p); }), std::function<void()>([&] { workspace_bytes(p); }),
        std::function<void()>([&] { forward(p, nullptr, 0, nullptr); })}) {
    try {
      call();
      ADD_FAILURE() << "accepted: " << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_THAT(error.what(), HasSubstr(words));
    }
  }
}

TEST(AttentionCudaCheck, RefusesContradictions) {
  const Refusal of_ragged[] = {
      {"scale is nan", [](Forward& p) { p.spec.scale = std::numeric_limits<double>::quiet_NaN(); }},
      {"softcap is -1", [](Forward& p) { p.spec.softcap = -1; }},
      {"window is -1", [](Forward& p) { p.spec.mask.window = -1; }},
      {"window_right is -2", [](Forward& p) { p.spec.mask.window_right = -2; }},
      {"sink_tokens is -1", [](Forward& p) { p.spec.mask.sink_tokens = -1; }},
      {"batch is 0", [](Forward& p) { p.batch = 0; }},
      {"q has 3 dimensions [10, 8, 64]; needed are 4", [](Forward& p) { p.q_begin = nullptr; }},
      {"k has 3 dimensions", [](Forward& p) { p.kv_begin = nullptr; }},
      {"page_table and kv_begin", [](Forward& p) { p.page_table = somewhere<const std::int32_t>(); }},
      {"max_q_tokens is -1", [](Forward& p) { p.max_q_tokens = -1; }},
      {"max_kv_tokens is -1", [](Forward& p) { p.max_kv_tokens = -1; }},
      {"q has a negative extent: [-1, 8, 64]", [](Forward& p) { p.q.shape[0] = -1; }},
      {"k has stride -8 in dimension 1", [](Forward& p) { p.k.stride[1] = -8; }},
      {"v has stride 2 in its last dimension", [](Forward& p) { p.v.stride[2] = 2; }},
      {"out of shape [10, 8, 64] has no data", [](Forward& p) { p.out.data = nullptr; }},
      {"out [9, 8, 64] and q [10, 8, 64]", [](Forward& p) { p.out.shape[0] = 9; }},
      {"out has stride 0 in dimension 0: its elements would overlap",
       [](Forward& p) { p.out.stride[0] = 0; }},
      {"k [199, 2, 64] and v [200, 2, 64]", [](Forward& p) { p.k.shape[0] = 199; }},
      {"8 query heads over 3 key heads", [](Forward& p) { p.k.shape[1] = p.v.shape[1] = 3; }},
      {"q [10, 8, 64] and k [200, 2, 56] have different head sizes", [](Forward& p) { p.k.shape[2] = 56; }},
      {"out [10, 8, 64] and v [200, 2, 56] have different head sizes", [](Forward& p) { p.v.shape[2] = 56; }},
      {"q_sink [10, 8, 56] and q [10, 8, 64]",
       [](Forward& p) {
         p.q_sink = p.q;
         p.q_sink.shape[2] = 56;
       }},
  };
  for (const Refusal& refusal : of_ragged) {
    Forward p = ragged();
    refusal.change(p);
    expect_invalid(p, refusal.words);
  }
  const Refusal of_dense[] = {
      {"q [2, 5, 8, 64] without q_begin holds 2 sequences; batch is 3", [](Forward& p) { p.batch = 3; }},
      {"has 5 tokens for each sequence; max_q_tokens is 4", [](Forward& p) { p.max_q_tokens = 4; }},
      {"has 100 tokens for each sequence; max_kv_tokens is 99", [](Forward& p) { p.max_kv_tokens = 99; }},
      {"max_kv_tokens is 101",
       [](Forward& p) {
         p.kv_tokens = somewhere<const std::int32_t>();
         p.max_kv_tokens = 101;
       }},
      {"k [3, 100, 2, 64] without kv_begin or page_table holds 3 sequences",
       [](Forward& p) { p.k.shape[0] = p.v.shape[0] = 3; }},
  };
  for (const Refusal& refusal : of_dense) {
    Forward p = dense();
    refusal.change(p);
    expect_invalid(p, refusal.words);
  }
  const Refusal of_paged[] = {
      {"kv_tokens is missing", [](Forward& p) { p.kv_tokens = nullptr; }},
      {"page_table_stride is 6; 100 tokens on pages of 16 need 7",
       [](Forward& p) { p.page_table_stride = 6; }},
      {"page_table_stride is -1", [](Forward& p) { p.page_table_stride = -1; }},
      {"pages without tokens", [](Forward& p) { p.k.shape[1] = p.v.shape[1] = 0; }},
  };
  for (const Refusal& refusal : of_paged) {
    Forward p = paged();
    refusal.change(p);
    expect_invalid(p, refusal.words);
  }
}

Backward backward_of(const Forward& forward) {
  Backward p;
  p.forward = forward;
  p.forward.lse_with_sink = somewhere<float>();
  const auto written = [](const ConstView& view) {
    return View{somewhere<void>(), view.dtype, view.rank, view.shape, view.stride};
  };
  p.dout = forward.out;
  p.dq = written(forward.q);
  p.dk = written(forward.k);
  p.dv = written(forward.v);
  return p;
}

TEST(CudaBackwardSupport, TakesWhatForwardTakes) {
  for (const Forward& forward : {dense(), ragged()}) EXPECT_EQ(supported(backward_of(forward)), "");
  Backward p = backward_of(ragged());
  p.forward.sink_logit = somewhere<const float>();
  p.dsink_logit = somewhere<float>();
  p.dlse_with_sink = somewhere<const float>();
  p.forward.spec.mask = {.window = 7, .sink_tokens = 2};
  p.forward.spec.softcap = 3;
  EXPECT_EQ(supported(p), "");
}

TEST(CudaBackwardSupport, RefusesByName) {
  EXPECT_THAT(supported(backward_of(paged())),
              HasSubstr("keys are paged; backward on sm_90 has contiguous keys"));
  Backward p = backward_of(dense());
  p.forward.q_sink = p.forward.q;
  EXPECT_THAT(supported(p), HasSubstr("q_sink has no backward"));
  p = backward_of(dense());
  p.dk.dtype = DType::f32;
  EXPECT_THAT(supported(p),
              HasSubstr("dk is f32 and q is bf16; backward on sm_90 needs one type for all tensors"));
  p = backward_of(dense());
  p.dv.stride[1] += 1;
  EXPECT_THAT(supported(p), HasSubstr("dv has stride"));
  p = backward_of(dense());
  p.dout.data = somewhere<const void>(0x10008);
  EXPECT_THAT(supported(p), HasSubstr("dout starts at address"));
}

TEST(CudaBackwardSupport, ContradictionsAreErrors) {
  const auto message = [](const Backward& p) -> std::string {
    try {
      supported(p);
    } catch (const Error& error) {
      return error.code() == ErrorCode::invalid_argument ? error.what() : "another code";
    }
    return "";
  };
  Backward p = backward_of(dense());
  p.forward.lse_with_sink = nullptr;
  EXPECT_THAT(message(p), HasSubstr("lse_with_sink is missing"));
  p = backward_of(dense());
  p.dsink_logit = somewhere<float>();
  EXPECT_THAT(message(p), HasSubstr("dsink_logit must be given exactly when sink_logit is"));
  p = backward_of(dense());
  p.dk.shape[1] -= 1;
  EXPECT_THAT(message(p), HasSubstr("dk [2, 99, 2, 64] and k [2, 100, 2, 64] must have the same shape"));
  p = backward_of(dense());
  p.dq.stride[1] = 0;
  EXPECT_THAT(message(p), HasSubstr("dq has stride 0"));
  p = backward_of(dense());
  p.dout.rank = 3;
  EXPECT_THAT(message(p), HasSubstr("dout has 3 dimensions"));
}

}  // namespace
}  // namespace basin::attention::cuda
