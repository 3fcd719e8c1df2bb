/* Whatever is wrong is refused by name, by the query and by the call alike, and nothing is written. */
#include <math.h>

#include "problem.h"

static basin_attention_context* context;
static Probe probe;

static void expect(basin_status status, const char* named) {
  probe.out[0] = 123.0f;
  CHECK(basin_attention_forward_supported(&probe.args) == status);
  CHECK(strstr(basin_error_message(), named) != NULL);
  CHECK(basin_attention_forward(context, &probe.args, NULL) == status);
  CHECK(strstr(basin_error_message(), named) != NULL);
  CHECK(probe.out[0] == 123.0f);
}

#define EXPECT(change, status, named) \
  do {                                \
    make_probe(&probe, 4, 20);        \
    change;                           \
    expect(status, named);            \
  } while (0)

static void test_fields(void) {
  float other[kMaxTokens * kHead] = {0.0f};
  const int32_t page = 9;
  EXPECT(probe.args.spec.device = BASIN_DEVICE_CUDA, BASIN_UNSUPPORTED, "cuda");
  EXPECT(probe.args.spec.device = -1, BASIN_INVALID_ARGUMENT, "device is -1");
  EXPECT(probe.args.spec.device_index = 1, BASIN_INVALID_ARGUMENT, "device_index");
  EXPECT(probe.args.spec.stream = other, BASIN_INVALID_ARGUMENT, "stream");
  EXPECT(probe.args.spec.backend = 3, BASIN_INVALID_ARGUMENT, "backend is 3");
  EXPECT(probe.args.spec.causal = 2, BASIN_INVALID_ARGUMENT, "causal is 2");
  EXPECT(probe.args.spec.window = -1, BASIN_INVALID_ARGUMENT, "window is -1");
  EXPECT(probe.args.spec.window_right = -2, BASIN_INVALID_ARGUMENT, "window_right is -2");
  EXPECT(probe.args.spec.sink_tokens = -1, BASIN_INVALID_ARGUMENT, "sink_tokens is -1");
  EXPECT(probe.args.spec.scale = (double)NAN, BASIN_INVALID_ARGUMENT, "scale");
  EXPECT(probe.args.spec.softcap = -1.0, BASIN_INVALID_ARGUMENT, "softcap");
  EXPECT(probe.args.sequences = NULL, BASIN_INVALID_ARGUMENT, "sequences is null");
  EXPECT(probe.args.sequence_count = -1, BASIN_INVALID_ARGUMENT, "sequence_count is -1");
  EXPECT(probe.sequence.kv_tokens = 21, BASIN_INVALID_ARGUMENT, "sequence 0");
  EXPECT(probe.sequence.q_begin = INT64_MAX, BASIN_INVALID_ARGUMENT, "sequence 0");
  EXPECT(probe.sequence.pages = &page, BASIN_INVALID_ARGUMENT, "page table");
  EXPECT(memset(&probe.args.q, 0, sizeof probe.args.q), BASIN_INVALID_ARGUMENT, "q has 0 dimensions");
  EXPECT(probe.args.q.rank = 5, BASIN_INVALID_ARGUMENT, "q has 5 dimensions");
  EXPECT(probe.args.k.rank = -1, BASIN_INVALID_ARGUMENT, "k has -1 dimensions");
  EXPECT(probe.args.k.rank = INT32_MAX, BASIN_INVALID_ARGUMENT, "k has 2147483647 dimensions");
  EXPECT(probe.args.v.dtype = 0, BASIN_INVALID_ARGUMENT, "v has dtype 0");
  EXPECT(probe.args.v.dtype = 99, BASIN_INVALID_ARGUMENT, "v has dtype 99");
  EXPECT(probe.args.v.data = NULL, BASIN_INVALID_ARGUMENT, "v of shape");
  EXPECT(probe.args.q.shape[2] = 15, BASIN_INVALID_ARGUMENT, "head sizes");
  EXPECT(probe.args.q.stride[0] = -16, BASIN_INVALID_ARGUMENT, "stride -16");
  EXPECT(probe.args.out.stride[0] = 0, BASIN_INVALID_ARGUMENT, "out has stride 0");
  EXPECT(probe.args.out.shape[0] = 3, BASIN_INVALID_ARGUMENT, "out is");
  EXPECT(probe.args.q_sink.rank = 3, BASIN_INVALID_ARGUMENT, "q_sink");
  EXPECT((probe.args.q_sink = input(other, 3)), BASIN_INVALID_ARGUMENT, "q_sink");
  EXPECT(probe.args.spec.backend = BASIN_BACKEND_CPU; probe.args.q.dtype = BASIN_F64;
         probe.args.q.data = other; probe.args.q.shape[0] = probe.sequence.q_tokens = 1;
         probe.args.out.shape[0] = 1, BASIN_UNSUPPORTED, "f64");
}

