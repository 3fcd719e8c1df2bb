#include "basin/base/cpu_target.h"

#include <gmock/gmock.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>

#include "basin/base/error.h"

namespace basin {
namespace {

// The choice is read once per process, so each case decides in a process of its own.
int exit_code_with(const char* value) {
  setenv("BASIN_CPU", value, 1);
  try {
    const CpuTarget target = cpu_target();
    return name(target) == value || *value == '\0' ? 0 : 3;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::invalid_argument) return 1;
    return error.code() == ErrorCode::unsupported && !error.hint().empty() ? 2 : 4;
  }
}

TEST(CpuTargetDeathTest, TheEnvironmentForcesATarget) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const CpuTarget target : kCpuTargets) {
    const std::string text(name(target));
    EXPECT_EXIT(std::exit(exit_code_with(text.c_str())), testing::ExitedWithCode(runs_here(target) ? 0 : 2),
                "");
  }
  EXPECT_EXIT(std::exit(exit_code_with("")), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(std::exit(exit_code_with("AVX2")), testing::ExitedWithCode(1), "");
  EXPECT_EXIT(std::exit(exit_code_with("sse9")), testing::ExitedWithCode(1), "");
}

#if defined(__linux__)
// Tiles would not fit into the frame of a handler on a small alternate stack, so Linux denies them.
int exit_code_with_a_small_signal_stack() {
  static char stack[8192];
  const stack_t alternate = {stack, 0, sizeof stack};
  sigaltstack(&alternate, nullptr);
  std::ifstream file("/proc/cpuinfo");
  bool has_tiles = false;
  for (std::string line; std::getline(file, line);) has_tiles |= line.find("amx_int8") != std::string::npos;
  if (runs_here(CpuTarget::amx)) return 5;
  setenv("BASIN_CPU", "amx", 1);
  try {
    cpu_target();
  } catch (const Error& error) {
    return (std::string_view(error.what()).find("kernel does not let") != std::string_view::npos) == has_tiles
               ? 0
               : 6;
  }
  return 7;
}

TEST(CpuTargetDeathTest, TilesThatTheKernelDeniesAreRefusedByName) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  // (A process that was permitted keeps it, so nothing may ask before the stack is there.)
  EXPECT_EXIT(std::exit(exit_code_with_a_small_signal_stack()), testing::ExitedWithCode(0), "");
}
#endif

TEST(CpuTarget, GenericRunsEverywhereAndTargetsAreOrdered) {
  EXPECT_TRUE(runs_here(CpuTarget::generic));
  EXPECT_TRUE(!runs_here(CpuTarget::avx512_bf16) || runs_here(CpuTarget::avx2));
  EXPECT_TRUE(!runs_here(CpuTarget::amx) || runs_here(CpuTarget::avx512_bf16));
  EXPECT_TRUE(runs_here(cpu_target()));
}

}  // namespace
}  // namespace basin
