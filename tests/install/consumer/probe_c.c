/* The probe of probe.cc through the C interface: one query over five keys and a sink. Prints the target that ran. */
#include <basin/attention/c_api.h>
#include <stdio.h>

int main(void) {
  float q[16] = {0}, k[5 * 16] = {0}, v[5 * 16], out[16];
  const float sink_logit = 0.0f;
  const basin_attention_sequence sequence = {0, 1, 0, 5, NULL};
  basin_attention_context* context = NULL;
  basin_attention_forward_args args;
  basin_attention_ran ran;
  for (int i = 0; i < 5 * 16; ++i) v[i] = 1.0f;
  if (basin_attention_context_create(1, &context) != BASIN_OK ||
      basin_attention_forward_init(&args, sizeof args) != BASIN_OK) {
    fprintf(stderr, "error: %s\n", basin_error_message());
    return 1;
  }
  const basin_const_tensor query = {q, BASIN_F32, 3, {1, 1, 16}, {16, 16, 1}};
  const basin_tensor output = {out, BASIN_F32, 3, {1, 1, 16}, {16, 16, 1}};
  const basin_const_tensor keys = {k, BASIN_F32, 3, {5, 1, 16}, {16, 16, 1}};
  args.spec.scale = 0.25;
  args.spec.backend = BASIN_BACKEND_CPU;
  args.sequences = &sequence;
  args.sequence_count = 1;
  args.q = query;
  args.k = args.v = keys;
  args.v.data = v;
  args.out = output;
  args.sink_logit = &sink_logit;
  const basin_status status = basin_attention_forward(context, &args, &ran);
  if (status != BASIN_OK) fprintf(stderr, "error: %s\n", basin_error_message());
  basin_attention_context_destroy(context);
  if (status != BASIN_OK) return 1;
  for (int i = 0; i < 16; ++i) {
    if (out[i] < 5.0f / 6.0f - 1e-6f || out[i] > 5.0f / 6.0f + 1e-6f) return 1;
  }
  printf("%s\n", ran.target);
  return 0;
}
