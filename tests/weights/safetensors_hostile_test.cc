// safetensors files that must be refused, each with one Error that names the file and the tensor or key.
#include <gtest/gtest.h>

#include "weights/damage.h"
#include "weights/files.h"
#include "weights/weights.h"

namespace basin::test {
namespace {

using weights::read_safetensors;

std::string file_of(const std::string& header, const std::string& data) {
  return little_endian<std::uint64_t>(header.size()) + header + data;
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

struct Hostile {
  const char* what;
  std::string bytes;
  std::string named;  // in the message, beside the file
  ErrorCode code = ErrorCode::corrupt;
};

// One tensor "w" with this entry, over eight bytes of data.
std::string one(const std::string& text) {
  return file_of(R"({"w":)" + text + "}", "01234567");
}

std::vector<Hostile> hostile_files() {
  const std::string good = entry("U8", "[8]", "[0,8]");
  const std::string deep = std::string(100'000, '['), deep_objects = [] {
    std::string text;
    for (int i = 0; i < 100'000; ++i) text += R"({"a":)";
    return text;
  }();
  const std::string huge(3'000'000, 'n');
  std::vector<Hostile> files = {
      {"empty", "", "0 bytes"},
      {"no length", "1234567", "7 bytes"},
      {"length without a header", little_endian<std::uint64_t>(2), "2 bytes"},
      {"length beyond the file", little_endian<std::uint64_t>(9) + "{}      ", "9 bytes"},
      {"largest length", little_endian<std::uint64_t>(~0ull) + "{}", "18446744073709551615"},
      {"length that wraps", little_endian<std::uint64_t>(~0ull - 7) + "{}", "18446744073709551608"},
      {"length over the format's limit", little_endian<std::uint64_t>(100'000'001) + "{}", "100000001"},
      {"empty header", file_of("", ""), "header"},
      {"header of blanks", file_of("    ", ""), "header"},
      {"not JSON", file_of("{", ""), "header"},
      {"header that goes on", file_of("{} {}", ""), "header"},
      {"comment", file_of("{/**/}", ""), "header"},
      {"trailing comma", file_of(R"({"__metadata__":{},})", ""), "header"},
      {"NUL", file_of(std::string("{\0}", 3), ""), "header"},
      {"not UTF-8", file_of("{\"\xff\":" + good + "}", "01234567"), "header"},
      {"array", file_of("[]", ""), "header"},
      {"string", file_of("\"x\"", ""), "header"},
      {"number", file_of("12", ""), "header"},
      {"null", file_of("null", ""), "header"},
      {"deep arrays", file_of(deep, ""), "header"},
      {"deep shape", one(R"({"shape":)" + deep), "'w'"},
      {"deep objects", file_of(deep_objects, ""), "'a'"},
      {"entry is a number", one("1"), "'w'"},
      {"entry is null", one("null"), "'w'"},
      {"entry is a string", one("\"x\""), "'w'"},
      {"entry is an array", one("[]"), "'w'"},
      {"entry is empty", one("{}"), "'w'"},
      {"no dtype", one(R"({"shape":[8],"data_offsets":[0,8]})"), "'w' has no dtype"},
      {"no shape", one(R"({"dtype":"U8","data_offsets":[0,8]})"), "'w' has no shape"},
      {"no offsets", one(R"({"dtype":"U8","shape":[8]})"), "'w' has no data_offsets"},
      {"unknown key", one(R"({"dtype":"U8","shape":[8],"data_offsets":[0,8],"extra":1})"), "'extra'"},
      {"key twice", one(R"({"dtype":"U8","dtype":"I8","shape":[8],"data_offsets":[0,8]})"), "'dtype'"},
      {"name twice", file_of(R"({"w":)" + good + R"(,"w":)" + good + "}", "01234567"), "'w' stands twice"},
      {"name twice by escapes", file_of(R"({"w":)" + good + R"(,"\u0077":)" + good + "}", "01234567"),
       "'w' stands twice"},
      {"metadata twice", file_of(R"({"__metadata__":{},"__metadata__":{}})", ""), "'__metadata__'"},
      {"metadata key twice", file_of(R"({"__metadata__":{"k":"a","k":"b"}})", ""), "'k' stands twice"},
      {"metadata is a string", file_of(R"({"__metadata__":"x"})", ""), "'__metadata__'"},
      {"metadata is null", file_of(R"({"__metadata__":null})", ""), "'__metadata__'"},
      {"metadata of a number", file_of(R"({"__metadata__":{"k":1}})", ""), "'k'"},
      {"metadata of null", file_of(R"({"__metadata__":{"k":null}})", ""), "'k'"},
      {"metadata of a float", file_of(R"({"__metadata__":{"k":1.5}})", ""), "'k'"},
      {"metadata of a boolean", file_of(R"({"__metadata__":{"k":true}})", ""), "'k'"},
      {"metadata of an object", file_of(R"({"__metadata__":{"k":{}}})", ""), "'k'"},
      {"metadata of an array", file_of(R"({"__metadata__":{"k":[]}})", ""), "'k'"},
      {"dtype unknown", one(entry("F7", "[8]", "[0,8]")), "'F7'", ErrorCode::unsupported},
      {"dtype of 8 bits", one(entry("F8_E5M2", "[8]", "[0,8]")), "'F8_E5M2'", ErrorCode::unsupported},
      {"dtype in lower case", one(entry("u8", "[8]", "[0,8]")), "'u8'", ErrorCode::unsupported},
      {"dtype empty", one(entry("", "[8]", "[0,8]")), "'w'", ErrorCode::unsupported},
      {"dtype a number", one(R"({"dtype":8,"shape":[8],"data_offsets":[0,8]})"), "'w'"},
      {"shape negative", one(entry("U8", "[-8]", "[0,8]")), "'w'"},
      {"shape twice negative", one(entry("U8", "[-2,-4]", "[0,8]")), "-2"},
      {"shape a float", one(entry("U8", "[8.0]", "[0,8]")), "'w'"},
      {"shape an exponent", one(entry("U8", "[1e99]", "[0,8]")), "'w'"},
      {"shape beyond a double", one(entry("U8", "[1e999]", "[0,8]")), "header"},
      {"shape a string", one(entry("U8", "[\"8\"]", "[0,8]")), "'w'"},
      {"shape of null", one(entry("U8", "[null]", "[0,8]")), "'w'"},
      {"shape nested", one(entry("U8", "[[8]]", "[0,8]")), "'w'"},
      {"shape not a list", one(entry("U8", "8", "[0,8]")), "'w'"},
      {"shape an object", one(entry("U8", "{}", "[0,8]")), "'w'"},
      {"shape overflows to the right size", one(entry("U8", "[4294967296,4294967296,1]", "[0,0]")),
       "overflows"},
      {"shape times dtype overflows", one(entry("F64", "[2305843009213693953]", "[0,8]")), "overflows"},
      {"shape beyond int64", one(entry("U8", "[9223372036854775808]", "[0,8]")), "overflows"},
      {"shape beyond uint64", one(entry("U8", "[18446744073709551624]", "[0,8]")), "'w'"},
      {"shape of 65 dimensions",
       one(entry(
           "U8",
           "[8" +
               [] {
                 std::string ones;
                 for (int i = 0; i < 64; ++i) ones += ",1";
                 return ones;
               }() +
               "]",
           "[0,8]")),
       "'w'"},
      {"offsets reversed", one(entry("U8", "[8]", "[8,0]")), "'w'"},
      {"offsets outside", one(entry("U8", "[8]", "[1,9]")), "'w'"},
      {"offsets far outside", one(entry("U8", "[8]", "[18446744073709551607,18446744073709551615]")), "'w'"},
      {"offsets negative", one(entry("U8", "[8]", "[-8,0]")), "'w'"},
      {"offsets of one", one(entry("U8", "[8]", "[8]")), "'w'"},
      {"offsets of three", one(entry("U8", "[8]", "[0,8,8]")), "'w'"},
      {"offsets empty", one(entry("U8", "[8]", "[]")), "'w'"},
      {"offsets of floats", one(entry("U8", "[8]", "[0.0,8.0]")), "'w'"},
      {"offsets an object", one(entry("U8", "[8]", "{}")), "'w'"},
      {"size too small for the range", one(entry("U8", "[7]", "[0,8]")), "'w' has 8 bytes"},
      {"size too large for the range", one(entry("F32", "[8]", "[0,8]")), "need 32"},
      {"size zero for a range", one(entry("U8", "[0]", "[0,8]")), "'w'"},
      {"overlap",
       file_of(R"({"a":)" + entry("U8", "[5]", "[0,5]") + R"(,"b":)" + entry("U8", "[4]", "[4,8]") + "}",
               "01234567"),
       "'b' overlaps"},
      {"same range", file_of(R"({"a":)" + good + R"(,"b":)" + good + "}", "01234567"), "overlaps"},
      {"range inside another",
       file_of(R"({"a":)" + good + R"(,"b":)" + entry("U8", "[2]", "[3,5]") + "}", "01234567"),
       "'b' overlaps"},
      {"hole at the start", one(entry("U8", "[7]", "[1,8]")), "'w' follows a hole"},
      {"hole between",
       file_of(R"({"a":)" + entry("U8", "[3]", "[0,3]") + R"(,"b":)" + entry("U8", "[4]", "[4,8]") + "}",
               "01234567"),
       "'b' follows a hole"},
      {"bytes after the last tensor", one(entry("U8", "[7]", "[0,7]")), "1 bytes after"},
      {"data without tensors", file_of("{}", "x"), "1 bytes after"},
      {"data cut short", file_of(R"({"w":)" + good + "}", "0123456"), "'w'"},
      {"huge name", file_of("{\"" + huge + "\":" + entry("U8", "[9]", "[0,8]") + "}", "01234567"), "nnn..."},
      {"huge name twice", file_of("{\"" + huge + "\":" + good + ",\"" + huge + "\":1}", "01234567"),
       "nnn..."},
      {"huge dtype", one(entry(huge, "[8]", "[0,8]")), "nnn...", ErrorCode::unsupported},
      {"huge unknown key", one("{\"" + huge + "\":1}"), "nnn..."},
      {"huge number", one(entry("U8", "[" + std::string(100'000, '1') + ".5]", "[0,8]")), "header"},
  };
  return files;
}

TEST(SafetensorsHostile, EachIsRefusedByName) {
  const TemporaryDirectory directory;
  for (const Hostile& hostile : hostile_files()) {
    SCOPED_TRACE(hostile.what);
    const auto path = directory.file("hostile.safetensors", hostile.bytes);
    expect_error([&] { read_safetensors(path); }, hostile.code, {path.string(), hostile.named});
  }
}

TEST(SafetensorsHostile, TheTableStartsFromAFileThatLoads) {
  const TemporaryDirectory directory;
  const auto path = directory.file("good.safetensors", one(entry("U8", "[8]", "[0,8]")));
  EXPECT_EQ(read_safetensors(path).tensors.size(), 1u);
}

TEST(SafetensorsHostile, EveryTruncationIsRefused) {
  const TemporaryDirectory directory;
  const std::string whole = one(entry("U8", "[8]", "[0,8]"));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    SCOPED_TRACE(size);
    const auto path = directory.file("cut", whole.substr(0, size));
    expect_error([&] { read_safetensors(path); }, ErrorCode::corrupt, {path.string()});
  }
}

TEST(SafetensorsHostile, WhatIsNotAFileIsRefused) {
  const TemporaryDirectory directory;
  const auto missing = directory.path() / "missing.safetensors";
  expect_error([&] { read_safetensors(missing); }, ErrorCode::not_found, {missing.string()});
  expect_error([&] { read_safetensors(directory.path()); }, ErrorCode::io, {directory.path().string()});
  expect_error([&] { read_safetensors("/dev/null"); }, ErrorCode::io, {"/dev/null"});
  const auto inside = directory.file("plain", "x") / "below";
  expect_error([&] { read_safetensors(inside); }, ErrorCode::not_found, {inside.string()});
}

RC_GTEST_PROP(SafetensorsHostile, DamageNeverCrashes, ()) {
  damage_never_crashes(file_of(R"({"__metadata__":{"k":"v"},"a":)" + entry("F32", "[1,2]", "[0,8]") +
                                   R"(,"b":)" + entry("I16", "[2]", "[8,12]") + "}",
                               "0123456789ab"),
                       [](const auto& path) { return read_safetensors(path); });
}

}  // namespace
}  // namespace basin::test
