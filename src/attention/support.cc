#include "basin/attention/support.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "attention/checks.h"
#include "basin/attention/cpu.h"
#include "basin/attention/mask.h"
#include "basin/base/error.h"

namespace basin::attention {
namespace {

template <typename Pointer>
void check_view(const char* what, const BasicView<Pointer>& view, int low_rank, int high_rank) {
  if (view.rank < low_rank || view.rank > high_rank) {
    refuse(fmt::format("{} has {} dimensions {}; needed are {}{}", what, view.rank, shape_text(view),
                       low_rank, low_rank == high_rank ? "" : fmt::format(" or {}", high_rank)));
  }
  bool empty = false;
  for (int i = 0; i < view.rank; ++i) {
    const std::int64_t extent = view.shape[static_cast<std::size_t>(i)];
    if (extent < 0) refuse(fmt::format("{} has a negative extent: {}", what, shape_text(view)));
    if (extent == 0) empty = true;
    if (view.stride[static_cast<std::size_t>(i)] < 0) {
      refuse(fmt::format("{} has stride {} in dimension {}; strides must be 0 or more", what,
                         view.stride[static_cast<std::size_t>(i)], i));
    }
  }
  if (!empty && view.data == nullptr)
    refuse(fmt::format("{} of shape {} has no data", what, shape_text(view)));
  switch (view.dtype) {
    case DType::f64:
    case DType::f32:
    case DType::f16:
    case DType::bf16:
      break;
    default:
      refuse(fmt::format("{} has dtype {}; allowed are f64, f32, f16 and bf16", what, name(view.dtype)));
  }
  if (view.stride[static_cast<std::size_t>(view.rank - 1)] != 1 &&
      view.shape[static_cast<std::size_t>(view.rank - 1)] > 1) {
    refuse(fmt::format("{} has stride {} in its last dimension; it must be dense (1)", what,
                       view.stride[static_cast<std::size_t>(view.rank - 1)]));
  }
}

// Two elements of an output must not share memory.
void check_output(const char* what, const View& view, int low_rank, int high_rank) {
  check_view(what, view, low_rank, high_rank);
  for (std::size_t i = 0; i < static_cast<std::size_t>(view.rank); ++i) {
    if (view.stride[i] == 0 && view.shape[i] > 1)
      refuse(fmt::format("{} has stride 0 in dimension {}: its elements would overlap", what, i));
  }
}

template <typename A, typename B>
void check_same_shape(const char* a_name, const BasicView<A>& a, const char* b_name, const BasicView<B>& b) {
  bool same = a.rank == b.rank;
  for (int i = 0; same && i < a.rank; ++i)
    same = a.shape[static_cast<std::size_t>(i)] == b.shape[static_cast<std::size_t>(i)];
  if (!same)
    refuse(fmt::format("{} {} and {} {} must have the same shape", a_name, shape_text(a), b_name,
                       shape_text(b)));
}

// Every page that holds a key which some query of the sequence sees must be a page of the tensor.
void check_pages(const Mask& mask, const Sequence& sequence, std::size_t index, std::int64_t page_tokens,
                 std::int64_t pages) {
  if (sequence.kv_tokens == 0) return;
  if (sequence.pages == nullptr)
    refuse(fmt::format("sequence {} has no page table although k and v are paged", index));
  if (sequence.q_tokens == 0) return;
  const auto check_range = [&](KeyRange keys) {
    if (keys.size() == 0) return;
    for (std::int64_t n = keys.begin / page_tokens; n <= (keys.end - 1) / page_tokens; ++n) {
      if (sequence.pages[n] < 0 || sequence.pages[n] >= pages) {
        refuse(fmt::format(
            "sequence {}: page table entry {} is {}, but its keys are visible and there are {} pages", index,
            n, sequence.pages[n], pages));
      }
    }
  };
  // Windows move forward with the query, so the first and the last query bound what any of them sees. A first
  // query without keys stands before key 0; a later one then stands at key 0.
  const VisibleKeys first = visible_keys(mask, query_position(sequence, 0), sequence.kv_tokens);
  const VisibleKeys last =
      visible_keys(mask, query_position(sequence, sequence.q_tokens - 1), sequence.kv_tokens);
  check_range(first.sinks);
  check_range(last.sinks);
  const std::int64_t begin = first.recent.size() > 0 ? std::min(first.recent.begin, last.recent.begin) : 0;
  check_range({begin, std::max(first.recent.end, last.recent.end)});
}

struct Shapes {
  std::int64_t total_q, total_kv, page_tokens, pages;
};

Shapes check_tensors(const ConstView& q, const ConstView& q_sink, const ConstView& k, const ConstView& v) {
  check_view("q", q, 3, 3);
  if (q_sink) {
    check_view("q_sink", q_sink, 3, 3);
    check_same_shape("q_sink", q_sink, "q", q);
  }
  check_view("k", k, 3, 4);
  check_view("v", v, 3, 4);
  if (k.rank != v.rank)
    refuse(
        fmt::format("k {} and v {} must both be paged or both be contiguous", shape_text(k), shape_text(v)));
  const auto head_axis = static_cast<std::size_t>(k.rank - 2);
  for (std::size_t i = 0; i <= head_axis; ++i) {
    if (k.shape[i] != v.shape[i])
      refuse(fmt::format("k {} and v {} differ in more than the head size", shape_text(k), shape_text(v)));
  }
  if (q.shape[2] != k.shape[head_axis + 1]) {
    refuse(fmt::format("q {} and k {} have different head sizes", shape_text(q), shape_text(k)));
  }
  const std::int64_t h_q = q.shape[1], h_kv = k.shape[head_axis];
  if (h_q < 1 || h_kv < 1 || h_q % h_kv != 0) {
    refuse(fmt::format(
        "{} query heads over {} key heads; the first must be a positive multiple of the second", h_q, h_kv));
  }
  if (q.shape[2] < 1 || v.shape[head_axis + 1] < 1) refuse("head sizes must be at least 1");
  const bool paged = k.rank == 4;
  if (paged && k.shape[1] < 1) refuse("pages must hold at least one token");
  return {q.shape[0], k.shape[0], paged ? k.shape[1] : 0, paged ? k.shape[0] : 0};
}

void check_sequences(const Mask& mask, std::span<const Sequence> sequences, const Shapes& shapes) {
  std::vector<KeyRange> queries;
  for (std::size_t s = 0; s < sequences.size(); ++s) {
    const Sequence& sequence = sequences[s];
    if (sequence.q_begin < 0 || sequence.q_tokens < 0 ||
        sequence.q_begin > shapes.total_q - sequence.q_tokens) {
      refuse(fmt::format("sequence {} has queries [{}, {} + {}) of {} rows", s, sequence.q_begin,
                         sequence.q_begin, sequence.q_tokens, shapes.total_q));
    }
    if (sequence.q_tokens > 0) queries.push_back({sequence.q_begin, sequence.q_begin + sequence.q_tokens});
    if (sequence.kv_tokens < 0) refuse(fmt::format("sequence {} has {} keys", s, sequence.kv_tokens));
    if (shapes.page_tokens > 0) {
      check_pages(mask, sequence, s, shapes.page_tokens, shapes.pages);
    } else if (sequence.pages != nullptr) {
      refuse(fmt::format("sequence {} has a page table although k and v are contiguous", s));
    } else if (sequence.kv_begin < 0 || sequence.kv_begin > shapes.total_kv - sequence.kv_tokens) {
      refuse(fmt::format("sequence {} has keys [{}, {} + {}) of {} rows", s, sequence.kv_begin,
                         sequence.kv_begin, sequence.kv_tokens, shapes.total_kv));
    }
  }
  std::sort(queries.begin(), queries.end(), [](KeyRange a, KeyRange b) { return a.begin < b.begin; });
  for (std::size_t n = 1; n < queries.size(); ++n) {
    if (queries[n].begin < queries[n - 1].end)
      refuse(fmt::format("two sequences share query row {}; each row may belong to one", queries[n].begin));
  }
}

}  // namespace

void check(const Forward& p) {
  check_spec(p.spec);
  const Shapes shapes = check_tensors(p.q, p.q_sink, p.k, p.v);
  check_output("out", p.out, 3, 3);
  const std::int64_t d_v = p.v.shape[static_cast<std::size_t>(p.v.rank - 1)];
  if (p.out.shape[0] != p.q.shape[0] || p.out.shape[1] != p.q.shape[1] || p.out.shape[2] != d_v) {
    refuse(
        fmt::format("out is {}; needed is [{}, {}, {}]", shape_text(p.out), p.q.shape[0], p.q.shape[1], d_v));
  }
  check_sequences(p.spec.mask, p.sequences, shapes);
}

void check(const Backward& p) {
  check_spec(p.spec);
  if (p.q_sink) refuse("q_sink has no backward: in-cache positions are for serving");
  const Shapes shapes = check_tensors(p.q, p.q_sink, p.k, p.v);
  check_view("dout", p.dout, 3, 3);
  check_output("dq", p.dq, 3, 3);
  check_output("dk", p.dk, 3, 4);
  check_output("dv", p.dv, 3, 4);
  check_same_shape("dq", p.dq, "q", p.q);
  check_same_shape("dk", p.dk, "k", p.k);
  check_same_shape("dv", p.dv, "v", p.v);
  const std::int64_t d_v = p.v.shape[static_cast<std::size_t>(p.v.rank - 1)];
  if (p.dout.shape[0] != p.q.shape[0] || p.dout.shape[1] != p.q.shape[1] || p.dout.shape[2] != d_v) {
    refuse(fmt::format("dout is {}; needed is [{}, {}, {}]", shape_text(p.dout), p.q.shape[0], p.q.shape[1],
                       d_v));
  }
  if (p.out) {
    check_view("out", p.out, 3, 3);
    check_same_shape("out", p.out, "dout", p.dout);
  }
  if (static_cast<bool>(p.out) != (p.lse_with_sink != nullptr))
    refuse("out and lse_with_sink must be given together");
  if ((p.sink_logit == nullptr) != (p.dsink_logit == nullptr))
    refuse("dsink_logit must be given exactly when sink_logit is");
  check_sequences(p.spec.mask, p.sequences, shapes);
  if (shapes.page_tokens == 0) return;
  // Gradients are written for every key that a page holds, seen or not.
  for (std::size_t n = 0; n < p.sequences.size(); ++n) {
    for (std::int64_t page = 0; page * shapes.page_tokens < p.sequences[n].kv_tokens; ++page) {
      if (p.sequences[n].pages[page] >= shapes.pages) {
        refuse(fmt::format("sequence {}: page table entry {} is {} of {} pages", n, page,
                           p.sequences[n].pages[page], shapes.pages));
      }
    }
  }
}

std::string unsupported_reason(const Forward& problem, Backend backend) {
  return backend == Backend::cpu ? cpu::supported(problem) : std::string();
}

std::string unsupported_reason(const Backward& problem, Backend backend) {
  return backend == Backend::cpu ? cpu::supported(problem) : std::string();
}

void require_supported(const Forward& problem, Backend backend) {
  if (const std::string reason = unsupported_reason(problem, backend); !reason.empty())
    throw Error(ErrorCode::unsupported, reason, "use the reference backend, or convert the tensors");
}

void require_supported(const Backward& problem, Backend backend) {
  if (const std::string reason = unsupported_reason(problem, backend); !reason.empty())
    throw Error(ErrorCode::unsupported, reason, "use the reference backend, or convert the tensors");
}

}  // namespace basin::attention
