// Input that starts with '{' is a tokenizer.json, which works or is refused with one Error; anything else is a text for
// the tokenizer in BASIN_TINY_TOKENIZER.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <string_view>
#include <vector>

#include "basin/base/error.h"
#include "fuzz/memory_file.h"
#include "text/tokenizer.h"

namespace {

using basin::text::Tokenizer;

// One directory for the whole run; it vanishes with the process unless that crashes.
const std::filesystem::path& directory() {
  static const struct Directory {
    std::filesystem::path path;
    Directory() {
      std::string name = (std::filesystem::temp_directory_path() / "basin_fuzz.XXXXXX").string();
      basin::fuzz::require(::mkdtemp(name.data()) != nullptr);
      path = name;
    }
    ~Directory() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
  } made;
  return made.path;
}

void load(std::string_view json) {
  std::ofstream(directory() / "tokenizer.json", std::ios::binary)
      .write(json.data(), static_cast<std::streamsize>(json.size()));
  try {
    const Tokenizer tokenizer = Tokenizer::from_directory(directory());
    const auto ids = tokenizer.encode("the cat<tool>, 12 \xc3\xa9\n", true);
    tokenizer.decode(ids, true);
  } catch (const basin::Error&) {
  }
}

// What ids stand for encodes to the same ids, and only text that is not UTF-8 is refused.
void encode(std::string_view text) {
  static const Tokenizer tokenizer = Tokenizer::from_directory(BASIN_TINY_TOKENIZER);
  std::vector<std::int32_t> ids;
  try {
    ids = tokenizer.encode(text, false);
    basin::fuzz::require(!basin::text::first_invalid_utf8(text));
  } catch (const basin::Error& error) {
    basin::fuzz::require(error.code() == basin::ErrorCode::invalid_argument &&
                         basin::text::first_invalid_utf8(text));
    return;
  }
  basin::fuzz::require(tokenizer.encode(tokenizer.decode(ids, true), false) == ids);
  tokenizer.encode(text, true);
}

// Any bytes are ids, and their text is UTF-8.
void decode(std::string_view bytes) {
  static const Tokenizer tokenizer = Tokenizer::from_directory(BASIN_TINY_TOKENIZER);
  std::vector<std::int32_t> ids;
  for (const char byte : bytes) ids.push_back(static_cast<unsigned char>(byte));
  const std::string text = tokenizer.decode(ids, true);
  basin::fuzz::require(!basin::text::first_invalid_utf8(text));
  basin::text::Utf8Stream stream;
  std::string streamed;
  for (const std::int32_t id : ids) streamed += stream.push(tokenizer.token_bytes(id, true));
  basin::fuzz::require(streamed + stream.finish() == text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  if (input.starts_with('{')) {
    load(input);
  } else {
    encode(input);
    decode(input);
  }
  return 0;
}
