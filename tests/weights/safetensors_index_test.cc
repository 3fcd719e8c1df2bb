// Checkpoints in several safetensors files, and F8_E4M3 with block scales.
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "weights/files.h"
#include "weights/weights.h"

namespace basin::test {
namespace {

using nlohmann::json;
using weights::expand_f8;
using weights::F8Block;
using weights::read_safetensors_index;
using weights::SafetensorsFile;
using weights::Tensor;

Tensor bytes(const std::string& name, const std::string& data) {
  return {name,
          DType::u8,
          {static_cast<std::int64_t>(data.size())},
          reinterpret_cast<const std::byte*>(data.data()),
          data.size()};
}

// Two shards with a, b and c, and the index that belongs to them.
struct Shards {
  TemporaryDirectory directory;
  std::string abc = "abc";
  json index = {{"metadata", {{"total_size", 3}}},
                {"weight_map", {{"a", "1.safetensors"}, {"b", "1.safetensors"}, {"c", "2.safetensors"}}}};

  Shards() {
    write("1.safetensors", {bytes("a", "A"), bytes("b", "BB")});
    write("2.safetensors", {bytes("c", "C")});
  }
  void write(const std::string& name, const std::vector<Tensor>& tensors) {
    weights::write_safetensors(directory.path() / name, tensors);
  }
  SafetensorsFile read() {
    return read_safetensors_index(directory.file("model.safetensors.index.json", index.dump()));
  }
};

TEST(SafetensorsIndex, ShardsReadAsOneFile) {
  Shards shards;
  const SafetensorsFile file = shards.read();
  ASSERT_EQ(file.tensors.size(), 3u);
  EXPECT_EQ(std::memcmp(file.tensors.at("b").data, "BB", 2), 0);
  EXPECT_EQ(std::memcmp(file.tensors.at("c").data, "C", 1), 0);
  EXPECT_EQ(file.owners.size(), 2u);
}

TEST(SafetensorsIndex, WhatDoesNotFitIsRefusedByName) {
  const auto refused = [](const auto& change, ErrorCode code, std::initializer_list<std::string> named) {
    Shards shards;
    change(shards);
    SCOPED_TRACE(shards.index.dump());
    expect_error([&] { shards.read(); }, code, named);
  };
  const auto shard_of_c = [](const json& shard) {
    return [shard](Shards& s) { s.index["weight_map"]["c"] = shard; };
  };
  refused(shard_of_c("3.safetensors"), ErrorCode::not_found, {"index.json", "'3.safetensors'"});
  refused(shard_of_c("1.safetensors"), ErrorCode::corrupt, {"index.json", "'c'", "'1.safetensors'"});
  for (const char* elsewhere : {"../2.safetensors", "/etc/passwd", "sub/2.safetensors", "..", ".", ""})
    refused(shard_of_c(elsewhere), ErrorCode::corrupt, {"index.json", fmt::format("'{}'", elsewhere)});
  refused(shard_of_c(std::string("2.safetensors\0x", 15)), ErrorCode::corrupt, {"2.safetensors?x"});
  for (const json& no_name : {json(7), json(nullptr), json::array({"2.safetensors"})})
    refused(shard_of_c(no_name), ErrorCode::corrupt, {"index.json", "'c'"});
  refused([](Shards& s) { s.index["weight_map"].erase("b"); }, ErrorCode::corrupt, {"'b'", "not listed"});
  refused([](Shards& s) { s.index["weight_map"]["d"] = "2.safetensors"; }, ErrorCode::corrupt,
          {"'d'", "'2.safetensors'"});
  refused(
      [](Shards& s) {
        s.write("2.safetensors", {bytes("c", "C"), bytes("a", "A")});
      },
      ErrorCode::corrupt, {"'a'", "two shards", "'1.safetensors'", "'2.safetensors'"});
  // The tensor is where the index says, and in another listed shard that the index does not give it.
  refused(
      [](Shards& s) {
        s.index["weight_map"]["a"] = "2.safetensors";
        s.write("2.safetensors", {bytes("c", "C"), bytes("a", "A")});
      },
      ErrorCode::corrupt, {"'a'"});
  refused([](Shards& s) { s.directory.file("2.safetensors", "cut"); }, ErrorCode::corrupt, {"2.safetensors"});
  refused([](Shards& s) { s.index.erase("weight_map"); }, ErrorCode::corrupt, {"weight_map"});
  refused([](Shards& s) { s.index["weight_map"] = json::object(); }, ErrorCode::corrupt, {"weight_map"});
  refused([](Shards& s) { s.index["weight_map"] = json::array(); }, ErrorCode::corrupt, {"weight_map"});
}

// A 3 x 5 matrix in blocks of 2 x 2, so that the last ones are cut.
struct F8Matrix {
  std::vector<std::uint8_t> values;
  std::vector<float> scales = {0.5f, 1.0f / 3.0f, 3e-5f, -2.0f, 7.0f, 1e-30f};
  SafetensorsFile file;

