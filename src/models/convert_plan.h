// What a conversion makes of every tensor.
#pragma once

#include <vector>

#include "models/convert.h"
#include "models/convert_tensor.h"
#include "models/translate.h"
#include "weights/output.h"

namespace basin::models {

/// Plans every tensor, and counts what is written of it. The pool, and the tensors' mappings, must outlive the writing.
class Plan {
 public:
  Plan(DType dtype, ThreadPool& pool, const OnConverted& on_converted)
      : dtype_(dtype), pool_(pool), on_converted_(on_converted) {}

  void add(const weights::Tensor& tensor) {
    add(tensor, [this](const weights::Tensor& t, DType to) { return converted(t, to, pool_); });
  }

  /// A tensor whose rows get the other format's order when its turn comes.
  void add(const Translated& translated, bool to_gguf) {
    if (translated.heads == 0) return add(translated.tensor);
    add(translated.tensor, [this, translated, to_gguf](const weights::Tensor& tensor, DType to) {
      weights::Output output = converted(tensor, to, pool_);
      output.produce = [this, translated, to_gguf, to](const weights::WriteBytes& write) {
        const std::vector<std::byte> rows = reordered(translated.tensor, translated.heads, to_gguf);
        weights::Tensor in_order = translated.tensor;
        in_order.data = rows.data();
        converted(in_order, to, pool_).produce(write);
      };
      return output;
    });
  }

  const std::vector<weights::Output>& outputs() const { return outputs_; }
  const ConvertReport& report() const { return report_; }

 private:
  static constexpr std::int64_t kMegabyte = 1'000'000;

  template <typename MakeOutput>
  void add(const weights::Tensor& tensor, const MakeOutput& make_output) {
    const DType to = converted_dtype(tensor, dtype_);
    weights::Output output = make_output(tensor, to);
    ++report_.tensors;
    report_.converted += to != tensor.dtype;
    report_.bytes += static_cast<std::int64_t>(weights::byte_size(output));
    output.produce = [this, produce = std::move(output.produce)](const weights::WriteBytes& write) {
      produce([&](const void* data, std::uint64_t bytes) {
        write(data, bytes);
        written_ += static_cast<std::int64_t>(bytes);
        on_converted_(written_ / kMegabyte, report_.bytes / kMegabyte);
      });
    };
    outputs_.push_back(std::move(output));
  }

  DType dtype_;
  ThreadPool& pool_;
  const OnConverted& on_converted_;
  std::vector<weights::Output> outputs_;
  ConvertReport report_;
  std::int64_t written_ = 0;
};

}  // namespace basin::models
