#include "models/convert.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <vector>

#include "basin/base/error.h"
#include "models/config.h"
#include "models/convert_plan.h"
#include "models/decoder.h"
#include "models/hf_layout.h"
#include "text/export.h"
#include "weights/gguf_writer.h"
#include "weights/quantise.h"

namespace basin::models {
namespace {

namespace fs = std::filesystem;

// The tensors of a file in their order there.
std::vector<weights::Tensor> in_order(const std::map<std::string, weights::Tensor>& tensors) {
  std::vector<weights::Tensor> list;
  for (const auto& [name, tensor] : tensors) list.push_back(tensor);
  std::stable_sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.data < b.data; });
  return list;
}

// llama.cpp's number for a file whose matrices are of this type (general.file_type).
std::uint32_t file_type(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return 1;
    case DType::q4_0:
      return 2;
    case DType::q4_1:
      return 3;
    case DType::q8_0:
      return 7;
    case DType::q5_0:
      return 8;
    case DType::q5_1:
      return 9;
    case DType::q4_k:
      return 14;
    case DType::q5_k:
      return 16;
    case DType::q6_k:
      return 18;
    case DType::bf16:
      return 32;
    case DType::mxfp4:
      return 38;
    default:
      return 0;  // f32
  }
}

// The type of the most weights.
DType main_dtype(const std::vector<Translated>& tensors) {
  std::map<DType, std::int64_t> elements;
  for (const Translated& translated : tensors) {
    if (!weights::is_weight_type(translated.tensor.dtype)) continue;
    std::int64_t count = 1;
    for (const std::int64_t extent : translated.tensor.shape) count *= extent;
    elements[translated.tensor.dtype] += count;
  }
  DType most = DType::f32;
  for (const auto& [dtype, count] : elements) {
    if (count > elements[most]) most = dtype;
  }
  return most;
}

void gguf_to_gguf(const fs::path& in, const fs::path& out, std::optional<DType> dtype, Plan& plan) {
  const weights::GgufFile file = weights::read_gguf(in);
  weights::GgufMetadata metadata;
  for (const weights::GgufEntry& entry : file.entries) metadata.copy(entry);
  metadata.remove("general.alignment");
  if (dtype) {
    metadata.set("general.file_type", file_type(*dtype));
    if (is_quantised(*dtype)) metadata.set("general.quantization_version", std::uint32_t{2});
  }
  for (const weights::Tensor& tensor : in_order(file.tensors)) plan.add(tensor);
  weights::write_gguf(out, metadata, plan.outputs());
}

const char* torch_name(DType dtype) {
  return dtype == DType::f32 ? "float32" : dtype == DType::f16 ? "float16" : "bfloat16";
}

void safetensors_to_safetensors(const Layout& in, const Layout& out, std::optional<DType> dtype, Plan& plan) {
  Source source = read_source(in);
  std::vector<SideFile> side_files;
  if (source.config) {
    for (const char* key : {"torch_dtype", "dtype"}) {
      if (dtype && source.config->contains(key)) (*source.config)[key] = torch_name(*dtype);
    }
    side_files.push_back({"config.json", source.config->dump(2) + "\n"});
  }
  for (SideFile& file : read_side_files(in.directory)) side_files.push_back(std::move(file));
  for (const weights::Tensor& tensor : in_order(source.file.tensors)) plan.add(tensor);
  write_layout(out, side_files, plan.outputs(), source.file.metadata);
}

// GGUF has no head where it is the embedding; a checkpoint may repeat it.
void leave_out_tied_head(std::vector<weights::Tensor>& tensors, const std::string& where) {
  const TensorNames names = hugging_face_names();
  const auto find = [&](const std::string& name) {
    return std::find_if(tensors.begin(), tensors.end(),
                        [&](const auto& tensor) { return tensor.name == name; });
  };
  const auto head = find(names.head), embedding = find(names.embedding);
  if (head == tensors.end()) return;
  const bool same = embedding != tensors.end() && embedding->dtype == head->dtype &&
                    embedding->bytes == head->bytes &&
                    std::equal(head->data, head->data + head->bytes, embedding->data);
  if (!same) {
    throw Error(ErrorCode::corrupt, fmt::format("{}: embeddings are tied, but '{}' differs from '{}'", where,
                                                names.head, names.embedding));
  }
  tensors.erase(head);
}

