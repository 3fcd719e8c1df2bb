// Hands out a checkpoint's tensors by name and remembers which were taken, so that none is missing and none ignored.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ops/linear.h"
#include "weights/weights.h"

namespace basin::models {

class TensorTable {
 public:
  /// `tensors` must outlive the table; `where` names the file in messages.
  TensorTable(const std::map<std::string, weights::Tensor>& tensors, std::string where)
      : tensors_(tensors), where_(std::move(where)) {}

  const std::string& where() const { return where_; }
  bool has(const std::string& name) const { return tensors_.contains(name); }

  // Each throws Error(corrupt | unsupported) when the tensor is absent or not as asked for.

  /// A matrix [outputs, inputs] that stays in its stored form.
  ops::WeightMatrix matrix(const std::string& name, std::int64_t outputs, std::int64_t inputs);
  /// `count` matrices in one tensor [count, outputs, inputs].
  std::vector<ops::WeightMatrix> stack(const std::string& name, std::int64_t count, std::int64_t outputs,
                                       std::int64_t inputs);

  /// A vector as floats.
  std::vector<float> vector(const std::string& name, std::int64_t size);
  /// `count` vectors in one tensor [count, size].
  std::vector<std::vector<float>> vectors(const std::string& name, std::int64_t count, std::int64_t size);

  /// The bytes of a tensor of u8, each of which stands for so many parameters of the model.
  const std::byte* bytes(const std::string& name, const std::vector<std::int64_t>& shape,
                         std::int64_t parameters_per_byte);

  /// Takes every tensor whose name begins so, for nothing: parts of the file that are known not to be part of the model.
  void leave_out(const std::string& prefix);

  /// Throws Error(unsupported) naming a tensor that nobody took.
  void refuse_unused() const;

  std::int64_t parameters() const { return parameters_; }      // elements of the tensors taken
  std::int64_t weight_bytes() const { return weight_bytes_; }  // their stored bytes

 private:
  const weights::Tensor& find(const std::string& name, const std::vector<std::int64_t>& shape) const;
  const weights::Tensor& take(const std::string& name, const std::vector<std::int64_t>& shape);
  void count(const weights::Tensor& tensor, const std::string& name, std::int64_t parameters);

  const std::map<std::string, weights::Tensor>& tensors_;
  std::string where_;
  std::set<std::string> taken_;
  std::int64_t parameters_ = 0;
  std::int64_t weight_bytes_ = 0;
};

}  // namespace basin::models
