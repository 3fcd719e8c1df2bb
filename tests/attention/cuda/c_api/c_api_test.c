/* Sizes, refusals and bad arguments through C: all of it is decided on the host. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "basin/attention/cuda_c_api.h"

static int failures = 0;

#define CHECK(condition)                                                 \
  do {                                                                   \
    if (!(condition)) {                                                  \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, \
              basin_attention_cuda_error_message());                     \
      ++failures;                                                        \
    }                                                                    \
  } while (0)

enum { kHeads = 8, kKeyHeads = 2, kHead = 64, kTokens = 3, kPages = 20, kPage = 16 };

/* An address that nobody reads. */
static void* somewhere(void) {
  return (void*)(uintptr_t)0x10000;
}

static basin_const_tensor input(int64_t a, int64_t b, int64_t c) {
  const basin_const_tensor tensor = {somewhere(), BASIN_BF16, 3, {a, b, c, 0}, {b * c, c, 1, 0}};
  return tensor;
}

static basin_const_tensor pages(void) {
  const basin_const_tensor tensor = {somewhere(),
                                     BASIN_BF16,
                                     4,
                                     {kPages, kPage, kKeyHeads, kHead},
                                     {kPage * kKeyHeads * kHead, kKeyHeads * kHead, kHead, 1}};
  return tensor;
}

static basin_tensor writable(basin_const_tensor from) {
  basin_tensor tensor = {somewhere(), from.dtype, from.rank, {0}, {0}};
  memcpy(tensor.shape, from.shape, sizeof tensor.shape);
  memcpy(tensor.stride, from.stride, sizeof tensor.stride);
  return tensor;
}

static basin_attention_cuda_forward_args forward_args;
static basin_attention_cuda_backward_args backward_args;
static basin_attention_cuda_append_args append_args;

static void make_forward(void) {
  CHECK(basin_attention_cuda_forward_init(&forward_args, sizeof forward_args) == BASIN_OK);
  forward_args.spec.scale = 0.125;
  forward_args.batch = 2;
  forward_args.max_q_tokens = 1;
  forward_args.max_kv_tokens = 100;
  forward_args.q = input(kTokens, kHeads, kHead);
  forward_args.k = forward_args.v = pages();
  forward_args.q_begin = forward_args.kv_tokens = forward_args.page_table = somewhere();
  forward_args.page_table_stride = 10;
  forward_args.out = writable(forward_args.q);
}

static void make_backward(void) {
  CHECK(basin_attention_cuda_backward_init(&backward_args, sizeof backward_args) == BASIN_OK);
  backward_args.spec.scale = 0.125;
  backward_args.batch = 2;
  backward_args.max_q_tokens = backward_args.max_kv_tokens = kTokens;
  backward_args.q = backward_args.out = backward_args.dout = input(kTokens, kHeads, kHead);
  backward_args.k = backward_args.v = input(kTokens, kKeyHeads, kHead);
  backward_args.q_begin = backward_args.kv_begin = somewhere();
  backward_args.lse_with_sink = somewhere();
  backward_args.dq = writable(backward_args.q);
  backward_args.dk = backward_args.dv = writable(backward_args.k);
}

static void make_append(void) {
  CHECK(basin_attention_cuda_append_init(&append_args, sizeof append_args) == BASIN_OK);
  append_args.batch = 2;
  append_args.new_k = append_args.new_v = input(kTokens, kKeyHeads, kHead);
  append_args.k = append_args.v = writable(pages());
  append_args.new_begin = append_args.kv_tokens = append_args.page_table = somewhere();
  append_args.page_table_stride = 10;
}

static int says(basin_status got, basin_status status, const char* named) {
  if (got == status && strstr(basin_attention_cuda_error_message(), named) != NULL) return 1;
  fprintf(stderr, "status %d for \"%s\"\n", (int)got, named);
  return 0;
}

/* The three functions agree, and the size of what is refused is 0. */
static void expect_refused(basin_status status, const char* named) {
  size_t bytes = 7;
  CHECK(says(basin_attention_cuda_forward_supported(&forward_args), status, named));
  CHECK(says(basin_attention_cuda_workspace_bytes(&forward_args, &bytes), status, named));
  CHECK(bytes == 0);
  CHECK(says(basin_attention_cuda_forward(&forward_args, somewhere(), 1 << 30), status, named));
}

