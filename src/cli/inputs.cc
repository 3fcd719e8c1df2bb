#include "cli/inputs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>

#include "basin/base/error.h"
#include "text/tokenizer.h"
#include "weights/weights.h"

namespace basin::cli {
namespace {

constexpr std::size_t kMaxTextBytes = std::size_t{1} << 28;  // a hundred long novels; devices have no end

}  // namespace

std::string read_text(const std::string& path) {
  const auto cannot_read = [&](int error) {
    return Error(error == ENOENT ? ErrorCode::not_found : ErrorCode::io,
                 fmt::format("cannot read {}: {}", path, std::strerror(error)));
  };
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (!file) throw cannot_read(errno);
  std::string text;
  std::vector<char> buffer(1 << 16);
  while (true) {
    const std::size_t count = std::fread(buffer.data(), 1, buffer.size(), file.get());
    text.append(buffer.data(), count);
    if (text.size() > kMaxTextBytes) {
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format("{} has more than {} bytes, the most that a text may have", path, kMaxTextBytes));
    }
    if (count == buffer.size()) continue;
    if (std::ferror(file.get()) != 0) throw cannot_read(errno);
    break;
  }
  if (text.empty()) throw Error(ErrorCode::invalid_argument, fmt::format("{} is empty", path));
  if (const auto offset = text::first_invalid_utf8(text)) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{} is not UTF-8: invalid byte at offset {}", path, *offset),
                "convert it, for example with iconv -t UTF-8");
  }
  return text;
}

Encoded encode_for_model(const text::Tokenizer& tokenizer, const std::string& text) {
  std::vector<std::int32_t> ids = tokenizer.encode(text, true);
  if (!tokenizer.adds_bos() || !tokenizer.bos()) return {std::move(ids), false};
  std::vector<std::int32_t> with_bos(ids.size() + 1, *tokenizer.bos());
  std::copy(ids.begin(), ids.end(), with_bos.begin() + 1);
  return {std::move(with_bos), true};
}

std::vector<std::int32_t> read_tokens(const std::string& path) {
  const weights::SafetensorsFile file = weights::read_safetensors(path);
  const auto found = file.tensors.find("input_ids");
  if (found == file.tensors.end()) {
    throw Error(ErrorCode::not_found, fmt::format("{} has no tensor named input_ids", path));
  }
  const weights::Tensor& tensor = found->second;
  const bool wide = tensor.dtype == DType::i64;
  if ((!wide && tensor.dtype != DType::i32) || tensor.shape.size() != 1) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("input_ids of {} is {} with {} dimensions; it must be int32 or int64 with one",
                            path, name(tensor.dtype), tensor.shape.size()));
  }
  if (tensor.shape[0] == 0)
    throw Error(ErrorCode::invalid_argument, fmt::format("input_ids of {} is empty", path));
  std::vector<std::int32_t> ids(static_cast<std::size_t>(tensor.shape[0]));
  if (!wide) {
    std::memcpy(ids.data(), tensor.data, ids.size() * sizeof(std::int32_t));
    return ids;
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    std::int64_t id = 0;
    std::memcpy(&id, tensor.data + i * sizeof(id), sizeof(id));
    if (id < 0 || id > std::numeric_limits<std::int32_t>::max()) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("input_ids[{}] of {} is {}, not a token id", i, path, id));
    }
    ids[i] = static_cast<std::int32_t>(id);
  }
  return ids;
}

}  // namespace basin::cli
