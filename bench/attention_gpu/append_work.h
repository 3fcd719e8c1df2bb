// What appending new keys to pages costs, for prefill and decode.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention_gpu/device.h"
#include "basin/attention/cuda.h"

namespace basin::bench {

struct AppendWork {
  std::string name;
  std::int64_t h_kv = 8, d_qk = 0, d_v = 0;
  std::int64_t batch = 0;
  std::int64_t new_tokens = 0;  // of each sequence
  std::int64_t kv_tokens = 0;   // of each sequence, with them
  std::int64_t page_tokens = 0;

  /// Each new key and value is read and written once.
  double bytes() const;
  /// Bytes of noise and of cache that it takes.
  std::size_t memory_bytes() const;
};

std::vector<AppendWork> all_append_work();

class PreparedAppend {
 public:
  /// `memory` is read and written.
  PreparedAppend(const AppendWork& work, const DeviceMemory& memory);
  void launch() const;

 private:
  attention::cuda::Append append_;
  DeviceMemory new_begin_, kv_tokens_, page_table_;
};

}  // namespace basin::bench
