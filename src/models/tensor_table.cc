#include "models/tensor_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "basin/base/error.h"

namespace basin::models {

const weights::Tensor& TensorTable::find(const std::string& name,
                                         const std::vector<std::int64_t>& shape) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end()) {
    throw Error(ErrorCode::corrupt, fmt::format("{} has no tensor '{}'", where_, name),
                "the checkpoint is incomplete, or its configuration belongs to another model");
  }
  const weights::Tensor& tensor = it->second;
  if (tensor.shape != shape) {
    throw Error(ErrorCode::corrupt,
                fmt::format("{}: tensor '{}' is [{}]; the configuration needs [{}]", where_, name,
                            fmt::join(tensor.shape, ", "), fmt::join(shape, ", ")));
  }
  return tensor;
}

const weights::Tensor& TensorTable::take(const std::string& name, const std::vector<std::int64_t>& shape) {
  const weights::Tensor& tensor = find(name, shape);
  const bool is_float =
      tensor.dtype == DType::f32 || tensor.dtype == DType::f16 || tensor.dtype == DType::bf16;
  if (!is_float && !is_quantised(tensor.dtype)) {
    throw Error(ErrorCode::unsupported,
                fmt::format("{}: tensor '{}' is stored as {}", where_, name, basin::name(tensor.dtype)),
                "weights may be f32, f16, bf16 or quantised blocks");
  }
  std::int64_t parameters = 1;
  for (const std::int64_t extent : shape) parameters *= extent;
  count(tensor, name, parameters);
  return tensor;
}

void TensorTable::count(const weights::Tensor& tensor, const std::string& name, std::int64_t parameters) {
  if (!taken_.insert(name).second) return;
  parameters_ += parameters;
  weight_bytes_ += static_cast<std::int64_t>(tensor.bytes);
}

ops::WeightMatrix TensorTable::matrix(const std::string& name, std::int64_t outputs, std::int64_t inputs) {
  const weights::Tensor& tensor = take(name, {outputs, inputs});
  return {tensor.data, tensor.dtype, outputs, inputs};
}

std::vector<float> TensorTable::vector(const std::string& name, std::int64_t size) {
  const weights::Tensor& tensor = take(name, {size});
  std::vector<float> values(static_cast<std::size_t>(size));
  ops::widen_row({tensor.data, tensor.dtype, 1, size}, 0, values.data());
  return values;
}

std::vector<ops::WeightMatrix> TensorTable::stack(const std::string& name, std::int64_t count,
                                                  std::int64_t outputs, std::int64_t inputs) {
  const weights::Tensor& tensor = take(name, {count, outputs, inputs});
  std::vector<ops::WeightMatrix> matrices;
  ops::WeightMatrix matrix{tensor.data, tensor.dtype, outputs, inputs};
  for (std::int64_t i = 0; i < count; ++i) {
    matrices.push_back(matrix);
    matrix.data += outputs * matrix.row_bytes();
  }
  return matrices;
}

std::vector<std::vector<float>> TensorTable::vectors(const std::string& name, std::int64_t count,
                                                     std::int64_t size) {
  const weights::Tensor& tensor = take(name, {count, size});
  std::vector<std::vector<float>> result(static_cast<std::size_t>(count),
                                         std::vector<float>(static_cast<std::size_t>(size)));
  for (std::int64_t i = 0; i < count; ++i)
    ops::widen_row({tensor.data, tensor.dtype, count, size}, i, result[static_cast<std::size_t>(i)].data());
  return result;
}

const std::byte* TensorTable::bytes(const std::string& name, const std::vector<std::int64_t>& shape,
                                    std::int64_t parameters_per_byte) {
  const weights::Tensor& tensor = find(name, shape);
  if (tensor.dtype != DType::u8) {
    throw Error(ErrorCode::unsupported, fmt::format("{}: tensor '{}' is stored as {}; it must be bytes (u8)",
                                                    where_, name, basin::name(tensor.dtype)));
  }
  count(tensor, name, static_cast<std::int64_t>(tensor.bytes) * parameters_per_byte);
  return tensor.data;
}

void TensorTable::leave_out(const std::string& prefix) {
  for (auto it = tensors_.lower_bound(prefix); it != tensors_.end() && it->first.starts_with(prefix); ++it)
    taken_.insert(it->first);
}

void TensorTable::refuse_unused() const {
  for (const auto& [name, tensor] : tensors_) {
    if (!taken_.contains(name)) {
      throw Error(ErrorCode::unsupported,
                  fmt::format("{}: the tensor '{}' is not known to this architecture", where_, name),
                  "ignoring it could change the results");
    }
  }
}

}  // namespace basin::models
