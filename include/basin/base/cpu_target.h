// Which of the compiled CPU targets runs. Kernels are compiled once per target (cmake/options.cmake,
// basin_cpu_kernels) and every caller chooses by cpu_target(), so that one process uses one target throughout.
#pragma once

#include <string_view>

namespace basin {

enum class CpuTarget {
  generic,      // any x86-64 (or other) machine
  avx2,         // AVX2 + FMA + F16C
  avx512_bf16,  // AVX-512 F/BW/DQ/VL with BF16 and VNNI
  amx,          // that, and AMX tiles of int8, in the products of ops: the same bits, sooner
};

inline constexpr CpuTarget kCpuTargets[] = {CpuTarget::generic, CpuTarget::avx2, CpuTarget::avx512_bf16,
                                            CpuTarget::amx};

/// "generic", "avx2", "avx512_bf16", "amx": the values of BASIN_CPU.
std::string_view name(CpuTarget target);

/// Whether this machine runs it. For amx that asks the kernel to let this process use the tiles, which makes the frames of its
/// signal handlers larger.
bool runs_here(CpuTarget target);

/// The best target of this machine, or the one that BASIN_CPU names; read once, at the first call. Throws
/// Error(invalid_argument) for an unknown name, Error(unsupported) for one that this machine cannot run.
CpuTarget cpu_target();

}  // namespace basin
