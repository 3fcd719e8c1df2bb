// What both C interfaces do at their boundary: nothing is thrown across it, errors are kept for each thread, structs may be
// older or newer than the library. Every shared library has its own copy of all of it, and shows none.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>

#include "attention/checks.h"
#include "basin/attention/c_api.h"
#include "basin/attention/spec.h"
#include "basin/base/error.h"
#include "basin/tensor/view.h"

namespace basin::attention::c_boundary {

/// Of fixed size: keeping an error must not fail.
struct LastError {
  char message[1024] = "";
  char hint[256] = "";
};
inline thread_local LastError last_error;

inline basin_status keep(basin_status status, const char* message, const char* hint) {
  std::snprintf(last_error.message, sizeof last_error.message, "%s", message);
  std::snprintf(last_error.hint, sizeof last_error.hint, "%s", hint);
  return status;
}

inline basin_status status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return BASIN_INVALID_ARGUMENT;
    case ErrorCode::unsupported:
      return BASIN_UNSUPPORTED;
    default:
      return BASIN_INTERNAL;
  }
}

/// Runs body, and turns whatever it throws into a status.
template <typename Body>
basin_status guarded(const Body& body) noexcept {
  try {
    body();
    return BASIN_OK;
  } catch (const Error& error) {
    return keep(status_of(error.code()), error.what(), error.hint().c_str());
  } catch (const std::bad_alloc&) {
    return keep(BASIN_OUT_OF_MEMORY, "out of memory", "");
  } catch (const std::exception& error) {
    return keep(BASIN_INTERNAL, error.what(), "");
  } catch (...) {
    return keep(BASIN_INTERNAL, "unknown error", "");
  }
}

template <typename Pointer>
void need(const Pointer* pointer, const char* name) {
  if (pointer == nullptr) refuse(fmt::format("{} is null", name));
}

/// A version that appends fields must go on accepting the smaller struct of this one.
template <typename Args>
void check_size(std::size_t struct_bytes) {
  constexpr std::size_t kMaxStructBytes = 4096;  // beyond it struct_bytes was not set at all
  if (struct_bytes < sizeof(Args) || struct_bytes > kMaxStructBytes) {
    refuse(
        fmt::format("struct_bytes is {}; this library's struct has {} bytes. Set it with the init function",
                    struct_bytes, sizeof(Args)));
  }
}

/// A newer caller's fields behind ours may be there, but must not ask for anything.
template <typename Args>
void check_struct(const Args* args) {
  need(args, "args");
  check_size<Args>(args->struct_bytes);
  const auto* bytes = reinterpret_cast<const unsigned char*>(args);
  if (std::any_of(bytes + sizeof(Args), bytes + args->struct_bytes, [](unsigned char b) { return b != 0; })) {
    throw Error(ErrorCode::unsupported, "args has fields set that are newer than this library",
                fmt::format("leave them 0, or use a library newer than {}", BASIN_VERSION));
  }
}

/// Every field 0, and then what `defaults` sets.
template <typename Args, typename Defaults>
basin_status init(Args* args, std::size_t struct_bytes, const Defaults& defaults) noexcept {
  return guarded([&] {
    need(args, "args");
    check_size<Args>(struct_bytes);
    std::memset(static_cast<void*>(args), 0, struct_bytes);
    args->struct_bytes = struct_bytes;
    defaults(*args);
  });
}

inline void set_defaults(basin_attention_spec& spec) {
  spec.causal = 1;
  spec.window_right = -1;
}

inline DType dtype_of(const char* name, std::int32_t dtype) {
  switch (dtype) {
    case BASIN_F64:
      return DType::f64;
    case BASIN_F32:
      return DType::f32;
    case BASIN_F16:
      return DType::f16;
    case BASIN_BF16:
      return DType::bf16;
    default:
      refuse(fmt::format("{} has dtype {}; allowed are BASIN_F64, BASIN_F32, BASIN_F16 and BASIN_BF16", name,
                         dtype));
  }
}

/// basin_tensor -> View, basin_const_tensor -> ConstView.
template <typename Tensor>
auto view_of(const char* name, const Tensor& tensor) {
  BasicView<decltype(Tensor::data)> view;
  if (tensor.rank < 0 || tensor.rank > 4)
    refuse(fmt::format("{} has {} dimensions; allowed are 0 to 4", name, tensor.rank));
  if (tensor.data == nullptr && tensor.rank == 0) return view;  // absent
  view.data = tensor.data;
  view.dtype = dtype_of(name, tensor.dtype);
  view.rank = tensor.rank;
  std::copy_n(tensor.shape, tensor.rank, view.shape.begin());
  std::copy_n(tensor.stride, tensor.rank, view.stride.begin());
  return view;
}

/// A tensor that a problem may lack.
inline ConstView optional_view_of(const char* name, const basin_const_tensor& tensor) {
  if (tensor.data == nullptr && tensor.rank != 0) refuse(fmt::format("{} has a shape, but no data", name));
  return view_of(name, tensor);
}

/// The mask and the factors; where it runs is the caller's.
inline Spec spec_of(const basin_attention_spec& from) {
  if (from.causal != 0 && from.causal != 1)
    refuse(fmt::format("causal is {}; allowed are 0 and 1", from.causal));
  Spec spec;
  spec.mask = {from.causal == 1, from.window, from.window_right, from.sink_tokens};
  spec.scale = from.scale;
  spec.softcap = from.softcap;
  return spec;
}

}  // namespace basin::attention::c_boundary