static void expect_backward_refused(basin_status status, const char* named) {
  size_t bytes = 7;
  CHECK(says(basin_attention_cuda_backward_supported(&backward_args), status, named));
  CHECK(says(basin_attention_cuda_backward_workspace_bytes(&backward_args, &bytes), status, named));
  CHECK(bytes == 0);
  CHECK(says(basin_attention_cuda_backward(&backward_args, somewhere(), 1 << 30), status, named));
}

static void expect_append_refused(basin_status status, const char* named) {
  CHECK(says(basin_attention_cuda_append_supported(&append_args), status, named));
  CHECK(says(basin_attention_cuda_append(&append_args), status, named));
}

#define REFUSED(change, status, named) \
  do {                                 \
    make_forward();                    \
    change;                            \
    expect_refused(status, named);     \
  } while (0)

#define BACKWARD_REFUSED(change, status, named) \
  do {                                          \
    make_backward();                            \
    change;                                     \
    expect_backward_refused(status, named);     \
  } while (0)

#define APPEND_REFUSED(change, status, named) \
  do {                                        \
    make_append();                            \
    change;                                   \
    expect_append_refused(status, named);     \
  } while (0)

static void test_what_exists(void) {
  size_t decode = 0, longer = 0, prefill = 0;
  CHECK(basin_attention_cuda_abi() == BASIN_ATTENTION_CUDA_ABI);
  make_forward();
  CHECK(forward_args.spec.device == BASIN_DEVICE_CUDA && forward_args.spec.causal == 1);
  CHECK(forward_args.spec.window_right == -1 && forward_args.q_sink.data == NULL);
  CHECK(basin_attention_cuda_forward_supported(&forward_args) == BASIN_OK);
  CHECK(basin_attention_cuda_workspace_bytes(&forward_args, &decode) == BASIN_OK);
  forward_args.max_kv_tokens = 10000;
  forward_args.page_table_stride = 1000;
  CHECK(basin_attention_cuda_workspace_bytes(&forward_args, &longer) == BASIN_OK);
  CHECK(decode > 0 && longer > decode);
  forward_args.max_q_tokens = 1000;
  CHECK(basin_attention_cuda_workspace_bytes(&forward_args, &prefill) == BASIN_OK);
  CHECK(prefill > 0 && prefill < decode);
  make_backward();
  CHECK(basin_attention_cuda_backward_supported(&backward_args) == BASIN_OK);
  CHECK(basin_attention_cuda_backward_workspace_bytes(&backward_args, &decode) == BASIN_OK);
  backward_args.q.shape[0] = backward_args.out.shape[0] = backward_args.dout.shape[0] = 1000;
  backward_args.dq.shape[0] = 1000;
  CHECK(basin_attention_cuda_backward_workspace_bytes(&backward_args, &longer) == BASIN_OK);
  CHECK(decode > 0 && longer > decode);
  make_append();
  CHECK(basin_attention_cuda_append_supported(&append_args) == BASIN_OK);
}

static void test_spec(void) {
  REFUSED(forward_args.spec.device = BASIN_DEVICE_CPU, BASIN_INVALID_ARGUMENT, "device is 0");
  REFUSED(forward_args.spec.device_index = -1, BASIN_INVALID_ARGUMENT, "device_index is -1");
  REFUSED(forward_args.spec.backend = BASIN_BACKEND_CPU, BASIN_UNSUPPORTED, "backend cpu");
  CHECK(basin_attention_cuda_error_hint()[0] != '\0');
  REFUSED(forward_args.spec.backend = BASIN_BACKEND_REFERENCE, BASIN_UNSUPPORTED, "backend reference");
  REFUSED(forward_args.spec.backend = 3, BASIN_INVALID_ARGUMENT, "backend is 3");
  REFUSED(forward_args.spec.causal = 2, BASIN_INVALID_ARGUMENT, "causal is 2");
  REFUSED(forward_args.spec.window = -1, BASIN_INVALID_ARGUMENT, "window is -1");
  REFUSED(forward_args.spec.window_right = -2, BASIN_INVALID_ARGUMENT, "window_right is -2");
  REFUSED(forward_args.spec.sink_tokens = -1, BASIN_INVALID_ARGUMENT, "sink_tokens is -1");
  REFUSED(forward_args.spec.scale = (double)NAN, BASIN_INVALID_ARGUMENT, "scale");
  REFUSED(forward_args.spec.scale = 0.0, BASIN_UNSUPPORTED, "scale is 0");
  REFUSED(forward_args.spec.softcap = -1.0, BASIN_INVALID_ARGUMENT, "softcap");
}

