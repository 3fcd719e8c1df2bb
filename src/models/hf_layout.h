// A model as files in the Hugging Face layout: where they lie, and what stands beside the weights.
#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "weights/output.h"
#include "weights/weights.h"

namespace basin::models {

struct Layout {
  std::filesystem::path tensors;    // a safetensors file, or the index of its shards
  std::filesystem::path directory;  // of config.json
};

/// Of a directory, or of a .safetensors file in one. Throws Error(not_found).
Layout find_layout(const std::filesystem::path& in);

/// Where a model is written: a .safetensors file with the rest beside it, else a directory.
Layout layout_at(const std::filesystem::path& out);

/// A checkpoint with F8_E4M3 expanded, and its config.json without what that needed. Throws as the readers do.
struct Source {
  std::optional<nlohmann::json> config;
  weights::SafetensorsFile file;
};
Source read_source(const Layout& in);

struct SideFile {
  std::string name;
  std::string contents;
};

/// What belongs to the model beside its weights and config.json: tokenizer, chat template, generation settings.
std::vector<SideFile> read_side_files(const std::filesystem::path& directory);

/// Makes the directory, and in it the side files and the weights: each appears when all of them are written, and none where that
/// fails. Throws Error(invalid_argument) before anything is written where a side file of another model stands.
void write_layout(const Layout& out, const std::vector<SideFile>& side_files,
                  const std::vector<weights::Output>& tensors, std::map<std::string, std::string> metadata);

}  // namespace basin::models
