#include "attention_gpu/work.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <stdexcept>

#include "basin/attention/mask.h"

namespace basin::bench {
namespace {

constexpr std::int64_t kElementBytes = 2;
constexpr std::int64_t kAlignment = 256;  // bytes, of each tensor

std::vector<std::int64_t> sequences(std::int64_t count, std::int64_t tokens) {
  return std::vector<std::int64_t>(static_cast<std::size_t>(count), tokens);
}

std::string size_text(std::int64_t tokens) {
  return tokens % 1024 == 0 ? fmt::format("{}k", tokens / 1024) : fmt::format("{}", tokens);
}

// Tokens of a sequence that are held: all when contiguous, those on pages with a visible key when paged.
bool held(const Work& work, std::int64_t kv_tokens, std::int64_t page) {
  const std::int64_t first = page * work.page_tokens,
                     last = std::min(first + work.page_tokens, kv_tokens) - 1;
  const std::int64_t p = kv_tokens - work.q_tokens;
  return first < work.mask.sink_tokens || work.mask.window == 0 || p - last < work.mask.window;
}

std::int64_t pages_of(const Work& work) {
  std::int64_t pages = 0;
  for (const std::int64_t tokens : work.kv_tokens) {
    for (std::int64_t page = 0; page * work.page_tokens < tokens; ++page)
      pages += held(work, tokens, page) ? 1 : 0;
  }
  return pages;
}

std::int64_t key_rows(const Work& work) {
  if (work.page_tokens > 0) return pages_of(work) * work.page_tokens;
  return std::accumulate(work.kv_tokens.begin(), work.kv_tokens.end(), std::int64_t{0});
}

std::int64_t query_rows(const Work& work) {
  return work.q_tokens * static_cast<std::int64_t>(work.kv_tokens.size());
}

struct Sizes {
  std::int64_t q, k, v;  // bytes, aligned
};
Sizes sizes_of(const Work& work) {
  const auto bytes = [](std::int64_t elements) {
    return (elements * kElementBytes + kAlignment - 1) / kAlignment * kAlignment;
  };
  return {bytes(query_rows(work) * work.h_q * work.d_qk) * (work.second_query ? 2 : 1),
          bytes(key_rows(work) * work.h_kv * work.d_qk), bytes(key_rows(work) * work.h_kv * work.d_v)};
}

template <typename T>
DeviceMemory upload(const std::vector<T>& host) {
  return allocate_copy(host.data(), host.size() * sizeof(T));
}

}  // namespace

std::vector<Work> all_work() {
  struct Heads {
    std::int64_t h_q, d_qk, d_v;
    std::string text() const {
      return d_qk == d_v ? fmt::format("d{}", d_qk) : fmt::format("d{}/{}", d_qk, d_v);
    }
  };
  const Heads d64{64, 64, 64}, d128{32, 128, 128}, d192{16, 192, 128}, d256{16, 256, 256};
  std::vector<Work> works;
  const auto add = [&](const std::string& name, const Heads& heads, std::int64_t q_tokens,
                       std::vector<std::int64_t> kv_tokens, std::int64_t page_tokens = 0,
                       attention::Mask mask = {}, bool sink_logit = true) {
    works.push_back({name + " " + heads.text(), heads.h_q, 8, heads.d_qk, heads.d_v, q_tokens,
                     std::move(kv_tokens), page_tokens, mask, sink_logit, false});
  };
  for (const Heads& heads : {d128, d64}) {
    add("prefill causal 1x16k", heads, 16384, sequences(1, 16384));
    add("prefill causal 4x4k", heads, 4096, sequences(4, 4096));
    add("prefill causal 1x16k, no sink_logit", heads, 16384, sequences(1, 16384), 0, {}, false);
    add("prefill full 1x16k", heads, 16384, sequences(1, 16384), 0, {.causal = false});
  }
  for (const Heads& heads : {d192, d256}) {
    add("prefill causal 1x16k", heads, 16384, sequences(1, 16384));
    add("prefill causal 4x4k", heads, 4096, sequences(4, 4096));
  }
  for (const Heads& heads : {d64, d128})
    add("prefill window 128, 1x16k", heads, 16384, sequences(1, 16384), 0, {.window = 128});
  add("prefill window 1024, 1x64k", d64, 65536, sequences(1, 65536), 0, {.window = 1024});
  add("prefill 4 sink tokens + window 1024, 1x64k", d64, 65536, sequences(1, 65536), 0,
      {.window = 1024, .sink_tokens = 4});

  const auto add_backward = [&](const std::string& name, const Heads& heads, std::int64_t batch,
                                std::int64_t tokens, attention::Mask mask, bool sink_logit = true) {
    add("backward " + name, heads, tokens, sequences(batch, tokens), 0, mask, sink_logit);
    works.back().backward = true;
  };
  for (const Heads& heads : {d128, d64}) {
    add_backward("causal 1x16k", heads, 1, 16384, {});
    add_backward("causal 1x16k, no sink_logit", heads, 1, 16384, {}, false);
    add_backward("causal 4x4k", heads, 4, 4096, {});
    add_backward("full 1x16k", heads, 1, 16384, {.causal = false});
    add_backward("window 128, 1x16k", heads, 1, 16384, {.window = 128});
  }
  add_backward("causal 1x16k", d256, 1, 16384, {});
  add_backward("window 1024, 1x64k", d64, 1, 65536, {.window = 1024});
  add_backward("4 sink tokens + window 1024, 1x64k", d64, 1, 65536, {.window = 1024, .sink_tokens = 4});

  for (const Heads& heads : {d192, d256}) {
    for (const auto& [batch, tokens] :
         {std::pair<std::int64_t, std::int64_t>{1, 8192}, {1, 131072}, {8, 32768}, {64, 8192}})
      add(fmt::format("decode {}x{}", batch, size_text(tokens)), heads, 1, sequences(batch, tokens), 64);
    add("decode 64x8k, 4 query tokens", heads, 4, sequences(64, 8192), 64);
  }
  for (const Heads& heads : {d64, d128}) {
    for (const auto& [batch, tokens] :
         {std::pair<std::int64_t, std::int64_t>{1, 8192}, {1, 131072}, {8, 32768}, {64, 8192}, {256, 8192}})
      add(fmt::format("decode {}x{}", batch, size_text(tokens)), heads, 1, sequences(batch, tokens), 64);
    add("decode 1x8k, no sink_logit", heads, 1, sequences(1, 8192), 64, {}, false);
    add("decode 64x8k, no sink_logit", heads, 1, sequences(64, 8192), 64, {}, false);
    for (const std::int64_t page_tokens : {1, 16, 32, 128, 256})
      add(fmt::format("decode 64x8k, pages of {}", page_tokens), heads, 1, sequences(64, 8192), page_tokens);
    for (const auto& [batch, tokens] :
         {std::pair<std::int64_t, std::int64_t>{1, 8192}, {1, 131072}, {8, 32768}, {64, 8192}})
      add(fmt::format("decode {}x{}, contiguous", batch, size_text(tokens)), heads, 1,
          sequences(batch, tokens));
    for (const std::int64_t batch : {1, 64}) {
      for (const std::int64_t tokens : {8192, 16384, 1048576})
        add(fmt::format("decode {}x{}, 1024 sink tokens + window 7168", batch, size_text(tokens)), heads, 1,
            sequences(batch, tokens), 64, {.window = 7168, .sink_tokens = 1024});
    }
    std::vector<std::int64_t> lengths;
    std::mt19937 random(1);
    std::uniform_real_distribution<double> exponent(std::log(100.0), std::log(32768.0));
    for (int i = 0; i < 64; ++i) lengths.push_back(static_cast<std::int64_t>(std::exp(exponent(random))));
    add("decode 64 ragged, 100..32k", heads, 1, lengths, 64);
    add("decode 64x8k, 4 query tokens", heads, 4, sequences(64, 8192), 64);
    for (const auto& [batch, q_tokens] :
         {std::pair<std::int64_t, std::int64_t>{1, 512}, {1, 2048}, {8, 64}}) {
      add(fmt::format("extend {}x{} of 16k, 1024 sink tokens + window 7168, in cache", batch, q_tokens),
          heads, q_tokens, sequences(batch, 16384), 64, {.window = 7168, .sink_tokens = 1024});
      works.back().second_query = true;
    }
  }
  return works;
}

Cost cost_of(const Work& work) {
  double pairs = 0, keys = 0;
  for (const std::int64_t tokens : work.kv_tokens) {
    for (std::int64_t i = 0; i < work.q_tokens; ++i)
      pairs +=
          static_cast<double>(attention::visible_keys(work.mask, tokens - work.q_tokens + i, tokens).size());
    // Windows move forward, so those of all queries cover everything from the first one's beginning to the last one's end.
    const auto first = attention::visible_keys(work.mask, tokens - work.q_tokens, tokens);
    const auto last = attention::visible_keys(work.mask, tokens - 1, tokens);
    keys += static_cast<double>(last.sinks.size() + last.recent.end - first.recent.begin);
  }
  const auto h_q = static_cast<double>(work.h_q), d = static_cast<double>(work.d_qk + work.d_v);
  const double rows = static_cast<double>(query_rows(work));
  // Backward: five products instead of two; q, k, v, out and dout are read, dq, dk and dv written.
  if (work.backward)
    return {5 * pairs * h_q * d,
            kElementBytes * d * (2 * keys * static_cast<double>(work.h_kv) + 2 * rows * h_q)};
  return {2 * pairs * h_q * d, kElementBytes * d * (keys * static_cast<double>(work.h_kv) + rows * h_q)};
}

std::size_t Prepared::noise_bytes(const Work& work) {
  const Sizes sizes = sizes_of(work);
  return static_cast<std::size_t>(sizes.q + sizes.k + sizes.v);
}

Prepared::Prepared(const Work& work, const DeviceMemory& noise, std::size_t noise_size) {
  if (noise_bytes(work) > noise_size) throw std::logic_error("not enough noise");
  const Sizes sizes = sizes_of(work);
  const auto batch = static_cast<std::int64_t>(work.kv_tokens.size());
  const std::int64_t rows = query_rows(work),
                     most = *std::max_element(work.kv_tokens.begin(), work.kv_tokens.end());
  const auto* memory = static_cast<const unsigned char*>(noise.get());
  const DType dtype = DType::bf16;
  forward_.spec.mask = work.mask;
  forward_.spec.scale = 1 / std::sqrt(static_cast<double>(work.d_qk));
  forward_.batch = batch;
  forward_.max_q_tokens = work.q_tokens;
  forward_.max_kv_tokens = most;
  forward_.q = contiguous<const void*>(memory, dtype, {rows, work.h_q, work.d_qk});
  if (work.second_query)
    forward_.q_sink = contiguous<const void*>(memory + sizes.q / 2, dtype, {rows, work.h_q, work.d_qk});
  out_ = allocate(static_cast<std::size_t>(rows * work.h_q * work.d_v * kElementBytes));
  forward_.out = contiguous<void*>(out_.get(), dtype, {rows, work.h_q, work.d_v});
  std::vector<std::int32_t> q_begin, kv_begin, kv_tokens;
  std::int32_t kv_next = 0;
  for (std::int64_t s = 0; s <= batch; ++s) {
    q_begin.push_back(static_cast<std::int32_t>(s * work.q_tokens));
    kv_begin.push_back(kv_next);
    if (s == batch) break;
    kv_tokens.push_back(static_cast<std::int32_t>(work.kv_tokens[static_cast<std::size_t>(s)]));
    kv_next += kv_tokens.back();
  }
  q_begin_ = upload(q_begin);
  forward_.q_begin = static_cast<const std::int32_t*>(q_begin_.get());
  const unsigned char* k = memory + sizes.q;
  const unsigned char* v = k + sizes.k;
  if (work.page_tokens == 0) {
    kv_begin_ = upload(kv_begin);
    forward_.kv_begin = static_cast<const std::int32_t*>(kv_begin_.get());
    forward_.k = contiguous<const void*>(k, dtype, {kv_next, work.h_kv, work.d_qk});
    forward_.v = contiguous<const void*>(v, dtype, {kv_next, work.h_kv, work.d_v});
  } else {
    const std::int64_t pages = pages_of(work), stride = (most + work.page_tokens - 1) / work.page_tokens;
    std::vector<std::int32_t> order(static_cast<std::size_t>(pages));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(1));
    std::vector<std::int32_t> table(static_cast<std::size_t>(batch * stride), -1);
    std::size_t next = 0;
    for (std::int64_t s = 0; s < batch; ++s) {
      const std::int64_t tokens = work.kv_tokens[static_cast<std::size_t>(s)];
      for (std::int64_t page = 0; page * work.page_tokens < tokens; ++page) {
        if (held(work, tokens, page)) table[static_cast<std::size_t>(s * stride + page)] = order[next++];
      }
    }
    kv_tokens_ = upload(kv_tokens);
    page_table_ = upload(table);
    forward_.kv_tokens = static_cast<const std::int32_t*>(kv_tokens_.get());
    forward_.page_table = static_cast<const std::int32_t*>(page_table_.get());
    forward_.page_table_stride = stride;
    forward_.k = contiguous<const void*>(k, dtype, {pages, work.page_tokens, work.h_kv, work.d_qk});
    forward_.v = contiguous<const void*>(v, dtype, {pages, work.page_tokens, work.h_kv, work.d_v});
  }
  if (work.sink_logit) {
    sink_logit_ = upload(std::vector<float>(static_cast<std::size_t>(work.h_q), 1.0f));
    forward_.sink_logit = static_cast<const float*>(sink_logit_.get());
  }
  if (work.backward) prepare_backward(work);
  if (!refusal().empty()) return;
  workspace_bytes_ = attention::cuda::workspace_bytes(forward_);
  workspace_ = allocate(workspace_bytes_);
  expect_success(cudaMemset(workspace_.get(), 0, workspace_bytes_), "cudaMemset");
  if (!work.backward) return;
  launch();  // forward
  is_backward_ = true;
}

