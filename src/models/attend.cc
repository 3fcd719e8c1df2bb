#include <algorithm>

#include "kv/sequence_cache.h"
#include "models/pass.h"
#include "ops/elementwise.h"

namespace basin::models {

bool has_sink_positions(const Chunk& chunk) {
  const kv::Policy& policy = chunk.cache->full().policy();
  const std::int64_t end = chunk.cache->logical_position() + static_cast<std::int64_t>(chunk.tokens.size());
  return policy.in_cache_positions && policy.sink_tokens > 0 && end > policy.sink_tokens + policy.window;
}

namespace {

// Keys and values of the step go to the chunk's pages; then its queries, rows `first` and on, read what they see there.
attention::Ran attend_chunk(Pass& pass, const AttentionWeights& weights, const Chunk& chunk,
                            std::int64_t layer, std::int64_t first) {
  const ModelConfig& c = pass.config;
  const auto tokens = static_cast<std::int64_t>(chunk.tokens.size());
  const auto [cache, index] = chunk.cache->layer(layer);
  const std::int64_t q_offset = first * c.h_q * c.d_head, kv_offset = first * c.h_kv * c.d_head;
  cache->append(index, pass.work.k.data() + kv_offset, pass.work.v.data() + kv_offset);

  const DType dtype = chunk.cache->dtype();
  const auto queries = [&](const std::vector<std::byte>& rotated) {
    const void* data = rotated.data() + q_offset * block_bytes(dtype);
    return contiguous(data, dtype, {tokens, c.h_q, c.d_head});
  };
  attention::Sequence sequence;
  sequence.q_tokens = tokens;
  sequence.kv_tokens = cache->logical_position() + tokens;
  sequence.pages = cache->pages();
  attention::Forward problem;
  problem.spec.mask = cache->mask();
  problem.spec.scale = c.attention_scale;
  problem.spec.softcap = c.attention_softcap;
  problem.sequences = {&sequence, 1};
  problem.q = queries(pass.work.q_rotated);
  if (cache->policy().sink_tokens > 0 && has_sink_positions(chunk))
    problem.q_sink = queries(pass.work.q_sink_rotated);
  problem.k = cache->keys(index);
  problem.v = cache->values(index);
  if (!weights.sink_logit.empty()) problem.sink_logit = weights.sink_logit.data();
  void* out = pass.work.attended.data() + q_offset;
  problem.out = contiguous(out, DType::f32, {tokens, c.h_q, c.d_head});
  PassObserver* const observer = pass.options.observer;
  if (observer != nullptr) {
    problem.lse = Workspace::floats(pass.work.lse, tokens * c.h_q);
    problem.lse_with_sink = Workspace::floats(pass.work.lse_with_sink, tokens * c.h_q);
  }
  const attention::Ran ran = attention::forward(problem, pass.options.attention_backend, pass.pool);
  if (observer != nullptr) observer->attended(layer, problem, pass.pool);
  return ran;
}

}  // namespace

Rotation make_rotation(std::span<const Chunk> chunks, const ops::Rope& rope) {
  std::vector<std::int64_t> logical, sink;
  bool differ = false;
  for (const Chunk& chunk : chunks) {
    const kv::Policy& policy = chunk.cache->full().policy();
    const bool clamp = has_sink_positions(chunk);
    for (std::size_t t = 0; t < chunk.tokens.size(); ++t) {
      const std::int64_t p = chunk.cache->logical_position() + static_cast<std::int64_t>(t);
      logical.push_back(p);
      sink.push_back(clamp ? std::min(p, policy.sink_tokens + policy.window - 1) : p);
    }
    differ = differ || clamp;
  }
  return {&rope, rope.table(logical), differ ? rope.table(sink) : ops::RopeTable{}};
}

attention::Ran attend(Pass& pass, const AttentionWeights& weights, std::int64_t layer) {
  const ModelConfig& c = pass.config;
  Workspace& work = pass.work;
  const std::int64_t rows = pass.rows, q_width = c.h_q * c.d_head, kv_width = c.h_kv * c.d_head;
  float* normed = Workspace::floats(work.normed, rows * c.hidden);
  float* q = Workspace::floats(work.q, rows * q_width);
  float* k = Workspace::floats(work.k, rows * kv_width);
  float* v = Workspace::floats(work.v, rows * kv_width);
  const auto eps = static_cast<float>(c.rms_norm_eps);
  ops::rms_norm(work.x.data(), c.hidden, weights.norm.data(), eps, normed, c.hidden, rows, c.hidden,
                pass.pool);
  const ops::LinearOutput products[] = {weights.q.into(q), weights.k.into(k), weights.v.into(v)};
  const ops::WeightMatrix* const next = &weights.o.weight;
  ops::linear(normed, c.hidden, rows, products, pass.options.compute, pass.pool, {&next, 1});
  if (!weights.q_norm.empty()) {
    ops::rms_norm(q, c.d_head, weights.q_norm.data(), eps, q, c.d_head, rows * c.h_q, c.d_head, pass.pool);
    ops::rms_norm(k, c.d_head, weights.k_norm.data(), eps, k, c.d_head, rows * c.h_kv, c.d_head, pass.pool);
  }

  const bool is_local = c.layers[static_cast<std::size_t>(layer)].window > 0;
  const Rotation& rotation = is_local && pass.local_rotation ? *pass.local_rotation : pass.rotation;
  const DType dtype = pass.chunks.front().cache->dtype();
  const auto view = [&](auto* data, DType type, std::int64_t heads) {
    return contiguous(data, type, {rows, heads, c.d_head});
  };
  const auto rotate_q = [&](const ops::RopeTable& table, std::vector<std::byte>& to) {
    void* rotated = Workspace::bytes(to, rows * q_width * block_bytes(dtype));
    rotation.rope->rotate(view(static_cast<const void*>(q), DType::f32, c.h_q), table,
                          view(rotated, dtype, c.h_q), pass.pool);
  };
  rotate_q(rotation.logical, work.q_rotated);
  if (!is_local && rotation.sink.tokens > 0) rotate_q(rotation.sink, work.q_sink_rotated);
  rotation.rope->rotate(view(static_cast<const void*>(k), DType::f32, c.h_kv), rotation.logical,
                        view(static_cast<void*>(k), DType::f32, c.h_kv), pass.pool);

  const float* attended = Workspace::floats(work.attended, rows * q_width);
  attention::Ran ran{};
  std::int64_t first = 0;
  for (const Chunk& chunk : pass.chunks) {
    ran = attend_chunk(pass, weights, chunk, layer, first);
    first += static_cast<std::int64_t>(chunk.tokens.size());
  }
  project_attended(pass, weights, attended, q_width);
  return ran;
}

}  // namespace basin::models
