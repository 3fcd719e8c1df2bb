// One pass of a decoder over a chunk of each of some sequences, and the two halves of a layer. The rows of all chunks lie
// one after another, so that every product runs over all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "models/layer.h"
#include "models/model.h"
#include "ops/rope.h"

namespace basin::models {

// Activations of a pass, kept from pass to pass so that a decode step allocates nothing.
struct Workspace {
  std::vector<float> x, normed, q, k, v, attended, gate, up, logits;
  std::vector<float> lse, lse_with_sink;  // for observers only
  std::vector<std::byte> q_rotated, q_sink_rotated;

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
struct Rotations {
  ops::RopeTable logical;  // [rows]
  ops::RopeTable sink;     // [rows]; no tokens when no row needs it
};

struct Pass {
  const ModelConfig& config;
  std::span<const Chunk> chunks;
  const PassOptions& options;
  std::int64_t rows;  // tokens of all chunks
  const ops::Rope& rope;
  Rotations rotations;
  Workspace& work;
  ThreadPool& pool;
};

/// Turns every row of the pass, for layers that attend as their chunks' caches say.
Rotations rotations(std::span<const Chunk> chunks, const ops::Rope& rope);

/// x += W_o attention(rope(W_q n), rope(W_k n), W_v n) with n = norm(x). Returns what attention ran.
attention::Ran attend(Pass& pass, const AttentionWeights& weights, std::int64_t layer);

/// x += W_down (silu(W_gate n) * W_up n) with n = norm(x).
void feed_forward(Pass& pass, const FeedForwardWeights& weights);

/// x += W input, with input [rows, W's inputs] dense.
void add_product(Pass& pass, const ops::WeightMatrix& weight, const float* input);

}  // namespace basin::models
