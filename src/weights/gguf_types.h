// The numbers of the format: types of metadata values and of tensors.
#pragma once

#include <cstdint>
#include <optional>

#include "basin/base/dtype.h"

namespace basin::weights {

inline constexpr std::uint32_t kGgufMagic = 0x46554747u;  // "GGUF"
inline constexpr std::uint64_t kGgufAlignment = 32;       // unless general.alignment says otherwise

enum GgufValueType : std::uint32_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64,
};

// ggml's types, so that a refusal can say what the file has.
struct GgufTensorType {
  std::uint32_t id;
  const char* text;
  std::optional<DType> dtype;  // none: known by name, so that a refusal can say what the file has
};
inline constexpr GgufTensorType kGgufTensorTypes[] = {{0, "F32", DType::f32},    {1, "F16", DType::f16},
                                                      {2, "Q4_0", DType::q4_0},  {3, "Q4_1", DType::q4_1},
                                                      {6, "Q5_0", DType::q5_0},  {7, "Q5_1", DType::q5_1},
                                                      {8, "Q8_0", DType::q8_0},  {9, "Q8_1", {}},
                                                      {10, "Q2_K", {}},          {11, "Q3_K", {}},
                                                      {12, "Q4_K", DType::q4_k}, {13, "Q5_K", DType::q5_k},
                                                      {14, "Q6_K", DType::q6_k}, {15, "Q8_K", {}},
                                                      {16, "IQ2_XXS", {}},       {17, "IQ2_XS", {}},
                                                      {18, "IQ3_XXS", {}},       {19, "IQ1_S", {}},
                                                      {20, "IQ4_NL", {}},        {21, "IQ3_S", {}},
                                                      {22, "IQ2_S", {}},         {23, "IQ4_XS", {}},
                                                      {24, "I8", DType::i8},     {25, "I16", DType::i16},
                                                      {26, "I32", DType::i32},   {27, "I64", DType::i64},
                                                      {28, "F64", DType::f64},   {29, "IQ1_M", {}},
                                                      {30, "BF16", DType::bf16}, {34, "TQ1_0", {}},
                                                      {35, "TQ2_0", {}},         {39, "MXFP4", DType::mxfp4},
                                                      {40, "NVFP4", {}}};

}  // namespace basin::weights
