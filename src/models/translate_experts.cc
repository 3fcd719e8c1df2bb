#include "models/translate_experts.h"

#include <fmt/format.h>

#include <cstring>

#include "basin/base/error.h"
#include "models/expert_layout.h"
#include "ops/linear.h"
#include "weights/quantise.h"

namespace basin::models {
namespace {

using weights::Tensor;

constexpr std::int64_t kBlock = block_elements(DType::mxfp4);

Tensor described(const std::string& name, DType dtype, std::vector<std::int64_t> shape) {
  Tensor tensor;
  tensor.name = name;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  return tensor;
}

// Of one layer.
class Experts {
 public:
  Experts(const std::map<std::string, Tensor>& tensors, const Architecture& architecture,
          const ModelConfig& config, std::size_t layer, std::set<std::string>& used,
          std::vector<Translated>& result)
      : tensors_(tensors),
        config_(config),
        hugging_face_(architecture.hugging_face_names()),
        gguf_(architecture.gguf_names()),
        in_hugging_face_(fmt::format("{}{}.", hugging_face_.layer_prefix, layer)),
        in_gguf_(fmt::format("{}{}.", gguf_.layer_prefix, layer)),
        used_(used),
        result_(result) {}

  void to_gguf() {
    const std::int64_t wide = config_.intermediate, hidden = config_.hidden;
    const std::string gate_up = in_hugging_face_ + hugging_face_.expert_gate_up;
    const std::string down = in_hugging_face_ + hugging_face_.expert_down;
    const std::string gate_name = in_gguf_ + gguf_.expert_gate, up_name = in_gguf_ + gguf_.expert_up;
    rows(gate_up, 2 * wide, hidden, gate_name + ".weight", 0, 2);
    rows(gate_up, 2 * wide, hidden, up_name + ".weight", 1, 2);
    rows(down, hidden, wide, in_gguf_ + gguf_.expert_down + ".weight", 0, 1);
    biases(gate_up + "_bias", 2 * wide, gate_name + ".bias", 0, 2);
    biases(gate_up + "_bias", 2 * wide, up_name + ".bias", 1, 2);
    biases(down + "_bias", hidden, in_gguf_ + gguf_.expert_down + ".bias", 0, 1);
  }

  void to_hugging_face(std::optional<DType> wanted) {
    const std::int64_t wide = config_.intermediate, hidden = config_.hidden;
    const std::string gate = in_gguf_ + gguf_.expert_gate, up = in_gguf_ + gguf_.expert_up;
    const std::string down = in_gguf_ + gguf_.expert_down;
    const std::string gate_up_name = in_hugging_face_ + hugging_face_.expert_gate_up;
    const std::string down_name = in_hugging_face_ + hugging_face_.expert_down;
    const Tensor& g = find(gate + ".weight", {config_.experts, wide, hidden});
    const Tensor& u = find(up + ".weight", {config_.experts, wide, hidden});
    const Tensor& d = find(down + ".weight", {config_.experts, hidden, wide});
    together({g, u}, gate_up_name, wanted);
    together({d}, down_name, wanted);
    const Tensor& gate_bias = find(gate + ".bias", {config_.experts, wide});
    const Tensor& up_bias = find(up + ".bias", {config_.experts, wide});
    alternating_biases(gate_bias, up_bias, gate_up_name + "_bias");
    Translated down_bias{find(down + ".bias", {config_.experts, hidden}), {}, 1};
    down_bias.tensor.name = down_name + "_bias";
    result_.push_back(std::move(down_bias));
  }

 private:
  const Tensor& find(const std::string& name, const std::vector<std::int64_t>& shape) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end())
      throw Error(ErrorCode::corrupt, fmt::format("there is no tensor '{}'", name));
    if (found->second.shape != shape) {
      throw Error(ErrorCode::corrupt,
                  fmt::format("tensor '{}' has the shape [{}]; expected is [{}]", name,
                              fmt::join(found->second.shape, ", "), fmt::join(shape, ", ")));
    }
    used_.insert(name);
    return found->second;
  }

