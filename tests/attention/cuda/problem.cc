#include "attention/cuda/problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <stdexcept>

#include "attention/cuda/sm90/choose.h"
#include "basin/base/thread_pool.h"

namespace basin::attention::cuda_tests {
namespace {

constexpr unsigned char kSentinel = 0x5a;
constexpr std::int64_t kElementBytes = 2;
constexpr std::int64_t kGap = 8;            // elements: the smallest that keeps 16-byte steps
constexpr std::int32_t kNoEntry = 1 << 28;  // of a page table, behind the pages of a sequence

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

// Of all launches, zeroed once and as far as one needs it, as an application would keep it: every launch finds what the last
// one left. It never moves, because captured graphs hold its address.
class Workspace {
 public:
  void* reserve(std::size_t bytes) {
    if (bytes + kWatchedBytes > memory_.bytes())
      throw std::logic_error("the tests have a workspace that is too small: raise Workspace::kBytes");
    if (bytes > used_) {
      std::vector<std::byte> zeros(bytes - used_);
      memory_.upload(zeros.data(), zeros.size(), used_);
      used_ = bytes;
      test::synchronize_device();  // other streams do not wait for the upload
    }
    return memory_.data();
  }

  /// Fails the test when a counter is not back at zero, or a byte behind what any launch was given has changed.
  void expect_sound() const {
    std::vector<std::uint32_t> counters(std::min(used_ / sizeof(std::uint32_t), index(sm90::kCounters)));
    memory_.download(counters.data(), counters.size() * sizeof(std::uint32_t));
    EXPECT_TRUE(std::all_of(counters.begin(), counters.end(), [](std::uint32_t n) { return n == 0; }))
        << "a launch left a counter that is not zero";
    std::vector<unsigned char> behind(kWatchedBytes);
    memory_.download(behind.data(), behind.size(), used_);
    EXPECT_TRUE(std::all_of(behind.begin(), behind.end(), [](unsigned char byte) { return byte == 0xff; }))
        << "a launch wrote behind its workspace";
    EXPECT_TRUE(memory_.guards_intact()) << "a launch wrote outside its workspace";
  }

