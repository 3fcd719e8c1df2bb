#include "models/f8_config.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "basin/base/error.h"

namespace basin::models {

std::optional<weights::F8Block> take_f8_block(nlohmann::json& config, const std::string& where) {
  const auto it = config.find("quantization_config");
  if (it == config.end() || !it->is_object() || it->value("quant_method", nlohmann::json()) != "fp8")
    return {};
  weights::F8Block block;
  for (const auto& [key, value] : it->items()) {
    const nlohmann::json& size = value;
    const bool is_block = key == "weight_block_size" && size.is_array() && size.size() == 2 &&
                          size[0].is_number_unsigned() && size[1].is_number_unsigned() && size[0] > 0 &&
                          size[1] > 0 && size[0] <= 65536 && size[1] <= 65536;
    if (is_block) block = {size[0].get<std::int64_t>(), size[1].get<std::int64_t>()};
    const bool known =
        is_block || key == "quant_method" || key == "modules_to_not_convert" ||
        (key == "fmt" && value == "e4m3") ||
        (key == "scale_fmt" && (value == "ue8m0" || value.is_null())) ||  // scales are floats all the same
        (key == "activation_scheme" && value == "dynamic");
    if (!known) {
      throw Error(ErrorCode::unsupported,
                  fmt::format("{}: '{}' of its fp8 'quantization_config' is not supported", where,
                              key.substr(0, 100)),
                  "supported is e4m3 with scales of blocks and dynamic activations");
    }
  }
  config.erase(it);
  return block;
}

}  // namespace basin::models
