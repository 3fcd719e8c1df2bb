/* Every field of the spec through C: each must change what the probe counts. */
#include <math.h>
#include <stdlib.h>

#include "problem.h"

static basin_attention_context* context;
static Probe probe;

static basin_status run(void) {
  basin_attention_ran ran = {NULL, NULL};
  const basin_status status = basin_attention_forward(context, &probe.args, &ran);
  CHECK(basin_attention_forward_supported(&probe.args) == status);
  if (status != BASIN_OK) return status;
  const char* forced = getenv("BASIN_CPU");
  if (probe.args.spec.backend == BASIN_BACKEND_REFERENCE) {
    CHECK(strcmp(ran.backend, "reference") == 0 && strcmp(ran.target, "double") == 0);
  } else {
    CHECK(strcmp(ran.backend, "cpu") == 0 && (forced == NULL || strcmp(ran.target, forced) == 0));
  }
  return status;
}

static int64_t at_most(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static void test_masks(void) {
  make_probe(&probe, 20, 20);
  CHECK(run() == BASIN_OK);
  for (int64_t i = 0; i < 20; ++i) CHECK(counts(&probe, i, i + 1));

  make_probe(&probe, 20, 20);
  probe.args.spec.causal = 0;
  CHECK(run() == BASIN_OK);
  for (int64_t i = 0; i < 20; ++i) CHECK(counts(&probe, i, 20));
  probe.args.spec.window_right = 3;
  CHECK(run() == BASIN_OK);
  for (int64_t i = 0; i < 20; ++i) CHECK(counts(&probe, i, at_most(i + 4, 20)));

  make_probe(&probe, 20, 20);
  probe.args.spec.window = 5;
  CHECK(run() == BASIN_OK);
  for (int64_t i = 0; i < 20; ++i) CHECK(counts(&probe, i, at_most(i + 1, 5)));
  probe.args.spec.sink_tokens = 4;
  CHECK(run() == BASIN_OK);
  for (int64_t i = 0; i < 20; ++i) CHECK(counts(&probe, i, at_most(i + 1, 9)));
}

static void test_sink_logit(void) {
  const float sinks[] = {0.0f, 2.5f, -300.0f, 30.0f, -INFINITY};
  for (size_t s = 0; s < sizeof sinks / sizeof *sinks; ++s) {
    make_probe(&probe, 4, 20);
    probe.sink_logit = sinks[s];
    probe.args.sink_logit = &probe.sink_logit;
    CHECK(run() == BASIN_OK);
    for (int64_t i = 0; i < 4; ++i) CHECK(counts(&probe, i, 17 + i));
  }
}

static void test_rows_without_keys(void) {
  make_probe(&probe, 5, 2); /* the first three queries stand before key 0 */
  CHECK(run() == BASIN_OK);
  for (int64_t i = 0; i < 5; ++i) CHECK(counts(&probe, i, i < 3 ? 0 : i - 2));
}

static void test_scale_and_softcap(void) {
  make_probe(&probe, 1, 2);
  probe.q[0] = 1.0f;
  memset(probe.k, 0, sizeof probe.k);
  probe.k[0] = 8.0f;
  CHECK(run() == BASIN_OK);
  CHECK(fabs((double)probe.lse[0] - log(exp(2.0) + 1.0)) < 1e-6);
  probe.args.spec.scale = 0.5;
  CHECK(run() == BASIN_OK);
  CHECK(fabs((double)probe.lse[0] - log(exp(4.0) + 1.0)) < 1e-6);
  probe.args.spec.softcap = 3.0;
  CHECK(run() == BASIN_OK);
  CHECK(fabs((double)probe.lse[0] - log(exp(3.0 * tanh(4.0 / 3.0)) + 1.0)) < 1e-6);
}

static void test_second_query(void) {
  float q_sink[kHead] = {0.0f};
  make_probe(&probe, 1, 3);
  memset(probe.k, 0, sizeof probe.k);
  for (int j = 0; j < 3; ++j) probe.k[j * kHead] = 4.0f;
  q_sink[0] = 1.0f; /* score 1 for the sink key, 0 for the others */
  probe.args.q_sink = input(q_sink, 1);
  probe.args.spec.sink_tokens = 1;
  probe.args.spec.window = 2;
  CHECK(run() == BASIN_OK);
  CHECK(fabs((double)probe.lse[0] - log(exp(1.0) + 2.0)) < 1e-6);
}

static void test_pages_and_batches(void) {
  const int32_t pages[2][3] = {{2, 0, 3}, {1, 4, -1}}; /* of 4 keys; the second sequence has 8 */
  basin_attention_sequence sequences[2] = {{0, 2, 0, 10, pages[0]}, {2, 1, 0, 8, pages[1]}};
  make_probe(&probe, 3, 20);
  const basin_const_tensor paged = {probe.k, BASIN_F32, 4, {5, 4, 1, kHead}, {4 * kHead, kHead, kHead, 1}};
  probe.args.k = probe.args.v = paged;
  probe.args.v.data = probe.v;
  probe.args.sequences = sequences;
  probe.args.sequence_count = 2;
  CHECK(run() == BASIN_OK);
  CHECK(counts(&probe, 0, 9) && counts(&probe, 1, 10) && counts(&probe, 2, 8));

  probe.args.sequence_count = 1; /* the row of the other is not touched */
  probe.out[2 * kHead] = 77.0f;
  CHECK(run() == BASIN_OK);
  CHECK(probe.out[2 * kHead] == 77.0f);

  probe.args.sequence_count = 0;
  probe.args.sequences = NULL;
  CHECK(run() == BASIN_OK);
}

static void test_types_and_strides(void) {
  uint16_t half[2][kMaxTokens * kHead]; /* 1 in f16 and in bf16 */
  for (int i = 0; i < kMaxTokens * kHead; ++i) {
    half[0][i] = 0x3c00;
    half[1][i] = 0x3f80;
  }
  for (int type = 0; type < 2; ++type) {
    make_probe(&probe, 3, 20);
    probe.args.q.dtype = probe.args.k.dtype = probe.args.v.dtype = type == 0 ? BASIN_F16 : BASIN_BF16;
    probe.args.k.data = probe.args.v.data = half[type];
    CHECK(run() == BASIN_OK);
    for (int64_t i = 0; i < 3; ++i) CHECK(counts(&probe, i, 18 + i));
  }
  make_probe(&probe, 3, 20); /* every second row of k; those between are not read */
  for (int j = 0; j < 40; ++j) probe.k[j * kHead] = j % 2 == 0 ? 1.0f : NAN;
  probe.args.k.stride[0] = 2 * kHead;
  CHECK(run() == BASIN_OK);
  for (int64_t i = 0; i < 3; ++i) CHECK(counts(&probe, i, 18 + i));
}

static void test_backends(void) {
  make_probe(&probe, 3, 20);
  probe.args.spec.backend = BASIN_BACKEND_REFERENCE;
  CHECK(run() == BASIN_OK);
  CHECK(counts(&probe, 2, 20));
  probe.args.spec.backend = BASIN_BACKEND_CPU;
  CHECK(run() == BASIN_OK);
  CHECK(counts(&probe, 2, 20));
}

/* q = 0, v = 1, dout = 1 over n keys with a sink: out = n / (n + e), e = exp(sink), D = d out; P = 1 / (n + e);
 * dv = P, d_sink_logit = - e / (n + e) * d n / (n + e); dk = 0 for q = 0, and dlse_with_sink g adds e / (n + e) g. */
static void test_backward(void) {
  float dq[kHead], dk[4 * kHead], dv[4 * kHead], dout[kHead], dsink = NAN, dlse = 0.75f;
  basin_attention_backward_args back;
  make_probe(&probe, 1, 4);
  probe.sink_logit = 0.5f;
  for (int d = 0; d < kHead; ++d) dout[d] = 1.0f;
  CHECK(basin_attention_backward_init(&back, sizeof back) == BASIN_OK);
  back.spec.scale = 0.25;
  back.sequences = &probe.sequence;
  back.sequence_count = 1;
  back.q = probe.args.q;
  back.k = probe.args.k;
  back.v = probe.args.v;
  back.sink_logit = &probe.sink_logit;
  back.dout = input(dout, 1);
  back.dlse_with_sink = &dlse;
  back.dq = output(dq, 1);
  back.dk = output(dk, 4);
  back.dv = output(dv, 4);
  back.dsink_logit = &dsink;
  basin_attention_ran ran;
  CHECK(basin_attention_backward_supported(&back) == BASIN_OK);
  CHECK(basin_attention_backward(context, &back, &ran) == BASIN_OK);
  CHECK(strcmp(ran.backend, "cpu") == 0);
  const double e = exp(0.5), total = 4.0 + e;
  for (int i = 0; i < 4 * kHead; ++i) {
    CHECK(fabs((double)dv[i] - 1.0 / total) < 1e-6);
    CHECK(dk[i] == 0.0f);
  }
  CHECK(fabs((double)dsink - e / total * (0.75 - kHead * 4.0 / total)) < 1e-5);
  back.dsink_logit = NULL;
  CHECK(basin_attention_backward(context, &back, NULL) == BASIN_INVALID_ARGUMENT);
  CHECK(strstr(basin_error_message(), "dsink_logit") != NULL);
  back.dsink_logit = &dsink;
  back.spec.backend = BASIN_BACKEND_CPU;
  CHECK(basin_attention_backward_supported(&back) == BASIN_OK);
  back.dout.dtype = BASIN_BF16;
  CHECK(basin_attention_backward_supported(&back) == BASIN_UNSUPPORTED);
  CHECK(basin_attention_backward(context, &back, NULL) == BASIN_UNSUPPORTED);
  CHECK(strstr(basin_error_message(), "dout") != NULL && basin_error_hint()[0] != '\0');
}

int main(void) {
  CHECK(basin_attention_abi() == BASIN_ATTENTION_ABI);
  CHECK(basin_version()[0] != '\0');
  CHECK(basin_attention_context_create(2, &context) == BASIN_OK);
  make_probe(&probe, 1, 1);
  const basin_status first = basin_attention_forward(context, &probe.args, NULL);
  if (first == BASIN_UNSUPPORTED && strstr(basin_error_message(), "this CPU lacks it") != NULL) {
    fprintf(stderr, "skipped: %s\n", basin_error_message());
    return 77;
  }
  test_masks();
  test_sink_logit();
  test_rows_without_keys();
  test_scale_and_softcap();
  test_second_query();
  test_pages_and_batches();
  test_types_and_strides();
  test_backends();
  test_backward();
  test_bad_arguments();
  basin_attention_context_destroy(context);
  basin_attention_context_destroy(NULL);
  if (failures > 0) fprintf(stderr, "%d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
