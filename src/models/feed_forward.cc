#include <algorithm>

#include "models/pass.h"
#include "ops/elementwise.h"

namespace basin::models {
namespace {

void activate(const ModelConfig& c, float* gate, const float* up, std::int64_t rows, ThreadPool& pool) {
  switch (c.activation) {
    case Activation::silu:
      return ops::silu_multiply(gate, up, gate, rows, c.intermediate, pool);
    case Activation::gelu_tanh:
      return ops::gelu_multiply(gate, up, gate, rows, c.intermediate, pool);
    case Activation::swiglu_clamped:
      return ops::swiglu_clamped(gate, up, static_cast<float>(c.activation_limit), gate, rows, c.intermediate,
                                 pool);
  }
}

// y = W_down activation(W_gate x, W_up x) for `rows` rows.
void run_mlp(Pass& pass, const Mlp& mlp, const float* x, std::int64_t rows, float* y) {
  const ModelConfig& c = pass.config;
  float* gate = Workspace::floats(pass.work.gate, rows * c.intermediate);
  float* up = Workspace::floats(pass.work.up, rows * c.intermediate);
  const ops::LinearOutput products[] = {mlp.gate.into(gate), mlp.up.into(up)};
  ops::linear(x, c.hidden, rows, products, pass.options.compute, pass.pool);
  activate(c, gate, up, rows, pass.pool);
  const ops::LinearOutput down = mlp.down.into(y);
  ops::linear(gate, c.intermediate, rows, {&down, 1}, pass.options.compute, pass.pool);
}

// Each expert answers all rows that were sent to it at once; answers are then added row by row in the order of the row's
// own choice, so that a row's sum does not depend on the others.
void run_experts(Pass& pass, const FeedForwardWeights& weights, const float* normed, float* result) {
  const ModelConfig& c = pass.config;
  Workspace& work = pass.work;
  float* logits = Workspace::floats(work.routes, pass.rows * c.experts);
  const ops::LinearOutput router = weights.router.into(logits);
  // A rounded logit would send tokens elsewhere, and the product is small: always in float.
  ops::linear(normed, c.hidden, pass.rows, {&router, 1}, ops::Compute::fp32, pass.pool);
  ops::route(logits, pass.rows, c.experts, c.chosen_experts, work.routing);

  const std::vector<std::int32_t>& chosen = work.routing.expert;
  float* answers = Workspace::floats(work.answers, pass.rows * c.chosen_experts * c.hidden);
  float* gathered = Workspace::floats(work.gathered, pass.rows * c.hidden);
  float* answer = Workspace::floats(work.answer, pass.rows * c.hidden);
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
}

}  // namespace

void feed_forward(Pass& pass, const FeedForwardWeights& weights) {
  const ModelConfig& c = pass.config;
  Workspace& work = pass.work;
  float* normed = Workspace::floats(work.normed, pass.rows * c.hidden);
  ops::rms_norm(work.x.data(), c.hidden, weights.norm.data(), static_cast<float>(c.rms_norm_eps), normed,
                c.hidden, pass.rows, c.hidden, pass.pool);
  float* result = Workspace::floats(work.result, pass.rows * c.hidden);
  if (weights.router.weight.outputs > 0) {
    run_experts(pass, weights, normed, result);
  } else {
    run_mlp(pass, weights.experts.front(), normed, pass.rows, result);
  }
  add_result(pass, weights.post_norm);
}

void add_result(Pass& pass, const std::vector<float>& post_norm) {
  const ModelConfig& c = pass.config;
  float* result = pass.work.result.data();
  if (!post_norm.empty()) {
    ops::rms_norm(result, c.hidden, post_norm.data(), static_cast<float>(c.rms_norm_eps), result, c.hidden,
                  pass.rows, c.hidden, pass.pool);
  }
  ops::add(pass.work.x.data(), result, pass.rows * c.hidden, pass.pool);
}

}  // namespace basin::models
