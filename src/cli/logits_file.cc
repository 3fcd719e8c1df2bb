#include "cli/logits_file.h"

#include <fmt/format.h>

#include <bit>
#include <string>

#include "basin/base/error.h"

namespace basin::cli {

static_assert(std::endian::native == std::endian::little, "safetensors is little-endian");

void LogitsFile::begin(std::int64_t rows, std::int64_t columns) {
  missing_ = rows * columns;
  std::string header = fmt::format(R"({{"logits":{{"dtype":"F32","shape":[{},{}],"data_offsets":[0,{}]}}}})",
                                   rows, columns, missing_ * static_cast<std::int64_t>(sizeof(float)));
  header.resize((header.size() + 7) / 8 * 8, ' ');  // the format aligns the data to 8
  const std::uint64_t header_bytes = header.size();
  file_.write(&header_bytes, sizeof(header_bytes));
  file_.write(header.data(), header.size());
}

void LogitsFile::append(std::span<const float> values) {
  missing_ -= static_cast<std::int64_t>(values.size());
  file_.write(values.data(), values.size_bytes());
}

void LogitsFile::finish() {
  if (missing_ != 0) throw Error(ErrorCode::internal, fmt::format("logits: {} values short", missing_));
  file_.commit();
}

}  // namespace basin::cli
