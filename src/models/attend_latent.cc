// Multi-head latent attention, in both of its forms.
//
// A token's latent is [c | k_rope]: c of kv_rank elements, and one rotated key part for all heads. Head h has the keys
// [K_h c | k_rope] and the values V_h c. Expanded, these are formed and kept. Absorbed, the latent is the one key of all heads, read
// by the queries [K_h^T q_nope | q_rope], its first part is the value, and V_h is applied to what attention gives.
#include <algorithm>

#include "basin/attention/sparse.h"
#include "kv/sequence_cache.h"
#include "models/pass.h"
#include "ops/elementwise.h"

namespace basin::models {
namespace {

// Queries [rows, h_q, d], their last d_rope dimensions rotated by `table`, in the dtype of the caches.
class Queries {
 public:
  Queries(Pass& pass, std::int64_t d) : pass_(pass), d_(d) {}

  /// Rotates `q` in place, or a copy of it in `copy`; the result lies in `to`, or where it was rotated.
  void rotate(float* q, std::vector<float>* copy, const ops::RopeTable& table, std::vector<std::byte>& to) {
    const std::int64_t heads = pass_.config.h_q, rows = pass_.rows, d_rope = pass_.config.latent->d_rope;
    if (copy != nullptr)
      q = std::copy_n(q, rows * heads * d_, Workspace::floats(*copy, rows * heads * d_)) - rows * heads * d_;
    View part = contiguous(static_cast<void*>(q), DType::f32, {rows, heads, d_});
    part.data = q + d_ - d_rope;
    part.shape[2] = d_rope;
    pass_.rotation.rope->rotate(part, table, part, pass_.pool);
    auto* out = reinterpret_cast<float*>(Workspace::bytes(to, rows * heads * d_ * 4));
    const bool narrow = pass_.chunks.front().cache->dtype() == DType::bf16;
    pass_.pool.parallel_for(rows, [&](std::int64_t row, int) {
      const std::int64_t begin = row * heads * d_, end = begin + heads * d_;
      if (!narrow) std::copy(q + begin, q + end, out + begin);
      for (std::int64_t i = begin; narrow && i < end; ++i) reinterpret_cast<bf16*>(out)[i] = to_bf16(q[i]);
    });
  }

  ConstView view(const std::vector<std::byte>& rotated, std::int64_t first, std::int64_t tokens) const {
    const DType dtype = pass_.chunks.front().cache->dtype();
    const void* data = rotated.data() + first * pass_.config.h_q * d_ * block_bytes(dtype);
    return contiguous(data, dtype, {tokens, pass_.config.h_q, d_});
  }

