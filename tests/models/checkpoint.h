// Golden models by family, and copies of them with a changed configuration or changed tensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "weights/weights.h"

namespace basin::test {

/// The golden models whose model_type this build supports, sorted. Families that it lacks are left out.
std::vector<std::filesystem::path> supported_golden_models();

/// Of these, those whose family is read from GGUF, too.
std::vector<std::filesystem::path> golden_models_with_gguf();

/// A model of a family from the repository's own goldens. Throws std::runtime_error when there is none.
std::filesystem::path golden_model(const std::string& family);

/// GoogleTest parameter names: the folder's name.
std::string folder_name(const std::filesystem::path& folder);

/// A checkpoint in a temporary folder, removed with the object.
class Checkpoint {
 public:
  /// A copy of `model` (model.safetensors and config.json), not yet written.
  explicit Checkpoint(const std::filesystem::path& model);
  ~Checkpoint();
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  nlohmann::json config;
  std::map<std::string, weights::Tensor> tensors;  // borrow from the copied model's mapping

  /// Writes both files; gives the folder.
  const std::filesystem::path& write();
  const std::filesystem::path& folder() const { return folder_; }

  /// Keeps the first `layers` layers.
  void cut(std::int64_t layers);

 private:
  weights::SafetensorsFile source_;
  std::filesystem::path folder_;
};

}  // namespace basin::test
