/* Attention for every language that can call C. The words, shapes and maths are those of basin/attention/spec.h and
 * docs/sinks.md: b sequences, h_q query heads over h_kv key heads, head sizes d_qk and d_v.
 *
 *   basin_attention_context* context = NULL;
 *   basin_attention_forward_args args;
 *   if (basin_attention_context_create(0, &context) != BASIN_OK) fail(basin_error_message());
 *   basin_attention_forward_init(&args, sizeof args);
 *   args.spec.scale = ...;  args.q = ...;
 *   if (basin_attention_forward(context, &args, NULL) != BASIN_OK) fail(basin_error_message());
 *
 * No function throws, prints or exits. What is not supported is refused by name, before anything is written.
 * Structs start with their size, set by the init function: a field that is added later stands at the end, and 0 there
 * means what this version does. A library that is older than its caller refuses fields that it does not know unless they
 * are 0. */
#ifndef BASIN_ATTENTION_C_API_H
#define BASIN_ATTENTION_C_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#define BASIN_NOEXCEPT noexcept
#else
#define BASIN_NOEXCEPT
#endif

/* Changes when a program that was compiled before would no longer work. It is the .so number, too. */
#define BASIN_ATTENTION_ABI 1

/* What a call came to. */
typedef int32_t basin_status;
enum {
  BASIN_OK = 0,
  BASIN_INVALID_ARGUMENT = 1, /* the arguments contradict themselves or each other */
  BASIN_UNSUPPORTED = 2,      /* legal, but this library or the chosen backend does not have it */
  BASIN_OUT_OF_MEMORY = 3,
  BASIN_INTERNAL = 4 /* a bug in Basin */
};

/* Types of elements. 0 is none, so that a forgotten type is refused. */
enum { BASIN_F64 = 1, BASIN_F32 = 2, BASIN_F16 = 3, BASIN_BF16 = 4 };

/* Where the memory of tensors and of sink_logit, lse, lse_with_sink and their gradients lies. */
enum {
  BASIN_DEVICE_CPU = 0,
  BASIN_DEVICE_CUDA = 1 /* of basin/attention/cuda_c_api.h; refused by the functions below */
};

enum {
  BASIN_BACKEND_AUTOMATIC = 0, /* cpu where it can, else reference */
  BASIN_BACKEND_REFERENCE = 1, /* double precision, plain loops, every feature */
  BASIN_BACKEND_CPU = 2        /* SIMD, chosen by cpuid or BASIN_CPU */
};

/* Strides count elements; the last dimension must be dense. data == NULL: an absent tensor. */
typedef struct basin_const_tensor {
  const void* data;
  int32_t dtype;
  int32_t rank;      /* 0 to 4 */
  int64_t shape[4];  /* the first `rank` count */
  int64_t stride[4]; /* the first `rank` count */
} basin_const_tensor;

typedef struct basin_tensor {
  void* data;
  int32_t dtype;
  int32_t rank;
  int64_t shape[4];
  int64_t stride[4];
} basin_tensor;

/* One sequence of the batch. Lies in host memory, and so do its page numbers. */
typedef struct basin_attention_sequence {
  int64_t q_begin;   /* first row in q and out */
  int64_t q_tokens;  /* may be 0 */
  int64_t kv_begin;  /* first row in k and v; unused when paged */
  int64_t kv_tokens; /* may be 0, and smaller than q_tokens */
  const int32_t*
      pages; /* [ceil(kv_tokens / page_tokens)], negative = holds no visible key; NULL = contiguous */
} basin_attention_sequence;

/* What is asked for, apart from the tensors: the same in both directions. */
typedef struct basin_attention_spec {
  int32_t device;       /* BASIN_DEVICE_CPU */
  int32_t device_index; /* 0 on the CPU */
  void* stream;         /* a cudaStream_t; NULL on the CPU */
  int32_t backend;      /* BASIN_BACKEND_AUTOMATIC */
  int32_t causal;       /* 0 or 1 */
  int64_t window;       /* visible recent keys including self: p - j < window; 0 = unlimited */
  int64_t window_right; /* j - p <= window_right; -1 = unlimited */
  int64_t sink_tokens;  /* the first sink_tokens keys stay visible */
  double scale;         /* multiplies q.k; usually 1 / sqrt(d_qk) */
  double softcap;       /* x = softcap * tanh(scale * q.k / softcap); 0 = off */
} basin_attention_spec;

