#include <algorithm>

#include "models/pass.h"
#include "ops/elementwise.h"

namespace basin::models {
namespace {

void activate(const ModelConfig& c, float* gate, const float* up, std::int64_t rows, std::int64_t width,
              ThreadPool& pool) {
  switch (c.activation) {
    case Activation::silu:
      return ops::silu_multiply(gate, up, gate, rows, width, pool);
    case Activation::gelu_tanh:
      return ops::gelu_multiply(gate, up, gate, rows, width, pool);
    case Activation::swiglu_clamped:
      return ops::swiglu_clamped(gate, up, static_cast<float>(c.activation_limit), gate, rows, width, pool);
  }
}

// y = W_down activation(W_gate x, W_up x) for `rows` rows.
void run_mlp(Pass& pass, const Mlp& mlp, const float* x, std::int64_t rows, float* y) {
  const ModelConfig& c = pass.config;
  const std::int64_t width = mlp.gate.weight.outputs;
  float* gate = Workspace::floats(pass.work.gate, rows * width);
  float* up = Workspace::floats(pass.work.up, rows * width);
  const ops::LinearOutput products[] = {mlp.gate.into(gate), mlp.up.into(up)};
  ops::linear(x, c.hidden, rows, products, pass.options.compute, pass.pool);
  activate(c, gate, up, rows, width, pass.pool);
  const ops::LinearOutput down = mlp.down.into(y);
  ops::linear(gate, width, rows, {&down, 1}, pass.options.compute, pass.pool);
}

// Each expert answers all rows that were sent to it at once; answers are then added row by row in the order of the row's
// own choice, so that a row's sum does not depend on the others.
void run_experts(Pass& pass, const FeedForwardWeights& weights, std::int64_t rows, const float* normed,
                 float* result) {
  const ModelConfig& c = pass.config;
  Workspace& work = pass.work;
  float* logits = Workspace::floats(work.routes, rows * c.experts);
  const ops::LinearOutput router = weights.router.into(logits);
  // A rounded logit would send tokens elsewhere, and the product is small: always in float.
  ops::linear(normed, c.hidden, rows, {&router, 1}, ops::Compute::fp32, pass.pool);
  if (c.grouped) {
    ops::route_grouped(logits, weights.correction.data(), rows, c.experts, c.grouped->choice, work.routing);
  } else {
    ops::route(logits, rows, c.experts, c.chosen_experts, work.routing);
  }

  const std::vector<std::int32_t>& chosen = work.routing.expert;
  float* answers = Workspace::floats(work.answers, rows * c.chosen_experts * c.hidden);
  float* gathered = Workspace::floats(work.gathered, rows * c.hidden);
  float* answer = Workspace::floats(work.answer, rows * c.hidden);
  std::vector<std::int64_t> sent;  // places in [rows, chosen] that name this expert
  for (std::int64_t expert = 0; expert < c.experts; ++expert) {
    sent.clear();
    for (std::size_t place = 0; place < chosen.size(); ++place) {
      if (chosen[place] != expert) continue;
      const float* row = normed + static_cast<std::int64_t>(place) / c.chosen_experts * c.hidden;
      std::copy_n(row, c.hidden, gathered + std::ssize(sent) * c.hidden);
      sent.push_back(static_cast<std::int64_t>(place));
    }
    if (sent.empty()) continue;
    run_mlp(pass, weights.experts[static_cast<std::size_t>(expert)], gathered, std::ssize(sent), answer);
    for (std::int64_t i = 0; i < std::ssize(sent); ++i)
      std::copy_n(answer + i * c.hidden, c.hidden, answers + sent[static_cast<std::size_t>(i)] * c.hidden);
  }
  ops::weigh(work.routing, answers, c.hidden, result, pass.pool);
  if (!weights.shared) return;
  run_mlp(pass, *weights.shared, normed, rows, answer);
  ops::add(result, answer, rows * c.hidden, pass.pool);
}

}  // namespace

void feed_forward(Pass& pass, const FeedForwardWeights& weights) {
  const ModelConfig& c = pass.config;
  Workspace& work = pass.work;
  each_slice(pass.rows, [&](const RowSlice& slice) {
    float* normed = Workspace::floats(work.normed, slice.rows * c.hidden);
    ops::rms_norm(work.x.data() + slice.first * c.hidden, c.hidden, weights.norm.data(),
                  static_cast<float>(c.rms_norm_eps), normed, c.hidden, slice.rows, c.hidden, pass.pool);
    float* result = Workspace::floats(work.result, slice.rows * c.hidden);
    if (weights.router.weight.outputs > 0) {
      run_experts(pass, weights, slice.rows, normed, result);
    } else {
      run_mlp(pass, weights.experts.front(), normed, slice.rows, result);
    }
    add_result(pass, slice, weights.post_norm);
  });
}

void project_attended(Pass& pass, const AttentionWeights& weights, const float* attended,
                      std::int64_t width) {
  each_slice(pass.rows, [&](const RowSlice& slice) {
    float* result = Workspace::floats(pass.work.result, slice.rows * pass.config.hidden);
    const ops::LinearOutput output = weights.o.into(result);
    ops::linear(attended + slice.first * width, width, slice.rows, {&output, 1}, pass.options.compute,
                pass.pool);
    add_result(pass, slice, weights.post_norm);
  });
}

void add_result(Pass& pass, const RowSlice& slice, const std::vector<float>& post_norm) {
  const ModelConfig& c = pass.config;
  float* result = pass.work.result.data();
  if (!post_norm.empty()) {
    ops::rms_norm(result, c.hidden, post_norm.data(), static_cast<float>(c.rms_norm_eps), result, c.hidden,
                  slice.rows, c.hidden, pass.pool);
  }
  ops::add(pass.work.x.data() + slice.first * c.hidden, result, slice.rows * c.hidden, pass.pool);
}

}  // namespace basin::models
