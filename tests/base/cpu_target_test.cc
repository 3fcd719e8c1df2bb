#include "basin/base/cpu_target.h"

#include <gmock/gmock.h>

#include <cstdlib>

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
  for (const CpuTarget target : {CpuTarget::generic, CpuTarget::avx2, CpuTarget::avx512_bf16}) {
    const std::string text(name(target));
    EXPECT_EXIT(std::exit(exit_code_with(text.c_str())), testing::ExitedWithCode(runs_here(target) ? 0 : 2),
                "");
  }
  EXPECT_EXIT(std::exit(exit_code_with("")), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(std::exit(exit_code_with("AVX2")), testing::ExitedWithCode(1), "");
  EXPECT_EXIT(std::exit(exit_code_with("sse9")), testing::ExitedWithCode(1), "");
}

TEST(CpuTarget, GenericRunsEverywhereAndTargetsAreOrdered) {
  EXPECT_TRUE(runs_here(CpuTarget::generic));
  EXPECT_TRUE(!runs_here(CpuTarget::avx512_bf16) || runs_here(CpuTarget::avx2));
  EXPECT_TRUE(runs_here(cpu_target()));
}

}  // namespace
}  // namespace basin
