// What an indexer selects: its queries come from the latent of the main attention's queries, its one key per token from the
// layer's input.
#include <cmath>

#include "basin/attention/sparse.h"
#include "kv/sequence_cache.h"
#include "models/index_fp8.h"
#include "models/pass.h"
#include "ops/elementwise.h"

namespace basin::models {
namespace {

constexpr float kNormEps = 1e-6f;

// The chunk's rows of `floats`, in the cache's dtype: work memory of `to`.
ConstView stored(const std::vector<float>& floats, std::int64_t first, std::int64_t tokens,
                 std::int64_t heads, std::int64_t d, DType dtype, std::vector<std::byte>& to) {
  const float* from = floats.data() + first * heads * d;
  if (dtype == DType::f32) return contiguous(static_cast<const void*>(from), dtype, {tokens, heads, d});
  const std::int64_t count = tokens * heads * d;
  auto* out = reinterpret_cast<bf16*>(Workspace::bytes(to, count * 2));
  for (std::int64_t i = 0; i < count; ++i) out[i] = to_bf16(from[i]);
  return contiguous(static_cast<const void*>(out), dtype, {tokens, heads, d});
}

}  // namespace

attention::Ran select_keys(Pass& pass, const IndexerWeights& weights, const float* latent,
                           const float* normed, std::int64_t layer,
                           const std::function<void(const float* keys)>& append) {
  const ModelConfig& c = pass.config;
  const IndexerConfig& indexer = *c.indexer;
  Workspace& work = pass.work;
  const std::int64_t rows = pass.rows, heads = indexer.heads, d = indexer.d_head;
  float* q = Workspace::floats(work.index_q, rows * heads * d);
  float* k = Workspace::floats(work.index_k, rows * d);
  float* weight = Workspace::floats(work.index_weights, rows * heads);
  const ops::LinearOutput queries = weights.q.into(q), keys = weights.k.into(k),
                          gates = weights.weights.into(weight);
  ops::linear(latent, weights.q.weight.inputs, rows, {&queries, 1}, pass.options.compute, pass.pool);
  ops::linear(normed, c.hidden, rows, {&keys, 1}, pass.options.compute, pass.pool);
  // A rounded weight would select other keys, and the product is small: always in float.
  ops::linear(normed, c.hidden, rows, {&gates, 1}, ops::Compute::fp32, pass.pool);
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(heads) * static_cast<double>(d)));
  for (std::int64_t i = 0; i < rows * heads; ++i) weight[i] *= scale;
  ops::layer_norm(k, d, weights.k_norm.data(), weights.k_norm_bias.data(), kNormEps, k, d, rows, d,
                  pass.pool);

  // The rotated dimensions come first. The rest is copied.
  const Rotation& rotation = *pass.index_rotation;
  const auto rotate = [&](float* from, std::int64_t h, const ops::RopeTable& table, float* to) {
    rotation.rope->rotate(contiguous(static_cast<const void*>(from), DType::f32, {rows, h, d}), table,
                          contiguous(static_cast<void*>(to), DType::f32, {rows, h, d}), pass.pool);
    if (pass.options.index.fp8) to_index_fp8(to, rows * h, d, pass.pool);
  };
  if (rotation.sink.tokens > 0)
    rotate(q, heads, rotation.sink, Workspace::floats(work.index_q_sink, rows * heads * d));
  rotate(q, heads, rotation.logical, q);
  rotate(k, 1, rotation.logical, k);
  append(k);

  work.selection.resize(static_cast<std::size_t>(rows * indexer.topk));
  attention::Ran ran{};
  std::int64_t first = 0;
  for (const Chunk& chunk : pass.chunks) {
    const auto tokens = static_cast<std::int64_t>(chunk.tokens.size());
    const auto [cache, index] = chunk.cache->layer(layer);
    attention::Sequence sequence;
    sequence.q_tokens = tokens;
    sequence.kv_tokens = cache->logical_position() + tokens;
    sequence.pages = cache->pages();
    attention::Indexer problem;
    problem.mask = cache->mask();
    problem.sequences = {&sequence, 1};
    problem.q = stored(work.index_q, first, tokens, heads, d, chunk.cache->dtype(), work.q_rotated);
    if (has_sink_positions(chunk))
      problem.q_sink =
          stored(work.index_q_sink, first, tokens, heads, d, chunk.cache->dtype(), work.q_sink_rotated);
    problem.k = cache->index_keys(index);
    problem.weights = weight + first * heads;
    problem.topk = indexer.topk;
    problem.forced_first = pass.options.index.sink_tokens;
    problem.forced_last = pass.options.index.window;
    problem.indices = work.selection.data() + first * indexer.topk;
    ran = attention::select(problem, pass.options.attention_backend, pass.pool);
    first += tokens;
  }
  return ran;
}

}  // namespace basin::models
