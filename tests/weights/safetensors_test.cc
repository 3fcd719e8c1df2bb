// What safetensors files must load, and how they are written.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>  // needs gtest.h before it
#include <sys/fsuid.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "weights/files.h"
#include "weights/weights.h"

namespace basin::test {
namespace {

using weights::read_safetensors;
using weights::SafetensorsFile;
using weights::Tensor;
using weights::write_safetensors;

Tensor tensor(std::string name, DType dtype, std::vector<std::int64_t> shape, const std::string& bytes) {
  return {std::move(name), dtype, std::move(shape), reinterpret_cast<const std::byte*>(bytes.data()),
          bytes.size()};
}

std::string bytes_of(const Tensor& t) {
  return t.bytes == 0 ? std::string() : std::string(reinterpret_cast<const char*>(t.data), t.bytes);
}

std::string counting(std::size_t size) {
  std::string bytes(size, '\0');
  std::iota(bytes.begin(), bytes.end(), '\1');
  return bytes;
}

TEST(Safetensors, ReadsBackWhatWasWritten) {
  const TemporaryDirectory directory;
  const auto path = directory.path() / "model.safetensors";
  const std::string data = counting(96);
  // Every dtype the format has, each with six elements cut from `data`.
  std::vector<Tensor> all;
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16, DType::i64, DType::i32,
                            DType::i16, DType::i8, DType::u8, DType::f8_e4m3}) {
    Tensor t = tensor(std::string(name(dtype)), dtype, {3, 2}, data);
    t.bytes = static_cast<std::uint64_t>(6 * block_bytes(dtype));
    all.push_back(t);
  }
  write_safetensors(path, all, {{"format", "pt"}, {"note", "\"quoted\" \xc3\xa9"}});
  const SafetensorsFile file = read_safetensors(path);
  EXPECT_EQ(file.metadata.size(), 2u);
  EXPECT_EQ(file.metadata.at("note"), "\"quoted\" \xc3\xa9");
  ASSERT_EQ(file.tensors.size(), all.size());
  for (const Tensor& expected : all) {
    const Tensor& t = file.tensors.at(expected.name);
    EXPECT_EQ(t.name, expected.name);
    EXPECT_EQ(t.dtype, expected.dtype);
    EXPECT_EQ(t.shape, expected.shape);
    EXPECT_EQ(bytes_of(t), bytes_of(expected)) << t.name;
  }
}

TEST(Safetensors, ScalarsEmptyTensorsAndEmptyFilesAreLegal) {
  const TemporaryDirectory directory;
  const std::string four = "abcd";
  const auto path = directory.path() / "odd.safetensors";
  write_safetensors(path, {tensor("empty", DType::f32, {0, 5}, ""), tensor("scalar", DType::f32, {}, four),
                           tensor("also empty", DType::i8, {3, 0}, "")});
  const SafetensorsFile file = read_safetensors(path);
  EXPECT_TRUE(file.metadata.empty());
  EXPECT_EQ(file.tensors.at("empty").bytes, 0u);
  EXPECT_EQ(file.tensors.at("empty").shape, (std::vector<std::int64_t>{0, 5}));
  EXPECT_EQ(file.tensors.at("also empty").bytes, 0u);
  EXPECT_TRUE(file.tensors.at("scalar").shape.empty());
  EXPECT_EQ(bytes_of(file.tensors.at("scalar")), four);

  write_safetensors(path, {});
  EXPECT_TRUE(read_safetensors(path).tensors.empty());
}

TEST(Safetensors, TensorsMayStandInAnyOrderAndKeysToo) {
  const TemporaryDirectory directory;
  const std::string header = R"( {"b":{"data_offsets":[4,6],"shape":[2],"dtype":"U8"},
    "__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  )";
  const auto path = directory.file("x", little_endian<std::uint64_t>(header.size()) + header + "abcdef");
  const SafetensorsFile file = read_safetensors(path);
  EXPECT_EQ(bytes_of(file.tensors.at("a")), "abcd");
  EXPECT_EQ(bytes_of(file.tensors.at("b")), "ef");
  EXPECT_EQ(file.metadata.at("k"), "v");
}

