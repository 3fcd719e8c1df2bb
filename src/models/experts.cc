// Experts as files keep them: stacked matrices as products want them (GGUF), or, in Hugging Face's gpt-oss, gate and up in
// one matrix whose outputs alternate, either transposed or as MXFP4 in two tensors. The last two are laid out anew.
#include <fmt/format.h>

#include "basin/base/error.h"
#include "models/bind.h"
#include "models/expert_layout.h"

namespace basin::models {
namespace {

// Rows of new memory for the matrices of all experts, handed out one after another.
class Rows {
 public:
  Rows(std::vector<std::byte>& memory, DType dtype, std::int64_t bytes) : dtype_(dtype) {
    memory.resize(static_cast<std::size_t>(bytes));
    next_ = memory.data();
  }

  /// A matrix whose rows are the outputs `first`, `first` + step, ... of `source`.
  template <typename Source>
  ops::WeightMatrix take(const Source& source, std::int64_t first, std::int64_t step, std::int64_t outputs) {
    const ops::WeightMatrix matrix{next_, dtype_, outputs, source.inputs};
    for (std::int64_t i = 0; i < outputs; ++i, next_ += matrix.row_bytes())
      source.copy_row(first + i * step, next_);
    return matrix;
  }

 private:
  DType dtype_;
  std::byte* next_;
};

// `gate_up` and `down` give the sources of an expert. Gate and up products alternate in the former's outputs.
template <typename GateUp, typename Down>
void lay_out(const ModelConfig& c, DType dtype, const GateUp& gate_up, const Down& down,
             FeedForwardWeights& weights) {
  const ops::WeightMatrix wide{nullptr, dtype, 2 * c.intermediate, c.hidden};
  const ops::WeightMatrix narrow{nullptr, dtype, c.hidden, c.intermediate};
  const std::int64_t bytes = wide.outputs * wide.row_bytes() + narrow.outputs * narrow.row_bytes();
  Rows rows(weights.memory, dtype, c.experts * bytes);
  for (std::int64_t e = 0; e < c.experts; ++e) {
    Mlp& mlp = weights.experts[static_cast<std::size_t>(e)];
    mlp.gate.weight = rows.take(gate_up(e), 0, 2, c.intermediate);
    mlp.up.weight = rows.take(gate_up(e), 1, 2, c.intermediate);
    mlp.down.weight = rows.take(down(e), 0, 1, c.hidden);
  }
}

void bind_transposed(const ModelConfig& c, const std::string& gate_up, const std::string& down,
                     TensorTable& tensors, FeedForwardWeights& weights) {
  const auto wide = tensors.stack(gate_up, c.experts, c.hidden, 2 * c.intermediate);
  const auto narrow = tensors.stack(down, c.experts, c.intermediate, c.hidden);
  const DType dtype = wide.front().dtype;
  if (is_quantised(dtype) || narrow.front().dtype != dtype) {
    throw Error(ErrorCode::unsupported,
                fmt::format("{}: '{}' is stored as {} and '{}' as {}", tensors.where(), gate_up, name(dtype),
                            down, name(narrow.front().dtype)),
                "experts may be f32, f16 or bf16, or MXFP4 in _blocks and _scales");
  }
  const auto source = [](const ops::WeightMatrix& stored) {
    return TransposedSource{stored.data, stored.outputs, stored.inputs, block_bytes(stored.dtype)};
  };
  lay_out(
      c, dtype, [&](std::int64_t e) { return source(wide[static_cast<std::size_t>(e)]); },
      [&](std::int64_t e) { return source(narrow[static_cast<std::size_t>(e)]); }, weights);
}

void bind_mxfp4(const ModelConfig& c, const std::string& gate_up, const std::string& down,
                TensorTable& tensors, FeedForwardWeights& weights) {
  constexpr std::int64_t kBlock = block_elements(DType::mxfp4);
  if (c.hidden % kBlock != 0 || c.intermediate % kBlock != 0) {
    throw Error(ErrorCode::corrupt, fmt::format("{}: MXFP4 experts of {} by {}; both must be multiples of {}",
                                                tensors.where(), c.hidden, c.intermediate, kBlock));
  }
  const auto sources = [&](const std::string& name, std::int64_t outputs, std::int64_t inputs) {
    const std::int64_t blocks = inputs / kBlock;
    const std::byte* data = tensors.bytes(name + "_blocks", {c.experts, outputs, blocks, kBlock / 2}, 2);
    const std::byte* scales = tensors.bytes(name + "_scales", {c.experts, outputs, blocks}, 0);
    return [=](std::int64_t e) {
      const std::int64_t first = e * outputs * blocks;
      return Mxfp4Source{data + first * (kBlock / 2), scales + first, inputs};
    };
  };
  lay_out(c, DType::mxfp4, sources(gate_up, 2 * c.intermediate, c.hidden),
          sources(down, c.hidden, c.intermediate), weights);
}

// Biases of gate and up alternate as their outputs do.
void bind_gate_up_biases(const ModelConfig& c, const std::string& name, TensorTable& tensors,
                         std::vector<Mlp>& experts) {
  const auto biases = tensors.vectors(name, c.experts, 2 * c.intermediate);
  for (std::size_t e = 0; e < experts.size(); ++e) {
    for (std::size_t i = 0; i < biases[e].size(); i += 2) {
      experts[e].gate.bias.push_back(biases[e][i]);
      experts[e].up.bias.push_back(biases[e][i + 1]);
    }
  }
}

// One kind of product of every expert, as GGUF stacks them.
void bind_stack(const std::string& name, std::int64_t outputs, std::int64_t inputs, Projection Mlp::*part,
                TensorTable& tensors, std::vector<Mlp>& experts) {
  const auto count = static_cast<std::int64_t>(experts.size());
  const auto matrices = tensors.stack(name + ".weight", count, outputs, inputs);
  auto biases = tensors.vectors(name + ".bias", count, outputs);
  for (std::size_t e = 0; e < experts.size(); ++e) experts[e].*part = {matrices[e], std::move(biases[e])};
}

}  // namespace

void bind_experts(const ModelConfig& c, const TensorNames& names, const std::string& prefix,
                  TensorTable& tensors, FeedForwardWeights& weights) {
  weights.experts.resize(static_cast<std::size_t>(c.experts));
  if (names.expert_gate_up.empty()) {
    bind_stack(prefix + names.expert_gate, c.intermediate, c.hidden, &Mlp::gate, tensors, weights.experts);
    bind_stack(prefix + names.expert_up, c.intermediate, c.hidden, &Mlp::up, tensors, weights.experts);
    bind_stack(prefix + names.expert_down, c.hidden, c.intermediate, &Mlp::down, tensors, weights.experts);
    return;
  }
  const std::string gate_up = prefix + names.expert_gate_up, down = prefix + names.expert_down;
  if (tensors.has(gate_up + "_blocks")) {
    bind_mxfp4(c, gate_up, down, tensors, weights);
  } else {
    bind_transposed(c, gate_up, down, tensors, weights);
  }
  bind_gate_up_biases(c, gate_up + "_bias", tensors, weights.experts);
  auto biases = tensors.vectors(down + "_bias", c.experts, c.hidden);
  for (std::size_t e = 0; e < biases.size(); ++e) weights.experts[e].down.bias = std::move(biases[e]);
}

}  // namespace basin::models
