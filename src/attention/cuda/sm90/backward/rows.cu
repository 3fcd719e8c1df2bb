// What the backward pass knows of rows alone, before the products: D and the log-sum-exp of every query row, the gradient of the
// sinks, and dq of rows that see nothing.
#include "attention/cuda/sm90/backward/arguments.h"
#include "attention/cuda/sm90/backward/row_blocks.cuh"
#include "attention/cuda/sm90/backward/rows.h"
#include "attention/cuda/sm90/ptx/grid.cuh"
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

/// x + the dot of eight elements each.
template <typename T>
__device__ __forceinline__ float add_dot(float x, const uint4& a, const uint4& b) {
  const std::uint32_t first[] = {a.x, a.y, a.z, a.w}, second[] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 o = unpack<T>(first[i]), g = unpack<T>(second[i]);
    x = __fmaf_rn(o.x, g.x, x);
    x = __fmaf_rn(o.y, g.y, x);
  }
  return x;
}

/// The sum over the CTA, in a fixed order; for thread 0.
__device__ __forceinline__ float sum_of_threads(float x, int thread) {
  __shared__ float parts[kThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = __fadd_rn(x, __shfl_down_sync(0xffffffffu, x, step));
  if (thread % 32 == 0) parts[thread / 32] = x;
  __syncthreads();
  if (thread == 0) {
    for (int warp = 1; warp < kThreads / 32; ++warp) x = __fadd_rn(x, parts[warp]);
  }
  return x;
}

/// Sums of one block of query rows of one head: D = rowsum(dO * O) - dlse, the log-sum-exp in units of log2, and the share of
/// the rows in the gradient of the sink. Also sets back the turns of the block's sums of dq. Eight lanes take a row to read it, and
/// eight rows at once; then every thread takes a row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    row_sums_kernel(const __grid_constant__ BackwardArguments arguments) {
  constexpr int kLanes = 8, kGroups = kThreads / kLanes, kRowsOfGroup = kSumRows / kGroups;
  static_assert(kSumRows == kThreads, "a row for every thread");
  __shared__ float row_sums[kSumRows];
  // Heads side by side: theirs are the neighbouring bytes of a token.
  const int block = static_cast<int>(blockIdx.x) / arguments.h_q;
  const int head = static_cast<int>(blockIdx.x) % arguments.h_q;
  const int thread = static_cast<int>(threadIdx.x);
  const bool ragged = arguments.q_begin != nullptr;
  grid_launch_dependents();
  if (arguments.dq_turns != nullptr && thread < arguments.dq_units)
    arguments.dq_turns[(head * arguments.row_blocks + block) * arguments.dq_units + thread] = 0;
  if (block == 0 && head == 0 && thread == 0) *arguments.ticket = 0;

  const int sequence = sequence_of_block(arguments, block);
  const SequenceRange range = sequence_range(arguments, sequence);
  const int first = (block - first_block(arguments, sequence)) * kSumRows;
  const auto is_row = [&](int row) {  // (blocks before the first sequence have none)
    return first + row >= 0 && first + row < range.q_tokens;
  };
  {
    const int group = thread / kLanes, lane = thread % kLanes;
    const auto* out = static_cast<const T*>(arguments.forward_out.data) +
                      row_index(arguments.forward_out, ragged, sequence, range.q_row, head, first + group);
    const auto* dout = static_cast<const T*>(arguments.dout.data) +
                       row_index(arguments.dout, ragged, sequence, range.q_row, head, first + group);
    float sums[kRowsOfGroup] = {};
#pragma unroll 1
    for (int column = lane * 8; column < arguments.d_v; column += kLanes * 8) {
      uint4 a[kRowsOfGroup], b[kRowsOfGroup];
#pragma unroll
      for (int i = 0; i < kRowsOfGroup; ++i) {
        a[i] = b[i] = make_uint4(0, 0, 0, 0);
        if (!is_row(i * kGroups + group)) continue;
        a[i] =
            __ldcs(reinterpret_cast<const uint4*>(out + i * kGroups * arguments.forward_out.token + column));
        b[i] = *reinterpret_cast<const uint4*>(dout + i * kGroups * arguments.dout.token + column);
      }
#pragma unroll
      for (int i = 0; i < kRowsOfGroup; ++i) sums[i] = add_dot<T>(sums[i], a[i], b[i]);
    }
#pragma unroll
    for (int i = 0; i < kRowsOfGroup; ++i) {
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2)
        sums[i] = __fadd_rn(sums[i], __shfl_xor_sync(0xffffffffu, sums[i], step));
      if (lane == 0) row_sums[i * kGroups + group] = sums[i];
    }
  }
  __syncthreads();

  const int token = first + thread;
  const bool exists = is_row(thread);
  const float sink = sink_of(arguments, head);
  const float inf = __int_as_float(0x7f800000);
  float lse = -inf, dlse = 0, dsink = 0;
  if (exists) {
    const std::int64_t at = lse_index(arguments, sequence, range.q_row, head, token);
    lse = __ldg(arguments.forward_lse + at);
    if (arguments.dlse != nullptr) dlse = __ldg(arguments.dlse + at);
  }
  // A row without visible keys has no weights: its O is 0 times nothing.
  const RowKeys keys = row_keys(arguments, range.kv_tokens - range.q_tokens + token, range.kv_tokens);
  const bool sees = exists && (keys.sink_end > 0 || keys.begin < keys.end);
  if (exists && !sees && arguments.dq_turns != nullptr) {  // no block of keys has a share of its dq
    auto* dq = static_cast<T*>(arguments.dq.data) +
               row_index(arguments.dq, ragged, sequence, range.q_row, head, token);
    for (int column = 0; column < arguments.d_qk; column += 8)
      *reinterpret_cast<uint4*>(dq + column) = make_uint4(0, 0, 0, 0);
  }
  const float big_d = __fadd_rn(sees ? row_sums[thread] : 0.0f, -dlse);
  const std::int64_t at = sum_index(arguments, head, block) + thread;
  arguments.lse2[at] = sees ? __fmul_rn(lse, kLog2E) : inf;
  arguments.big_d[at] = sees ? big_d : 0.0f;
  if (arguments.dsink_logit == nullptr) return;
  if (exists && sink != -inf) {
    // lse is at least the sink; where both are +inf the sink has all the weight.
    const float weight = sink == inf ? 1.0f : exp2_fast(__fmul_rn(__fadd_rn(sink, -lse), kLog2E));
    dsink = __fmul_rn(-weight, big_d);
  }
  dsink = sum_of_threads(dsink, thread);
  if (thread == 0) arguments.dsink_parts[std::int64_t{block} * arguments.h_q + head] = dsink;
}

/// The gradient of one sink: the shares of all blocks of rows, added in a fixed order.
__global__ void __launch_bounds__(kThreads)
    dsink_kernel(const __grid_constant__ BackwardArguments arguments) {
  const int head = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  float sum = 0;
  for (std::int64_t block = thread; block < arguments.row_blocks; block += kThreads)
    sum = __fadd_rn(sum, arguments.dsink_parts[block * arguments.h_q + head]);
  sum = sum_of_threads(sum, thread);
  if (thread == 0) arguments.dsink_logit[head] = sum;
  grid_wait();  // what runs after this grid may use all gradients
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
