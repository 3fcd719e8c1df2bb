// Stands in for libFuzzer where there is none: runs a harness over every file given, then over CHANGES changed copies of
// each. The changes are the same in every run; coverage does not guide them, so this finds less and is no replacement.
// The input at work lies in the file CRASH, which is removed at the end: what a crash leaves there, repeats it.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
extern "C" __attribute__((weak)) std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                                                     std::size_t most, unsigned seed);
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most);

namespace {

using Bytes = std::vector<std::uint8_t>;

std::minstd_rand random_source;  // NOLINT: its fixed seed is the point

std::size_t below(std::size_t end) {
  return std::uniform_int_distribution<std::size_t>(0, end - 1)(random_source);
}

void run(const Bytes& input, const std::filesystem::path& crash) {
  std::ofstream(crash, std::ios::binary)
      .write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
  const Bytes exact(input.begin(), input.end());  // no spare capacity, so that a sanitizer sees where it ends
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
}

Bytes changed(const Bytes& input) {
  Bytes bytes = input;
  const std::size_t most = input.size() + 64;
  bytes.resize(most);
  std::size_t size = input.size();
  for (std::size_t left = 1 + below(4); left > 0; --left) {
    size = LLVMFuzzerCustomMutator != nullptr
               ? LLVMFuzzerCustomMutator(bytes.data(), size, most, static_cast<unsigned>(random_source()))
               : LLVMFuzzerMutate(bytes.data(), size, most);
  }
  bytes.resize(size);
  return bytes;
}

std::vector<std::filesystem::path> files_of(const std::filesystem::path& path) {
  if (!std::filesystem::is_directory(path)) return {path};
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

// One change: a bit, a byte, an inserted byte, a repeated or removed piece, or the end cut off.
std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most) {
  if (size == 0) {
    if (most == 0) return 0;
    data[0] = static_cast<std::uint8_t>(below(256));
    return 1;
  }
  const std::size_t at = below(size);
  const std::size_t piece = 1 + below(std::min<std::size_t>(size - at, 16));
  switch (below(6)) {
    case 0:
      data[at] = static_cast<std::uint8_t>(data[at] ^ (1u << below(8)));
      return size;
    case 1:
      data[at] = static_cast<std::uint8_t>(below(256));
      return size;
    case 2:
      if (size == most) return size;
      std::copy_backward(data + at, data + size, data + size + 1);
      data[at] = static_cast<std::uint8_t>(below(256));
      return size + 1;
    case 3:
      if (size + piece > most) return size;
      std::copy_backward(data + at, data + size, data + size + piece);
      return size + piece;
    case 4:
      std::copy(data + at + piece, data + size, data + at);
      return size - piece;
    default:
      return at;
  }
}

int main(int count, char** arguments) {
  if (count < 4) {
    std::fprintf(stderr, "usage: %s CHANGES CRASH FILE_OR_FOLDER...\n", arguments[0]);
    return 2;
  }
  const long changes = std::strtol(arguments[1], nullptr, 10);
  const std::filesystem::path crash = arguments[2];
  long files = 0;
  for (int i = 3; i < count; ++i) {
    for (const auto& path : files_of(arguments[i])) {
      std::ifstream stream(path, std::ios::binary);
      const Bytes input{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
      if (!stream) {
        std::fprintf(stderr, "error: cannot read %s\n", path.c_str());
        return 1;
      }
      run(input, crash);
      for (long change = 0; change < changes; ++change) run(changed(input), crash);
      ++files;
    }
  }
  std::error_code ignored;
  std::filesystem::remove(crash, ignored);
  std::printf("%ld files, each as it is and with %ld changes\n", files, changes);
  return files == 0 ? 1 : 0;
}
