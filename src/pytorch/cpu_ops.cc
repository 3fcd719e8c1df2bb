// The operators on host memory: float32, float16 and bfloat16 by the SIMD path, float64 by the reference.
#include <unistd.h>

#include <limits>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "basin/attention/attention.h"
#include "basin/attention/reference.h"
#include "basin/attention/support.h"
#include "pytorch/tensors.h"

namespace basin::pytorch {
namespace {

using attention::Sequence;

// As many threads as PyTorch uses; calls take turns. After a fork the threads of the parent are gone, and so is their pool.
class Threads {
 public:
  template <typename Body>
  void run(const Body& body) {
    const std::lock_guard lock(mutex_);
    const int wanted = static_cast<int>(torch::stable::get_num_threads());
    if (owner_ != getpid()) static_cast<void>(pool_.release());
    if (!pool_ || pool_->threads() != wanted) pool_ = std::make_unique<ThreadPool>(wanted);
    owner_ = getpid();
    body(*pool_);
  }

 private:
  std::mutex mutex_;
  std::unique_ptr<ThreadPool> pool_;
  pid_t owner_ = getpid();
};

Threads& threads() {
  static Threads* const all = new Threads;  // never destroyed: a call may outlive static objects
  return *all;
}

void refuse(const std::string& what) {
  throw Error(ErrorCode::invalid_argument, what);
}

// Rows [rows, heads, d] of a dense [b, s, heads, d] or ragged tensor, and who owns their memory.
struct Rows {
  Tensor tensor;
  View view;
};

// Whether the sequences of a dense tensor lie as if they were one. Strides of dimensions of one element mean nothing.
bool sequences_touch(const Tensor& dense) {
  return dense.size(0) <= 1 || dense.size(1) == 1 || dense.numel() == 0 ||
         dense.stride(0) == dense.size(1) * dense.stride(1);
}

Rows rows_of(const Tensor& given) {
  Rows rows{dense_last(given), {}};
  if (given.dim() == 4 && !sequences_touch(rows.tensor)) rows.tensor = torch::stable::contiguous(given);
  rows.view = view_as<void*>(rows.tensor);
  if (rows.view.rank == 3) return rows;
  const View v = rows.view;
  rows.view.rank = 3;
  rows.view.shape = {v.shape[0] * v.shape[1], v.shape[2], v.shape[3], 0};
  rows.view.stride = {v.shape[1] == 1 ? v.stride[0] : v.stride[1], v.stride[2], v.stride[3], 0};
  return rows;
}

// Where the sequences of a call lie, as the operators are told.
struct Layout {
  const std::optional<Tensor>&q_begin, &kv_begin, &kv_tokens;
  const std::optional<Tensor> page_table = std::nullopt;
};

std::int64_t batch_size(const Tensor& q, const Layout& layout) {
  return layout.q_begin ? layout.q_begin->size(0) - 1 : q.size(0);
}

std::vector<Sequence> sequences_of(const Tensor& q, const Tensor& k, const Layout& layout) {
  const std::int32_t* q_begin = int32_data("q_begin", layout.q_begin, 1);
  const std::int32_t* kv_begin = int32_data("kv_begin", layout.kv_begin, 1);
  const std::int32_t* kv_tokens = int32_data("kv_tokens", layout.kv_tokens, 1);
  const std::int32_t* page_table = int32_data("page_table", layout.page_table, 2);
  const bool paged = page_table != nullptr;
  if ((q.dim() == 3) != (q_begin != nullptr))
    refuse("q_begin goes with q of three dimensions, and only with it");
  if ((k.dim() == 3) != (kv_begin != nullptr))
    refuse("kv_begin goes with k of three dimensions, and only with it");
  if (paged && kv_tokens == nullptr) refuse("page_table needs kv_tokens");
  const std::int64_t count = batch_size(q, layout);
  const auto check_count = [](const char* name, const std::optional<Tensor>& tensor, std::int64_t want) {
    if (tensor && tensor->size(0) != want)
      refuse(std::string(name) + " must have " + std::to_string(want) + " entries");
  };
  check_count("kv_begin", layout.kv_begin, count + 1);
  check_count("kv_tokens", layout.kv_tokens, count);
  check_count("page_table", layout.page_table, count);
  if (!paged && k.dim() == 4 && k.size(0) != count) refuse("q and k have different batch sizes");

  std::vector<Sequence> sequences(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    Sequence& s = sequences[static_cast<std::size_t>(i)];
    s.q_begin = q_begin != nullptr ? q_begin[i] : i * q.size(1);
    s.q_tokens = q_begin != nullptr ? q_begin[i + 1] - q_begin[i] : q.size(1);
    std::int64_t room = k.size(1);
    if (kv_begin != nullptr) {
      s.kv_begin = kv_begin[i];
      room = kv_begin[i + 1] - kv_begin[i];
    } else if (paged) {
      room = layout.page_table->size(1) * k.size(1);
      s.pages = page_table + i * layout.page_table->size(1);
    } else {
      s.kv_begin = i * k.size(1);
    }
    s.kv_tokens = kv_tokens != nullptr ? kv_tokens[i] : room;
    // Ragged keys with kv_tokens may end beyond the next kv_begin; the check of the problem holds them to the tensor.
    if (kv_begin == nullptr && s.kv_tokens > room) {
      refuse("sequence " + std::to_string(i) + " has " + std::to_string(s.kv_tokens) + " keys and room for " +
             std::to_string(room));
    }
  }
  return sequences;
}

// Keys and values of a forward pass. Dense ones whose sequences do not touch (part of a longer cache) are taken as pages of
// one sequence each, so that a cache is never copied.
class Keys {
 public:
  Keys(const Tensor& k, const Tensor& v, bool paged, std::vector<Sequence>& sequences)
      : k_(dense_last(k)), v_(dense_last(v)) {
    if (!paged && k.dim() == 4 && !(sequences_touch(k_) && sequences_touch(v_))) {
      for (std::size_t i = 0; i < sequences.size(); ++i) page_.push_back(static_cast<std::int32_t>(i));
      for (std::size_t i = 0; i < sequences.size(); ++i) sequences[i].pages = &page_[i];
      paged = true;
    }
    k_view_ = paged ? view_as<void*>(k_) : rows_of(k_).view;
    v_view_ = paged ? view_as<void*>(v_) : rows_of(v_).view;
  }
  Keys(const Keys&) = delete;
  Keys& operator=(const Keys&) = delete;

