#include "models/hf_layout.h"

#include <fmt/format.h>

#include <array>
#include <deque>
#include <system_error>

#include "basin/base/error.h"
#include "models/f8_config.h"
#include "weights/atomic_file.h"
#include "weights/json_file.h"

namespace basin::models {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kMaxSideBytes = 256u << 20;  // a tokenizer.json may be large

// What stands beside the weights in the Hugging Face layout and belongs to the model. config.json is written anew.
constexpr std::array kSideFiles = {"tokenizer.json",
                                   "tokenizer_config.json",
                                   "special_tokens_map.json",
                                   "added_tokens.json",
                                   "vocab.json",
                                   "merges.txt",
                                   "tokenizer.model",
                                   "chat_template.jinja",
                                   "chat_template.json",
                                   "generation_config.json"};

std::string contents_of(const fs::path& path) {
  const weights::MappedFile file(path);
  if (file.size() > kMaxSideBytes)
    throw Error(ErrorCode::corrupt,
                fmt::format("{} has {} bytes, too many for such a file", path.string(), file.size()));
  return {reinterpret_cast<const char*>(file.data()), file.size()};
}

// A file of another model must not be replaced because this one is written beside it.
void check_side_files(const std::vector<SideFile>& files, const fs::path& directory) {
  for (const SideFile& file : files) {
    const fs::path path = directory / file.name;
    std::error_code ignored;
    if (fs::exists(path, ignored) && contents_of(path) != file.contents) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("{} is there already and says something else", path.string()),
                  "name a place in an empty or new directory");
    }
  }
}

// A directory with those above it. What was made goes again while it is empty, unless it is kept.
class NewDirectory {
 public:
  explicit NewDirectory(const fs::path& directory) {
    std::error_code error;
    for (fs::path above = directory; !above.empty() && !fs::exists(above, error); above = above.parent_path())
      made_.push_back(above);
    if (!directory.empty()) fs::create_directories(directory, error);
    if (error) {
      throw Error(ErrorCode::io,
                  fmt::format("cannot make the directory {}: {}", directory.string(), error.message()));
    }
  }
  ~NewDirectory() {
    std::error_code ignored;
    for (const fs::path& directory : made_) fs::remove(directory, ignored);
  }
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;

  void keep() { made_.clear(); }

 private:
  std::vector<fs::path> made_;  // the innermost first
};

}  // namespace

Layout find_layout(const fs::path& in) {
  std::error_code ignored;
  if (!fs::is_directory(in, ignored)) {
    weights::require_exists(in);
    return {in, in.parent_path()};
  }
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"}) {
    if (fs::exists(in / name, ignored)) return {in / name, in};
  }
  throw Error(ErrorCode::not_found,
              fmt::format("{} holds no model.safetensors and no index of shards", in.string()));
}

Layout layout_at(const fs::path& out) {
  if (out.extension() == ".safetensors") return {out, out.parent_path()};
  return {out / "model.safetensors", out};
}

Source read_source(const Layout& in) {
  Source source;
  std::optional<weights::F8Block> f8_block;
  std::error_code ignored;
  if (const fs::path config_path = in.directory / "config.json"; fs::exists(config_path, ignored)) {
    source.config = weights::read_json_object(config_path, kMaxSideBytes);
    f8_block = take_f8_block(*source.config, config_path.string());
  }
  source.file = in.tensors.extension() == ".json" ? weights::read_safetensors_index(in.tensors)
                                                  : weights::read_safetensors(in.tensors);
  if (f8_block) weights::expand_f8(source.file, *f8_block, in.tensors.string());
  return source;
}

std::vector<SideFile> read_side_files(const fs::path& directory) {
  std::vector<SideFile> files;
  std::error_code ignored;
  for (const char* name : kSideFiles) {
    if (fs::exists(directory / name, ignored)) files.push_back({name, contents_of(directory / name)});
  }
  return files;
}

void write_layout(const Layout& out, const std::vector<SideFile>& side_files,
                  const std::vector<weights::Output>& tensors, std::map<std::string, std::string> metadata) {
  metadata.emplace("format", "pt");  // transformers refuses a file without it
  check_side_files(side_files, out.directory);
  NewDirectory directory(out.directory);
  std::deque<weights::AtomicFile> beside;
  for (const SideFile& file : side_files) {
    beside.emplace_back(out.directory / file.name);
    beside.back().write(file.contents.data(), file.contents.size());
  }
  weights::write_safetensors(out.tensors, tensors, metadata);
  for (weights::AtomicFile& file : beside) file.commit();
  directory.keep();
}

}  // namespace basin::models
