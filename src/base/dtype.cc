#include "basin/base/dtype.h"

namespace basin {

std::string_view name(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "f64";
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::i64:
      return "i64";
    case DType::i32:
      return "i32";
    case DType::i16:
      return "i16";
    case DType::i8:
      return "i8";
    case DType::u8:
      return "u8";
    case DType::q8_0:
      return "q8_0";
    case DType::q4_1:
      return "q4_1";
  }
  return "unknown";
}

}  // namespace basin
