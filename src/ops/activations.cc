#include "ops/activations.h"

#include <algorithm>

#include "base/scratch_buffer.h"

namespace basin::ops {
namespace {

using cpu::Activations;

constexpr std::int64_t kLine = 64;
constexpr std::int64_t kTokensPerTask = 32;
// Fewer take less time than handing them out.
constexpr std::int64_t kLeastElements = 16384;

std::int64_t whole_lines(std::int64_t bytes) {
  return (bytes + kLine - 1) / kLine * kLine;
}

// Places of one input's parts, from the beginning of its memory.
struct Places {
  std::int64_t scale, scaled_sum, half_sum, end;
};

Places places(const cpu::Prepared& prepared) {
  const std::int64_t rows = prepared.tokens * prepared.row_bytes;
  if (prepared.form == Activations::bf16) return {rows, rows, rows, rows};
  const std::int64_t blocks = 4 * prepared.tokens * (prepared.padded / cpu::kBlock);
  return {rows, rows + blocks, rows + 2 * blocks, whole_lines(rows + 4 * blocks)};
}

}  // namespace

std::size_t PreparedInputs::add(const Rows& rows, Activations form) {
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (rows_[i].x == rows.x && rows_[i].x_stride == rows.x_stride && rows_[i].tokens == rows.tokens &&
        prepared_[i].form == form)
      return i;
  }
  cpu::Prepared to{};
  to.form = form;
  to.tokens = rows.tokens;
  to.inputs = rows.inputs;
  to.padded = (rows.inputs + 63) / 64 * 64;
  // An odd number of cache lines: rows a large power of two apart compete for the same few places of the nearest cache.
  to.row_bytes = form == Activations::f32
                     ? rows.x_stride * 4
                     : (to.padded * (form == Activations::bf16 ? 2 : 1) / kLine | 1) * kLine;
  rows_.push_back(rows);
  prepared_.push_back(to);
  return rows_.size() - 1;
}

void PreparedInputs::make(ThreadPool& pool) {
  std::int64_t bytes = 0, elements = 0;
  for (const cpu::Prepared& prepared : prepared_) {
    if (prepared.form == Activations::f32) continue;
    bytes += places(prepared).end;
    elements += prepared.tokens * prepared.padded;
  }
  thread_local ScratchBuffer<std::byte> memory;  // of the calling thread; the pool only fills it
  std::byte* free = memory.at_least(static_cast<std::size_t>(bytes));
  struct Task {
    std::size_t number;
    std::int64_t token;
  };
  std::vector<Task> tasks;
  for (std::size_t i = 0; i < prepared_.size(); ++i) {
    cpu::Prepared& to = prepared_[i];
    if (to.form == Activations::f32) {
      to.data = reinterpret_cast<const std::byte*>(rows_[i].x);
      continue;
    }
    const Places at = places(to);
    to.data = free;
    if (to.form == Activations::int8) {
      to.scale = reinterpret_cast<const float*>(free + at.scale);
      to.scaled_sum = reinterpret_cast<const float*>(free + at.scaled_sum);
      to.half_sum = reinterpret_cast<const std::int32_t*>(free + at.half_sum);
    }
    free += at.end;
    for (std::int64_t token = 0; token < to.tokens; token += kTokensPerTask) tasks.push_back({i, token});
  }
  const auto run = [&](std::int64_t task) {
    const auto [number, token] = tasks[static_cast<std::size_t>(task)];
    const cpu::Prepared& whole = prepared_[number];
    const Rows& rows = rows_[number];
    cpu::kernel().prepare(rows.x + token * rows.x_stride, rows.x_stride,
                          slice(whole, token, std::min(kTokensPerTask, whole.tokens - token)));
  };
  if (elements < kLeastElements) {
    for (std::int64_t task = 0; task < std::ssize(tasks); ++task) run(task);
  } else {
    pool.parallel_for(std::ssize(tasks), [&](std::int64_t task, int) { run(task); });
  }
}

cpu::Prepared PreparedInputs::slice(const cpu::Prepared& whole, std::int64_t first, std::int64_t count) {
  cpu::Prepared part = whole;
  part.tokens = count;
  part.data += first * whole.row_bytes;
  if (whole.scale != nullptr) {
    part.scale += first * (whole.padded / cpu::kBlock);
    part.scaled_sum += first * (whole.padded / cpu::kBlock);
    part.half_sum += first * (whole.padded / cpu::kBlock * 2);
  }
  return part;
}

}  // namespace basin::ops
