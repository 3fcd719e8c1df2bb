#include "problem.h"

#include <math.h>

int failures = 0;

basin_const_tensor input(const void* data, int64_t rows) {
  const basin_const_tensor tensor = {data, BASIN_F32, 3, {rows, 1, kHead}, {kHead, kHead, 1}};
  return tensor;
}

basin_tensor output(void* data, int64_t rows) {
  const basin_tensor tensor = {data, BASIN_F32, 3, {rows, 1, kHead}, {kHead, kHead, 1}};
  return tensor;
}

void make_probe(Probe* probe, int64_t q_tokens, int64_t kv_tokens) {
  memset(probe, 0, sizeof *probe);
  for (int i = 0; i < kMaxTokens * kHead; ++i) {
    probe->k[i] = (float)(i % 7) - 3.0f;
    probe->v[i] = 1.0f;
    probe->out[i] = NAN;
  }
  for (int i = 0; i < kMaxTokens; ++i) probe->lse[i] = probe->lse_with_sink[i] = NAN;
  probe->sequence.q_tokens = q_tokens;
  probe->sequence.kv_tokens = kv_tokens;
  CHECK(basin_attention_forward_init(&probe->args, sizeof probe->args) == BASIN_OK);
  probe->args.spec.scale = 0.25;
  probe->args.sequences = &probe->sequence;
  probe->args.sequence_count = 1;
  probe->args.q = input(probe->q, q_tokens);
  probe->args.k = input(probe->k, kv_tokens);
  probe->args.v = input(probe->v, kv_tokens);
  probe->args.out = output(probe->out, q_tokens);
  probe->args.lse = probe->lse;
  probe->args.lse_with_sink = probe->lse_with_sink;
}

static int near(double value, double expected) {
  return value == expected || fabs(value - expected) < 1e-6;
}

int counts(const Probe* probe, int64_t i, int64_t n) {
  const double sink = probe->args.sink_logit == NULL ? -INFINITY : (double)probe->sink_logit;
  const double total = (double)n + exp(sink);
  for (int d = 0; d < kHead; ++d) {
    if (!near((double)probe->out[i * kHead + d], total == 0.0 ? 0.0 : (double)n / total)) return 0;
  }
  return near((double)probe->lse[i], log((double)n)) && near((double)probe->lse_with_sink[i], log(total));
}