  F8Matrix() {
    for (int i = 0; i < 15; ++i) values.push_back(static_cast<std::uint8_t>(i * 17 + 1));
    add("w", DType::f8_e4m3, {3, 5}, values.data(), values.size());
    add("w_scale_inv", DType::f32, {2, 3}, scales.data(), scales.size() * 4);
    add("norm", DType::f32, {6}, scales.data(), scales.size() * 4);
  }
  void add(const std::string& name, DType dtype, std::vector<std::int64_t> shape, const void* data,
           std::size_t size) {
    file.tensors[name] = {name, dtype, std::move(shape), static_cast<const std::byte*>(data), size};
  }
};

TEST(F8, AMatrixIsExpandedByTheScalesOfItsBlocks) {
  F8Matrix m;
  expand_f8(m.file, {2, 2}, "here");
  ASSERT_EQ(m.file.tensors.size(), 2u);  // the scales are used up
  const Tensor& w = m.file.tensors.at("w");
  EXPECT_EQ(w.dtype, DType::bf16);
  EXPECT_EQ(w.shape, (std::vector<std::int64_t>{3, 5}));
  ASSERT_EQ(w.bytes, 30u);
  for (std::size_t r = 0; r < 3; ++r) {
    for (std::size_t c = 0; c < 5; ++c) {
      bf16 got;
      std::memcpy(&got, w.data + 2 * (5 * r + c), 2);
      const float want = f8_e4m3_to_float(m.values[5 * r + c]) * m.scales[r / 2 * 3 + c / 2];
      EXPECT_EQ(got.bits, to_bf16(want).bits) << r << " " << c;
    }
  }
  EXPECT_EQ(m.file.tensors.at("norm").dtype, DType::f32);
}

TEST(F8, ScalesThatDoNotFitAreRefusedByName) {
  const auto refused = [](const auto& change, F8Block block, ErrorCode code,
                          std::initializer_list<std::string> named) {
    F8Matrix m;
    change(m);
    expect_error([&] { expand_f8(m.file, block, "here"); }, code, named);
  };
  const auto nothing = [](F8Matrix&) {};
  refused(nothing, {1, 2}, ErrorCode::unsupported, {"here", "'w'", "[3, 3]", "1 x 2"});
  refused(nothing, {128, 128}, ErrorCode::unsupported, {"'w'", "[1, 1]"});
  refused([](F8Matrix& m) { m.file.tensors.erase("w_scale_inv"); }, {2, 2}, ErrorCode::unsupported,
          {"here", "'w'", "'w_scale_inv'"});
  refused([](F8Matrix& m) { m.file.tensors.erase("w"); }, {2, 2}, ErrorCode::corrupt, {"'w_scale_inv'"});
  refused([](F8Matrix& m) { m.file.tensors.at("w_scale_inv").dtype = DType::i32; }, {2, 2},
          ErrorCode::unsupported, {"'w'", "F32"});
  refused([](F8Matrix& m) { m.file.tensors.at("w").shape = {15}; }, {2, 2}, ErrorCode::unsupported,
          {"'w'", "matrix"});
}

}  // namespace
}  // namespace basin::test
