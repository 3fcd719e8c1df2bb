// One pass of a decoder over a chunk of each of some sequences, and the two halves of a layer. The rows of all chunks lie
// one after another, so that every product runs over all of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "models/layer.h"
#include "models/model.h"
#include "ops/moe.h"
#include "ops/rope.h"

namespace basin::models {

// Activations of a pass, kept from pass to pass so that a decode step allocates nothing.
struct Workspace {
  std::vector<float> x, normed, q, k, v, attended, gate, up, result, logits;
  std::vector<float> routes, gathered, answer, answers;  // of experts
  std::vector<float> lse, lse_with_sink;                 // for observers only
  std::vector<float> q_latent, q_sink, values;           // of latent attention
  std::vector<float> index_q, index_q_sink, index_k, index_weights;
  std::vector<std::int32_t> selection;  // [rows, topk] of the last indexer
  std::vector<std::byte> q_rotated, q_sink_rotated;
  ops::Routing routing;

  static float* floats(std::vector<float>& buffer, std::int64_t count) {
    if (static_cast<std::int64_t>(buffer.size()) < count) buffer.resize(static_cast<std::size_t>(count));
    return buffer.data();
  }
  static std::byte* bytes(std::vector<std::byte>& buffer, std::int64_t count) {
    if (static_cast<std::int64_t>(buffer.size()) < count) buffer.resize(static_cast<std::size_t>(count));
    return buffer.data();
  }
};

// How queries and keys of a pass are turned: at logical positions, and queries of sink keys where they stand elsewhere.
struct Rotation {
  const ops::Rope* rope;   // not null
  ops::RopeTable logical;  // [rows]
  ops::RopeTable sink;     // [rows]; no tokens when no row needs it
};

struct Pass {
  const ModelConfig& config;
  std::span<const Chunk> chunks;
  const PassOptions& options;
  std::int64_t rows;  // tokens of all chunks
  Rotation rotation;  // of layers with full attention, and of the others where they have no own
  std::optional<Rotation> local_rotation;  // of layers with a window
  std::optional<Rotation> index_rotation;  // of indexers
  Workspace& work;
  ThreadPool& pool;
};

/// Turns every row as its chunk's cache says.
Rotation make_rotation(std::span<const Chunk> chunks, const ops::Rope& rope);

/// x += post_norm(W_o attention(rope(W_q n), rope(W_k n), W_v n)) with n = norm(x). Returns what attention ran.
attention::Ran attend(Pass& pass, const AttentionWeights& weights, std::int64_t layer);

/// The same by latents, over selected keys where the model has indexers. The caches say which form they keep.
attention::Ran attend_latent(Pass& pass, const AttentionWeights& weights, std::int64_t layer);

/// Fills work.selection from `latent` [rows, q_rank], the queries' latent, and `normed` [rows, hidden]. `append` is called once the
/// index keys [rows, d_head] are there and puts them into the caches; then the queries choose.
attention::Ran select_keys(Pass& pass, const IndexerWeights& weights, const float* latent,
                           const float* normed, std::int64_t layer,
                           const std::function<void(const float* keys)>& append);

/// Whether a chunk's sink keys are read by queries rotated elsewhere than its recent keys are.
bool has_sink_positions(const Chunk& chunk);

/// x += post_norm(mlp(norm(x))), where an MLP is W_down activation(W_gate n, W_up n); of experts, the weighted sum of
/// those that the router chooses for the row.
void feed_forward(Pass& pass, const FeedForwardWeights& weights);

/// Some consecutive rows of a pass. What follows attention is done for so many at a time: rows do not depend on each other, and a
/// text that is read as one chunk needs wide activations for a part of it only.
struct RowSlice {
  std::int64_t first, rows;
};
inline constexpr std::int64_t kSliceRows = 2048;

template <typename Body>
void each_slice(std::int64_t rows, const Body& body) {
  for (std::int64_t first = 0; first < rows; first += kSliceRows)
    body(RowSlice{first, std::min(kSliceRows, rows - first)});
}

/// x += post_norm(W_o attended [rows, width]), a slice at a time.
void project_attended(Pass& pass, const AttentionWeights& weights, const float* attended, std::int64_t width);

/// x += post_norm(work.result [slice.rows, hidden]), without a norm where there is none.
void add_result(Pass& pass, const RowSlice& slice, const std::vector<float>& post_norm);

}  // namespace basin::models