 private:
  static constexpr std::size_t kBytes = std::size_t{512} << 20, kWatchedBytes = 4096;
  test::DeviceBuffer memory_{kBytes};
  std::size_t used_ = 0;
};

Workspace& workspace() {
  static Workspace workspace;
  return workspace;
}

// The same view over a copy of `memory` at `base`.
template <typename Pointer>
BasicView<Pointer> moved(const View& view, const std::vector<std::byte>& memory, void* base) {
  BasicView<Pointer> result{nullptr, view.dtype, view.rank, view.shape, view.stride};
  result.data = static_cast<std::byte*>(base) + (static_cast<std::byte*>(view.data) - memory.data());
  return result;
}

// [rows, heads, d] as [sequences, extent, heads, d], from row `first`.
template <typename Pointer>
BasicView<Pointer> as_dense(BasicView<Pointer> view, std::int64_t first, std::int64_t sequences,
                            std::int64_t extent, std::int64_t tokens) {
  using Byte =
      std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::byte, std::byte>;
  view.data = static_cast<Byte*>(view.data) + first * view.stride[0] * kElementBytes;
  view.rank = 4;
  view.shape = {sequences, tokens, view.shape[1], view.shape[2]};
  view.stride = {extent * view.stride[0], view.stride[0], view.stride[1], 1};
  return view;
}

}  // namespace

double noise(Kind kind, std::int64_t sequence, std::int64_t position, std::int64_t head, std::int64_t d) {
  std::uint64_t x = (static_cast<std::uint64_t>(kind) + 1) * 0x9e3779b97f4a7c15u;
  for (const std::int64_t part : {sequence, position, head, d}) {
    x ^= static_cast<std::uint64_t>(part) + 0x632be59bd9b4e019u;
    x *= 0xff51afd7ed558ccdu;
    x ^= x >> 32;
    x *= 0xc4ceb9fe1a85ec53u;
    x ^= x >> 29;
  }
  return static_cast<double>(x >> 11) * 0x1p-52 - 1.0;
}

void Problem::put(std::vector<std::byte>& memory, std::int64_t at, double value) const {
  const auto x = static_cast<float>(value);
  const std::uint16_t bits = shape_.dtype == DType::bf16 ? to_bf16(x).bits : to_f16(x).bits;
  std::memcpy(memory.data() + at * kElementBytes, &bits, sizeof bits);
}

View Problem::rows_view(std::vector<std::byte>& memory, std::int64_t rows, std::int64_t heads,
                        std::int64_t d) const {
  const std::int64_t gap = layout_.loose ? kGap : 0;
  View view = contiguous<void*>(nullptr, shape_.dtype, {rows, heads, d});
  view.stride = {heads * (d + gap) + gap, d + gap, 1, 0};
  memory.assign(index((rows * view.stride[0] + 2 * kGap) * kElementBytes), std::byte{0xff});
  view.data = memory.data() + gap * kElementBytes;  // the smallest alignment
  return view;
}

Problem::Problem(const Shape& shape, const std::vector<Part>& parts, const Layout& layout)
    : shape_(shape), parts_(parts), layout_(layout), places_(parts.size()) {
  if (shape_.spec.scale == 0) shape_.spec.scale = 1 / std::sqrt(static_cast<double>(shape.d_qk));
  for (const Part& part : parts_) {
    max_q_ = std::max(max_q_, part.q_tokens);
    max_kv_ = std::max(max_kv_, part.kv_tokens);
  }
  place_queries();
  place_keys();
  write_keys();
}

void Problem::place_queries() {
  const std::int64_t lead = layout_.loose ? 3 : 0;
  q_extent_ = max_q_ + (layout_.loose ? 2 : 0);
  std::int64_t next = lead;
  for (std::size_t s = 0; s < parts_.size(); ++s) {
    if (layout_.dense && parts_[s].q_tokens != max_q_)
      throw std::logic_error("dense queries of different lengths");
    places_[s].q_begin = next;
    next += layout_.dense ? q_extent_ : parts_[s].q_tokens;
  }
  const std::int64_t extent = next + lead;
  q_view_ = rows_view(q_, extent, shape_.h_q, shape_.d_qk);
  if (shape_.q_sink) q_sink_view_ = rows_view(q_sink_, extent, shape_.h_q, shape_.d_qk);
  const std::int64_t offset = (static_cast<std::byte*>(q_view_.data) - q_.data()) / kElementBytes;
  for (std::size_t s = 0; s < parts_.size(); ++s) {
    const Part& part = parts_[s];
    for (std::int64_t i = 0; i < part.q_tokens; ++i) {
      row_part_.push_back(static_cast<std::int64_t>(s));
      row_token_.push_back(i);
      const std::int64_t p = part.kv_tokens - part.q_tokens + i;
      for (std::int64_t h = 0; h < shape_.h_q; ++h) {
        const std::int64_t at = offset + (places_[s].q_begin + i) * q_view_.stride[0] + h * q_view_.stride[1];
        for (std::int64_t d = 0; d < shape_.d_qk; ++d) {
          put(q_, at + d, shape_.spread * shape_.source(Kind::q, part.sequence, p, h, d));
          if (shape_.q_sink)
            put(q_sink_, at + d, shape_.spread * shape_.source(Kind::q_sink, part.sequence, p, h, d));
        }
      }
    }
  }
}

// Whether the kernel may use the key: contiguous keys are all valid; keys on pages are gone
// when every query has left them behind. (No key is beyond the right end of the last query's window: it stands on the last.)
bool Problem::used(const Part& part, std::int64_t j) const {
  if (j >= part.kv_tokens) return false;
  const Mask& mask = shape_.spec.mask;
  if (layout_.page_tokens == 0 || layout_.shared_keys || j < mask.sink_tokens) return true;
  return mask.window == 0 || part.kv_tokens - part.q_tokens - j < mask.window;
}

void Problem::place_keys() {
  const std::int64_t lead = layout_.loose ? 3 : 0, page = layout_.page_tokens;
  kv_extent_ = max_kv_ + (layout_.loose ? 2 : 0);
  std::map<std::int64_t, std::size_t> owners;  // sequence -> the part whose place its others share
  std::int64_t next = lead, pages = 1;         // page 0 is never used
  for (std::size_t s = 0; s < parts_.size(); ++s) {
    const Part& part = parts_[s];
    std::int64_t tokens = part.kv_tokens;
    if (layout_.shared_keys) {
      const auto [owner, fresh] = owners.emplace(part.sequence, s);
      if (!fresh) {
        places_[s].kv_begin = places_[owner->second].kv_begin;
        places_[s].pages = places_[owner->second].pages;
        continue;
      }
      for (const Part& other : parts_)
        if (other.sequence == part.sequence) tokens = std::max(tokens, other.kv_tokens);
    }
    places_[s].kv_begin = next;
    next += layout_.dense ? kv_extent_ : tokens + (layout_.loose ? 5 : 0);
    for (std::int64_t first = 0; page > 0 && first < tokens; first += page) {
      bool needed = layout_.shared_keys;
      for (std::int64_t j = first; !needed && j < std::min(first + page, tokens); ++j) needed = used(part, j);
      places_[s].pages.push_back(needed ? static_cast<std::int32_t>(pages++) : -1);
    }
  }
  if (page == 0) {
    k_view_ = rows_view(k_, next + lead, shape_.h_kv, shape_.d_qk);
    v_view_ = rows_view(v_, next + lead, shape_.h_kv, shape_.d_v);
    return;
  }
  // Random order, and the last page belongs to nobody either.
  std::vector<std::int32_t> order(index(pages));
  for (std::int64_t n = 0; n < pages; ++n) order[index(n)] = static_cast<std::int32_t>(n);
  std::shuffle(order.begin() + 1, order.end(), std::mt19937(7));
  for (Place& place : places_) {
    for (std::int32_t& n : place.pages)
      if (n > 0) n = order[static_cast<std::size_t>(n)];
  }
  const auto paged = [&](std::vector<std::byte>& memory, std::int64_t d) {
    // (A page of `page` rows and, in loose layouts, one more row that is a gap.)
    const std::int64_t extent = page + (layout_.loose ? 1 : 0);
    View view = rows_view(memory, (pages + 1) * extent, shape_.h_kv, d);
    view.rank = 4;
    view.stride = {extent * view.stride[0], view.stride[0], view.stride[1], 1};
    view.shape = {pages + 1, page, shape_.h_kv, d};
    return view;
  };
  k_view_ = paged(k_, shape_.d_qk);
  v_view_ = paged(v_, shape_.d_v);
}

void Problem::write_keys() {
  const std::int64_t page = layout_.page_tokens;
  std::map<std::int64_t, std::int64_t> written;  // tokens of a sequence, when its parts share them
  for (std::size_t s = 0; s < parts_.size(); ++s) {
    const Part& part = parts_[s];
    std::int64_t first = 0;
    if (layout_.shared_keys) {
      first = written[part.sequence];
      written[part.sequence] = std::max(first, part.kv_tokens);
    }
    const auto write = [&](std::vector<std::byte>& memory, const View& view, Kind kind, std::int64_t j) {
      const std::size_t head_axis = page > 0 ? 2 : 1;
      std::int64_t at = (static_cast<std::byte*>(view.data) - memory.data()) / kElementBytes;
      at += page > 0 ? places_[s].pages[index(j / page)] * view.stride[0] + j % page * view.stride[1]
                     : (places_[s].kv_begin + j) * view.stride[0];
      for (std::int64_t h = 0; h < shape_.h_kv; ++h) {
        for (std::int64_t d = 0; d < view.shape[head_axis + 1]; ++d)
          put(memory, at + h * view.stride[head_axis] + d, shape_.source(kind, part.sequence, j, h, d));
      }
    };
    for (std::int64_t j = first; j < part.kv_tokens; ++j) {
      if (!used(part, j)) continue;
      write(k_, k_view_, Kind::k, j);
      write(v_, v_view_, Kind::v, j);
    }
  }
}

Result Problem::reference(reference::Precision precision, const std::vector<std::int64_t>& rows) const {
  const bool oracle = precision == reference::Precision::f64;
  const DType out_dtype = oracle ? DType::f64 : shape_.dtype;
  const std::int64_t extent = q_view_.shape[0], group = shape_.h_q / shape_.h_kv;
  std::vector<std::byte> out(index(extent * shape_.h_q * shape_.d_v * block_bytes(out_dtype)));
  std::vector<double> lse(index(shape_.h_q * extent)), lse_with_sink = lse;
  const View out_view = contiguous<void*>(out.data(), out_dtype, {extent, shape_.h_q, shape_.d_v});

  struct Task {
    std::size_t part;
    std::int64_t begin, end, kv_head;
  };
  std::vector<Task> tasks;
  const bool causal = shape_.spec.mask.causal;
  if (!rows.empty() && !causal) throw std::logic_error("single rows of the reference need a causal mask");
  for (std::int64_t kv_head = 0; kv_head < shape_.h_kv; ++kv_head) {
    for (const std::int64_t row : rows)
      tasks.push_back(
          {index(row_part_[index(row)]), row_token_[index(row)], row_token_[index(row)] + 1, kv_head});
    if (!rows.empty()) continue;
    for (std::size_t s = 0; s < parts_.size(); ++s) {
      const std::int64_t step = causal ? 16 : std::max<std::int64_t>(parts_[s].q_tokens, 1);
      for (std::int64_t begin = 0; begin < parts_[s].q_tokens; begin += step)
        tasks.push_back({s, begin, std::min(begin + step, parts_[s].q_tokens), kv_head});
    }
  }
  const auto run_task = [&](const Task& task) {
    const Part& part = parts_[task.part];
    const Place& place = places_[task.part];
    Sequence sequence;
    sequence.q_begin = place.q_begin + task.begin;
    sequence.q_tokens = task.end - task.begin;
    sequence.kv_begin = place.kv_begin;
    // Under a causal mask the keys behind the last row do not matter, so the rows may stand at the end of theirs.
    sequence.kv_tokens = std::max<std::int64_t>(part.kv_tokens - part.q_tokens + task.end, 0);
    if (layout_.page_tokens > 0) sequence.pages = place.pages.data();
    attention::Forward forward;
    forward.spec = shape_.spec;
    forward.sequences = {&sequence, 1};
    const auto heads = [](ConstView view, std::int64_t first, std::int64_t count) {
      const auto axis = static_cast<std::size_t>(view.rank - 2);
      view.data =
          static_cast<const std::byte*>(view.data) + first * view.stride[axis] * block_bytes(view.dtype);
      view.shape[axis] = count;
      return view;
    };
    const std::int64_t h = task.kv_head * group;
    forward.q = heads(q_view_, h, group);
    if (shape_.q_sink) forward.q_sink = heads(q_sink_view_, h, group);
    forward.k = heads(k_view_, task.kv_head, 1);
    forward.v = heads(v_view_, task.kv_head, 1);
    if (!shape_.sink_logit.empty()) forward.sink_logit = shape_.sink_logit.data() + h;
    forward.out = out_view;
    forward.out.data = static_cast<std::byte*>(out_view.data) + h * shape_.d_v * block_bytes(out_dtype);
    reference::Doubles doubles;
    doubles.lse = lse.data() + h * extent;
    doubles.lse_with_sink = lse_with_sink.data() + h * extent;
    reference::forward(forward, precision, doubles);
  };
  static ThreadPool pool(0);
  pool.parallel_for(static_cast<std::int64_t>(tasks.size()),
                    [&](std::int64_t n, int) { run_task(tasks[index(n)]); });

  Result result;
  for (std::size_t row = 0; row < row_part_.size(); ++row) {
    const std::int64_t at = places_[index(row_part_[row])].q_begin + row_token_[row];
    for (std::int64_t h = 0; h < shape_.h_q; ++h) {
      for (std::int64_t d = 0; d < shape_.d_v; ++d) {
        const std::byte* element =
            out.data() + ((at * shape_.h_q + h) * shape_.d_v + d) * block_bytes(out_dtype);
        double value = 0;
        std::uint16_t bits = 0;
        if (oracle)
          std::memcpy(&value, element, sizeof value);
        else
          std::memcpy(&bits, element, sizeof bits);
        if (!oracle)
          value =
              static_cast<double>(shape_.dtype == DType::bf16 ? to_float(bf16{bits}) : to_float(f16{bits}));
        result.out.push_back(value);
      }
      result.lse.push_back(lse[index(h * extent + at)]);
      result.lse_with_sink.push_back(lse_with_sink[index(h * extent + at)]);
    }
  }
  return result;
}

OnDevice::OnDevice(const Problem& problem) : problem_(problem) {
  const Shape& shape = problem.shape_;
  const Layout& layout = problem.layout_;
  const auto batch = static_cast<std::int64_t>(problem.parts_.size());
  const std::int64_t first = layout.loose ? 3 : 0;  // physical row of the first sequence
  forward.spec = shape.spec;
  forward.batch = batch;
  forward.max_q_tokens = problem.max_q_;
  forward.max_kv_tokens = problem.max_kv_;

  // Queries and results.
  q = test::DeviceBuffer(problem.q_);
  forward.q = moved<const void*>(problem.q_view_, problem.q_, q.data());
  if (shape.q_sink) {
    q_sink = test::DeviceBuffer(problem.q_sink_);
    forward.q_sink = moved<const void*>(problem.q_sink_view_, problem.q_sink_, q_sink.data());
  }
  const std::int64_t extent = problem.q_view_.shape[0];
  std::vector<std::byte> host_out;
  out_rows_ = problem.rows_view(host_out, extent, shape.h_q, shape.d_v);
  out_offset_ = (static_cast<std::byte*>(out_rows_.data) - host_out.data()) / kElementBytes;
  out = test::DeviceBuffer(host_out.size());
  forward.out = moved<void*>(out_rows_, host_out, out.data());
  std::int64_t lse_count = shape.h_q * extent;
  if (layout.dense) {
    forward.q = as_dense(forward.q, first, batch, problem.q_extent_, problem.max_q_);
    if (shape.q_sink)
      forward.q_sink = as_dense(forward.q_sink, first, batch, problem.q_extent_, problem.max_q_);
    forward.out = as_dense(forward.out, first, batch, problem.q_extent_, problem.max_q_);
    lse_count = batch * shape.h_q * problem.max_q_;
  } else {
    std::vector<std::int32_t> begin(problem.places_.size() + 1);
    for (std::size_t i = 0; i < problem.places_.size(); ++i) {
      begin[i] = static_cast<std::int32_t>(problem.places_[i].q_begin);
      begin[i + 1] = begin[i] + static_cast<std::int32_t>(problem.parts_[i].q_tokens);
    }
    q_begin = test::DeviceBuffer(begin);
    forward.q_begin = static_cast<const std::int32_t*>(q_begin.data());
  }
  lse = test::DeviceBuffer(index(lse_count) * sizeof(float));
  lse_with_sink = test::DeviceBuffer(index(lse_count) * sizeof(float));
  forward.lse = static_cast<float*>(lse.data());
  forward.lse_with_sink = static_cast<float*>(lse_with_sink.data());
  reset();

  // Keys.
  k = test::DeviceBuffer(problem.k_);
  v = test::DeviceBuffer(problem.v_);
  forward.k = moved<const void*>(problem.k_view_, problem.k_, k.data());
  forward.v = moved<const void*>(problem.v_view_, problem.v_, v.data());
  std::vector<std::int32_t> tokens;
  for (const Part& part : problem.parts_) tokens.push_back(static_cast<std::int32_t>(part.kv_tokens));
  const bool equal = std::adjacent_find(tokens.begin(), tokens.end(), std::not_equal_to<>()) == tokens.end();
  const bool paged = layout.page_tokens > 0;
  if (paged || layout.shared_keys || layout.loose || (layout.dense && !equal)) {
    kv_tokens = test::DeviceBuffer(tokens);
    forward.kv_tokens = static_cast<const std::int32_t*>(kv_tokens.data());
  }
  if (paged) {
    std::int64_t stride = 1;
    for (const auto& place : problem.places_)
      stride = std::max(stride, static_cast<std::int64_t>(place.pages.size()) + 1);
    std::vector<std::int32_t> table(index(batch * stride), kNoEntry);
    for (std::int64_t s = 0; s < batch; ++s) {
      const auto& pages = problem.places_[index(s)].pages;
      std::copy(pages.begin(), pages.end(), table.begin() + s * stride);
    }
    page_table = test::DeviceBuffer(table);
    forward.page_table = static_cast<const std::int32_t*>(page_table.data());
    forward.page_table_stride = stride;
  } else if (layout.dense) {
    forward.k = as_dense(forward.k, first, batch, problem.kv_extent_, problem.max_kv_);
    forward.v = as_dense(forward.v, first, batch, problem.kv_extent_, problem.max_kv_);
  } else {
    std::vector<std::int32_t> begin(problem.places_.size() + 1);
    for (std::size_t i = 0; i < problem.places_.size(); ++i) {
      begin[i] = static_cast<std::int32_t>(problem.places_[i].kv_begin);
      begin[i + 1] = begin[i] + tokens[i];
    }
    kv_begin = test::DeviceBuffer(begin);
    forward.kv_begin = static_cast<const std::int32_t*>(kv_begin.data());
  }
  if (!shape.sink_logit.empty()) {
    sink_logit = test::DeviceBuffer(shape.sink_logit);
    forward.sink_logit = static_cast<const float*>(sink_logit.data());
  }
}

void OnDevice::reset() {
  out.fill(kSentinel);
  lse.fill(kSentinel);
  lse_with_sink.fill(kSentinel);
}

void OnDevice::launch(CUstream_st* stream) {
  const std::size_t bytes = cuda::workspace_bytes(forward);
  cuda::forward(forward, workspace().reserve(bytes), bytes, stream);
}

Bits OnDevice::bits() const {
  test::synchronize_device();
  workspace().expect_sound();
  for (const auto* buffer : {&out, &lse, &lse_with_sink}) EXPECT_TRUE(buffer->guards_intact());
  std::vector<std::uint16_t> values(out.bytes() / kElementBytes);
  std::vector<std::uint32_t> sums(lse.bytes() / sizeof(float)), sums_with_sink = sums;
  out.download(values.data(), out.bytes());
  lse.download(sums.data(), lse.bytes());
  lse_with_sink.download(sums_with_sink.data(), lse.bytes());

  const Shape& shape = problem_.shape_;
  std::vector<bool> value_is_row(values.size(), false), sum_is_row(sums.size(), false);
  Bits result;
  for (std::size_t row = 0; row < problem_.row_part_.size(); ++row) {
    const std::int64_t part = problem_.row_part_[row], token = problem_.row_token_[row];
    const std::int64_t place = problem_.places_[index(part)].q_begin + token;
    std::vector<std::uint32_t>& words = result.emplace_back();
    for (std::int64_t h = 0; h < shape.h_q; ++h) {
      for (std::int64_t d = 0; d < shape.d_v; ++d) {
        const std::size_t at = index(out_offset_ + place * out_rows_.stride[0] + h * out_rows_.stride[1] + d);
        words.push_back(values[at]);
        value_is_row[at] = true;
      }
      const std::size_t at = index(problem_.layout_.dense ? (part * shape.h_q + h) * problem_.max_q_ + token
                                                          : h * out_rows_.shape[0] + place);
      words.push_back(sums[at]);
      words.push_back(sums_with_sink[at]);
      sum_is_row[at] = true;
    }
  }
  std::int64_t strays = 0;
  for (std::size_t i = 0; i < values.size(); ++i)
    strays += !value_is_row[i] && values[i] != kSentinel * 0x101;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    constexpr std::uint32_t kUntouched = kSentinel * 0x1010101u;
    strays += !sum_is_row[i] && (sums[i] != kUntouched || sums_with_sink[i] != kUntouched);
  }
  EXPECT_EQ(strays, 0) << "elements outside the rows were written";
  return result;
}

