/* The probe of one layer, for languages that can call C: where the attention of some queries and keys goes.
 *
 * No function throws. A call that fails returns null, and basin_probe_error() says why (of this thread, never null). */
#ifndef BASIN_PROBE_C_API_H
#define BASIN_PROBE_C_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes when a caller that was written for the one before would no longer work. */
#define BASIN_PROBE_ABI 1

enum { BASIN_PROBE_F32 = 2, BASIN_PROBE_F16 = 3, BASIN_PROBE_BF16 = 4 }; /* as in basin/attention/c_api.h */

/* All tokens of one causal sequence, dense: q [tokens, heads, d], k [tokens, kv_heads, d]. Words as in docs/sinks.md. */
typedef struct basin_probe_args {
  size_t struct_bytes; /* sizeof(basin_probe_args) */
  const void *q, *k;
  int32_t dtype, threads; /* threads: 0 = one per core */
  int64_t tokens, heads, kv_heads, d;
  const float* sink_logit; /* [heads], or null */
  double scale, softcap;
  int64_t window, sink_tokens;
  int64_t map_bins, topk; /* as basin probe has them */
} basin_probe_args;

/* What a layer's file of `basin probe` holds, by the same names: floats unless said. `data` lives as long as the result. */
typedef struct basin_probe_array {
  const char* name;
  const void* data;
  int32_t kind; /* 0 = float, 1 = int64 (numbers, sink_counts, windows), 2 = int32 (topk) */
  int32_t rank;
  int64_t shape[4];
} basin_probe_array;

typedef struct basin_probe_result basin_probe_result;

int32_t basin_probe_abi(void);
const char* basin_probe_error(void);
basin_probe_result* basin_probe_attention(const basin_probe_args* args);
/* The array of number `index`, from 0; 0 when there are fewer. */
int32_t basin_probe_result_array(const basin_probe_result* result, int32_t index, basin_probe_array* array);
void basin_probe_result_free(basin_probe_result* result); /* null: nothing */

#ifdef __cplusplus
}
#endif

#endif /* BASIN_PROBE_C_API_H */
