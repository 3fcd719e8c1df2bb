// The operators, without a line of arithmetic: every device registers its own implementation.
//
// Tensors are dense (q [b, s_q, h_q, d_qk], k [b, s_kv, h_kv, d_qk]), ragged (q [total_q, h_q, d_qk] with q_begin, k
// [total_kv, h_kv, d_qk] with kv_begin) or, for keys, paged ([pages, page_tokens, h_kv, d_qk] with page_table). q_begin,
// kv_begin int32 [b + 1], kv_tokens int32 [b], page_table int32 [b, n], all on the device of q. Ragged keys with kv_tokens
// end there and not at the next kv_begin. window counts keys including self, 0 = unlimited; window_right -1 = unlimited.
// lse is that with the sink, float32 (float64 for float64 tensors), [b, h_q, s_q] or [h_q, total_q].
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(basin, m) {
  m.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? sink_logit, Tensor? q_begin, Tensor? "
      "kv_begin, "
      "Tensor? kv_tokens, Tensor? page_table, SymInt max_q_tokens, SymInt max_kv_tokens, float scale, float "
      "softcap, "
      "bool causal, int window, int window_right, int sink_tokens) -> (Tensor out, Tensor lse)");
  // dsink_logit has no element when sink_logit is absent.
  m.def(
      "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor? sink_logit, Tensor? q_begin, Tensor? kv_begin, Tensor? kv_tokens, SymInt max_q_tokens, "
      "SymInt max_kv_tokens, float scale, float softcap, bool causal, int window, int window_right, int "
      "sink_tokens) "
      "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink_logit)");
}
