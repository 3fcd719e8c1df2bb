// basin tokenize: ids and pieces of a text. Needs the tokenizer only, not the weights.
#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "basin/base/error.h"
#include "cli/commands.h"
#include "cli/inputs.h"
#include "cli/output.h"
#include "text/tokenizer.h"
#include "weights/gguf.h"
#include "weights/weights.h"

namespace basin::cli {
namespace {

text::Tokenizer from_gguf(const std::filesystem::path& path) {
  const weights::GgufFile file = weights::read_gguf(path);
  try {
    return text::Tokenizer::from_gguf(file);
  } catch (const Error& error) {  // which knows the metadata, not the file
    throw error.in(path.string());
  }
}

text::Tokenizer load_tokenizer(const std::filesystem::path& model) {
  weights::require_exists(model);
  std::error_code error;
  if (std::filesystem::is_directory(model, error)) return text::Tokenizer::from_directory(model);
  if (model.extension() == ".gguf") return from_gguf(model);
  if (model.extension() == ".safetensors") {
    return text::Tokenizer::from_directory(model.has_parent_path() ? model.parent_path() : ".");
  }
  throw Error(ErrorCode::unsupported, fmt::format("{} is not a model", model.string()),
              "give a directory, a .gguf file or a .safetensors file");
}

// The token's bytes as text; what is not UTF-8 by itself becomes U+FFFD.
std::string piece(const text::Tokenizer& tokenizer, std::int32_t id) {
  text::Utf8Stream utf8;
  std::string text = utf8.push(tokenizer.token_bytes(id, true));
  return text + utf8.finish();
}

}  // namespace

int run(const TokenizeArgs& args) {
  const std::string text = args.text ? *args.text : read_text(*args.text_file);
  const text::Tokenizer tokenizer = load_tokenizer(args.model);
  const Encoded encoded =
      args.special ? encode_for_model(tokenizer, text) : Encoded{tokenizer.encode(text, false), false};
  const std::vector<std::int32_t>& ids = encoded.ids;
  const bool bos_added = encoded.bos_added;

  if (args.json) {
    nlohmann::ordered_json object;
    object["token_ids"] = ids;
    object["tokens"] = nlohmann::ordered_json::array();
    for (const std::int32_t id : ids) object["tokens"].push_back(piece(tokenizer, id));
    object["bos_added"] = bos_added;
    write_json(object);
    return 0;
  }
  std::string lines;
  for (const std::int32_t id : ids) lines += fmt::format("{:>8}  '{}'\n", id, one_line(piece(tokenizer, id)));
  lines += fmt::format("{} tokens{}\n", ids.size(), bos_added ? ", BOS added" : "");
  write_stdout(lines);
  return 0;
}

}  // namespace basin::cli
