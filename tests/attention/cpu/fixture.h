// Runs every test with the target that BASIN_CPU names, and proves that it ran.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include "basin/attention/attention.h"
#include "basin/attention/cpu.h"
#include "basin/base/cpu_target.h"

namespace basin::attention::cpu_tests {

class CpuTest : public testing::Test {
 protected:
  void SetUp() override {
    const char* forced = std::getenv("BASIN_CPU");
    ASSERT_NE(forced, nullptr)
        << "these tests need BASIN_CPU=generic, avx2, avx512_bf16 or amx; ctest sets it";
    for (const CpuTarget target : kCpuTargets) {
      if (name(target) == forced && !runs_here(target)) {
        GTEST_SKIP() << "this CPU cannot run the target " << forced;
      }
    }
    ASSERT_EQ(cpu::target_name(), forced);
  }

  static void run(const Forward& problem, ThreadPool& pool) {
    const Ran ran = forward(problem, Backend::cpu, pool);
    ASSERT_EQ(ran.backend, "cpu");
    ASSERT_EQ(ran.target, cpu::target_name());
  }
};

}  // namespace basin::attention::cpu_tests
