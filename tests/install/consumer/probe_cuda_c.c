/* As probe_cuda, through C. */
#include <basin/attention/cuda_c_api.h>
#include <stdio.h>

int main(void) {
  void* const somewhere = (void*)(uintptr_t)0x10000;
  const basin_const_tensor q = {somewhere, BASIN_BF16, 4, {1, 1, 8, 64}, {512, 512, 64, 1}};
  const basin_const_tensor k = {somewhere, BASIN_BF16, 4, {1, 100, 2, 64}, {12800, 128, 64, 1}};
  const basin_tensor out = {somewhere, BASIN_BF16, 4, {1, 1, 8, 64}, {512, 512, 64, 1}};
  basin_attention_cuda_forward_args args;
  size_t bytes = 0;
  if (basin_attention_cuda_forward_init(&args, sizeof args) != BASIN_OK) return 1;
  args.spec.scale = 0.125;
  args.batch = args.max_q_tokens = 1;
  args.max_kv_tokens = 100;
  args.q = q;
  args.k = args.v = k;
  args.out = out;
  if (basin_attention_cuda_workspace_bytes(&args, &bytes) != BASIN_OK) {
    fprintf(stderr, "%s\n", basin_attention_cuda_error_message());
    return 1;
  }
  printf("%zu\n", bytes);
  return 0;
}