static void test_pages(void) {
  int32_t pages[] = {0, 5};
  make_probe(&probe, 4, 20);
  const basin_const_tensor paged = {probe.k, BASIN_F32, 4, {5, 4, 1, kHead}, {4 * kHead, kHead, kHead, 1}};
  probe.args.k = probe.args.v = paged;
  probe.sequence.kv_tokens = 8;
  expect(BASIN_INVALID_ARGUMENT, "no page table");
  probe.sequence.pages = pages;
  expect(BASIN_INVALID_ARGUMENT, "page table entry 1 is 5");
  pages[1] = -1;
  expect(BASIN_INVALID_ARGUMENT, "page table entry 1 is -1");
}

static void test_struct_versions(void) {
  struct {
    basin_attention_forward_args args;
    int64_t added; /* as a newer header would have it */
  } newer;
  make_probe(&probe, 4, 20);
  probe.args.struct_bytes = 0;
  expect(BASIN_INVALID_ARGUMENT, "struct_bytes is 0");
  probe.args.struct_bytes = sizeof probe.args - 1;
  expect(BASIN_INVALID_ARGUMENT, "struct_bytes");
  probe.args.struct_bytes = (size_t)-1;
  expect(BASIN_INVALID_ARGUMENT, "struct_bytes");

  CHECK(basin_attention_forward_init(&newer.args, sizeof newer) == BASIN_OK);
  CHECK(newer.added == 0);
  make_probe(&probe, 4, 20);
  newer.args = probe.args;
  newer.args.struct_bytes = sizeof newer;
  CHECK(basin_attention_forward(context, &newer.args, NULL) == BASIN_OK);
  CHECK(counts(&probe, 3, 20));
  newer.added = 1;
  CHECK(basin_attention_forward(context, &newer.args, NULL) == BASIN_UNSUPPORTED);
  CHECK(strstr(basin_error_message(), "newer") != NULL);
  CHECK(basin_attention_forward_init(&newer.args, 8) == BASIN_INVALID_ARGUMENT);
  CHECK(basin_attention_backward_init((void*)&newer.args, 8) == BASIN_INVALID_ARGUMENT);
}

static void test_null(void) {
  basin_attention_context* none = context;
  CHECK(basin_attention_forward_init(NULL, sizeof probe.args) == BASIN_INVALID_ARGUMENT);
  CHECK(basin_attention_backward_init(NULL, sizeof(basin_attention_backward_args)) == BASIN_INVALID_ARGUMENT);
  CHECK(basin_attention_forward(context, NULL, NULL) == BASIN_INVALID_ARGUMENT);
  CHECK(strstr(basin_error_message(), "args is null") != NULL);
  CHECK(basin_attention_backward(context, NULL, NULL) == BASIN_INVALID_ARGUMENT);
  CHECK(basin_attention_forward_supported(NULL) == BASIN_INVALID_ARGUMENT);
  CHECK(basin_attention_backward_supported(NULL) == BASIN_INVALID_ARGUMENT);
  make_probe(&probe, 4, 20);
  CHECK(basin_attention_forward(NULL, &probe.args, NULL) == BASIN_INVALID_ARGUMENT);
  CHECK(strstr(basin_error_message(), "context is null") != NULL);
  CHECK(basin_attention_context_create(1, NULL) == BASIN_INVALID_ARGUMENT);
  CHECK(basin_attention_context_create(-1, &none) == BASIN_INVALID_ARGUMENT);
  CHECK(none == NULL && strstr(basin_error_message(), "-1 threads") != NULL);
  none = context;
  CHECK(basin_attention_context_create(INT32_MAX, &none) == BASIN_INVALID_ARGUMENT && none == NULL);
}

void test_bad_arguments(void) {
  CHECK(basin_attention_context_create(1, &context) == BASIN_OK);
  test_fields();
  test_pages();
  test_struct_versions();
  test_null();
  basin_attention_context_destroy(context);
}