static void test_tensors(void) {
  REFUSED(forward_args.batch = 0, BASIN_INVALID_ARGUMENT, "batch is 0");
  REFUSED(forward_args.max_q_tokens = -1, BASIN_INVALID_ARGUMENT, "max_q_tokens is -1");
  REFUSED(forward_args.page_table_stride = 1, BASIN_INVALID_ARGUMENT, "page_table_stride is 1");
  REFUSED(forward_args.kv_tokens = NULL, BASIN_INVALID_ARGUMENT, "kv_tokens is missing");
  REFUSED(forward_args.kv_begin = somewhere(), BASIN_INVALID_ARGUMENT, "page_table and kv_begin");
  REFUSED(forward_args.q_begin = NULL, BASIN_INVALID_ARGUMENT, "q has 3 dimensions");
  REFUSED(forward_args.q.rank = 5, BASIN_INVALID_ARGUMENT, "q has 5 dimensions");
  REFUSED(forward_args.k.rank = -1, BASIN_INVALID_ARGUMENT, "k has -1 dimensions");
  REFUSED(forward_args.v.dtype = 0, BASIN_INVALID_ARGUMENT, "v has dtype 0");
  REFUSED(forward_args.v.data = NULL, BASIN_INVALID_ARGUMENT, "v of shape");
  REFUSED(forward_args.out.stride[0] = 0, BASIN_INVALID_ARGUMENT, "out has stride 0");
  REFUSED(forward_args.q_sink.rank = 3, BASIN_INVALID_ARGUMENT, "q_sink has a shape, but no data");
  REFUSED(forward_args.q_sink = input(kTokens, kHeads, 32), BASIN_INVALID_ARGUMENT, "q_sink");
  REFUSED(forward_args.q.dtype = BASIN_F32, BASIN_UNSUPPORTED, "q is f32");
  REFUSED(forward_args.k.data = (char*)somewhere() + 8, BASIN_UNSUPPORTED, "k starts at address");
  REFUSED(forward_args.k.shape[1] = forward_args.v.shape[1] = 12, BASIN_UNSUPPORTED, "page_tokens is 12");
}

static void test_backward(void) {
  BACKWARD_REFUSED(backward_args.spec.device = BASIN_DEVICE_CPU, BASIN_INVALID_ARGUMENT, "device is 0");
  BACKWARD_REFUSED(backward_args.spec.backend = BASIN_BACKEND_CPU, BASIN_UNSUPPORTED, "backend cpu");
  BACKWARD_REFUSED(backward_args.spec.scale = 0.0, BASIN_UNSUPPORTED, "scale is 0");
  BACKWARD_REFUSED(backward_args.batch = 0, BASIN_INVALID_ARGUMENT, "batch is 0");
  BACKWARD_REFUSED(backward_args.kv_begin = NULL, BASIN_INVALID_ARGUMENT, "k has 3 dimensions");
  BACKWARD_REFUSED(backward_args.q.dtype = BASIN_F32, BASIN_UNSUPPORTED, "q is f32");
  BACKWARD_REFUSED(backward_args.out.data = NULL, BASIN_INVALID_ARGUMENT, "out of shape");
  BACKWARD_REFUSED(backward_args.dout.rank = 5, BASIN_INVALID_ARGUMENT, "dout has 5 dimensions");
  BACKWARD_REFUSED(backward_args.dout.shape[2] = 32, BASIN_INVALID_ARGUMENT, "dout");
  BACKWARD_REFUSED(backward_args.dq.shape[1] = 4, BASIN_INVALID_ARGUMENT, "dq");
  BACKWARD_REFUSED(backward_args.dk.dtype = BASIN_F16, BASIN_UNSUPPORTED, "dk is f16");
  BACKWARD_REFUSED(backward_args.dv.data = NULL, BASIN_INVALID_ARGUMENT, "dv of shape");
  BACKWARD_REFUSED(backward_args.lse_with_sink = NULL, BASIN_INVALID_ARGUMENT, "lse_with_sink");
  BACKWARD_REFUSED(backward_args.sink_logit = somewhere(), BASIN_INVALID_ARGUMENT, "dsink_logit");
  BACKWARD_REFUSED(backward_args.dsink_logit = somewhere(), BASIN_INVALID_ARGUMENT, "dsink_logit");
}

