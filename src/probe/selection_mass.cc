// How much of the attention over all keys a sparse model's selections hold.
#include <algorithm>
#include <cmath>

#include "basin/attention/sparse.h"
#include "probe/run.h"

namespace basin::probe {

std::vector<float> mass_of_selections(const attention::Forward& problem, ThreadPool& pool) {
  constexpr std::int64_t kQueries = 64;  // at a time: the outputs, which nobody wants, need room
  const attention::Sequence& sequence = problem.sequences[0];
  const std::int64_t heads = problem.q.shape[1], d_v = problem.out.shape[2], rows = problem.q.shape[0];
  std::vector<float> mass(static_cast<std::size_t>(sequence.q_tokens));
  std::vector<float> out(static_cast<std::size_t>(kQueries * heads * d_v));
  std::vector<float> lse(static_cast<std::size_t>(kQueries * heads));
  for (std::int64_t begin = 0; begin < sequence.q_tokens; begin += kQueries) {
    const std::int64_t count = std::min(kQueries, sequence.q_tokens - begin);
    attention::Sequence part = sequence;
    part.q_begin = 0;
    part.q_tokens = count;
    part.kv_tokens = sequence.kv_tokens - sequence.q_tokens + begin + count;
    attention::Forward all = problem;
    const auto from = [&](ConstView& view) {
      if (!view) return;
      view.data = static_cast<const std::byte*>(view.data) +
                  (sequence.q_begin + begin) * view.stride[0] * block_bytes(view.dtype);
      view.shape[0] = count;
    };
    from(all.q);
    from(all.q_sink);
    all.sequences = {&part, 1};
    all.out = contiguous(static_cast<void*>(out.data()), DType::f32, {count, heads, d_v});
    all.lse = lse.data();
    all.lse_with_sink = nullptr;
    attention::forward(all, attention::Selection{}, attention::Backend::automatic, pool);
    for (std::int64_t q = 0; q < count; ++q) {
      double sum = 0.0;
      for (std::int64_t h = 0; h < heads; ++h) {
        const float selected = problem.lse[h * rows + sequence.q_begin + begin + q];
        sum += std::exp(static_cast<double>(selected) -
                        static_cast<double>(lse[static_cast<std::size_t>(h * count + q)]));
      }
      mass[static_cast<std::size_t>(begin + q)] = static_cast<float>(sum / static_cast<double>(heads));
    }
  }
  return mass;
}

}  // namespace basin::probe
