// Asks for the size of a workspace, which needs no device. Prints it.
#include <basin/attention/cuda.h>

#include <cstdint>
#include <cstdio>

int main() {
  void* const somewhere = reinterpret_cast<void*>(std::uintptr_t{0x10000});
  basin::attention::cuda::Forward problem;
  problem.spec.scale = 0.125;
  problem.batch = problem.max_q_tokens = 1;
  problem.max_kv_tokens = 100;
  problem.q = basin::contiguous<const void*>(somewhere, basin::DType::bf16, {1, 1, 8, 64});
  problem.k = problem.v = basin::contiguous<const void*>(somewhere, basin::DType::bf16, {1, 100, 2, 64});
  problem.out = basin::contiguous(somewhere, basin::DType::bf16, {1, 1, 8, 64});
  std::printf("%zu\n", basin::attention::cuda::workspace_bytes(problem));
}
