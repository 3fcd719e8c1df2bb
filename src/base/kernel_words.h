// What host code and the sources compiled once per CPU target (basin_cpu_kernels) have in common: plain words, nothing
// that the linker could share between targets.
#pragma once

namespace basin {

inline constexpr int kLanes = 16;  // elements of one logical vector, whatever the register width

/// How the elements of a tensor that a kernel reads are stored.
enum class Storage { f32, f16, bf16 };

// Each compiled target as a type. A module's kernel source overloads a function on it, once per target, that returns
// the module's table of kernels; base/choose_kernels.h calls the one of this process.
namespace generic {
struct Target {};
}  // namespace generic
namespace avx2 {
struct Target {};
}  // namespace avx2
namespace avx512_bf16 {
struct Target {};
}  // namespace avx512_bf16
namespace amx {
// A module that has no kernels of its own for it runs those of avx512_bf16.
struct Target : avx512_bf16::Target {};
}  // namespace amx

}  // namespace basin
