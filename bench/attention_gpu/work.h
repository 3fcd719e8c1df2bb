// What is measured: problems of the speed table, in memory that they share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention_gpu/device.h"
#include "basin/attention/cuda.h"

namespace basin::bench {

struct Work {
  std::string name;
  std::int64_t h_q = 0, h_kv = 8, d_qk = 0, d_v = 0;
  std::int64_t q_tokens = 0;              // of each sequence
  std::vector<std::int64_t> kv_tokens{};  // [batch] logical lengths
  std::int64_t page_tokens = 0;           // 0: ragged, contiguous
  attention::Mask mask{};
  bool sink_logit = true;
  bool second_query =
      false;              // keys below sink_tokens are scored with a query of their own (in-cache positions)
  bool backward = false;  // the gradients; forward has run before
};

/// The rows of the table, in its order.
std::vector<Work> all_work();

/// What an implementation cannot do without: products of visible pairs, and every visible key and value, query and result once.
struct Cost {
  double flops = 0;
  double bytes = 0;
};
Cost cost_of(const Work& work);

/// Tensors for one piece of work. The memory of keys is one block for all, as large as the largest needs.
class Prepared {
 public:
  Prepared(const Work& work, const DeviceMemory& noise, std::size_t noise_bytes);

  /// Why it cannot run; empty when it can.
  std::string refusal() const;
  void launch() const;

  /// Bytes of noise that `work` takes.
  static std::size_t noise_bytes(const Work& work);

 private:
  void prepare_backward(const Work& work);

  bool is_backward_ = false;
  attention::cuda::Forward forward_;
  attention::cuda::Backward backward_;
  DeviceMemory gradients_, backward_workspace_;
  std::size_t backward_workspace_bytes_ = 0;
  DeviceMemory out_, lse_, q_begin_, kv_begin_, kv_tokens_, page_table_, sink_logit_, workspace_;
  std::size_t workspace_bytes_ = 0;
};

}  // namespace basin::bench