  const View& k() const { return k_view_; }
  const View& v() const { return v_view_; }

 private:
  Tensor k_, v_;
  View k_view_, v_view_;
  std::vector<std::int32_t> page_;  // of every sequence
};

attention::Spec spec_of(double scale, double softcap, bool causal, std::int64_t window,
                        std::int64_t window_right, std::int64_t sink_tokens) {
  attention::Spec spec;
  spec.mask = {causal, window, window_right, sink_tokens};
  spec.scale = scale;
  spec.softcap = softcap;
  return spec;
}

bool in_double(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double;
}

ScalarType real_type(const Tensor& q) {
  return in_double(q) ? ScalarType::Double : ScalarType::Float;
}

// One number per query and head: outside [b, h, s] or [h, total], in the library [h, rows of q].
template <typename Real>
class PerRow {
 public:
  explicit PerRow(const Tensor& q)
      : heads_(q.size(-2)),
        batch_(q.dim() == 4 ? q.size(0) : 1),
        tokens_(q.dim() == 4 ? q.size(1) : q.size(0)) {}

  /// Memory in the library's layout: that of the tensor where both agree. Call `store` when it has been written.
  Real* buffer(const Tensor& tensor) {
    outside_ = static_cast<Real*>(tensor.data_ptr());
    if (batch_ == 1) return outside_;
    memory_.resize(static_cast<std::size_t>(heads_ * batch_ * tokens_));
    return memory_.data();
  }
  Real* load(const Tensor& tensor) {
    Real* inside = buffer(tensor);
    if (batch_ > 1) each([](Real& out, Real& in) { in = out; });
    return inside;
  }
  void store() {
    if (batch_ > 1) each([](Real& out, Real& in) { out = in; });
  }

 private:
  template <typename Body>
  void each(const Body& body) {
    for (std::int64_t i = 0; i < batch_; ++i) {
      for (std::int64_t h = 0; h < heads_; ++h) {
        Real* out = outside_ + (i * heads_ + h) * tokens_;
        Real* in = memory_.data() + (h * batch_ + i) * tokens_;
        for (std::int64_t t = 0; t < tokens_; ++t) body(out[t], in[t]);
      }
    }
  }

  std::int64_t heads_, batch_, tokens_;
  Real* outside_ = nullptr;
  std::vector<Real> memory_;
};

template <typename Real>
const Real* sink_data(const std::optional<Tensor>& sink, const Tensor& q) {
  if (!sink) return nullptr;
  if (sink->scalar_type() != real_type(q) || sink->dim() != 1 || sink->size(0) != q.size(-2) ||
      !sink->is_contiguous())
    refuse(
        "sink_logit must be a contiguous tensor of one float32 (float64 for float64 tensors) per query head");
  return static_cast<const Real*>(sink->data_ptr());
}

template <typename Real>
void run_forward(attention::Forward& problem, const std::optional<Tensor>& sink, const Tensor& q,
                 const Tensor& lse) {
  PerRow<Real> lse_rows(q);
  if constexpr (sizeof(Real) == sizeof(double)) {
    attention::check(problem);
    attention::reference::Doubles doubles;
    doubles.sink_logit = sink_data<double>(sink, q);
    doubles.lse_with_sink = lse_rows.buffer(lse);
    attention::reference::forward(problem, attention::reference::Precision::f64, doubles);
  } else {
    problem.sink_logit = sink_data<float>(sink, q);
    problem.lse_with_sink = lse_rows.buffer(lse);
    threads().run([&](ThreadPool& pool) { attention::forward(problem, attention::Backend::cpu, pool); });
  }
  lse_rows.store();
}

std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, std::optional<Tensor> sink_logit,
                                   std::optional<Tensor> q_begin, std::optional<Tensor> kv_begin,
                                   std::optional<Tensor> kv_tokens, std::optional<Tensor> page_table,
                                   std::int64_t, std::int64_t, double scale, double softcap, bool causal,
                                   std::int64_t window, std::int64_t window_right, std::int64_t sink_tokens) {
  std::vector<Sequence> sequences = sequences_of(q, k, {q_begin, kv_begin, kv_tokens, page_table});
  const Keys keys(k, v, page_table.has_value(), sequences);
  const Rows q_rows = rows_of(q);
  std::vector<std::int64_t> shape(q.sizes().begin(), q.sizes().end());
  shape.back() = v.size(-1);
  const bool ragged = q.dim() == 3;  // there may be rows of no sequence
  Tensor out = ragged ? torch::stable::new_zeros(q, shape) : torch::stable::new_empty(q, shape);
  std::vector<std::int64_t> lse_shape = {q.size(-2), q.size(0)};
  if (!ragged) lse_shape = {q.size(0), q.size(2), q.size(1)};
  Tensor lse = torch::stable::new_empty(q, lse_shape, real_type(q));
  if (ragged) torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());

