// What the backward pass knows of rows alone, before the products: D and the log-sum-exp of every query row, the gradient of the
// sinks, and dq of rows that see nothing.
#include "attention/cuda/sm90/backward/arguments.h"
#include "attention/cuda/sm90/backward/row_blocks.cuh"
#include "attention/cuda/sm90/backward/rows.h"
#include "attention/cuda/sm90/ptx/math.cuh"
#include "attention/cuda/sm90/walk.cuh"

namespace basin::attention::sm90 {
namespace {

constexpr int kThreads = 128;
constexpr float kLog2E = 1.4426950408889634f;

template <typename T>
__device__ __forceinline__ float2 unpack(std::uint32_t pair) {
  if constexpr (__is_same(T, __nv_bfloat16)) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}

/// Sums of one block of query rows of one head: D = rowsum(dO * O) - dlse, the log-sum-exp in units of log2, and the share of
/// the rows in the gradient of the sink. Eight lanes take a row. Also sets back the turns of the block's sums of dq.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    row_sums_kernel(const __grid_constant__ BackwardArguments arguments) {
  constexpr int kLanes = 8, kRowsAtOnce = kThreads / kLanes;
  const int block = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  const bool ragged = arguments.q_begin != nullptr;
  if (arguments.dq_turns != nullptr && thread < arguments.dq_units)
    arguments.dq_turns[(head * arguments.row_blocks + block) * arguments.dq_units + thread] = 0;
  if (block == 0 && head == 0 && thread == 0) *arguments.ticket = 0;

  const int sequence = sequence_of_block(arguments, block);
  const SequenceRange range = sequence_range(arguments, sequence);
  const int first = (block - first_block(arguments, sequence)) * kSumRows;
  const float sink = sink_of(arguments, head);
  const float inf = __int_as_float(0x7f800000);
  float dsink = 0;
#pragma unroll 4
  for (int row = thread / kLanes; row < kSumRows; row += kRowsAtOnce) {
    const int token = first + row;
    float sum = 0, lse = -inf, dlse = 0;
    const bool is_row = token >= 0 && token < range.q_tokens;  // (blocks before the first sequence have none)
    if (is_row) {
      const auto* out = static_cast<const T*>(arguments.forward_out.data) +
                        row_index(arguments.forward_out, ragged, sequence, range.q_row, head, token);
      const auto* dout = static_cast<const T*>(arguments.dout.data) +
                         row_index(arguments.dout, ragged, sequence, range.q_row, head, token);
      for (int column = lane * 8; column < arguments.d_v; column += kLanes * 8) {
        const uint4 a = __ldcs(reinterpret_cast<const uint4*>(out + column));
        const uint4 b = *reinterpret_cast<const uint4*>(dout + column);
        const std::uint32_t x[] = {a.x, a.y, a.z, a.w}, y[] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 o = unpack<T>(x[i]), g = unpack<T>(y[i]);
          sum = __fmaf_rn(o.x, g.x, sum);
          sum = __fmaf_rn(o.y, g.y, sum);
        }
      }
      const std::int64_t at = lse_index(arguments, sequence, range.q_row, head, token);
      lse = __ldg(arguments.forward_lse + at);
      if (arguments.dlse != nullptr) dlse = __ldg(arguments.dlse + at);
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2)
      sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, step));
    // A row without visible keys has no weights: its O is 0 times nothing.
    const RowKeys keys = row_keys(arguments, range.kv_tokens - range.q_tokens + token, range.kv_tokens);
    const bool sees = is_row && (keys.sink_end > 0 || keys.begin < keys.end);
    if (is_row && !sees && arguments.dq_turns != nullptr) {  // no block of keys has a share of its dq
      auto* dq = static_cast<T*>(arguments.dq.data) +
                 row_index(arguments.dq, ragged, sequence, range.q_row, head, token);
      for (int column = lane * 8; column < arguments.d_qk; column += kLanes * 8)
        *reinterpret_cast<uint4*>(dq + column) = make_uint4(0, 0, 0, 0);
    }
    const float big_d = __fadd_rn(sees ? sum : 0.0f, -dlse);
    if (lane == 0) {
      const std::int64_t at = sum_index(arguments, head, block) + row;
      arguments.lse2[at] = sees ? __fmul_rn(lse, kLog2E) : inf;
      arguments.big_d[at] = sees ? big_d : 0.0f;
    }
    if (is_row && sink != -inf) {
      // lse is at least the sink; where both are +inf the sink has all the weight.
      const float weight = sink == inf ? 1.0f : exp2_fast(__fmul_rn(__fadd_rn(sink, -lse), kLog2E));
      dsink = __fmaf_rn(-weight, big_d, dsink);
    }
  }
  if (arguments.dsink_logit == nullptr) return;
  // Lane 0 of each eight speaks for its rows; added in a fixed order.
  __shared__ float parts[kRowsAtOnce];
  if (lane == 0) parts[thread / kLanes] = dsink;
  __syncthreads();
  if (thread == 0) {
    float sum = 0;
    for (const float part : parts) sum = __fadd_rn(sum, part);
    arguments.dsink_parts[std::int64_t{block} * arguments.h_q + head] = sum;
  }
}

/// The gradient of one sink: the shares of all blocks of rows, added in a fixed order.
__global__ void __launch_bounds__(kThreads)
    dsink_kernel(const __grid_constant__ BackwardArguments arguments) {
  const int head = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  __shared__ float sums[kThreads];
  float sum = 0;
  for (std::int64_t block = thread; block < arguments.row_blocks; block += kThreads)
    sum = __fadd_rn(sum, arguments.dsink_parts[block * arguments.h_q + head]);
  sums[thread] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] = __fadd_rn(sums[thread], sums[thread + half]);
  }
  if (thread == 0) arguments.dsink_logit[head] = sums[0];
}

}  // namespace

RowKernels row_kernels(bool bf16) {
  RowKernels kernels;
  kernels.threads = kThreads;
  kernels.dsink = reinterpret_cast<const void*>(&dsink_kernel);
  kernels.row_sums = bf16 ? reinterpret_cast<const void*>(&row_sums_kernel<__nv_bfloat16>)
                          : reinterpret_cast<const void*>(&row_sums_kernel<__half>);
  return kernels;
}

}  // namespace basin::attention::sm90
