#include <algorithm>
#include <array>
#include <span>
#include <vector>

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

// Some rows of one MLP: y = W_down activation(W_gate x, W_up x), all dense.
struct MlpRows {
  const Mlp* mlp;
  const float* x;
  std::int64_t rows;
  float* y;
};

// MLPs of one form, the products of all in two calls. `next` is what is multiplied after them.
void run_mlps(Pass& pass, std::span<const MlpRows> mlps, const ops::NextMatrices& next) {
  const ModelConfig& c = pass.config;
  const std::int64_t width = mlps.front().mlp->gate.weight.outputs;
  std::int64_t rows = 0;
  for (const MlpRows& part : mlps) rows += part.rows;
  float* const gate = Workspace::floats(pass.work.gate, rows * width);
  float* const up = Workspace::floats(pass.work.up, rows * width);
  std::vector<std::array<ops::LinearOutput, 2>> wide(mlps.size());
  std::vector<ops::LinearOutput> narrow(mlps.size());
  std::vector<ops::LinearInput> first, second;
  ops::NextMatrices downs;
  std::int64_t row = 0;
  for (std::size_t i = 0; i < mlps.size(); ++i) {
    const auto& [mlp, x, count, y] = mlps[i];
    wide[i] = {mlp->gate.into(gate + row * width), mlp->up.into(up + row * width)};
    narrow[i] = mlp->down.into(y);
    first.push_back({x, c.hidden, count, wide[i]});
    second.push_back({gate + row * width, width, count, {&narrow[i], 1}});
    downs.push_back(&mlp->down.weight);
    row += count;
  }
  ops::linear(first, pass.options.compute, pass.pool, downs);
  activate(c, gate, up, rows, width, pass.pool);
  ops::linear(second, pass.options.compute, pass.pool, next);
}

// The rows that go to one expert: places [first, first + rows) of those sorted by expert.
struct Sent {
  std::size_t expert;
  std::int64_t first, rows;
};

// Fills `places` with every place of [rows, chosen], those of an expert together.
std::vector<Sent> sort_by_expert(const std::vector<std::int32_t>& chosen, std::int64_t experts,
                                 std::vector<std::int64_t>& places) {
  std::vector<Sent> sent;
  places.clear();
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    const std::int64_t first = std::ssize(places);
    for (std::size_t place = 0; place < chosen.size(); ++place) {
      if (chosen[place] == expert) places.push_back(static_cast<std::int64_t>(place));
    }
    if (std::ssize(places) > first)
      sent.push_back({static_cast<std::size_t>(expert), first, std::ssize(places) - first});
  }
  return sent;
}

// Each expert answers all rows that were sent to it at once, and several experts together; answers are then added row by row in
// the order of the row's own choice, so that a row's sum does not depend on the others.
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

  // So many rows at a time bound the memory; no expert gets more than there are.
  constexpr std::int64_t kLeastRowsAtOnce = 512;
  const std::int64_t most = std::max(rows, kLeastRowsAtOnce);
  float* answers = Workspace::floats(work.answers, rows * c.chosen_experts * c.hidden);
  const std::int64_t held = std::min(most, rows * c.chosen_experts) * c.hidden;
  float* gathered = Workspace::floats(work.gathered, held);
  float* answer = Workspace::floats(work.answer, held);
  std::vector<std::int64_t> places;
  const std::vector<Sent> sent = sort_by_expert(work.routing.expert, c.experts, places);
  const auto place = [&](std::int64_t i) { return places[static_cast<std::size_t>(i)]; };
  std::vector<MlpRows> mlps;
  for (std::size_t begin = 0; begin < sent.size();) {
    const std::int64_t first = sent[begin].first;
    std::int64_t count = 0;
    mlps.clear();
    std::size_t end = begin;
    for (; end < sent.size() && count + sent[end].rows <= most; ++end) {
      mlps.push_back({&weights.experts[sent[end].expert], gathered + count * c.hidden, sent[end].rows,
                      answer + count * c.hidden});
      count += sent[end].rows;
    }
    for (std::int64_t i = 0; i < count; ++i)
      std::copy_n(normed + place(first + i) / c.chosen_experts * c.hidden, c.hidden, gathered + i * c.hidden);
    run_mlps(pass, mlps, end == sent.size() ? weights.next : ops::NextMatrices{});
    for (std::int64_t i = 0; i < count; ++i)
      std::copy_n(answer + i * c.hidden, c.hidden, answers + place(first + i) * c.hidden);
    begin = end;
  }
  ops::weigh(work.routing, answers, c.hidden, result, pass.pool);
  if (!weights.shared) return;
  answer = Workspace::floats(work.answer, rows * c.hidden);
  const MlpRows shared{&*weights.shared, normed, rows, answer};
  run_mlps(pass, {&shared, 1}, weights.next);
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
      const MlpRows dense{&weights.experts.front(), normed, slice.rows, result};
      run_mlps(pass, {&dense, 1}, weights.next);
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
                pass.pool, weights.next);
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