  // Outputs `first`, `first` + step, ... of a stack, whichever way it is stored.
  void rows(const std::string& from, std::int64_t outputs, std::int64_t inputs, const std::string& to,
            std::int64_t first, std::int64_t step) {
    const std::int64_t experts = config_.experts, count = outputs / step;
    if (tensors_.contains(from + "_blocks")) {
      const std::int64_t blocks = inputs / kBlock;
      const Tensor& data = find(from + "_blocks", {experts, outputs, blocks, kBlock / 2});
      const Tensor& scales = find(from + "_scales", {experts, outputs, blocks});
      put_rows(
          described(to, DType::mxfp4, {experts, count, inputs}),
          [=](std::int64_t e) {
            const std::int64_t at = e * outputs * blocks;
            return Mxfp4Source{data.data + at * (kBlock / 2), scales.data + at, inputs};
          },
          first, step);
    } else {
      const Tensor& stored = find(from, {experts, inputs, outputs});
      const std::int64_t size = block_bytes(stored.dtype);
      put_rows(
          described(to, stored.dtype, {experts, count, inputs}),
          [=](std::int64_t e) {
            return TransposedSource{stored.data + e * inputs * outputs * size, inputs, outputs, size};
          },
          first, step);
    }
  }

  template <typename Source>
  void put_rows(Tensor tensor, const Source& source, std::int64_t first, std::int64_t step) {
    const std::int64_t count = tensor.shape[1];
    const std::int64_t row_bytes = tensor.shape[2] / block_elements(tensor.dtype) * block_bytes(tensor.dtype);
    const auto part = [=](std::int64_t e) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(count * row_bytes));
      for (std::int64_t i = 0; i < count; ++i)
        source(e).copy_row(first + i * step, bytes.data() + i * row_bytes);
      return bytes;
    };
    result_.push_back({std::move(tensor), part, config_.experts});
  }

  void biases(const std::string& from, std::int64_t outputs, const std::string& to, std::int64_t first,
              std::int64_t step) {
    const Tensor& stored = find(from, {config_.experts, outputs});
    const std::int64_t size = block_bytes(stored.dtype);
    const auto part = [=](std::int64_t e) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(outputs / step * size));
      for (std::int64_t i = 0; i < outputs / step; ++i)
        std::memcpy(bytes.data() + i * size, stored.data + (e * outputs + first + i * step) * size,
                    static_cast<std::size_t>(size));
      return bytes;
    };
    result_.push_back(
        {described(to, stored.dtype, {config_.experts, outputs / step}), part, config_.experts});
  }

  // Matrices [experts, outputs, inputs] whose outputs alternate.
  void together(const std::vector<Tensor>& matrices, const std::string& to, std::optional<DType> wanted) {
    const Tensor& first = matrices.front();
    for (const Tensor& matrix : matrices) {
      if (matrix.dtype == first.dtype) continue;
      throw Error(ErrorCode::unsupported, fmt::format("'{}' is stored as {} and '{}' as {}", first.name,
                                                      name(first.dtype), matrix.name, name(matrix.dtype)));
    }
    if (first.dtype == DType::mxfp4 && !wanted) return in_blocks(matrices, to);
    const DType dtype = wanted.value_or(first.dtype);
    if (is_quantised(dtype)) {
      throw Error(ErrorCode::unsupported,
                  fmt::format("tensor '{}': safetensors has no dtype for {}", first.name, name(dtype)),
                  "give --type bf16, f16 or f32");
    }
    const auto step = static_cast<std::int64_t>(matrices.size());
    const std::int64_t experts = config_.experts;
    const std::int64_t outputs = first.shape[1], inputs = first.shape[2], size = block_bytes(dtype);
    const auto part = [=](std::int64_t e) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(step * outputs * inputs * size));
      std::vector<float> values(static_cast<std::size_t>(inputs));
      std::vector<std::byte> row(static_cast<std::size_t>(inputs * size));
      for (std::int64_t output = 0; output < step * outputs; ++output) {
        const Tensor& matrix = matrices[static_cast<std::size_t>(output % step)];
        const ops::WeightMatrix stored{matrix.data, matrix.dtype, experts * outputs, inputs};
        ops::widen_row(stored, e * outputs + output / step, values.data());
        if (const auto bad = weights::quantise_row(dtype, values.data(), inputs, row.data())) {
          throw Error(ErrorCode::unsupported,
                      fmt::format("tensor '{}' holds {}, which {} cannot hold", matrix.name,
                                  values[static_cast<std::size_t>(*bad)], name(dtype)));
        }
        for (std::int64_t i = 0; i < inputs; ++i)
          std::memcpy(bytes.data() + (i * step * outputs + output) * size, row.data() + i * size,
                      static_cast<std::size_t>(size));
      }
      return bytes;
    };
    result_.push_back({described(to, dtype, {experts, inputs, step * outputs}), part, experts});
  }

  // MXFP4 as it is, in two tensors.
  void in_blocks(const std::vector<Tensor>& matrices, const std::string& to) {
    constexpr std::int64_t kBytes = block_bytes(DType::mxfp4);
    const auto step = static_cast<std::int64_t>(matrices.size());
    const std::int64_t outputs = matrices.front().shape[1], blocks = matrices.front().shape[2] / kBlock;
    const auto each = [matrices, step, outputs, blocks](std::int64_t e, std::int64_t bytes_each,
                                                        const auto& copy) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(step * outputs * blocks * bytes_each));
      for (std::int64_t output = 0; output < step * outputs; ++output) {
        const std::byte* row = matrices[static_cast<std::size_t>(output % step)].data +
                               (e * outputs + output / step) * blocks * kBytes;
        for (std::int64_t b = 0; b < blocks; ++b)
          copy(row + b * kBytes, bytes.data() + (output * blocks + b) * bytes_each);
      }
      return bytes;
    };
    const std::int64_t experts = config_.experts;
    result_.push_back({described(to + "_blocks", DType::u8, {experts, step * outputs, blocks, kBlock / 2}),
                       [=](std::int64_t e) { return each(e, kBlock / 2, copy_elements); }, experts});
    const auto scale = [](const std::byte* block, std::byte* at) { *at = *block; };
    result_.push_back({described(to + "_scales", DType::u8, {experts, step * outputs, blocks}),
                       [=](std::int64_t e) { return each(e, 1, scale); }, experts});
  }

  void alternating_biases(const Tensor& gate, const Tensor& up, const std::string& to) {
    if (gate.dtype != up.dtype) {
      throw Error(ErrorCode::unsupported, fmt::format("'{}' is stored as {} and '{}' as {}", gate.name,
                                                      name(gate.dtype), up.name, name(up.dtype)));
    }
    const std::int64_t count = gate.shape[1], size = block_bytes(gate.dtype);
    const auto part = [=](std::int64_t e) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(2 * count * size));
      for (std::int64_t i = 0; i < 2 * count; ++i)
        std::memcpy(bytes.data() + i * size, (i % 2 == 0 ? gate : up).data + (e * count + i / 2) * size,
                    static_cast<std::size_t>(size));
      return bytes;
    };
    result_.push_back({described(to, gate.dtype, {config_.experts, 2 * count}), part, config_.experts});
  }

  const std::map<std::string, Tensor>& tensors_;
  const ModelConfig& config_;
  const TensorNames hugging_face_, gguf_;
  const std::string in_hugging_face_, in_gguf_;
  std::set<std::string>& used_;
  std::vector<Translated>& result_;
};

}  // namespace

std::vector<Translated> translate_experts(const std::map<std::string, Tensor>& tensors,
                                          const Architecture& architecture, const ModelConfig& config,
                                          bool to_gguf, std::optional<DType> wanted,
                                          std::set<std::string>& used) {
  std::vector<Translated> result;
  for (std::size_t layer = 0; layer < config.layers.size(); ++layer) {
    Experts experts(tensors, architecture, config, layer, used, result);
    if (to_gguf) {
      experts.to_gguf();
    } else {
      experts.to_hugging_face(wanted);
    }
  }
  return result;
}

}  // namespace basin::models