 private:
  Pass& pass_;
  std::int64_t d_;
};

// What every form starts from: queries [rows, h_q, d_qk] in work.q and latents [rows, latent] in work.k, not yet rotated, and the
// queries' latent in work.gate (or none).
void project(Pass& pass, const LatentWeights& weights, const float* normed) {
  const ModelConfig& c = pass.config;
  const LatentAttention& latent = *c.latent;
  Workspace& work = pass.work;
  const auto eps = static_cast<float>(c.rms_norm_eps);
  const std::int64_t rows = pass.rows;
  float* q = Workspace::floats(work.q, rows * c.h_q * latent.d_qk());
  float* kv = Workspace::floats(work.k, rows * latent.latent());
  const ops::LinearOutput keys = weights.kv_a.into(kv), queries = weights.q.into(q);
  ops::linear(normed, c.hidden, rows, {&keys, 1}, pass.options.compute, pass.pool);
  ops::rms_norm(kv, latent.latent(), weights.kv_norm.data(), eps, kv, latent.latent(), rows, latent.kv_rank,
                pass.pool);
  if (latent.q_rank == 0)
    return ops::linear(normed, c.hidden, rows, {&queries, 1}, pass.options.compute, pass.pool);
  float* q_latent = Workspace::floats(work.gate, rows * latent.q_rank);
  const ops::LinearOutput down = weights.q_a.into(q_latent);
  ops::linear(normed, c.hidden, rows, {&down, 1}, pass.options.compute, pass.pool);
  ops::rms_norm(q_latent, latent.q_rank, weights.q_norm.data(), eps, q_latent, latent.q_rank, rows,
                latent.q_rank, pass.pool);
  ops::linear(q_latent, latent.q_rank, rows, {&queries, 1}, pass.options.compute, pass.pool);
}

// [K_h^T q_nope | q_rope] in work.q_latent.
float* absorb_queries(Pass& pass, const LatentWeights& weights) {
  const LatentAttention& latent = *pass.config.latent;
  const std::int64_t h_q = pass.config.h_q, width = h_q * latent.d_qk(), wide = h_q * latent.latent();
  const float* q = pass.work.q.data();
  float* to = Workspace::floats(pass.work.q_latent, pass.rows * wide);
  for (std::int64_t h = 0; h < h_q; ++h) {
    const ops::LinearOutput product{&weights.absorbed[static_cast<std::size_t>(h)], nullptr,
                                    to + h * latent.latent(), wide};
    ops::linear(q + h * latent.d_qk(), width, pass.rows, {&product, 1}, pass.options.compute, pass.pool);
  }
  for (std::int64_t i = 0; i < pass.rows * h_q; ++i)
    std::copy_n(q + i * latent.d_qk() + latent.d_nope, latent.d_rope,
                to + i * latent.latent() + latent.kv_rank);
  return to;
}

// Keys [rows, h_q, d_qk] in work.q_latent and values [rows, h_q, d_v] in work.values, of rotated latents.
void expand_keys(Pass& pass, const LatentWeights& weights) {
  const LatentAttention& latent = *pass.config.latent;
  const std::int64_t h_q = pass.config.h_q, each = latent.d_nope + latent.d_v;
  const float* kv = pass.work.k.data();
  float* both = Workspace::floats(pass.work.up, pass.rows * h_q * each);
  const ops::LinearOutput product = weights.kv.into(both);
  ops::linear(kv, latent.latent(), pass.rows, {&product, 1}, pass.options.compute, pass.pool);
  float* k = Workspace::floats(pass.work.q_latent, pass.rows * h_q * latent.d_qk());
  float* v = Workspace::floats(pass.work.values, pass.rows * h_q * latent.d_v);
  for (std::int64_t i = 0; i < pass.rows * h_q; ++i) {
    k = std::copy_n(both + i * each, latent.d_nope, k);
    k = std::copy_n(kv + i / h_q * latent.latent() + latent.kv_rank, latent.d_rope, k);
    v = std::copy_n(both + i * each + latent.d_nope, latent.d_v, v);
  }
}

// V_h of what the absorbed form gives, [rows, h_q, d_v] in work.values.
void apply_values(Pass& pass, const LatentWeights& weights) {
  const LatentAttention& latent = *pass.config.latent;
  const std::int64_t h_q = pass.config.h_q, width = h_q * latent.d_v;
  float* to = Workspace::floats(pass.work.values, pass.rows * width);
  for (std::int64_t h = 0; h < h_q; ++h) {
    const ops::LinearOutput product{&weights.values[static_cast<std::size_t>(h)], nullptr,
                                    to + h * latent.d_v, width};
    ops::linear(pass.work.attended.data() + h * latent.kv_rank, h_q * latent.kv_rank, pass.rows,
                {&product, 1}, pass.options.compute, pass.pool);
  }
}

struct Form {
  bool absorbed;
  std::int64_t d_qk, d_v;  // as attention sees them
};

attention::Ran attend_chunk(Pass& pass, const Form& form, const Queries& queries, const Chunk& chunk,
                            std::int64_t layer, std::int64_t first) {
  const ModelConfig& c = pass.config;
  const auto tokens = static_cast<std::int64_t>(chunk.tokens.size());
  const auto [cache, index] = chunk.cache->layer(layer);
  attention::Sequence sequence;
  sequence.q_tokens = tokens;
  sequence.kv_tokens = cache->logical_position() + tokens;
  sequence.pages = cache->pages();
  attention::Forward problem;
  problem.spec = {cache->mask(), c.attention_scale, 0.0};
  problem.sequences = {&sequence, 1};
  problem.q = queries.view(pass.work.q_rotated, first, tokens);
  if (has_sink_positions(chunk)) problem.q_sink = queries.view(pass.work.q_sink_rotated, first, tokens);
  problem.k = cache->keys(index);
  problem.v = form.absorbed ? problem.k : cache->values(index);
  problem.v.shape[3] = form.d_v;  // of a latent: its first part
  void* out = pass.work.attended.data() + first * c.h_q * form.d_v;
  problem.out = contiguous(out, DType::f32, {tokens, c.h_q, form.d_v});

  const attention::Backend backend = pass.options.attention_backend;
  PassObserver* const observer = pass.options.observer;
  if (observer != nullptr) {
    problem.lse = Workspace::floats(pass.work.lse, tokens * c.h_q);
    problem.lse_with_sink = Workspace::floats(pass.work.lse_with_sink, tokens * c.h_q);
  }
  if (c.indexer) {
    const std::int32_t* indices = pass.work.selection.data() + first * c.indexer->topk;
    const attention::Ran ran =
        attention::forward(problem, {indices, c.indexer->topk, nullptr}, backend, pass.pool);
    if (observer != nullptr) {
      observer->selected(layer, {indices, static_cast<std::size_t>(tokens * c.indexer->topk)}, problem,
                         pass.pool);
    }
    return ran;
  }
  if (form.absorbed) return attention::forward(problem, attention::Selection{}, backend, pass.pool);
  const attention::Ran ran = attention::forward(problem, backend, pass.pool);
  if (observer != nullptr) observer->attended(layer, problem, pass.pool);
  return ran;
}

}  // namespace

attention::Ran attend_latent(Pass& pass, const AttentionWeights& all, std::int64_t layer) {
  const ModelConfig& c = pass.config;
  const LatentAttention& latent = *c.latent;
  const LatentWeights& weights = *all.latent;
  Workspace& work = pass.work;
  const std::int64_t rows = pass.rows;
  const bool absorbed = pass.chunks.front().cache->full().shape().d_value == 0;
  const Form form{absorbed, absorbed ? latent.latent() : latent.d_qk(),
                  absorbed ? latent.kv_rank : latent.d_v};
  float* normed = Workspace::floats(work.normed, rows * c.hidden);
  ops::rms_norm(work.x.data(), c.hidden, all.norm.data(), static_cast<float>(c.rms_norm_eps), normed,
                c.hidden, rows, c.hidden, pass.pool);
  project(pass, weights, normed);
  View rotated =
      contiguous(static_cast<void*>(work.k.data() + latent.kv_rank), DType::f32, {rows, 1, latent.d_rope});
  rotated.stride[0] = latent.latent();
  pass.rotation.rope->rotate(rotated, pass.rotation.logical, rotated, pass.pool);

  float* q = work.q.data();
  if (absorbed) {
    q = absorb_queries(pass, weights);
  }
  const auto append = [&](const float* index_keys) {
    const float* keys = absorbed ? work.k.data() : work.q_latent.data();
    const float* values = absorbed ? nullptr : work.values.data();
    std::int64_t first = 0;
    for (const Chunk& chunk : pass.chunks) {
      const auto [cache, index] = chunk.cache->layer(layer);
      const kv::Shape& shape = cache->shape();
      cache->append(index, keys + first * shape.key_floats(),
                    values == nullptr ? nullptr : values + first * shape.value_floats(),
                    index_keys + first * shape.d_index);
      first += static_cast<std::int64_t>(chunk.tokens.size());
    }
  };
  if (!absorbed) expand_keys(pass, weights);
  if (weights.indexer) {
    select_keys(pass, *weights.indexer, work.gate.data(), normed, layer, append);
  } else {  // a shared indexer's keys are kept, too, as zeros: pages have one shape
    append(c.indexer ? Workspace::floats(work.index_k, rows * c.indexer->d_head) : work.k.data());
  }
  Queries queries(pass, form.d_qk);
  if (pass.rotation.sink.tokens > 0) queries.rotate(q, &work.q_sink, pass.rotation.sink, work.q_sink_rotated);
  queries.rotate(q, nullptr, pass.rotation.logical, work.q_rotated);

  Workspace::floats(work.attended, rows * c.h_q * form.d_v);
  attention::Ran ran{};
  std::int64_t first = 0;
  for (const Chunk& chunk : pass.chunks) {
    ran = attend_chunk(pass, form, queries, chunk, layer, first);
    first += static_cast<std::int64_t>(chunk.tokens.size());
  }
  if (absorbed) apply_values(pass, weights);
  const float* attended = absorbed ? work.values.data() : work.attended.data();
  project_attended(pass, all, attended, c.h_q * latent.d_v);
  return ran;
}

}  // namespace basin::models
