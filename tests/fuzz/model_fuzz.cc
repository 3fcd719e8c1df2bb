// Any config.json beside the weights of a small model, of which the first byte chooses one, either loads or gives one Error; what loads is
// written as GGUF and loads again, or that is refused with one Error. Input that starts with GGUF is such a file of a model.
#include <array>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>

#include "basin/base/error.h"
#include "fuzz/memory_file.h"
#include "models/convert.h"
#include "models/model.h"

namespace {

namespace fs = std::filesystem;

constexpr std::array kModels = {"llama_tiny",      "qwen3_tiny",       "qwen3_yarn_tiny",
                                "gemma3_tiny",     "gpt_oss_tiny",     "gpt_oss_mxfp4_tiny",
                                "deepseekv3_tiny", "deepseekv32_tiny", "glmmoedsa_tiny"};

// One for each model, of the whole run; they vanish with the process unless that crashes.
struct Folders {
  fs::path path;
  Folders() {
    std::string name = (fs::temp_directory_path() / "basin_model_fuzz.XXXXXX").string();
    basin::fuzz::require(::mkdtemp(name.data()) != nullptr);
    path = name;
    for (const char* model : kModels) {
      fs::create_directory(path / model);
      fs::create_symlink(fs::path(BASIN_GOLDEN_MODELS) / model / "model.safetensors",
                         path / model / "model.safetensors");
    }
  }
  ~Folders() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
};

void read_gguf(const std::uint8_t* data, std::size_t size) {
  const basin::fuzz::MemoryFile file(data, size);
  const std::string link =
      fs::temp_directory_path() / ("basin_model_fuzz" + std::to_string(::getpid()) + ".gguf");
  std::error_code ignored;
  fs::remove(link, ignored);
  fs::create_symlink(file.path(), link);
  try {
    basin::models::load(link);
  } catch (const basin::Error&) {
  }
  fs::remove(link, ignored);
}

void read_config(unsigned char choice, std::string_view config) {
  static const Folders folders;
  static basin::ThreadPool pool(1);
  const fs::path folder = folders.path / kModels[choice % kModels.size()];
  std::ofstream(folder / "config.json", std::ios::binary)
      .write(config.data(), static_cast<std::streamsize>(config.size()));
  try {
    const std::int64_t parameters = basin::models::load(folder).model->parameters();
    const fs::path out = folders.path / "out.gguf";
    basin::models::convert(folder, out, std::nullopt, pool, [](std::int64_t, std::int64_t) {});
    basin::fuzz::require(basin::models::load(out).model->parameters() <= parameters);
  } catch (const basin::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  if (input.starts_with("GGUF")) {
    read_gguf(data, size);
  } else if (size > 0) {
    read_config(data[0], input.substr(1));
  }
  return 0;
}