  attention::Forward problem;
  problem.spec = spec_of(scale, softcap, causal, window, window_right, sink_tokens);
  problem.sequences = sequences;
  problem.q = q_rows.view;
  problem.k = keys.k();
  problem.v = keys.v();
  problem.out = rows_of(out).view;
  if (in_double(q)) {
    run_forward<double>(problem, sink_logit, q, lse);
  } else {
    run_forward<float>(problem, sink_logit, q, lse);
  }
  return {out, lse};
}

template <typename Real>
void run_backward(attention::Backward& problem, const std::optional<Tensor>& sink, const Tensor& q,
                  const Tensor& lse, const std::optional<Tensor>& dlse, const Tensor& dsink) {
  PerRow<Real> dlse_rows(q);
  const Real* dlse_data = dlse ? dlse_rows.load(*dlse) : nullptr;
  const Real* sink_logit = sink_data<Real>(sink, q);
  Real* dsink_logit = sink ? static_cast<Real*>(dsink.data_ptr()) : nullptr;
  if constexpr (sizeof(Real) == sizeof(double)) {
    attention::check(problem);
    attention::reference::Doubles doubles;
    doubles.sink_logit = sink_logit;
    doubles.dlse_with_sink = dlse_data;
    doubles.dsink_logit = dsink_logit;
    attention::reference::backward(problem, doubles);
  } else {
    PerRow<float> lse_rows(q);
    problem.lse_with_sink = lse_rows.load(lse);
    problem.sink_logit = sink_logit;
    problem.dlse_with_sink = dlse_data;
    problem.dsink_logit = dsink_logit;
    threads().run([&](ThreadPool& pool) { attention::backward(problem, attention::Backend::cpu, pool); });
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
    std::optional<Tensor> sink_logit, std::optional<Tensor> q_begin, std::optional<Tensor> kv_begin,
    std::optional<Tensor> kv_tokens, std::int64_t, std::int64_t, double scale, double softcap, bool causal,
    std::int64_t window, std::int64_t window_right, std::int64_t sink_tokens) {
  const std::vector<Sequence> sequences = sequences_of(q, k, {q_begin, kv_begin, kv_tokens});
  const Rows q_rows = rows_of(q), k_rows = rows_of(k), v_rows = rows_of(v), dout_rows = rows_of(dout),
             out_rows = rows_of(out);
  // Rows and keys of no sequence get no gradient.
  const auto gradient = [](const Tensor& of, bool whole) {
    return whole ? torch::stable::new_empty(of, of.sizes()) : torch::stable::new_zeros(of, of.sizes());
  };
  Tensor dq = gradient(q, !q_begin);
  Tensor dk = gradient(k, !kv_begin && !kv_tokens);
  Tensor dv = gradient(v, !kv_begin && !kv_tokens);
  const std::int64_t sinks = sink_logit ? q.size(-2) : 0;
  Tensor dsink = torch::stable::new_zeros(q, {sinks}, real_type(q));
  lse = torch::stable::contiguous(lse);
  if (dlse) dlse = torch::stable::contiguous(*dlse);

  attention::Backward problem;
  problem.spec = spec_of(scale, softcap, causal, window, window_right, sink_tokens);
  problem.sequences = sequences;
  problem.q = q_rows.view;
  problem.k = k_rows.view;
  problem.v = v_rows.view;
  problem.dout = dout_rows.view;
  problem.dq = rows_of(dq).view;
  problem.dk = rows_of(dk).view;
  problem.dv = rows_of(dv).view;
  if (in_double(q)) {
    run_backward<double>(problem, sink_logit, q, lse, dlse, dsink);
  } else {
    problem.out = out_rows.view;
    run_backward<float>(problem, sink_logit, q, lse, dlse, dsink);
  }
  return {dq, dk, dv, dsink};
}

}  // namespace
}  // namespace basin::pytorch

STABLE_TORCH_LIBRARY_IMPL(basin, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&basin::pytorch::forward));
  m.impl("attention_backward", TORCH_BOX(&basin::pytorch::backward));
}
