// What is written as GGUF reads back, and what the format cannot hold is refused before anything is written.
#include "weights/gguf_writer.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "weights/files.h"
#include "weights/quantise.h"

namespace basin::test {
namespace {

using weights::GgufMetadata;
using weights::Output;
using weights::read_gguf;
using weights::Tensor;
using weights::write_gguf;

class GgufWriter : public testing::Test {
 protected:
  Output output(const std::string& name, DType dtype, std::vector<std::int64_t> shape) {
    Output made{name, dtype, std::move(shape), nullptr};
    made.produce = [this, size = weights::byte_size(made)](const weights::WriteBytes& write) {
      write(data_.data(), size);
    };
    return made;
  }
  void refused(const std::vector<Output>& tensors, ErrorCode code, std::initializer_list<std::string> named) {
    expect_error([&] { write_gguf(path_, {}, tensors); }, code, named);
    EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
  }

  TemporaryDirectory directory_;
  std::filesystem::path path_ = directory_.path() / "x.gguf";
  std::string data_ = std::string(4096, 'x');
};

TEST_F(GgufWriter, MetadataAndTensorsReadBack) {
  std::iota(data_.begin(), data_.end(), '\0');
  GgufMetadata metadata;
  metadata.set("text", "sinks");
  metadata.set("count", std::uint32_t{~0u});
  metadata.set("number", 0.1f);
  metadata.set("flag", true);
  metadata.set("texts", std::vector<std::string>{"a", "", "bc"});
  metadata.set("numbers", std::vector<std::int32_t>{-1, 7});
  metadata.set("gone", false);
  metadata.remove("gone");
  metadata.set("text", "windows");  // keeps its place
  write_gguf(path_, metadata,
             {output("odd", DType::i8, {3}), output("q", DType::q4_k, {2, 256}),
              output("cube", DType::f16, {2, 3, 4}), output("one", DType::f64, {})});
  const weights::GgufFile file = read_gguf(path_);
  EXPECT_EQ(file.entries.size(), 6u);
  EXPECT_EQ(file.entries[0].key, "text");
  EXPECT_EQ(std::get<std::string>(file.metadata.at("text")), "windows");
  EXPECT_EQ(std::get<std::int64_t>(file.metadata.at("count")), 4294967295);
  EXPECT_EQ(std::get<double>(file.metadata.at("number")), static_cast<double>(0.1f));
  EXPECT_TRUE(std::get<bool>(file.metadata.at("flag")));
  EXPECT_EQ(std::get<std::vector<std::string>>(file.metadata.at("texts")),
            (std::vector<std::string>{"a", "", "bc"}));
  EXPECT_EQ(std::get<std::vector<std::int64_t>>(file.metadata.at("numbers")),
            (std::vector<std::int64_t>{-1, 7}));
  ASSERT_EQ(file.tensors.size(), 4u);
  EXPECT_EQ(file.tensors.at("cube").shape, (std::vector<std::int64_t>{2, 3, 4}));
  EXPECT_EQ(file.tensors.at("q").dtype, DType::q4_k);
  for (const auto& [name, tensor] : file.tensors) {
    EXPECT_TRUE(
        std::equal(tensor.data, tensor.data + tensor.bytes, reinterpret_cast<const std::byte*>(data_.data())))
        << name;
  }

  // Entries copied from a file are what they were.
  GgufMetadata copied;
  for (const weights::GgufEntry& entry : file.entries) copied.copy(entry);
  write_gguf(directory_.path() / "again.gguf", copied, {});
  EXPECT_EQ(read_gguf(directory_.path() / "again.gguf").metadata, file.metadata);
}

TEST_F(GgufWriter, WhatTheFormatCannotHoldIsRefusedByName) {
  refused({output("w", DType::f32, {2}), output("w", DType::f32, {2})}, ErrorCode::invalid_argument,
          {"'w'", "twice"});
  refused({output("w", DType::f32, {1, 1, 1, 1, 1})}, ErrorCode::invalid_argument, {"'w'", "5 dimensions"});
  refused({output("w", DType::f32, {2, 0})}, ErrorCode::invalid_argument, {"'w'", "no elements"});
  refused({output("w", DType::u8, {2})}, ErrorCode::unsupported, {"'w'", "u8"});
  EXPECT_THROW(output("w", DType::q8_0, {33}), Error);
  EXPECT_THROW(output("w", DType::q8_0, {}), Error);
  EXPECT_THROW(output("w", DType::f32, {std::int64_t{1} << 62, 8}), Error);
  Output short_one = output("w", DType::f32, {4});
  short_one.produce = [this](const weights::WriteBytes& write) { write(data_.data(), 12); };
  refused({short_one}, ErrorCode::internal, {"'w'", "12 bytes"});
}

TEST(Quantise, ValuesBeyondATypeAreFound) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float kNan = std::numeric_limits<float>::quiet_NaN();
  std::vector<std::byte> out(2048);
  const auto first_bad = [&](DType dtype, float value) {
    std::vector<float> x(512, 1.0f);
    x[300] = value;
    return weights::quantise_row(dtype, x.data(), 512, out.data());
  };
  for (const DType dtype : {DType::q8_0, DType::q4_0, DType::q4_1, DType::q5_0, DType::q5_1, DType::q4_k,
                            DType::q5_k, DType::q6_k, DType::mxfp4}) {
    for (const float value : {kNan, kInfinity, -kInfinity})
      EXPECT_EQ(first_bad(dtype, value), 300) << name(dtype);
    EXPECT_EQ(first_bad(dtype, -65504.0f), std::nullopt) << name(dtype);
    if (dtype != DType::mxfp4) {
      EXPECT_EQ(first_bad(dtype, 1e7f), 300) << name(dtype);
    }
  }
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const float value : {kNan, kInfinity, -kInfinity, 65504.0f})
      EXPECT_EQ(first_bad(dtype, value), std::nullopt) << name(dtype);
  }
  EXPECT_EQ(first_bad(DType::f16, 65520.0f), 300);
  EXPECT_EQ(first_bad(DType::f16, 65519.0f), std::nullopt);  // rounds to 65504
  EXPECT_EQ(first_bad(DType::bf16, 3.4e38f), 300);
  EXPECT_EQ(first_bad(DType::f32, 3.4e38f), std::nullopt);
}

}  // namespace
}  // namespace basin::test
