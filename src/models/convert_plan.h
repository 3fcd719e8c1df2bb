// What a conversion makes of every tensor.
#pragma once

#include <optional>
#include <vector>

#include "models/convert.h"
#include "models/convert_tensor.h"
#include "models/translate.h"
#include "weights/output.h"

namespace basin::models {

/// Plans every tensor, and counts what is written of it. The pool, and the tensors' mappings, must outlive the writing.
class Plan {
 public:
  /// Matrices become `dtype`, or keep theirs.
  Plan(std::optional<DType> dtype, bool to_gguf, ThreadPool& pool, const OnConverted& on_converted)
      : dtype_(dtype), to_gguf_(to_gguf), pool_(pool), on_converted_(on_converted) {}

  void add(const weights::Tensor& tensor) {
    add(tensor, [this](const weights::Tensor& t, DType to) { return converted(t, to, pool_); });
  }

  /// Parts are made when their turn comes.
  void add(const Translated& translated) {
    if (!translated.part) return add(translated.tensor);
    add(translated.tensor, [this, translated](const weights::Tensor& whole, DType to) {
      return weights::Output{whole.name, to, whole.shape,
                             [this, translated, to](const weights::WriteBytes& write) {
                               weights::Tensor part = translated.tensor;
                               if (!part.shape.empty()) part.shape[0] /= translated.parts;
                               for (std::int64_t i = 0; i < translated.parts; ++i) {
                                 const std::vector<std::byte> bytes = translated.part(i);
                                 part.data = bytes.data();
                                 part.bytes = bytes.size();
                                 converted(part, to, pool_).produce(write);
                               }
                             }};
    });
  }

  const std::vector<weights::Output>& outputs() const { return outputs_; }
  const ConvertReport& report() const { return report_; }

 private:
  static constexpr std::int64_t kMegabyte = 1'000'000;

  template <typename MakeOutput>
  void add(const weights::Tensor& tensor, const MakeOutput& make_output) {
    const DType to = converted_dtype(tensor, dtype_, to_gguf_);
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

  std::optional<DType> dtype_;
  bool to_gguf_;
  ThreadPool& pool_;
  const OnConverted& on_converted_;
  std::vector<weights::Output> outputs_;
  ConvertReport report_;
  std::int64_t written_ = 0;
};

}  // namespace basin::models