static void test_append(void) {
  APPEND_REFUSED(append_args.device_index = -1, BASIN_INVALID_ARGUMENT, "device_index is -1");
  APPEND_REFUSED(append_args.reserved = 1, BASIN_INVALID_ARGUMENT, "reserved is 1");
  APPEND_REFUSED(append_args.batch = 0, BASIN_INVALID_ARGUMENT, "batch is 0");
  APPEND_REFUSED(append_args.new_begin = NULL, BASIN_INVALID_ARGUMENT, "new_k has 3 dimensions");
  APPEND_REFUSED(append_args.new_v.dtype = 9, BASIN_INVALID_ARGUMENT, "new_v has dtype 9");
  APPEND_REFUSED(append_args.k.rank = 5, BASIN_INVALID_ARGUMENT, "k has 5 dimensions");
  APPEND_REFUSED(append_args.v.data = NULL, BASIN_INVALID_ARGUMENT, "v of shape");
  APPEND_REFUSED(append_args.kv_tokens = NULL, BASIN_INVALID_ARGUMENT, "kv_tokens is missing");
  APPEND_REFUSED(append_args.page_table = NULL, BASIN_INVALID_ARGUMENT, "page_table is missing");
  APPEND_REFUSED(append_args.page_table_stride = -1, BASIN_INVALID_ARGUMENT, "page_table_stride is -1");
  APPEND_REFUSED(append_args.new_k.dtype = BASIN_F16, BASIN_UNSUPPORTED, "new_k is f16");
}

static void test_structs(void) {
  struct {
    basin_attention_cuda_forward_args args;
    int64_t added; /* as a newer header would have it */
  } newer;
  size_t bytes = 0;
  REFUSED(forward_args.struct_bytes = 0, BASIN_INVALID_ARGUMENT, "struct_bytes is 0");
  REFUSED(forward_args.struct_bytes -= 1, BASIN_INVALID_ARGUMENT, "struct_bytes");
  REFUSED(forward_args.struct_bytes = (size_t)-1, BASIN_INVALID_ARGUMENT, "struct_bytes");
  BACKWARD_REFUSED(backward_args.struct_bytes -= 1, BASIN_INVALID_ARGUMENT, "struct_bytes");
  APPEND_REFUSED(append_args.struct_bytes -= 1, BASIN_INVALID_ARGUMENT, "struct_bytes");

  CHECK(basin_attention_cuda_forward_init(&newer.args, sizeof newer) == BASIN_OK);
  CHECK(newer.added == 0);
  make_forward();
  newer.args = forward_args;
  newer.args.struct_bytes = sizeof newer;
  CHECK(basin_attention_cuda_forward_supported(&newer.args) == BASIN_OK);
  newer.added = 1;
  CHECK(says(basin_attention_cuda_forward_supported(&newer.args), BASIN_UNSUPPORTED, "newer"));

  CHECK(basin_attention_cuda_forward_init(&forward_args, 8) == BASIN_INVALID_ARGUMENT);
  CHECK(basin_attention_cuda_backward_init(&backward_args, 8) == BASIN_INVALID_ARGUMENT);
  CHECK(basin_attention_cuda_append_init(&append_args, 8) == BASIN_INVALID_ARGUMENT);
  CHECK(basin_attention_cuda_forward_init(NULL, sizeof forward_args) == BASIN_INVALID_ARGUMENT);
  CHECK(basin_attention_cuda_append_init(NULL, sizeof append_args) == BASIN_INVALID_ARGUMENT);
  CHECK(says(basin_attention_cuda_forward_supported(NULL), BASIN_INVALID_ARGUMENT, "args is null"));
  CHECK(says(basin_attention_cuda_append_supported(NULL), BASIN_INVALID_ARGUMENT, "args is null"));
  CHECK(says(basin_attention_cuda_forward(NULL, somewhere(), 1), BASIN_INVALID_ARGUMENT, "args is null"));
  CHECK(says(basin_attention_cuda_backward(NULL, somewhere(), 1), BASIN_INVALID_ARGUMENT, "args is null"));
  CHECK(says(basin_attention_cuda_append(NULL), BASIN_INVALID_ARGUMENT, "args is null"));
  CHECK(says(basin_attention_cuda_workspace_bytes(NULL, &bytes), BASIN_INVALID_ARGUMENT, "args is null"));
  make_forward();
  CHECK(says(basin_attention_cuda_workspace_bytes(&forward_args, NULL), BASIN_INVALID_ARGUMENT,
             "bytes is null"));
}

int main(void) {
  CHECK(basin_attention_cuda_error_message()[0] == '\0' && basin_attention_cuda_error_hint()[0] == '\0');
  test_what_exists();
  test_spec();
  test_tensors();
  test_backward();
  test_append();
  test_structs();
  if (failures > 0) fprintf(stderr, "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