void safetensors_to_gguf(const Layout& in, const fs::path& out, std::optional<DType> dtype, Plan& plan) {
  const Source source = read_source(in);
  const std::string where = (in.directory / "config.json").string();
  if (!source.config) throw Error(ErrorCode::not_found, fmt::format("{} does not exist", where));
  const auto model_type = source.config->find("model_type");
  if (model_type == source.config->end() || !model_type->is_string())
    throw Error(ErrorCode::corrupt, fmt::format("{} has no 'model_type'", where));
  const Architecture& architecture =
      find_architecture(model_type->get<std::string>(), &Architecture::name, where);
  const ModelConfig config = read_hf_config(*source.config, architecture, where);
  weights::GgufMetadata metadata;
  std::vector<weights::Tensor> tensors = in_order(source.file.tensors);
  if (config.tied_embeddings) leave_out_tied_head(tensors, where);
  const std::vector<Translated> translated = translate(tensors, architecture, config, true, dtype);
  add_gguf_config(architecture, config, where, metadata);
  metadata.set("general.file_type", file_type(dtype.value_or(main_dtype(translated))));
  metadata.set("general.quantization_version", std::uint32_t{2});
  std::error_code ignored;
  if (fs::exists(in.directory / "tokenizer.json", ignored))
    text::add_gguf_tokenizer(in.directory, config.vocabulary, metadata);
  for (const Translated& each : translated) plan.add(each);
  weights::write_gguf(out, metadata, plan.outputs());
}

void gguf_to_safetensors(const fs::path& in, const Layout& out, std::optional<DType> dtype, Plan& plan) {
  const weights::GgufFile file = weights::read_gguf(in);
  const auto name = file.metadata.find("general.architecture");
  const auto* architecture_name =
      name == file.metadata.end() ? nullptr : std::get_if<std::string>(&name->second);
  if (architecture_name == nullptr)
    throw Error(ErrorCode::corrupt, fmt::format("{} does not name its architecture", in.string()));
  const Architecture& architecture =
      find_architecture(*architecture_name, &Architecture::gguf_name, in.string());
  const ModelConfig config = read_gguf_config(file, architecture, in.string());
  const std::vector<Translated> translated =
      translate(in_order(file.tensors), architecture, config, false, dtype);
  nlohmann::ordered_json json = hugging_face_config(config, in.string());
  json["torch_dtype"] = torch_name(dtype.value_or(main_dtype(translated)));
  if (std::ranges::any_of(translated,
                          [](const Translated& each) { return each.tensor.name.ends_with("_blocks"); })) {
    json["quantization_config"] = {
        {"quant_method", "mxfp4"},
        {"modules_to_not_convert",
         {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"}}};
  }
  std::vector<SideFile> side_files = {{"config.json", json.dump(2) + "\n"}};
  if (file.metadata.contains("tokenizer.ggml.model")) {
    try {
      const text::TokenizerFiles tokenizer = text::hugging_face_files(file);
      side_files.push_back({"tokenizer.json", tokenizer.tokenizer});
      side_files.push_back({"tokenizer_config.json", tokenizer.tokenizer_config});
      side_files.push_back({"generation_config.json", tokenizer.generation_config});
    } catch (const Error& error) {
      throw error.in(in.string());
    }
  }
  for (const Translated& each : translated) plan.add(each);
  write_layout(out, side_files, plan.outputs(), {});
}

}  // namespace

ConvertReport convert(const fs::path& in, const fs::path& out, std::optional<DType> dtype, ThreadPool& pool,
                      const OnConverted& on_converted) {
  const bool from_gguf = in.extension() == ".gguf", to_gguf = out.extension() == ".gguf";
  weights::require_exists(in);
  std::error_code ignored;
  if (fs::equivalent(in, out, ignored))
    throw Error(ErrorCode::invalid_argument, fmt::format("{} is the model itself", out.string()),
                "name another file");
  if (!to_gguf && dtype && is_quantised(*dtype)) {
    throw Error(ErrorCode::unsupported, fmt::format("safetensors has no dtype for {}", name(*dtype)),
                "write to a file that ends in .gguf, or as f32, f16 or bf16");
  }
  Plan plan(dtype, to_gguf, pool, on_converted);
  if (from_gguf && to_gguf) {
    gguf_to_gguf(in, out, dtype, plan);
  } else if (from_gguf) {
    gguf_to_safetensors(in, layout_at(out), dtype, plan);
  } else if (to_gguf) {
    safetensors_to_gguf(find_layout(in), out, dtype, plan);
  } else {
    safetensors_to_safetensors(find_layout(in), layout_at(out), dtype, plan);
  }
  return plan.report();
}

}  // namespace basin::models
