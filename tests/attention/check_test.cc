// Problems that contradict themselves are refused with a message that names the field and its values.
#include <gmock/gmock.h>

#include <functional>
#include <limits>

#include "attention/problem.h"
#include "basin/attention/support.h"
#include "basin/base/error.h"

namespace basin::test {
namespace {

using attention::Forward;
using testing::HasSubstr;

struct Broken {
  const char* text;  // what the message must hold
  std::function<void(Forward&)> change;
};

class AttentionCheck : public testing::Test {
 protected:
  void SetUp() override {
    problem_.lengths = {{2, 5}, {1, 3}};
    fill(problem_);
  }
  void expect_refused(const Layout& layout, const Broken& broken) {
    Stored stored(problem_, layout);
    Forward f = stored.forward;
    EXPECT_NO_THROW(attention::check(f));
    broken.change(f);
    ThreadPool pool(1);
    for (const auto backend :
         {attention::Backend::automatic, attention::Backend::reference, attention::Backend::cpu}) {
      try {
        attention::forward(f, backend, pool);
        ADD_FAILURE() << "accepted: " << broken.text;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << broken.text;
        EXPECT_THAT(error.what(), HasSubstr(broken.text));
      }
    }
    for (const double x : stored.output().out) EXPECT_NE(x, 0.0);  // nothing was written
  }
  Problem problem_;
};

TEST_F(AttentionCheck, ForwardContiguous) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::vector<attention::Sequence> sequences;
  const auto with_sequence = [&](attention::Sequence s) {
    return [&sequences, s](Forward& f) {
      sequences = {s};
      f.sequences = sequences;
    };
  };
  static const std::int32_t kPages[4] = {0, 0, 0, 0};
  const std::vector<Broken> cases = {
      {"scale is nan", [&](Forward& f) { f.spec.scale = nan; }},
      {"softcap is -1", [](Forward& f) { f.spec.softcap = -1; }},
      {"softcap is nan", [&](Forward& f) { f.spec.softcap = nan; }},
      {"window is -1", [](Forward& f) { f.spec.mask.window = -1; }},
      {"window_right is -2", [](Forward& f) { f.spec.mask.window_right = -2; }},
      {"sink_tokens is -4", [](Forward& f) { f.spec.mask.sink_tokens = -4; }},
      {"q has 2 dimensions", [](Forward& f) { f.q.rank = 2; }},
      {"k has dtype q8_0", [](Forward& f) { f.k.dtype = DType::q8_0; }},
      {"v has dtype i32", [](Forward& f) { f.v.dtype = DType::i32; }},
      {"q has stride 2 in its last dimension", [](Forward& f) { f.q.stride[2] = 2; }},
      {"v has stride -16", [](Forward& f) { f.v.stride[0] = -16; }},
      {"out has stride 0 in dimension 1", [](Forward& f) { f.out.stride[1] = 0; }},
      {"k of shape [8, 1, 16] has no data", [](Forward& f) { f.k.data = nullptr; }},
      {"q has a negative extent: [-3, 2, 16]", [](Forward& f) { f.q.shape[0] = -3; }},
      {"q [3, 2, 16] and k [8, 1, 32] have different head sizes", [](Forward& f) { f.k.shape[2] = 32; }},
      {"differ in more than the head size", [](Forward& f) { f.v.shape[0] = 9; }},
      {"2 query heads over 3 key heads", [](Forward& f) { f.k.shape[1] = f.v.shape[1] = 3; }},
      {"out is [3, 2, 32]; needed is [3, 2, 16]", [](Forward& f) { f.out.shape[2] = 32; }},
      {"q_sink [3, 2, 8] and q [3, 2, 16]",
       [](Forward& f) {
         f.q_sink = f.q;
         f.q_sink.shape[2] = 8;
       }},
      {"queries [2, 2 + 2) of 3 rows", with_sequence({2, 2, 0, 5, nullptr})},
      {"queries [-1, -1 + 2) of 3 rows", with_sequence({-1, 2, 0, 5, nullptr})},
      {"queries [0, 0 + -1)", with_sequence({0, -1, 0, 5, nullptr})},
      {"queries [1, 1 + 9223372036854775807)",
       with_sequence({1, std::numeric_limits<std::int64_t>::max(), 0, 5, nullptr})},
      {"has -1 keys", with_sequence({0, 1, 0, -1, nullptr})},
      {"keys [4, 4 + 5) of 8 rows", with_sequence({0, 1, 4, 5, nullptr})},
      {"keys [-1, -1 + 5) of 8 rows", with_sequence({0, 1, -1, 5, nullptr})},
      {"page table although k and v are contiguous", with_sequence({0, 1, 0, 5, kPages})},
      {"two sequences share query row 1",
       [&](Forward& f) {
         sequences = {{1, 2, 0, 5, nullptr}, {0, 2, 0, 5, nullptr}};
         f.sequences = sequences;
       }},
  };
  for (const Broken& broken : cases) expect_refused({}, broken);
}

TEST_F(AttentionCheck, ForwardPaged) {
  Layout layout;
  layout.page_tokens = 2;
  std::vector<std::int32_t> table;
  std::vector<attention::Sequence> sequences;
  const auto with_table = [&](std::vector<std::int32_t> pages) {
    return [&, pages](Forward& f) {
      table = pages;
      sequences = {{0, 2, 0, 5, table.data()}};
      f.sequences = sequences;
    };
  };
  expect_refused(layout, {"page table entry 1 is 99", with_table({0, 99, 1})});
  expect_refused(layout, {"page table entry 2 is -1", with_table({0, 1, -1})});
  expect_refused(layout, {"page table entry 0 is -7", with_table({-7, 1, 2})});
  expect_refused(layout, {"has no page table", [&](Forward& f) {
                            sequences = {{0, 2, 0, 5, nullptr}};
                            f.sequences = sequences;
                          }});
  expect_refused(layout,
                 {"pages must hold at least one token", [](Forward& f) { f.k.shape[1] = f.v.shape[1] = 0; }});
  expect_refused(layout, {"must both be paged or both be contiguous", [](Forward& f) { f.k.rank = 3; }});
  // Queries at 3 and 4 with window 2 see keys 2, 3, 4: page 0 is never read, unless a sink token lies there.
  Stored stored(problem_, layout);
  Forward f = stored.forward;
  with_table({-1, 1, 2})(f);
  f.spec.mask.window = 2;
  EXPECT_NO_THROW(attention::check(f));
  f.spec.mask.window = 3;
  EXPECT_THROW(attention::check(f), Error);
  f.spec.mask.window = 2;
  f.spec.mask.sink_tokens = 1;
  EXPECT_THROW(attention::check(f), Error);
}

TEST_F(AttentionCheck, Backward) {
  const Stored stored(problem_, {});
  std::vector<float> memory(1000);
  attention::Backward good;
  good.spec = stored.forward.spec;
  good.sequences = stored.forward.sequences;
  good.q = stored.forward.q;
  good.k = stored.forward.k;
  good.v = stored.forward.v;
  good.dout = contiguous<const void*>(memory.data(), DType::f32, {3, 2, 16});
  good.dq = contiguous<void*>(memory.data(), DType::f32, {3, 2, 16});
  good.dk = contiguous<void*>(memory.data(), DType::f32, {8, 1, 16});
  good.dv = good.dk;
  EXPECT_NO_THROW(attention::check(good));
  const auto expect_refusal = [&](const char* text, const std::function<void(attention::Backward&)>& change) {
    attention::Backward b = good;
    change(b);
    ThreadPool pool(1);
    try {
      attention::backward(b, attention::Backend::automatic, pool);
      ADD_FAILURE() << "accepted: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_THAT(error.what(), HasSubstr(text));
    }
  };
  expect_refusal("q_sink has no backward", [](attention::Backward& b) { b.q_sink = b.q; });
  expect_refusal("dsink_logit must be given exactly when",
                 [&](attention::Backward& b) { b.sink_logit = memory.data(); });
  expect_refusal("dsink_logit must be given exactly when",
                 [&](attention::Backward& b) { b.dsink_logit = memory.data(); });
  expect_refusal("dq [2, 2, 16] and q [3, 2, 16]", [](attention::Backward& b) { b.dq.shape[0] = 2; });
  expect_refusal("dk has stride 0", [](attention::Backward& b) { b.dk.stride[0] = 0; });
  expect_refusal("dout is [3, 2, 8]", [](attention::Backward& b) { b.dout.shape[2] = 8; });
  expect_refusal("out and lse_with_sink must be given together",
                 [&](attention::Backward& b) { b.lse_with_sink = memory.data(); });
  expect_refusal("out [2, 2, 16] and dout [3, 2, 16]", [](attention::Backward& b) {
    b.out = b.dout;
    b.out.shape[0] = 2;
  });
  attention::Backward mixed = good;
  mixed.dout.dtype = DType::bf16;
  EXPECT_THAT(attention::unsupported_reason(mixed, attention::Backend::cpu),
              HasSubstr("f32, f32, f32 and bf16"));
  EXPECT_TRUE(attention::unsupported_reason(mixed, attention::Backend::reference).empty());
  ThreadPool pool(1);
  EXPECT_THROW(attention::backward(mixed, attention::Backend::cpu, pool), Error);
}

TEST_F(AttentionCheck, WhatTheCpuLacksIsRefusedWithWhatItHas) {
  Stored stored(problem_, {.dtype = DType::f64, .out_dtype = DType::f64});
  ThreadPool pool(1);
  EXPECT_TRUE(attention::unsupported_reason(stored.forward, attention::Backend::reference).empty());
  const std::string reason = attention::unsupported_reason(stored.forward, attention::Backend::cpu);
  EXPECT_THAT(reason, HasSubstr("f64"));
  try {
    attention::forward(stored.forward, attention::Backend::cpu, pool);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_EQ(error.what(), reason);
    EXPECT_FALSE(error.hint().empty());
  }
}

}  // namespace
}  // namespace basin::test
