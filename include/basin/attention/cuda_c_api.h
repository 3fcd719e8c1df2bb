/* Attention on NVIDIA Hopper for every language that can call C: basin/attention/cuda.h in the words and the rules of
 * basin/attention/c_api.h, which has the structs of tensors and specs. Its library, basin::attention_cuda_c, exists where Basin
 * was built with CUDA, and stands beside basin::attention_c; neither needs the other.
 *
 *   basin_attention_cuda_forward_args args;
 *   size_t bytes;
 *   basin_attention_cuda_forward_init(&args, sizeof args);
 *   args.spec.scale = ...;  args.spec.stream = stream;  args.q = ...;
 *   if (basin_attention_cuda_workspace_bytes(&args, &bytes) != BASIN_OK) fail(basin_attention_cuda_error_message());
 *   cudaMalloc(&workspace, bytes);  cudaMemset(workspace, 0, bytes);     once, not for each call
 *   if (basin_attention_cuda_forward(&args, workspace, bytes) != BASIN_OK) fail(...);
 *
 * Tensors, lengths and page tables lie in device memory; the host gives upper bounds. Calls only launch: nothing is
 * allocated, waited for or read back, so they can be captured in a CUDA graph and replayed with changed lengths in the same
 * buffers. Launch once before a capture: CUDA loads kernels when they are first launched on a device. */
#ifndef BASIN_ATTENTION_CUDA_C_API_H
#define BASIN_ATTENTION_CUDA_C_API_H

#include "basin/attention/c_api.h"

