#include "models/tensor_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "basin/base/error.h"

namespace basin::models {

const weights::Tensor& TensorTable::take(const std::string& name, const std::vector<std::int64_t>& shape) {
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
  const bool is_float =
      tensor.dtype == DType::f32 || tensor.dtype == DType::f16 || tensor.dtype == DType::bf16;
  if (!is_float && !is_quantised(tensor.dtype)) {
    throw Error(ErrorCode::unsupported,
                fmt::format("{}: tensor '{}' is stored as {}", where_, name, basin::name(tensor.dtype)),
                "weights may be f32, f16, bf16 or quantised blocks");
  }
  if (taken_.insert(name).second) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    parameters_ += count;
    weight_bytes_ += static_cast<std::int64_t>(tensor.bytes);
  }
  return tensor;
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
