#include "attention/cuda/check.h"

#include <fmt/format.h>

#include "attention/checks.h"

namespace basin::attention::cuda {
namespace {

void check_view(const char* what, const ConstView& view, int rank) {
  if (view.rank != rank) {
    refuse(fmt::format("{} has {} dimensions {}; needed are {}", what, view.rank, shape_text(view), rank));
  }
  for (int i = 0; i < rank; ++i) {
    const auto axis = static_cast<std::size_t>(i);
    if (view.shape[axis] < 0) refuse(fmt::format("{} has a negative extent: {}", what, shape_text(view)));
    if (view.stride[axis] < 0) {
      refuse(fmt::format("{} has stride {} in dimension {}; strides must be 0 or more", what,
                         view.stride[axis], i));
    }
  }
  const auto last = static_cast<std::size_t>(rank - 1);
  if (view.stride[last] != 1 && view.shape[last] > 1) {
    refuse(
        fmt::format("{} has stride {} in its last dimension; it must be dense (1)", what, view.stride[last]));
  }
  if (!is_empty(view) && view.data == nullptr)
    refuse(fmt::format("{} of shape {} has no data", what, shape_text(view)));
}

void check_written_view(const char* what, const ConstView& view, int rank) {
  check_view(what, view, rank);
  if (is_empty(view)) return;
  for (std::size_t i = 0; i < static_cast<std::size_t>(rank); ++i) {
    if (view.stride[i] == 0 && view.shape[i] > 1)
      refuse(fmt::format("{} has stride 0 in dimension {}: its elements would overlap", what, i));
  }
}

// Every extent but the last.
void check_same_rows(const char* a_name, const ConstView& a, const char* b_name, const ConstView& b) {
  for (std::size_t i = 0; i + 1 < static_cast<std::size_t>(a.rank); ++i) {
    if (a.shape[i] != b.shape[i]) {
      refuse(fmt::format("{} {} and {} {} differ in more than the head size", a_name, shape_text(a), b_name,
                         shape_text(b)));
    }
  }
}

void check_same_heads(const char* a_name, const ConstView& a, const char* b_name, const ConstView& b) {
  const auto a_heads = static_cast<std::size_t>(a.rank - 2), b_heads = static_cast<std::size_t>(b.rank - 2);
  if (a.shape[a_heads] != b.shape[b_heads] || a.shape[a_heads + 1] != b.shape[b_heads + 1])
    refuse(fmt::format("{} {} and {} {} have different heads or head sizes", a_name, shape_text(a), b_name,
                       shape_text(b)));
  if (b.shape[b_heads] < 1 || b.shape[b_heads + 1] < 1)
    refuse(fmt::format("{} {} must have heads, and elements in them", b_name, shape_text(b)));
}

void check_same_shape(const char* a_name, const ConstView& a, const char* b_name, const ConstView& b) {
  for (std::size_t i = 0; i < static_cast<std::size_t>(a.rank); ++i) {
    if (a.shape[i] != b.shape[i]) {
      refuse(fmt::format("{} {} and {} {} must have the same shape", a_name, shape_text(a), b_name,
                         shape_text(b)));
    }
  }
}

void check_queries(const Forward& p) {
  const bool dense = p.q_begin == nullptr;
  const int rank = dense ? 4 : 3;
  check_view("q", p.q, rank);
  if (p.q_sink) {
    check_view("q_sink", p.q_sink, rank);
    check_same_rows("q_sink", p.q_sink, "q", p.q);
    if (p.q_sink.shape[static_cast<std::size_t>(rank - 1)] != p.q.shape[static_cast<std::size_t>(rank - 1)])
      refuse(
          fmt::format("q_sink {} and q {} must have the same shape", shape_text(p.q_sink), shape_text(p.q)));
  }
  check_written_view("out", p.out, rank);
  check_same_rows("out", p.out, "q", p.q);
  if (p.max_q_tokens < 0) refuse(fmt::format("max_q_tokens is {}; it must be 0 or more", p.max_q_tokens));
  if (!dense) return;
  if (p.q.shape[0] != p.batch)
    refuse(fmt::format("q {} without q_begin holds {} sequences; batch is {}", shape_text(p.q), p.q.shape[0],
                       p.batch));
  if (p.q.shape[1] != p.max_q_tokens)
    refuse(fmt::format("q {} without q_begin has {} tokens for each sequence; max_q_tokens is {}",
                       shape_text(p.q), p.q.shape[1], p.max_q_tokens));
}

void check_keys(const Forward& p) {
  const bool paged = p.page_table != nullptr, ragged = p.kv_begin != nullptr;
  if (paged && ragged) refuse("page_table and kv_begin are both given: keys are either paged or ragged");
  const int rank = ragged ? 3 : 4;
  check_view("k", p.k, rank);
  check_view("v", p.v, rank);
  check_same_rows("k", p.k, "v", p.v);
  if (p.max_kv_tokens < 0) refuse(fmt::format("max_kv_tokens is {}; it must be 0 or more", p.max_kv_tokens));
  if (paged) {
    if (p.kv_tokens == nullptr) refuse("kv_tokens is missing; paged keys need it");
    if (p.k.shape[1] < 1) refuse(fmt::format("k {} has pages without tokens", shape_text(p.k)));
    if (p.page_table_stride < 0)
      refuse(fmt::format("page_table_stride is {}; it must be 0 or more", p.page_table_stride));
    const std::int64_t pages = p.max_kv_tokens / p.k.shape[1] + (p.max_kv_tokens % p.k.shape[1] != 0);
    if (pages > p.page_table_stride) {
      refuse(fmt::format("page_table_stride is {}; {} tokens on pages of {} need {}", p.page_table_stride,
                         p.max_kv_tokens, p.k.shape[1], pages));
    }
  } else if (!ragged) {
    if (p.k.shape[0] != p.batch)
      refuse(fmt::format("k {} without kv_begin or page_table holds {} sequences; batch is {}",
                         shape_text(p.k), p.k.shape[0], p.batch));
    // Without kv_tokens every sequence has all of them.
    if (p.max_kv_tokens > p.k.shape[1] || (p.kv_tokens == nullptr && p.max_kv_tokens != p.k.shape[1]))
      refuse(
          fmt::format("k {} without kv_begin or page_table has {} tokens for each sequence; "
                      "max_kv_tokens is {}",
                      shape_text(p.k), p.k.shape[1], p.max_kv_tokens));
  }
}

}  // namespace

void check(const Forward& p) {
  check_spec(p.spec);
  if (p.batch < 1) refuse(fmt::format("batch is {}; it must be 1 or more", p.batch));
  check_queries(p);
  check_keys(p);
  const auto q_heads = static_cast<std::size_t>(p.q.rank - 2),
             kv_heads = static_cast<std::size_t>(p.k.rank - 2);
  const std::int64_t h_q = p.q.shape[q_heads], h_kv = p.k.shape[kv_heads];
  if (h_q < 1 || h_kv < 1 || h_q % h_kv != 0) {
    refuse(fmt::format(
        "{} query heads over {} key heads; the first must be a positive multiple of the second", h_q, h_kv));
  }
  const std::int64_t d_qk = p.q.shape[q_heads + 1], d_v = p.v.shape[kv_heads + 1];
  if (p.k.shape[kv_heads + 1] != d_qk)
    refuse(fmt::format("q {} and k {} have different head sizes", shape_text(p.q), shape_text(p.k)));
  if (p.out.shape[q_heads + 1] != d_v)
    refuse(fmt::format("out {} and v {} have different head sizes", shape_text(p.out), shape_text(p.v)));
  if (d_qk < 1 || d_v < 1) refuse("head sizes must be at least 1");
}

void check(const Append& a) {
  if (a.batch < 1) refuse(fmt::format("batch is {}; it must be 1 or more", a.batch));
  const int rank = a.new_begin == nullptr ? 4 : 3;
  check_view("new_k", a.new_k, rank);
  check_view("new_v", a.new_v, rank);
  check_same_rows("new_k", a.new_k, "new_v", a.new_v);
  if (rank == 4 && a.new_k.shape[0] != a.batch)
    refuse(fmt::format("new_k {} without new_begin holds {} sequences; batch is {}", shape_text(a.new_k),
                       a.new_k.shape[0], a.batch));
  check_written_view("k", a.k, 4);
  check_written_view("v", a.v, 4);
  check_same_rows("k", a.k, "v", a.v);
  if (a.k.shape[1] < 1) refuse(fmt::format("k {} has pages without tokens", shape_text(a.k)));
  if (a.kv_tokens == nullptr) refuse("kv_tokens is missing");
  if (a.page_table == nullptr) refuse("page_table is missing; keys are appended to pages only");
  if (a.page_table_stride < 0)
    refuse(fmt::format("page_table_stride is {}; it must be 0 or more", a.page_table_stride));
  check_same_heads("new_k", a.new_k, "k", a.k);
  check_same_heads("new_v", a.new_v, "v", a.v);
}

void check(const Backward& p) {
  check(p.forward);
  const int q_rank = p.forward.q.rank, kv_rank = p.forward.k.rank;
  check_view("dout", p.dout, q_rank);
  check_same_shape("dout", p.dout, "out", p.forward.out);
  check_written_view("dq", p.dq, q_rank);
  check_same_shape("dq", p.dq, "q", p.forward.q);
  check_written_view("dk", p.dk, kv_rank);
  check_same_shape("dk", p.dk, "k", p.forward.k);
  check_written_view("dv", p.dv, kv_rank);
  check_same_shape("dv", p.dv, "v", p.forward.v);
  if (p.forward.lse_with_sink == nullptr) refuse("lse_with_sink is missing; forward writes it for backward");
  if ((p.forward.sink_logit == nullptr) != (p.dsink_logit == nullptr))
    refuse("dsink_logit must be given exactly when sink_logit is");
}

}  // namespace basin::attention::cuda
