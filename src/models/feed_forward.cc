#include "models/pass.h"
#include "ops/elementwise.h"

namespace basin::models {

void feed_forward(Pass& pass, const FeedForwardWeights& weights) {
  const ModelConfig& c = pass.config;
  Workspace& work = pass.work;
  float* normed = Workspace::floats(work.normed, pass.rows * c.hidden);
  float* gate = Workspace::floats(work.gate, pass.rows * c.intermediate);
  float* up = Workspace::floats(work.up, pass.rows * c.intermediate);
  ops::rms_norm(work.x.data(), c.hidden, weights.norm.data(), static_cast<float>(c.rms_norm_eps), normed,
                c.hidden, pass.rows, c.hidden, pass.pool);
  const ops::LinearOutput products[] = {{&weights.gate, nullptr, gate, c.intermediate},
                                        {&weights.up, nullptr, up, c.intermediate}};
  ops::linear(normed, c.hidden, pass.rows, products, pass.options.compute, pass.pool);
  ops::silu_multiply(gate, up, gate, pass.rows, c.intermediate, pass.pool);
  add_product(pass, weights.down, gate);
}

void add_product(Pass& pass, const ops::WeightMatrix& weight, const float* input) {
  const std::int64_t hidden = pass.config.hidden;
  float* result = Workspace::floats(pass.work.normed, pass.rows * hidden);
  const ops::LinearOutput product{&weight, nullptr, result, hidden};
  ops::linear(input, weight.inputs, pass.rows, {&product, 1}, pass.options.compute, pass.pool);
  ops::add(pass.work.x.data(), result, pass.rows * hidden, pass.pool);
}

}  // namespace basin::models
