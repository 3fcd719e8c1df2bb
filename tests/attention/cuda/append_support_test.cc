// What appending to pages refuses, and in which words. Looks at host data only, so it needs no device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
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

Append ragged(std::int64_t page_tokens = 16, std::int64_t d_qk = 64, std::int64_t d_v = 64) {
  Append a;
  a.batch = 3;
  a.new_k = contiguous<const void*>(somewhere<const void>(), DType::bf16, {10, 2, d_qk});
  a.new_v = contiguous<const void*>(somewhere<const void>(), DType::bf16, {10, 2, d_v});
  a.new_begin = a.kv_tokens = a.page_table = somewhere<const std::int32_t>();
  a.page_table_stride = 8;
  a.k = contiguous<void*>(somewhere<void>(), DType::bf16, {50, page_tokens, 2, d_qk});
  a.v = contiguous<void*>(somewhere<void>(), DType::bf16, {50, page_tokens, 2, d_v});
  return a;
}

Append dense() {
  Append a = ragged();
  a.new_begin = nullptr;
  a.new_k = a.new_v = contiguous<const void*>(somewhere<const void>(), DType::bf16, {3, 5, 2, 64});
  return a;
}

TEST(AttentionCudaAppendSupport, TakesWhatExists) {
  EXPECT_EQ(supported(dense()), "");
  for (const std::int64_t page_tokens : {1, 7, 16, 100, 256, 1000})
    EXPECT_EQ(supported(ragged(page_tokens)), "");
  for (const std::int64_t d : {8, 64, 192, 576}) EXPECT_EQ(supported(ragged(16, d, 64)), "");
  for (Append a : {dense(), ragged()}) {
    a.new_k.dtype = a.new_v.dtype = a.k.dtype = a.v.dtype = DType::f16;
    EXPECT_EQ(supported(a), "");
  }
  Append none = dense();
  none.new_k = none.new_v = contiguous<const void*>(nullptr, DType::bf16, {3, 0, 2, 64});
  none.k = none.v = contiguous<void*>(nullptr, DType::bf16, {0, 16, 2, 64});
  EXPECT_EQ(supported(none), "");
}

TEST(AttentionCudaAppendSupport, RefusesByNameWhatDoesNotExist) {
  const struct {
    const char* words;
    std::function<void(Append&)> change;
  } cases[] = {
      {"new_v is f32; appending on sm_90 has bf16 and f16", [](Append& a) { a.new_v.dtype = DType::f32; }},
      {"v is f16 and k is bf16", [](Append& a) { a.v.dtype = DType::f16; }},
      {"k has head size 60; appending on sm_90 has multiples of 8",
       [](Append& a) { a.k.shape[3] = a.new_k.shape[2] = 60; }},
      {"k starts at address 0x10008", [](Append& a) { a.k.data = somewhere<void>(0x10008); }},
      {"v has stride 68 in dimension 2", [](Append& a) { a.v.stride[2] = 68; }},
      {"new_k has stride 0 in dimension 1", [](Append& a) { a.new_k.stride[1] = 0; }},
      {"new_k has extent 1073741824", [](Append& a) { a.new_k.shape[0] = a.new_v.shape[0] = 1 << 30; }},
      {"heads of size 64; appending on sm_90 has up to 16777216 elements of a token",
       [](Append& a) { a.new_k.shape[1] = a.new_v.shape[1] = a.k.shape[2] = a.v.shape[2] = 1 << 20; }},
  };
  for (const auto& c : cases) {
    Append a = ragged();
    c.change(a);
    const std::string reason = supported(a);
    EXPECT_THAT(reason, HasSubstr(c.words));
    try {
      append(a, nullptr);
      ADD_FAILURE() << "not refused: " << c.words;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported);
      EXPECT_EQ(error.what(), reason);
    }
  }
}

TEST(AttentionCudaAppendSupport, CountsTheTokensThatOneLaunchHas) {
  Append a = ragged();
  a.new_k.shape[0] = a.new_v.shape[0] = (1 << 30) - 1;
  EXPECT_EQ(supported(a), "");
  a = ragged(16, 1024, 64);  // two pieces and one
  a.new_k.shape[0] = a.new_v.shape[0] = (1 << 30) - 1;
  EXPECT_EQ(supported(a),
            "1073741823 new tokens are more than the 715827882 of these heads that appending on sm_90 has");
}

TEST(AttentionCudaAppendSupport, RefusesContradictions) {
  const struct {
    const char* words;
    std::function<void(Append&)> change;
  } cases[] = {
      {"batch is 0", [](Append& a) { a.batch = 0; }},
      {"new_k has 3 dimensions", [](Append& a) { a.new_begin = nullptr; }},
      {"new_k [10, 2, 64] and new_v [9, 2, 64] differ", [](Append& a) { a.new_v.shape[0] = 9; }},
      {"new_v of shape [10, 2, 64] has no data", [](Append& a) { a.new_v.data = nullptr; }},
      {"k has 3 dimensions", [](Append& a) { a.k.rank = 3; }},
      {"k of shape [50, 16, 2, 64] has no data", [](Append& a) { a.k.data = nullptr; }},
      {"k [50, 16, 2, 64] and v [50, 8, 2, 64] differ", [](Append& a) { a.v.shape[1] = 8; }},
      {"k [50, 0, 2, 64] has pages without tokens", [](Append& a) { a.k.shape[1] = a.v.shape[1] = 0; }},
      {"v has stride 0 in dimension 1: its elements would overlap", [](Append& a) { a.v.stride[1] = 0; }},
      {"new_k [10, 2, 64] and k [50, 16, 4, 64] have different heads",
       [](Append& a) { a.k.shape[2] = a.v.shape[2] = 4; }},
      {"new_v [10, 2, 56] and v [50, 16, 2, 64] have different heads",
       [](Append& a) { a.new_v.shape[2] = 56; }},
      {"must have heads",
       [](Append& a) { a.new_k.shape[1] = a.new_v.shape[1] = a.k.shape[2] = a.v.shape[2] = 0; }},
      {"kv_tokens is missing", [](Append& a) { a.kv_tokens = nullptr; }},
      {"page_table is missing", [](Append& a) { a.page_table = nullptr; }},
      {"page_table_stride is -1", [](Append& a) { a.page_table_stride = -1; }},
  };
  for (const auto& c : cases) {
    Append a = ragged();
    c.change(a);
    try {
      supported(a);
      ADD_FAILURE() << "not refused: " << c.words;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_THAT(error.what(), HasSubstr(c.words));
    }
  }
  Append a = dense();
  a.batch = 4;
  EXPECT_THROW(supported(a), Error);
}

}  // namespace
}  // namespace basin::attention::cuda