Result OnDevice::result() const {
  Result result;
  const Shape& shape = problem_.shape_;
  for (const auto& words : bits()) {
    std::size_t at = 0;
    for (std::int64_t h = 0; h < shape.h_q; ++h) {
      for (std::int64_t d = 0; d < shape.d_v; ++d) {
        const auto word = static_cast<std::uint16_t>(words[at++]);
        result.out.push_back(
            static_cast<double>(shape.dtype == DType::bf16 ? to_float(bf16{word}) : to_float(f16{word})));
      }
      result.lse.push_back(static_cast<double>(std::bit_cast<float>(words[at++])));
      result.lse_with_sink.push_back(static_cast<double>(std::bit_cast<float>(words[at++])));
    }
  }
  return result;
}

Bits run_bits(const Shape& shape, const std::vector<Part>& parts, const Layout& layout) {
  const Problem problem(shape, parts, layout);
  OnDevice device(problem);
  device.launch();
  return device.bits();
}

Result run(const Problem& problem) {
  OnDevice device(problem);
  device.launch();
  return device.result();
}

Difference difference(const std::vector<double>& a, const std::vector<double>& b) {
  Difference result;
  if (a.size() != b.size()) throw std::logic_error("results of different sizes");
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;  // also equal infinities
    const double d = std::abs(a[i] - b[i]);
    const double error = std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
    result.largest = std::max(result.largest, error);
    result.rms += error * error;
  }
  if (!a.empty()) result.rms = std::sqrt(result.rms / static_cast<double>(a.size()));
  return result;
}

}  // namespace basin::attention::cuda_tests
