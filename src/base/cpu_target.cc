#include "basin/base/cpu_target.h"

#include <fmt/format.h>

#include <cstdlib>
#include <optional>

#include "basin/base/error.h"

namespace basin {
namespace {

constexpr CpuTarget kTargets[] = {CpuTarget::generic, CpuTarget::avx2, CpuTarget::avx512_bf16};

CpuTarget best() {
  CpuTarget result = CpuTarget::generic;
  for (const CpuTarget target : kTargets) {
    if (runs_here(target)) result = target;
  }
  return result;
}

CpuTarget choose() {
  const char* forced = std::getenv("BASIN_CPU");
  if (forced == nullptr || *forced == '\0') return best();
  for (const CpuTarget target : kTargets) {
    if (name(target) != forced) continue;
    if (runs_here(target)) return target;
    throw Error(ErrorCode::unsupported,
                fmt::format("BASIN_CPU={} was asked for, but this CPU lacks it", forced),
                fmt::format("unset BASIN_CPU, or use BASIN_CPU={}", name(best())));
  }
  throw Error(ErrorCode::invalid_argument, fmt::format("BASIN_CPU={} is not a target", forced),
              "use generic, avx2 or avx512_bf16, or unset it");
}

}  // namespace

std::string_view name(CpuTarget target) {
  switch (target) {
    case CpuTarget::generic:
      return "generic";
    case CpuTarget::avx2:
      return "avx2";
    case CpuTarget::avx512_bf16:
      return "avx512_bf16";
  }
  return "unknown";
}

bool runs_here(CpuTarget target) {
#if defined(__x86_64__)
  switch (target) {
    case CpuTarget::generic:
      return true;
    case CpuTarget::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("bmi2");
    case CpuTarget::avx512_bf16:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni") &&
             __builtin_cpu_supports("avx512bf16");
  }
  return false;
#else
  return target == CpuTarget::generic;
#endif
}

CpuTarget cpu_target() {
  static const CpuTarget target = choose();
  return target;
}

}  // namespace basin
