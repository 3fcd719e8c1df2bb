#include "attention_gpu/append_work.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace basin::bench {
namespace {

constexpr std::int64_t kElementBytes = 2;

std::int64_t pages_of_sequence(const AppendWork& work) {
  return (work.kv_tokens + work.page_tokens - 1) / work.page_tokens;
}

DeviceMemory upload(const std::vector<std::int32_t>& host) {
  return allocate_copy(host.data(), host.size() * sizeof(std::int32_t));
}

}  // namespace

std::vector<AppendWork> all_append_work() {
  std::vector<AppendWork> works;
  for (const std::int64_t d : {64, 128}) {
    const auto add = [&](const std::string& name, std::int64_t batch, std::int64_t new_tokens,
                         std::int64_t kv_tokens, std::int64_t page_tokens) {
      works.push_back({fmt::format("append {}, pages of {} d{}", name, page_tokens, d), 8, d, d, batch,
                       new_tokens, kv_tokens, page_tokens});
    };
    for (const std::int64_t page_tokens : {1, 16, 64, 256}) add("1x16k", 1, 16384, 16384, page_tokens);
    add("64x256 of 8k", 64, 256, 8192, 64);
    for (const std::int64_t batch : {1, 64, 256}) add(fmt::format("{}x1 of 8k", batch), batch, 1, 8192, 64);
  }
  return works;
}

double AppendWork::bytes() const {
  return 2.0 * static_cast<double>(batch * new_tokens * h_kv * (d_qk + d_v) * kElementBytes);
}

std::size_t AppendWork::memory_bytes() const {
  const std::int64_t rows = batch * (new_tokens + pages_of_sequence(*this) * page_tokens);
  return static_cast<std::size_t>(rows * h_kv * (d_qk + d_v) * kElementBytes);
}

PreparedAppend::PreparedAppend(const AppendWork& work, const DeviceMemory& memory) {
  const DType dtype = DType::bf16;
  const std::int64_t rows = work.batch * work.new_tokens, stride = pages_of_sequence(work);
  const std::int64_t pages = work.batch * stride;
  auto* at = static_cast<unsigned char*>(memory.get());
  const auto take = [&](std::int64_t tokens, std::int64_t d) {
    unsigned char* begin = at;
    at += tokens * work.h_kv * d * kElementBytes;
    return static_cast<void*>(begin);
  };
  append_.batch = work.batch;
  append_.new_k = contiguous<const void*>(take(rows, work.d_qk), dtype, {rows, work.h_kv, work.d_qk});
  append_.new_v = contiguous<const void*>(take(rows, work.d_v), dtype, {rows, work.h_kv, work.d_v});
  append_.k = contiguous<void*>(take(pages * work.page_tokens, work.d_qk), dtype,
                                {pages, work.page_tokens, work.h_kv, work.d_qk});
  append_.v = contiguous<void*>(take(pages * work.page_tokens, work.d_v), dtype,
                                {pages, work.page_tokens, work.h_kv, work.d_v});
  std::vector<std::int32_t> begin(static_cast<std::size_t>(work.batch + 1)),
      tokens(static_cast<std::size_t>(work.batch), static_cast<std::int32_t>(work.kv_tokens)),
      table(static_cast<std::size_t>(pages));
  for (std::size_t s = 0; s < begin.size(); ++s)
    begin[s] = static_cast<std::int32_t>(s) * static_cast<std::int32_t>(work.new_tokens);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(1));
  new_begin_ = upload(begin);
  kv_tokens_ = upload(tokens);
  page_table_ = upload(table);
  append_.new_begin = static_cast<const std::int32_t*>(new_begin_.get());
  append_.kv_tokens = static_cast<const std::int32_t*>(kv_tokens_.get());
  append_.page_table = static_cast<const std::int32_t*>(page_table_.get());
  append_.page_table_stride = stride;
}

void PreparedAppend::launch() const {
  attention::cuda::append(append_, nullptr);
}

}  // namespace basin::bench
