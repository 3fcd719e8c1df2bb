// What GGUF files must load.
#include "weights/gguf.h"

#include <fmt/format.h>

#include "weights/gguf_bytes.h"

namespace basin::test {
namespace {

using weights::GgufFile;
using weights::read_gguf;
using weights::Tensor;

std::string bytes_of(const Tensor& t) {
  return {reinterpret_cast<const char*>(t.data), t.bytes};
}

TEST(Gguf, ScalarsKeepTheirValueAndKind) {
  const TemporaryDirectory directory;
  GgufBytes file;
  file.metadata = {
      gguf_key("u8", 0, "\xff"),
      gguf_key("i8", 1, "\xff"),
      gguf_key("u16", 2, "\xff\xff"),
      gguf_key("i16", 3, "\xff\xff"),
      gguf_key("u32", 4, u32(~0u)),
      gguf_key("i32", 5, u32(~0u)),
      gguf_key("f32", 6, little_endian(1.5f)),
      gguf_key("bool", 7, "\1"),
      gguf_key("string", 8, gguf_string("text \xe2\x82\xac")),
      gguf_key("u64", 10, u64(~0ull)),
      gguf_key("i64", 11, u64(~0ull)),
      gguf_key("f64", 12, little_endian(0.1)),
      gguf_key("empty", 8, gguf_string("")),
  };
  const GgufFile read = read_gguf(directory.file("x.gguf", file.bytes()));
  const auto integer = [&](const char* key) { return std::get<std::int64_t>(read.metadata.at(key)); };
  EXPECT_EQ(integer("u8"), 255);
  EXPECT_EQ(integer("i8"), -1);
  EXPECT_EQ(integer("u16"), 65535);
  EXPECT_EQ(integer("i16"), -1);
  EXPECT_EQ(integer("u32"), 4294967295);
  EXPECT_EQ(integer("i32"), -1);
  EXPECT_EQ(integer("i64"), -1);
  EXPECT_EQ(std::get<std::uint64_t>(read.metadata.at("u64")), ~0ull);
  EXPECT_EQ(std::get<double>(read.metadata.at("f32")), 1.5);
  EXPECT_EQ(std::get<double>(read.metadata.at("f64")), 0.1);
  EXPECT_EQ(std::get<bool>(read.metadata.at("bool")), true);
  EXPECT_EQ(std::get<std::string>(read.metadata.at("string")), "text \xe2\x82\xac");
  EXPECT_EQ(std::get<std::string>(read.metadata.at("empty")), "");
  EXPECT_EQ(read.metadata.size(), 13u);
  EXPECT_TRUE(read.tensors.empty());
}

TEST(Gguf, ArraysKeepTheirValues) {
  const TemporaryDirectory directory;
  GgufBytes file;
  file.metadata = {
      gguf_array("i8", 1, 2, "\xff\1"),
      gguf_array("u16", 2, 1, "\xff\xff"),
      gguf_array("u64", 10, 1, u64(7)),
      gguf_array("f32", 6, 2, little_endian(0.5f) + little_endian(-2.0f)),
      gguf_array("bool", 7, 3, std::string("\1\0\1", 3)),
      gguf_array("string", 8, 3, gguf_string("a") + gguf_string("") + gguf_string("bc")),
      gguf_array("empty", 8, 0, ""),
  };
  const GgufFile read = read_gguf(directory.file("x.gguf", file.bytes()));
  using Integers = std::vector<std::int64_t>;
  using Strings = std::vector<std::string>;
  EXPECT_EQ(std::get<Integers>(read.metadata.at("i8")), (Integers{-1, 1}));
  EXPECT_EQ(std::get<Integers>(read.metadata.at("u16")), (Integers{65535}));
  EXPECT_EQ(std::get<Integers>(read.metadata.at("u64")), (Integers{7}));
  EXPECT_EQ(std::get<std::vector<double>>(read.metadata.at("f32")), (std::vector<double>{0.5, -2.0}));
  EXPECT_EQ(std::get<std::vector<bool>>(read.metadata.at("bool")), (std::vector<bool>{true, false, true}));
  EXPECT_EQ(std::get<Strings>(read.metadata.at("string")), (Strings{"a", "", "bc"}));
  EXPECT_EQ(std::get<Strings>(read.metadata.at("empty")), Strings{});
}

TEST(Gguf, TensorsOfEverySupportedType) {
  struct Case {
    std::uint32_t type;
    DType dtype;
    std::uint64_t bytes;  // of 2 rows of 256
  };
  const Case cases[] = {{0, DType::f32, 2048},   {1, DType::f16, 1024},  {2, DType::q4_0, 288},
                        {3, DType::q4_1, 320},   {6, DType::q5_0, 352},  {7, DType::q5_1, 384},
                        {8, DType::q8_0, 544},   {12, DType::q4_k, 288}, {13, DType::q5_k, 352},
                        {14, DType::q6_k, 420},  {24, DType::i8, 512},   {25, DType::i16, 1024},
                        {26, DType::i32, 2048},  {27, DType::i64, 4096}, {28, DType::f64, 4096},
                        {30, DType::bf16, 1024}, {39, DType::mxfp4, 272}};
  const TemporaryDirectory directory;
  GgufBytes file;
  std::vector<std::string> payloads;
  for (const Case& c : cases) {
    file.tensors.push_back(gguf_tensor(fmt::format("t{}", c.type), {256, 2}, c.type, file.data.size()));
    payloads.emplace_back(c.bytes, static_cast<char>('A' + c.type));
    file.data += payloads.back();
    file.data.resize((file.data.size() + 31) / 32 * 32, '\0');
  }
  for (const std::uint32_t version : {2u, 3u}) {
    file.version = version;
    const GgufFile read = read_gguf(directory.file("x.gguf", file.bytes()));
    ASSERT_EQ(read.tensors.size(), std::size(cases));
    for (std::size_t i = 0; i < std::size(cases); ++i) {
      const Tensor& t = read.tensors.at(fmt::format("t{}", cases[i].type));
      EXPECT_EQ(t.dtype, cases[i].dtype);
      EXPECT_EQ(t.shape, (std::vector<std::int64_t>{2, 256}));
      EXPECT_EQ(bytes_of(t), payloads[i]) << t.name;
    }
  }
}

TEST(Gguf, ShapesAreOutermostFirstAndOffsetsInAnyOrder) {
  const TemporaryDirectory directory;
  GgufBytes file;
  file.tensors = {gguf_tensor("late", {2, 3, 1, 4}, 24, 64), gguf_tensor("early", {5}, 24, 0),
                  gguf_tensor("scalar", {}, 24, 32)};
  file.data = std::string(88, '\0');
  file.data.replace(0, 5, "first");
  file.data[32] = 's';
  file.data.replace(64, 24, "abcdefghijklmnopqrstuvwx");
  const GgufFile read = read_gguf(directory.file("x.gguf", file.bytes()));
  EXPECT_EQ(read.tensors.at("late").shape, (std::vector<std::int64_t>{4, 1, 3, 2}));
  EXPECT_EQ(bytes_of(read.tensors.at("late")), "abcdefghijklmnopqrstuvwx");
  EXPECT_EQ(bytes_of(read.tensors.at("early")), "first");
  EXPECT_TRUE(read.tensors.at("scalar").shape.empty());
  EXPECT_EQ(bytes_of(read.tensors.at("scalar")), "s");
}

TEST(Gguf, TheFilesAlignmentIsUsed) {
  const TemporaryDirectory directory;
  for (const std::uint32_t alignment : {1u, 8u, 64u, 4096u}) {
    GgufBytes file;
    file.alignment = alignment;
    file.metadata = {gguf_key("general.alignment", 4, u32(alignment))};
    file.tensors = {gguf_tensor("a", {3}, 24, 0),
                    gguf_tensor("b", {3}, 24, (3 + alignment - 1) / alignment * alignment)};
    file.data = "abc";
    file.data.resize((3 + alignment - 1) / alignment * alignment, '\0');
    file.data += "def";
    const GgufFile read = read_gguf(directory.file("x.gguf", file.bytes()));
    EXPECT_EQ(bytes_of(read.tensors.at("a")), "abc") << alignment;
    EXPECT_EQ(bytes_of(read.tensors.at("b")), "def") << alignment;
  }
}

}  // namespace
}  // namespace basin::test