// dout is the noise of q (of the same shape); all gradients lie in one block of memory.
void Prepared::prepare_backward(const Work& work) {
  if (work.d_qk != work.d_v) throw std::logic_error("backward is measured for heads of one size");
  lse_ = allocate(static_cast<std::size_t>(query_rows(work) * work.h_q) * sizeof(float));
  forward_.lse_with_sink = static_cast<float*>(lse_.get());
  const Sizes sizes = sizes_of(work);
  gradients_ = allocate(noise_bytes(work) + static_cast<std::size_t>(work.h_q) * sizeof(float));
  auto* memory = static_cast<unsigned char*>(gradients_.get());
  const auto like = [](const ConstView& view, void* data) {
    return View{data, view.dtype, view.rank, view.shape, view.stride};
  };
  backward_.forward = forward_;
  backward_.dout = forward_.q;
  backward_.dq = like(forward_.q, memory);
  backward_.dk = like(forward_.k, memory + sizes.q);
  backward_.dv = like(forward_.v, memory + sizes.q + sizes.k);
  if (work.sink_logit) backward_.dsink_logit = reinterpret_cast<float*>(memory + sizes.q + sizes.k + sizes.v);
  backward_workspace_bytes_ = attention::cuda::workspace_bytes(backward_);
  backward_workspace_ = allocate(backward_workspace_bytes_);
}

std::string Prepared::refusal() const {
  return is_backward_ ? attention::cuda::supported(backward_) : attention::cuda::supported(forward_);
}

void Prepared::launch() const {
  if (is_backward_) {
    attention::cuda::backward(backward_, backward_workspace_.get(), backward_workspace_bytes_, nullptr);
  } else {
    attention::cuda::forward(forward_, workspace_.get(), workspace_bytes_, nullptr);
  }
}

}  // namespace basin::bench