TEST(Safetensors, TensorsOutliveTheTable) {
  const TemporaryDirectory directory;
  const std::string four = "abcd";
  write_safetensors(directory.path() / "x", {tensor("t", DType::u8, {4}, four)});
  SafetensorsFile file = read_safetensors(directory.path() / "x");
  const auto mapping = file.owners.at(0);
  const Tensor kept = file.tensors.at("t");
  file = {};
  std::filesystem::remove(directory.path() / "x");
  EXPECT_EQ(bytes_of(kept), four);
}

RC_GTEST_PROP(Safetensors, AnyTableRoundTrips,
              (const std::map<std::string, std::vector<std::uint8_t>>& table)) {
  const TemporaryDirectory directory;
  std::vector<Tensor> written;
  std::map<std::string, std::string> metadata;
  for (const auto& [raw, values] : table) {
    std::string key;  // hexadecimal: any length, always UTF-8
    for (const char c : raw) key += "0123456789abcdef"[c & 15];
    if (metadata.contains(key)) continue;
    metadata[key] = key + "!";
    written.push_back({key,
                       DType::u8,
                       {static_cast<std::int64_t>(values.size())},
                       reinterpret_cast<const std::byte*>(values.data()),
                       values.size()});
  }
  write_safetensors(directory.path() / "x", written, metadata);
  const SafetensorsFile file = read_safetensors(directory.path() / "x");
  RC_ASSERT(file.metadata == metadata);
  RC_ASSERT(file.tensors.size() == written.size());
  for (const Tensor& t : written) {
    RC_ASSERT(file.tensors.at(t.name).shape == t.shape);
    RC_ASSERT(bytes_of(file.tensors.at(t.name)) == bytes_of(t));
  }
}

TEST(SafetensorsGolden, ModelsLoad) {
  const char* given = std::getenv("BASIN_GOLDEN_DIR");
  const std::filesystem::path root =
      std::filesystem::path(given ? given : BASIN_SOURCE_DIR "/tests/golden") / "models";
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
    if (entry.path().extension() != ".safetensors") continue;
    const SafetensorsFile file = read_safetensors(entry.path());
    std::uint64_t bytes = 0;
    for (const auto& [key, t] : file.tensors) bytes += t.bytes;
    EXPECT_GT(bytes, entry.file_size() * 9 / 10) << entry.path();
    EXPECT_LT(bytes, entry.file_size()) << entry.path();
    if (entry.path().filename() == "model.safetensors") {
      EXPECT_EQ(file.tensors.count("model.embed_tokens.weight"), 1u) << entry.path();
    }
    ++files;
  }
  EXPECT_GE(files, 8);
}

class SafetensorsWrite : public testing::Test {
 protected:
  std::vector<std::string> listing() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory_.path()))
      names.push_back(entry.path().filename().string());
    return names;
  }

  const TemporaryDirectory directory_;
  const std::filesystem::path path_ = directory_.path() / "x.safetensors";
  const std::string data_ = counting(1 << 20);
};

TEST_F(SafetensorsWrite, DataStartsAligned) {
  const std::string four = "abcd";
  for (std::size_t length = 1; length <= 9; ++length) {
    write_safetensors(path_, {tensor(std::string(length, 'n'), DType::f32, {1}, four)});
    const std::string bytes = contents(path_);
    std::uint64_t header = 0;
    std::memcpy(&header, bytes.data(), 8);
    EXPECT_EQ(header % 8, 0u);
  }
}

TEST_F(SafetensorsWrite, ReplacesAFileWhoseMappingStaysValid) {
  const std::string four = "abcd", other = "efgh";
  write_safetensors(path_, {tensor("t", DType::u8, {4}, four)});
  const SafetensorsFile before = read_safetensors(path_);
  write_safetensors(path_, {tensor("t", DType::u8, {4}, other)});
  EXPECT_EQ(bytes_of(before.tensors.at("t")), four);
  EXPECT_EQ(bytes_of(read_safetensors(path_).tensors.at("t")), other);
  EXPECT_THAT(listing(), testing::ElementsAre("x.safetensors"));
}