#ifdef __cplusplus
extern "C" {
#define BASIN_NOEXCEPT noexcept
#else
#define BASIN_NOEXCEPT
#endif

/* Changes when a program that was compiled before would no longer work. It is the .so number, too. */
#define BASIN_ATTENTION_CUDA_ABI 1

typedef struct basin_attention_cuda_forward_args {
  size_t struct_bytes; /* set by basin_attention_cuda_forward_init */
  /* device: BASIN_DEVICE_CUDA; device_index: as cudaSetDevice counts, the calling thread's own device is left as it was;
   * stream: a cudaStream_t of that device, NULL = its default stream; backend: BASIN_BACKEND_AUTOMATIC */
  basin_attention_spec spec;
  int64_t batch;             /* b, at least 1 */
  int64_t max_q_tokens;      /* upper bound of any sequence's queries; s_q when dense */
  int64_t max_kv_tokens;     /* upper bound of any sequence's keys; s_kv when dense */
  basin_const_tensor q;      /* [b, s_q, h_q, d_qk], or [total_q, h_q, d_qk] with q_begin */
  basin_const_tensor q_sink; /* as q, or absent: the query for keys j < sink_tokens (in-cache positions) */
  basin_const_tensor k;      /* [b, s_kv, h_kv, d_qk], [total_kv, h_kv, d_qk] with kv_begin, or
                                   [pages, page_tokens, h_kv, d_qk] with page_table */
  basin_const_tensor v;      /* as k, with d_v */
  const int32_t* q_begin;    /* [b + 1] rows of sequence i are q_begin[i] .. q_begin[i + 1]; NULL = dense */
  const int32_t* kv_begin;   /* [b + 1]; NULL = dense or paged */
  const int32_t* kv_tokens;  /* [b] valid keys; may be NULL unless paged */
  const int32_t*
      page_table; /* [b, page_table_stride]; a negative entry holds no visible key; NULL = not paged */
  int64_t page_table_stride; /* entries from one sequence's pages to the next's */
  const float* sink_logit;   /* [h_q] natural units; NULL = no sink */
  basin_tensor out;          /* as q, with d_v */
  float* lse;                /* [h_q, total_q], or [b, h_q, s_q] when dense; without the sink; may be NULL */
  float* lse_with_sink;      /* the same; logaddexp(lse, sink_logit); may be NULL */
} basin_attention_cuda_forward_args;

/* Gradients of sum(out * dout) + sum(lse_with_sink * dlse_with_sink), of a forward without q_sink and without pages. */
typedef struct basin_attention_cuda_backward_args {
  size_t struct_bytes;       /* set by basin_attention_cuda_backward_init */
  basin_attention_spec spec; /* from here to sink_logit: as forward was given */
  int64_t batch;
  int64_t max_q_tokens;
  int64_t max_kv_tokens;
  basin_const_tensor q, k, v;
  const int32_t* q_begin;
  const int32_t* kv_begin;
  const int32_t* kv_tokens;
  const float* sink_logit;
  basin_const_tensor out;      /* as forward wrote it */
  const float* lse_with_sink;  /* likewise; without a sink this is lse */
  basin_const_tensor dout;     /* as out */
  const float* dlse_with_sink; /* as lse_with_sink; may be NULL */
  basin_tensor dq;             /* as q; rows outside every sequence are not touched */
  basin_tensor dk;             /* as k; nor are keys */
  basin_tensor dv;             /* as v */
  float* dsink_logit;          /* [h_q]; NULL exactly when sink_logit is */
} basin_attention_cuda_backward_args;

/* New keys and values on their way into a paged cache, ahead of a forward on the same stream. They are the last of each
 * sequence: positions kv_tokens[i] - new tokens to kv_tokens[i]. A token whose place is on no page is left out. */
typedef struct basin_attention_cuda_append_args {
  size_t struct_bytes;       /* set by basin_attention_cuda_append_init */
  void* stream;              /* as in forward's spec */
  int32_t device_index;      /* likewise */
  int32_t reserved;          /* 0 */
  int64_t batch;             /* b, at least 1 */
  basin_const_tensor new_k;  /* [b, s_new, h_kv, d_qk], or [total_new, h_kv, d_qk] with new_begin */
  basin_const_tensor new_v;  /* as new_k, with d_v */
  const int32_t* new_begin;  /* [b + 1]; NULL = dense */
  basin_tensor k;            /* [pages, page_tokens, h_kv, d_qk] */
  basin_tensor v;            /* as k, with d_v */
  const int32_t* kv_tokens;  /* [b], with the new ones */
  const int32_t* page_table; /* [b, page_table_stride] */
  int64_t page_table_stride;
} basin_attention_cuda_append_args;

/* BASIN_ATTENTION_CUDA_ABI as the library was compiled with. */
int32_t basin_attention_cuda_abi(void) BASIN_NOEXCEPT;

/* As basin_error_message and basin_error_hint, of the functions below. */
const char* basin_attention_cuda_error_message(void) BASIN_NOEXCEPT;
const char* basin_attention_cuda_error_hint(void) BASIN_NOEXCEPT;

/* No tensor, causal, no window, no sink, device 0, its default stream; scale must be set. struct_bytes is the caller's
 * sizeof. */
basin_status basin_attention_cuda_forward_init(basin_attention_cuda_forward_args* args,
                                               size_t struct_bytes) BASIN_NOEXCEPT;
basin_status basin_attention_cuda_backward_init(basin_attention_cuda_backward_args* args,
                                                size_t struct_bytes) BASIN_NOEXCEPT;
basin_status basin_attention_cuda_append_init(basin_attention_cuda_append_args* args,
                                              size_t struct_bytes) BASIN_NOEXCEPT;

/* BASIN_OK when the call would be launched on a Hopper GPU, else what it would return. Looks at no device. */
basin_status basin_attention_cuda_forward_supported(const basin_attention_cuda_forward_args* args)
    BASIN_NOEXCEPT;
basin_status basin_attention_cuda_backward_supported(const basin_attention_cuda_backward_args* args)
    BASIN_NOEXCEPT;
basin_status basin_attention_cuda_append_supported(const basin_attention_cuda_append_args* args)
    BASIN_NOEXCEPT;

/* Device memory that forward and backward need beside their tensors; depends on shapes and upper bounds only. Looks at no
 * device. *bytes is 0 after a failure. */
basin_status basin_attention_cuda_workspace_bytes(const basin_attention_cuda_forward_args* args,
                                                  size_t* bytes) BASIN_NOEXCEPT;
basin_status basin_attention_cuda_backward_workspace_bytes(const basin_attention_cuda_backward_args* args,
                                                           size_t* bytes) BASIN_NOEXCEPT;

/* `workspace` (aligned to 16 bytes) must be zero before forward's first use; every launch of forward leaves it ready for the
 * next, also of another problem. Backward's may hold anything, and is of no use to forward afterwards. Launches that may run
 * at the same time need a workspace each. */
basin_status basin_attention_cuda_forward(const basin_attention_cuda_forward_args* args, void* workspace,
                                          size_t workspace_bytes) BASIN_NOEXCEPT;
basin_status basin_attention_cuda_backward(const basin_attention_cuda_backward_args* args, void* workspace,
                                           size_t workspace_bytes) BASIN_NOEXCEPT;
basin_status basin_attention_cuda_append(const basin_attention_cuda_append_args* args) BASIN_NOEXCEPT;

#undef BASIN_NOEXCEPT

#ifdef __cplusplus
}
#endif

#endif /* BASIN_ATTENTION_CUDA_C_API_H */
