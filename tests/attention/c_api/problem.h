/* What the C tests share: checks that count failures, and a small problem on which the answer is known by hand. */
#ifndef BASIN_TESTS_C_API_PROBLEM_H
#define BASIN_TESTS_C_API_PROBLEM_H

#include <stdio.h>
#include <string.h>

#include "basin/attention/c_api.h"

extern int failures;

#define CHECK(condition)                                                                         \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, basin_error_message()); \
      ++failures;                                                                                \
    }                                                                                            \
  } while (0)

enum { kHead = 16, kMaxTokens = 64 };

/* The probe: q = 0 and v = 1, so that every visible key weighs the same. Over n visible keys out = n / (n + exp(sink))
 * and lse = log(n): the output counts the keys. k is arbitrary. One sequence, one head. */
typedef struct Probe {
  float q[kMaxTokens * kHead], k[kMaxTokens * kHead], v[kMaxTokens * kHead], out[kMaxTokens * kHead];
  float lse[kMaxTokens], lse_with_sink[kMaxTokens];
  float sink_logit;
  basin_attention_sequence sequence;
  basin_attention_forward_args args;
} Probe;

/* No sink; `args` points into the probe, which must not move. Outputs are NaN. */
void make_probe(Probe* probe, int64_t q_tokens, int64_t kv_tokens);

basin_const_tensor input(const void* data, int64_t rows);
basin_tensor output(void* data, int64_t rows);

/* Whether row i of the probe came out as n visible keys make it. */
int counts(const Probe* probe, int64_t i, int64_t n);

void test_bad_arguments(void);

#endif
