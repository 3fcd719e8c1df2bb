#include "basin/base/cpu_target.h"

#include <fmt/format.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <string>

#include "basin/base/error.h"

namespace basin {
namespace {

#if defined(__x86_64__)
bool has_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kTile) != 0 && (d & kInt8) != 0;
}

// Linux keeps the tiles from a process that has not asked for them, and from one whose alternate signal stack has no room for them.
bool permits_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
#else
  return false;
#endif
}
#endif

std::string why_not(CpuTarget target) {
#if defined(__x86_64__)
  if (target == CpuTarget::amx && has_tiles() && runs_here(CpuTarget::avx512_bf16))
    return "the kernel does not let this process use AMX tiles";
#endif
  return "this CPU lacks it";
}

CpuTarget best() {
  CpuTarget result = CpuTarget::generic;
  for (const CpuTarget target : kCpuTargets) {
    if (runs_here(target)) result = target;
  }
  return result;
}

CpuTarget choose() {
  const char* forced = std::getenv("BASIN_CPU");
  if (forced == nullptr || *forced == '\0') return best();
  for (const CpuTarget target : kCpuTargets) {
    if (name(target) != forced) continue;
    if (runs_here(target)) return target;
    throw Error(ErrorCode::unsupported,
                fmt::format("BASIN_CPU={} was asked for, but {}", forced, why_not(target)),
                fmt::format("unset BASIN_CPU, or use BASIN_CPU={}", name(best())));
  }
  throw Error(ErrorCode::invalid_argument, fmt::format("BASIN_CPU={} is not a target", forced),
              "use generic, avx2, avx512_bf16 or amx, or unset it");
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
    case CpuTarget::amx:
      return "amx";
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
    case CpuTarget::amx:
      return runs_here(CpuTarget::avx512_bf16) && has_tiles() && permits_tiles();
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