typedef struct basin_attention_forward_args {
  size_t struct_bytes; /* set by basin_attention_forward_init */
  basin_attention_spec spec;
  const basin_attention_sequence* sequences; /* [sequence_count] */
  int64_t sequence_count;
  basin_const_tensor q;      /* [total_q, h_q, d_qk] */
  basin_const_tensor q_sink; /* as q, or absent: the query for keys j < sink_tokens (in-cache positions) */
  basin_const_tensor k;      /* [total_kv, h_kv, d_qk], or paged [pages, page_tokens, h_kv, d_qk] */
  basin_const_tensor v;      /* [total_kv, h_kv, d_v],  or paged [pages, page_tokens, h_kv, d_v] */
  const float* sink_logit;   /* [h_q] natural units; NULL = no sink */
  basin_tensor out;          /* [total_q, h_q, d_v]; rows outside every sequence are not touched */
  float* lse;                /* [h_q, total_q] natural log, without the sink; may be NULL */
  float* lse_with_sink;      /* [h_q, total_q] logaddexp(lse, sink_logit); may be NULL */
} basin_attention_forward_args;

/* Gradients of sum(out * dout) + sum(lse_with_sink * dlse_with_sink). */
typedef struct basin_attention_backward_args {
  size_t struct_bytes; /* set by basin_attention_backward_init */
  basin_attention_spec spec;
  const basin_attention_sequence* sequences; /* [sequence_count] */
  int64_t sequence_count;
  basin_const_tensor q, k, v;  /* as in forward; a q_sink has no backward */
  const float* sink_logit;     /* [h_q]; NULL = no sink */
  basin_const_tensor dout;     /* [total_q, h_q, d_v] */
  const float* dlse_with_sink; /* [h_q, total_q]; may be NULL */
  basin_tensor dq;             /* as q */
  basin_tensor dk;             /* as k */
  basin_tensor dv;             /* as v */
  float* dsink_logit;          /* [h_q]; NULL exactly when sink_logit is */
} basin_attention_backward_args;

/* What actually ran: static strings. */
typedef struct basin_attention_ran {
  const char* backend; /* "reference" or "cpu" */
  const char* target;  /* "double", or "amx", "avx512_bf16", "avx2", "generic" */
} basin_attention_ran;

/* "0.1.0", and BASIN_ATTENTION_ABI as the library was compiled with. */
const char* basin_version(void) BASIN_NOEXCEPT;
int32_t basin_attention_abi(void) BASIN_NOEXCEPT;

/* What the last call on this thread that did not return BASIN_OK had to say, and what to do about it (may be empty).
 * Never NULL; the text stays until the thread's next such call. */
const char* basin_error_message(void) BASIN_NOEXCEPT;
const char* basin_error_hint(void) BASIN_NOEXCEPT;

/* The threads that calls run on. Calls on one context wait for each other. */
typedef struct basin_attention_context basin_attention_context;

/* `threads` counts the calling one; 0 = one per available core. *context is NULL after a failure. */
basin_status basin_attention_context_create(int32_t threads,
                                            basin_attention_context** context) BASIN_NOEXCEPT;
void basin_attention_context_destroy(basin_attention_context* context) BASIN_NOEXCEPT; /* NULL: nothing */

/* No tensor, causal, no window, no sink; scale must be set. struct_bytes is the caller's sizeof. Refuses a size of which
 * no version of the struct is. */
basin_status basin_attention_forward_init(basin_attention_forward_args* args,
                                          size_t struct_bytes) BASIN_NOEXCEPT;
basin_status basin_attention_backward_init(basin_attention_backward_args* args,
                                           size_t struct_bytes) BASIN_NOEXCEPT;

/* BASIN_OK when the call would run, else what it would return; reads no tensor and writes nothing. */
basin_status basin_attention_forward_supported(const basin_attention_forward_args* args) BASIN_NOEXCEPT;
basin_status basin_attention_backward_supported(const basin_attention_backward_args* args) BASIN_NOEXCEPT;

/* `ran` may be NULL. */
basin_status basin_attention_forward(basin_attention_context* context,
                                     const basin_attention_forward_args* args,
                                     basin_attention_ran* ran) BASIN_NOEXCEPT;
basin_status basin_attention_backward(basin_attention_context* context,
                                      const basin_attention_backward_args* args,
                                      basin_attention_ran* ran) BASIN_NOEXCEPT;

#undef BASIN_NOEXCEPT

#ifdef __cplusplus
}
#endif

#endif /* BASIN_ATTENTION_C_API_H */
