// Mapping at once what the page cache holds.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <cstddef>
#include <string>

#include "weights/files.h"
#include "weights/map_cached.h"

namespace basin::weights::tests {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kBytes = (std::size_t{65} << 20) + 100;  // more than one slice, and not whole pages

long faults() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt + usage.ru_majflt;
}

// Page faults of reading every page. (A sanitizer's own memory would have faults of its own.)
__attribute__((no_sanitize("address", "undefined"))) long faults_of_reading(const MappedFile& file) {
  const long before = faults();
  unsigned sum = 0;
  for (std::uint64_t at = 0; at < file.size(); at += kPage)
    sum += static_cast<unsigned>(*const_cast<const volatile std::byte*>(file.data() + at));
  EXPECT_GT(sum, 0u);
  return faults() - before;
}

TEST(MapCached, WhatIsCachedIsMappedAtOnce) {
  const test::TemporaryDirectory directory;
  const auto path = directory.file("cached", std::string(kBytes, '\1'));  // just written, so cached
  const MappedFile lazy(path);
  const MappedFile eager(path);
#ifdef MADV_POPULATE_READ
  const bool is_possible = ::madvise(const_cast<std::byte*>(eager.data()), kPage, MADV_POPULATE_READ) == 0;
#else
  const bool is_possible = false;
#endif
  map_cached(eager);
  const long many = faults_of_reading(lazy), few = faults_of_reading(eager);
  EXPECT_GT(many, 20);
  if (!is_possible) GTEST_SKIP() << "this system cannot map ahead";
  EXPECT_LT(few, 20);
}

TEST(MapCached, AnEmptyFileHasNothingToMap) {
  const test::TemporaryDirectory directory;
  const MappedFile mapped(directory.file("empty", ""));
  map_cached(mapped);
  EXPECT_EQ(mapped.size(), 0u);
}

}  // namespace
}  // namespace basin::weights::tests