TEST_F(SafetensorsWrite, PermissionsFollowTheUmask) {
  for (const mode_t mask : {022u, 077u}) {
    const mode_t before = ::umask(mask);
    write_safetensors(path_, {tensor("t", DType::u8, {1 << 20}, data_)});
    ::umask(before);
    struct stat status {};
    ASSERT_EQ(::stat(path_.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777u, 0666u & ~mask);
  }
}

TEST_F(SafetensorsWrite, ADirectoryThatIsMissingOrNotOneIsRefused) {
  const auto read = [&](const std::filesystem::path& path) {
    return [this, path] { write_safetensors(path, {tensor("t", DType::u8, {1 << 20}, data_)}); };
  };
  expect_error(read(directory_.path() / "no" / "x"), ErrorCode::io,
               {(directory_.path() / "no" / "x").string()});
  const auto file = directory_.file("plain", "x");
  expect_error(read(file / "x"), ErrorCode::io, {(file / "x").string()});
}

// Root may write anywhere, so while this lives, root's thread opens files as nobody does. Others stay who they are.
class AsNobody {
 public:
  AsNobody() : before_(::setfsuid(65534)) {}
  ~AsNobody() { ::setfsuid(static_cast<uid_t>(before_)); }
  AsNobody(const AsNobody&) = delete;
  AsNobody& operator=(const AsNobody&) = delete;

 private:
  int before_;
};

TEST_F(SafetensorsWrite, AnUnwritableDirectoryIsRefused) {
  std::filesystem::permissions(directory_.path(), static_cast<std::filesystem::perms>(0555));
  expect_error(
      [&] {
        const AsNobody nobody;
        write_safetensors(path_, {});
      },
      ErrorCode::io, {path_.string(), "Permission denied"});
  std::filesystem::permissions(directory_.path(), std::filesystem::perms::owner_all);
  EXPECT_TRUE(listing().empty());
}

TEST_F(SafetensorsWrite, AWriteThatFailsHalfwayKeepsTheOldFileAndLeavesNothing) {
  const std::string four = "abcd";
  write_safetensors(path_, {tensor("old", DType::u8, {4}, four)});
  // A limit on file sizes stands in for a full disk: the header fits, the data does not.
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{4096, before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  expect_error([&] { write_safetensors(path_, {tensor("new", DType::u8, {1 << 20}, data_)}); }, ErrorCode::io,
               {path_.string(), "File too large"});
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(listing(), testing::ElementsAre("x.safetensors"));
  EXPECT_EQ(bytes_of(read_safetensors(path_).tensors.at("old")), four);
}

TEST_F(SafetensorsWrite, ATargetThatIsADirectoryIsRefusedAndNothingIsLeft) {
  std::filesystem::create_directory(path_);
  expect_error([&] { write_safetensors(path_, {tensor("t", DType::u8, {1 << 20}, data_)}); },
               ErrorCode::invalid_argument, {path_.string()});
  EXPECT_THAT(listing(), testing::ElementsAre("x.safetensors"));
}

TEST_F(SafetensorsWrite, WhatTheFormatCannotSayIsRefusedBeforeAnythingIsWritten) {
  const auto write = [&](std::vector<Tensor> tensors, std::map<std::string, std::string> metadata = {}) {
    return [this, tensors, metadata] { write_safetensors(path_, tensors, metadata); };
  };
  Tensor t = tensor("t", DType::u8, {4}, data_);
  t.bytes = 4;
  expect_error(write({t, t}), ErrorCode::invalid_argument, {"'t'", "twice"});
  t.bytes = 5;
  expect_error(write({t}), ErrorCode::invalid_argument, {"'t'", "5 bytes", "4"});
  t.bytes = 4;
  t.shape = {-4};
  expect_error(write({t}), ErrorCode::invalid_argument, {"'t'", "-4"});
  t.shape = {1ll << 62, 1ll << 62};
  expect_error(write({t}), ErrorCode::invalid_argument, {"'t'", "overflow"});
  t.shape = {4};
  t.name = "__metadata__";
  expect_error(write({t}), ErrorCode::invalid_argument, {"__metadata__"});
  t.name = "not \xff UTF-8";
  expect_error(write({t}), ErrorCode::invalid_argument, {path_.string(), "UTF-8"});
  expect_error(write({}, {{"key", "\xff"}}), ErrorCode::invalid_argument, {path_.string(), "UTF-8"});
  const std::string block(34, 'x');
  expect_error(write({tensor("q", DType::q8_0, {32}, block)}), ErrorCode::unsupported, {"q8_0"});
  EXPECT_TRUE(listing().empty());
}

}  // namespace
}  // namespace basin::test
