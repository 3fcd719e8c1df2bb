/* The example of docs/sinks.md through the C interface: one query, two keys, a sink logit. Exits 1 if it is not so. */
#include <math.h>
#include <stdio.h>

#include "basin/attention/c_api.h"

enum { kHeadSize = 16 }; /* only the first two numbers are used */

static int fail(const char* what) {
  fprintf(stderr, "error: %s: %s\n", what, basin_error_message());
  if (*basin_error_hint() != '\0') fprintf(stderr, "hint: %s\n", basin_error_hint());
  return 1;
}

static int near(double value, double expected) {
  return fabs(value - expected) < 1e-6;
}

int main(void) {
  /* Scores ln 2 and 0, values (1, 0, ...) and (0, 1, ...). */
  const float q[kHeadSize] = {1.0f};
  const float k[2 * kHeadSize] = {logf(2.0f)};
  const float v[2 * kHeadSize] = {[0] = 1.0f, [kHeadSize + 1] = 1.0f};
  const float sink_logit = 0.0f;
  float out[kHeadSize], lse, lse_with_sink;

  basin_attention_forward_args args;
  if (basin_attention_forward_init(&args, sizeof args) != BASIN_OK) return fail("init");
  const basin_attention_sequence sequence = {.q_tokens = 1, .kv_tokens = 2};
  const int64_t row = kHeadSize;
  args.spec.scale = 1.0;
  args.sequences = &sequence;
  args.sequence_count = 1;
  args.q = (basin_const_tensor){q, BASIN_F32, 3, {1, 1, row}, {row, row, 1}};
  args.k = (basin_const_tensor){k, BASIN_F32, 3, {2, 1, row}, {row, row, 1}};
  args.v = (basin_const_tensor){v, BASIN_F32, 3, {2, 1, row}, {row, row, 1}};
  args.out = (basin_tensor){out, BASIN_F32, 3, {1, 1, row}, {row, row, 1}};
  args.sink_logit = &sink_logit;
  args.lse = &lse;
  args.lse_with_sink = &lse_with_sink;

  basin_attention_context* context = NULL;
  basin_attention_ran ran;
  if (basin_attention_context_create(1, &context) != BASIN_OK) return fail("context");
  const int failed = basin_attention_forward(context, &args, &ran) != BASIN_OK && fail("forward");
  basin_attention_context_destroy(context);
  if (failed) return 1;
  printf("ran on %s (%s)\n", ran.backend, ran.target);
  printf("O = (%.4f, %.4f)  lse = %.4f  lse_with_sink = %.4f\n", out[0], out[1], lse, lse_with_sink);
  const int as_by_hand =
      near(out[0], 0.5) && near(out[1], 0.25) && near(lse, log(3.0)) && near(lse_with_sink, log(4.0));
  return as_by_hand ? 0 : 1;
}
