// F8_E4M3 with one scale for each block, as DeepSeek-V3 and the FP8 files of Qwen3 have it.
#include <fmt/format.h>

#include <array>
#include <cstring>

#include "basin/base/error.h"
#include "weights/printable.h"
#include "weights/weights.h"

namespace basin::weights {
namespace {

const std::string kScale = "_scale_inv";

std::array<float, 256> all_values() {
  std::array<float, 256> values{};
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = f8_e4m3_to_float(static_cast<std::uint8_t>(i));
  return values;
}

// [rows, columns] times a scale for each block, as bf16.
void expand(const Tensor& matrix, const Tensor& scales, F8Block block, bf16* out) {
  static const std::array<float, 256> kValues = all_values();
  const std::int64_t rows = matrix.shape[0], columns = matrix.shape[1], row_scales = scales.shape[1];
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::byte* scale_row = scales.data + r / block.rows * row_scales * 4;
    for (std::int64_t c = 0; c < columns; ++c) {
      float scale;
      std::memcpy(&scale, scale_row + c / block.columns * 4, 4);
      const auto value = std::to_integer<std::size_t>(matrix.data[r * columns + c]);
      out[r * columns + c] = to_bf16(kValues[value] * scale);
    }
  }
}

}  // namespace

void expand_f8(SafetensorsFile& file, F8Block block, const std::string& where) {
  std::vector<std::string> scale_names;
  for (auto& [name, tensor] : file.tensors) {
    const auto refuse = [&, &tensor_name = name](ErrorCode code, const std::string& what) {
      return Error(code, fmt::format("{}: tensor '{}' {}", where, printable(tensor_name), what));
    };
    if (name.ends_with(kScale)) {
      const auto of = file.tensors.find(name.substr(0, name.size() - kScale.size()));
      if (of == file.tensors.end())
        throw refuse(ErrorCode::corrupt, "is the scale of a tensor that is not there");
    }
    if (tensor.dtype != DType::f8_e4m3) continue;
    const auto scales = file.tensors.find(name + kScale);
    if (scales == file.tensors.end()) {
      throw refuse(ErrorCode::unsupported,
                   fmt::format("is F8_E4M3 without block scales '{}'", printable(name + kScale)));
    }
    if (tensor.shape.size() != 2) throw refuse(ErrorCode::unsupported, "is F8_E4M3 and no matrix");
    const auto blocks = [](std::int64_t extent, std::int64_t each) {
      return extent / each + (extent % each != 0);
    };
    const std::vector<std::int64_t> needed = {blocks(tensor.shape[0], block.rows),
                                              blocks(tensor.shape[1], block.columns)};
    if (scales->second.dtype != DType::f32 || scales->second.shape != needed) {
      throw refuse(ErrorCode::unsupported, fmt::format("needs scales F32 [{}, {}] for blocks of {} x {}",
                                                       needed[0], needed[1], block.rows, block.columns));
    }
    const auto count = static_cast<std::size_t>(tensor.bytes);
    const std::shared_ptr<bf16[]> expanded(new bf16[count]);
    expand(tensor, scales->second, block, expanded.get());
    file.owners.push_back(expanded);
    tensor.dtype = DType::bf16;
    tensor.data = reinterpret_cast<const std::byte*>(expanded.get());
    tensor.bytes = 2 * count;
    scale_names.push_back(scales->first);
  }
  for (const std::string& name : scale_names) file.tensors.erase(name);
}

}  // namespace basin::weights
