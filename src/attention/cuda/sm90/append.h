// Copies new keys and values to their pages.
#pragma once

#include <cstdint>

namespace basin::attention::sm90 {

/// Rows and strides of one tensor, in chunks of 16 bytes.
struct AppendSide {
  const void* from = nullptr;  // [batch or 1, tokens, heads, head_chunks]
  std::int64_t from_sequence = 0, from_token = 0, from_head = 0;
  void* to = nullptr;  // [pages, page_tokens, heads, head_chunks]
  std::int64_t to_page = 0, to_token = 0, to_head = 0;
  int head_chunks = 0;
  int chunks = 0;  // of a token: heads * head_chunks
  int pieces = 0;  // of a token, each of kAppendPieceChunks at most
};

struct AppendArguments {
  int batch = 0;
  int rows = 0;        // of new tokens, at most
  int new_tokens = 0;  // of each sequence when dense
  int page_tokens = 0;
  int pages = 0;
  const std::int32_t* new_begin = nullptr;   // [batch + 1]; null: dense
  const std::int32_t* kv_tokens = nullptr;   // [batch]
  const std::int32_t* page_table = nullptr;  // [batch, page_table_stride]
  std::int64_t page_table_stride = 0;
  AppendSide sides[2];  // k, v
};

inline constexpr int kAppendWarps = 4;  // of a CTA; each copies a piece of a token
inline constexpr int kAppendPieceChunks = 128;

/// A kernel with the argument AppendArguments for 32 kAppendWarps threads; one warp for each row and piece of both sides.
const void* append_kernel();

}  // namespace basin::attention::sm90
