#include "models/convert_tensor.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "basin/base/error.h"
#include "ops/linear.h"
#include "weights/printable.h"
#include "weights/quantise.h"

namespace basin::models {
namespace {

constexpr std::int64_t kBatchBytes = 16 << 20;  // of converted rows in memory at a time
constexpr std::int64_t kTaskElements = 64 << 10;

bool is_router(const std::string& name) {
  return name.find("ffn_gate_inp") != std::string::npos || name.find("router") != std::string::npos ||
         name.ends_with("mlp.gate.weight");
}

struct Bad {
  std::int64_t row = -1, column = 0;
  float value = 0.0f;
};

// Rows [first, first + count) as `dtype` at `out`; the first value that has no such form, if there is one.
Bad convert_rows(const ops::WeightMatrix& from, DType dtype, std::int64_t first, std::int64_t count,
                 std::byte* out) {
  std::vector<float> values(static_cast<std::size_t>(from.inputs));
  const std::int64_t row_bytes = from.inputs / block_elements(dtype) * block_bytes(dtype);
  for (std::int64_t row = first; row < first + count; ++row, out += row_bytes) {
    ops::widen_row(from, row, values.data());
    if (const auto bad = weights::quantise_row(dtype, values.data(), from.inputs, out))
      return {row, *bad, values[static_cast<std::size_t>(*bad)]};
  }
  return {};
}

}  // namespace

DType converted_dtype(const weights::Tensor& tensor, std::optional<DType> wanted, bool to_gguf) {
  if (!weights::is_weight_type(tensor.dtype)) return tensor.dtype;
  // Those of experts lie together in a matrix.
  const bool is_vector = tensor.shape.size() < 2 || tensor.name.ends_with("bias");
  if (is_vector && (wanted || to_gguf)) return DType::f32;
  if (!wanted) {
    if (to_gguf || !is_quantised(tensor.dtype)) return tensor.dtype;
    throw Error(ErrorCode::unsupported,
                fmt::format("tensor '{}': safetensors has no dtype for {}", weights::printable(tensor.name),
                            name(tensor.dtype)),
                "give --type bf16, f16 or f32");
  }
  if (is_quantised(*wanted) && is_router(tensor.name))
    return is_quantised(tensor.dtype) ? DType::f32 : tensor.dtype;
  if (tensor.shape.back() % block_elements(*wanted) != 0) {
    throw Error(ErrorCode::unsupported,
                fmt::format("tensor '{}' has rows of {} elements; {} needs a multiple of {}",
                            weights::printable(tensor.name), tensor.shape.back(), name(*wanted),
                            block_elements(*wanted)),
                block_elements(*wanted) > 32
                    ? "types with blocks of 32 are q8_0, q4_0, q4_1, q5_0, q5_1 and mxfp4"
                    : "f32, f16 and bf16 take any width");
  }
  return *wanted;
}

weights::Output converted(const weights::Tensor& tensor, DType dtype, ThreadPool& pool) {
  if (dtype == tensor.dtype) return weights::as_stored(tensor);
  const std::int64_t width = tensor.shape.empty() ? 1 : tensor.shape.back();
  std::int64_t rows = 1;
  for (std::size_t i = 0; i + 1 < tensor.shape.size(); ++i) rows *= tensor.shape[i];
  if (width == 0) rows = 0;
  const ops::WeightMatrix from{tensor.data, tensor.dtype, rows, width};
  const auto produce = [=, &pool, name = tensor.name](const weights::WriteBytes& write) {
    if (rows == 0) return;
    const std::int64_t row_bytes = width / block_elements(dtype) * block_bytes(dtype);
    const std::int64_t batch = std::max<std::int64_t>(1, kBatchBytes / row_bytes);
    const std::int64_t task_rows = std::max<std::int64_t>(1, kTaskElements / width);
    std::vector<std::byte> bytes(static_cast<std::size_t>(std::min(batch, rows) * row_bytes));
    for (std::int64_t first = 0; first < rows; first += batch) {
      const std::int64_t count = std::min(batch, rows - first), tasks = (count + task_rows - 1) / task_rows;
      std::vector<Bad> bad(static_cast<std::size_t>(tasks));
      pool.parallel_for(tasks, [&](std::int64_t task, int) {
        const std::int64_t at = task * task_rows;
        bad[static_cast<std::size_t>(task)] = convert_rows(
            from, dtype, first + at, std::min(task_rows, count - at), bytes.data() + at * row_bytes);
      });
      for (const Bad& each : bad) {
        if (each.row < 0) continue;
        throw Error(
            ErrorCode::unsupported,
            fmt::format("tensor '{}' holds {} (row {}, column {}), which {} cannot hold",
                        weights::printable(name), each.value, each.row, each.column, basin::name(dtype)));
      }
      write(bytes.data(), static_cast<std::uint64_t>(count * row_bytes));
    }
  };
  return {tensor.name, dtype, tensor.shape, produce};
}

}  // namespace basin::models
