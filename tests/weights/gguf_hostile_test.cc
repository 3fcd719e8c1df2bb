// GGUF files that must be refused, each with one Error that names the file and the tensor or key.
#include <gtest/gtest.h>

#include "weights/damage.h"
#include "weights/gguf.h"
#include "weights/gguf_bytes.h"

namespace basin::test {
namespace {

using weights::read_gguf;

GgufBytes with_key(const std::string& entry) {
  GgufBytes file;
  file.metadata = {entry};
  return file;
}

GgufBytes with_tensors(std::vector<std::string> tensors, std::size_t data = 64) {
  GgufBytes file;
  file.tensors = std::move(tensors);
  file.data.assign(data, 'x');
  return file;
}

std::string header(std::uint32_t version, std::uint64_t tensors, std::uint64_t keys) {
  return "GGUF" + u32(version) + u64(tensors) + u64(keys);
}

struct Hostile {
  const char* what;
  std::string bytes;
  std::string named;  // in the message, beside the file
  ErrorCode code = ErrorCode::corrupt;
};

std::vector<Hostile> header_cases() {
  return {
      {"empty", "", "magic"},
      {"other magic", "GGML" + u32(3) + u64(0) + u64(0), "magic"},
      {"magic of the other byte order", "FUGG" + u32(3) + u64(0) + u64(0), "magic"},
      {"version 0", header(0, 0, 0), "version 0", ErrorCode::unsupported},
      {"version 1", header(1, 0, 0), "version 1", ErrorCode::unsupported},
      {"version 4", header(4, 0, 0), "version 4", ErrorCode::unsupported},
      {"big-endian", header(0x03000000u, 0, 0), "big-endian", ErrorCode::unsupported},
      {"absurd tensor count", header(3, ~0ull, 0) + std::string(100, 'x'), "18446744073709551615 tensors"},
      {"absurd key count", header(3, 0, ~0ull) + std::string(100, 'x'), "18446744073709551615 keys"},
      {"one tensor more than there is", header(3, 1, 0), "1 tensors"},
      {"one key more than there is", header(3, 0, 1), "1 keys"},
  };
}

std::vector<Hostile> metadata_cases() {
  const std::string huge(2'000'000, 'n');
  return {
      {"key longer than the file", header(3, 0, 1) + u64(~0ull) + "abcdefgh", "metadata key"},
      {"string longer than the file", with_key(gguf_key("k", 8, u64(1ull << 63))).bytes(), "'k'"},
      {"value cut", with_key(gguf_key("k", 12, "1234")).bytes(), "'k'"},
      {"unknown type", with_key(gguf_key("k", 13, u64(0))).bytes(), "type 13 in 'k'"},
      {"absurd type", with_key(gguf_key("k", ~0u, u64(0))).bytes(), "type 4294967295 in 'k'"},
      {"boolean of 2", with_key(gguf_key("k", 7, "\2")).bytes(), "'k'"},
      {"boolean of 2 in an array", with_key(gguf_array("k", 7, 2, "\1\2")).bytes(), "'k'"},
      {"nested array", with_key(gguf_array("k", 9, 1, u32(0) + u64(0))).bytes(), "'k'",
       ErrorCode::unsupported},
      {"array of an unknown type", with_key(gguf_array("k", 99, 1, u64(0))).bytes(), "'k'",
       ErrorCode::unsupported},
      {"array longer than the file", with_key(gguf_array("k", 0, 9, "12345678")).bytes(),
       "9 elements in 'k'"},
      {"array whose size wraps", with_key(gguf_array("k", 10, 1ull << 61, u64(0))).bytes(), "'k'"},
      {"array of absurd strings", with_key(gguf_array("k", 8, 1, u64(~0ull))).bytes(), "'k'"},
      {"array of strings cut", with_key(gguf_array("k", 8, 2, gguf_string("abcdefgh"))).bytes(), "'k'"},
      {"array beyond int64", with_key(gguf_array("k", 10, 1, u64(~0ull))).bytes(), "'k'",
       ErrorCode::unsupported},
      {"key twice",
       [] {
         GgufBytes file;
         file.metadata = {gguf_key("k", 0, "1"), gguf_key("k", 0, "1")};
         return file.bytes();
       }(),
       "'k' twice"},
      {"huge key", with_key(gguf_key(huge, 13, "")).bytes(), "nnn..."},
      {"key of control characters", with_key(gguf_key("a\n\x1b[31m", 13, "")).bytes(), "'a??[31m'"},
      {"alignment 0", with_key(gguf_key("general.alignment", 4, u32(0))).bytes(), "general.alignment"},
      {"alignment 48", with_key(gguf_key("general.alignment", 4, u32(48))).bytes(), "general.alignment"},
      {"alignment 2^31", with_key(gguf_key("general.alignment", 4, u32(1u << 31))).bytes(),
       "general.alignment"},
      {"alignment negative", with_key(gguf_key("general.alignment", 5, u32(~31u))).bytes(),
       "general.alignment"},
      {"alignment a string", with_key(gguf_key("general.alignment", 8, gguf_string("32"))).bytes(),
       "general.alignment"},
  };
}

std::vector<Hostile> tensor_cases() {
  const std::uint64_t big = 1ull << 62;
  const std::string huge(2'000'000, 'n');
  std::vector<Hostile> cases = {
      {"name longer than the file", header(3, 1, 0) + u64(1ull << 40) + std::string(40, 'x'),
       "tensor's name"},
      {"five dimensions", with_tensors({gguf_tensor("t", {1, 1, 1, 1, 1}, 0, 0)}).bytes(),
       "'t' 5 dimensions"},
      {"absurd rank", with_tensors({gguf_string("t") + u32(~0u)}).bytes(), "'t' 4294967295 dimensions"},
      {"dimension of 0", with_tensors({gguf_tensor("t", {0}, 0, 0)}).bytes(), "'t' a dimension of 0"},
      {"dimension beyond int64", with_tensors({gguf_tensor("t", {1ull << 63}, 24, 0)}).bytes(), "'t'"},
      {"size that overflows to 0", with_tensors({gguf_tensor("t", {big, 4}, 24, 0)}).bytes(),
       "'t' a size that overflows"},
      {"size that overflows by type", with_tensors({gguf_tensor("t", {big}, 28, 0)}).bytes(),
       "'t' a size that overflows"},
      {"size that overflows by blocks", with_tensors({gguf_tensor("t", {big}, 8, 0)}).bytes(), "'t'"},
      {"unknown type", with_tensors({gguf_tensor("t", {32}, 1000, 0)}).bytes(), "'t' as 1000",
       ErrorCode::unsupported},
      {"removed type", with_tensors({gguf_tensor("t", {32}, 4, 0)}).bytes(), "'t' as 4",
       ErrorCode::unsupported},
      {"rows of half a block", with_tensors({gguf_tensor("t", {16, 2}, 8, 0)}).bytes(), "'t' rows of 16"},
      {"scalar of blocks", with_tensors({gguf_tensor("t", {}, 3, 0)}).bytes(), "'t' rows of 1 "},
      {"offset misaligned", with_tensors({gguf_tensor("t", {8}, 24, 1)}).bytes(),
       "'t' at an unaligned offset"},
      {"offset outside", with_tensors({gguf_tensor("t", {8}, 24, 96)}).bytes(), "'t'"},
      {"offset that wraps", with_tensors({gguf_tensor("t", {8}, 24, ~31ull)}).bytes(), "'t'"},
      {"data cut", with_tensors({gguf_tensor("t", {65}, 24, 0)}).bytes(), "'t'"},
      {"no data", with_tensors({gguf_tensor("t", {32}, 24, 0)}, 0).bytes(), "'t'"},
      {"overlap", with_tensors({gguf_tensor("a", {33}, 24, 0), gguf_tensor("b", {32}, 24, 32)}).bytes(),
       "'b' overlapping"},
      {"same offset", with_tensors({gguf_tensor("a", {1}, 24, 0), gguf_tensor("b", {1}, 24, 0)}).bytes(),
       "overlapping"},
      {"name twice", with_tensors({gguf_tensor("t", {1}, 24, 0), gguf_tensor("t", {1}, 24, 32)}).bytes(),
       "'t' twice"},
      {"huge name", with_tensors({gguf_tensor(huge, {0}, 0, 0)}).bytes(), "nnn..."},
  };
  const std::pair<std::uint32_t, const char*> unsupported[] = {
      {10, "Q2_K"}, {11, "Q3_K"}, {20, "IQ4_NL"}, {34, "TQ1_0"}, {40, "NVFP4"}, {99, "99 (unknown)"}};
  for (const auto& [type, text] : unsupported) {
    cases.push_back({text, with_tensors({gguf_tensor("blk.0.w", {256}, type, 0)}, 512).bytes(),
                     std::string("'blk.0.w' as ") + text, ErrorCode::unsupported});
  }
  return cases;
}

void expect_refusals(const std::vector<Hostile>& table) {
  const TemporaryDirectory directory;
  for (const Hostile& hostile : table) {
    SCOPED_TRACE(hostile.what);
    const auto path = directory.file("hostile.gguf", hostile.bytes);
    expect_error([&] { read_gguf(path); }, hostile.code, {path.string(), hostile.named});
  }
}

TEST(GgufHostile, HeadersAreRefusedByName) {
  expect_refusals(header_cases());
}
TEST(GgufHostile, MetadataIsRefusedByKey) {
  expect_refusals(metadata_cases());
}
TEST(GgufHostile, TensorsAreRefusedByName) {
  expect_refusals(tensor_cases());
}

GgufBytes small_file() {
  GgufBytes file;
  file.metadata = {gguf_key("general.alignment", 4, u32(32)), gguf_key("s", 8, gguf_string("text")),
                   gguf_array("names", 8, 2, gguf_string("a") + gguf_string("b")),
                   gguf_array("numbers", 6, 2, u64(0)), gguf_key("flag", 7, "\1")};
  file.tensors = {gguf_tensor("a", {4, 2}, 0, 0), gguf_tensor("b", {32}, 8, 32)};
  file.data = std::string(66, 'x');
  return file;
}

TEST(GgufHostile, EveryTruncationIsRefused) {
  const TemporaryDirectory directory;
  const std::string whole = small_file().bytes();
  EXPECT_EQ(read_gguf(directory.file("whole", whole)).tensors.size(), 2u);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    SCOPED_TRACE(size);
    const auto path = directory.file("cut", whole.substr(0, size));
    expect_error([&] { read_gguf(path); }, ErrorCode::corrupt, {path.string()});
  }
}

TEST(GgufHostile, WhatIsNotAFileIsRefused) {
  const TemporaryDirectory directory;
  const auto missing = directory.path() / "missing.gguf";
  expect_error([&] { read_gguf(missing); }, ErrorCode::not_found, {missing.string()});
  expect_error([&] { read_gguf(directory.path()); }, ErrorCode::io, {directory.path().string()});
}

RC_GTEST_PROP(GgufHostile, DamageNeverCrashes, ()) {
  damage_never_crashes(small_file().bytes(), read_gguf);
}

}  // namespace
}  // namespace basin::test
