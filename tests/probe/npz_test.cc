// NumPy files: what is written is read back, what is damaged is refused.
#include "probe/npz.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>

#include "basin/base/error.h"

namespace basin::probe {
namespace {

namespace fs = std::filesystem;

class NpzTest : public testing::Test {
 protected:
  NpzTest() : path_(fs::temp_directory_path() / ("basin_npz_" + std::to_string(getpid()) + ".npz")) {}
  ~NpzTest() override { fs::remove(path_); }

  std::string bytes() const {
    std::ifstream file(path_, std::ios::binary);
    std::stringstream content;
    content << file.rdbuf();
    return content.str();
  }
  void write(const std::string& content) const { std::ofstream(path_, std::ios::binary) << content; }

  fs::path path_;
};

TEST_F(NpzTest, RoundTrip) {
  std::vector<float> values(100'000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 97);
  const std::int64_t shape[] = {100, 1000}, empty[] = {0, 3};
  NpzWriter writer(path_);
  writer.add("a/b", shape, std::span<const float>(values));
  writer.add("none", empty, std::span<const float>());
  writer.add("numbers", std::vector<std::int64_t>{1, -2, 3});
  writer.finish();
  const NpzFile file(path_);
  EXPECT_THAT(file.names(), testing::ElementsAre("a/b", "none", "numbers"));
  const Array a = file.read("a/b");
  EXPECT_EQ(a.dtype, DType::f32);
  EXPECT_THAT(a.shape, testing::ElementsAre(100, 1000));
  EXPECT_EQ(std::memcmp(a.data, values.data(), values.size() * 4), 0);
  EXPECT_EQ(file.read("none").elements(), 0);
  std::int64_t second = 0;
  std::memcpy(&second, file.read("numbers").data + 8, 8);
  EXPECT_EQ(second, -2);
  EXPECT_THROW(static_cast<void>(file.read("c")), Error);
}

TEST_F(NpzTest, CopiesHoldTheBytesOfTheOther) {
  std::vector<float> values(5000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sqrt(static_cast<float>(i));
  const std::int64_t shape[] = {50, 100};
  NpzWriter first(path_);
  first.add("numbers", std::vector<std::int64_t>{1, -2, 3});
  first.add("values", shape, std::span<const float>(values));
  first.finish();
  const fs::path other = path_.string() + ".copy";
  {
    const NpzFile from(path_);
    NpzWriter writer(other);
    writer.copy("a/values", from, "values");
    writer.add("more", std::vector<std::int64_t>{4});
    writer.copy("a/numbers", from, "numbers");
    EXPECT_THROW(writer.copy("none", from, "none"), Error);
    writer.finish();
  }
  const NpzFile file(other);
  EXPECT_THAT(file.names(), testing::ElementsAre("a/numbers", "a/values", "more"));
  const Array copied = file.read("a/values");
  EXPECT_THAT(copied.shape, testing::ElementsAre(50, 100));
  EXPECT_EQ(std::memcmp(copied.data, values.data(), values.size() * 4), 0);
  EXPECT_EQ(file.read("a/numbers").elements(), 3);
  fs::remove(other);
}

TEST_F(NpzTest, NothingAppearsUnlessFinished) {
  {
    NpzWriter writer(path_);
    writer.add("numbers", std::vector<std::int64_t>{1});
  }
  EXPECT_FALSE(fs::exists(path_));
}

// Every cut and every changed byte is either noticed or leaves the arrays readable; nothing crashes.
TEST_F(NpzTest, DamageIsRefusedOrHarmless) {
  NpzWriter writer(path_);
  writer.add("numbers", std::vector<std::int64_t>{1, 2, 3, 4, 5, 6, 7, 8});
  const std::int64_t shape[] = {4};
  const std::vector<std::int32_t> keys = {4, 3, 2, 1};
  writer.add("keys", shape, std::span<const std::int32_t>(keys));
  writer.finish();
  const std::string good = bytes();
  const auto read_all = [&] {
    try {
      const NpzFile file(path_);
      for (const std::string& name : file.names()) {
        const Array array = file.read(name);
        EXPECT_GE(array.elements(), 0);
      }
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  for (std::size_t length = 0; length < good.size(); length += 5) {
    write(good.substr(0, length));
    EXPECT_FALSE(read_all()) << length;
  }
  std::mt19937 random(3);
  for (int i = 0; i < 500; ++i) {
    std::string bad = good;
    bad[random() % bad.size()] = static_cast<char>(random());
    write(bad);
    read_all();
  }
}

TEST(Npy, HeadersOfNumpyAreRead) {
  const auto parse = [](const std::string& header, std::size_t data_bytes) {
    std::string bytes("\x93NUMPY\x01\x00", 8);
    bytes += static_cast<char>(header.size());
    bytes += '\0';
    bytes += header + std::string(data_bytes, '\0');
    return parse_npy({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}, nullptr).shape;
  };
  EXPECT_THAT(parse("{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }\n", 24),
              testing::ElementsAre(2, 3));
  EXPECT_THAT(parse("{'shape':(5,),'fortran_order':True,'descr':'|u1'}", 5), testing::ElementsAre(5));
  EXPECT_THAT(parse("{'descr': '<f8', 'fortran_order': False, 'shape': (), }", 8), testing::IsEmpty());
  EXPECT_THROW(parse("{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }", 23), Error);
  EXPECT_THROW(parse("{'descr': '>i4', 'fortran_order': False, 'shape': (1,), }", 4), Error);
  EXPECT_THROW(parse("{'descr': '<i4', 'fortran_order': True, 'shape': (2, 3), }", 24), Error);
  EXPECT_THROW(parse("{'descr': '<i4', 'fortran_order': False, 'shape': (4611686018427387904, 4), }", 64),
               Error);
  EXPECT_THROW(parse("{'descr': '<i4', 'shape': (1,)", 4), Error);
}

}  // namespace
}  // namespace basin::probe
