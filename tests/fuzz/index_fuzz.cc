// Any bytes as model.safetensors.index.json beside two shards either load, with every byte of every tensor readable, or give
// one Error. Nothing outside the folder is opened: what loads came from the shards.
#include <fstream>
#include <vector>

#include "basin/base/error.h"
#include "fuzz/memory_file.h"
#include "weights/weights.h"

namespace {

using basin::weights::Tensor;

// The folder of the whole run; it vanishes with the process unless that crashes.
struct Folder {
  std::filesystem::path path;
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "basin_index_fuzz.XXXXXX").string();
    basin::fuzz::require(::mkdtemp(name.data()) != nullptr);
    path = name;
    const std::byte data[2] = {std::byte{1}, std::byte{2}};
    const auto tensor = [&](const char* tensor_name) {
      return Tensor{tensor_name, basin::DType::u8, {2}, data, 2};
    };
    basin::weights::write_safetensors(path / "a.safetensors", {tensor("x"), tensor("y")});
    basin::weights::write_safetensors(path / "b.safetensors", {tensor("z")});
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Folder folder;
  const std::filesystem::path index = folder.path / "model.safetensors.index.json";
  std::ofstream(index, std::ios::binary)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  try {
    const auto file = basin::weights::read_safetensors_index(index);
    basin::fuzz::require(file.tensors.size() >= 1 && file.tensors.size() <= 3);
    for (const auto& [name, tensor] : file.tensors) {
      basin::fuzz::require(name == "x" || name == "y" || name == "z");
      basin::fuzz::touch(tensor.data, tensor.bytes);
    }
  } catch (const basin::Error&) {
  }
  return 0;
}
