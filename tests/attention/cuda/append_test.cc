// New keys and values on their way to pages: every byte of the cache is compared, written or not.
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>

#include "attention/cuda/fixture.h"

namespace basin::attention::cuda_tests {
namespace {

constexpr std::int64_t kElementBytes = 2;
constexpr std::int64_t kGap = 8;  // elements
constexpr std::int32_t kNoEntry = 1 << 28;
constexpr std::byte kSentinel{0x5a};

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

void expect_success(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

struct Lengths {
  std::int64_t new_tokens = 0;
  std::int64_t kv_tokens = 0;  // with the new ones
};

struct Heads {
  std::int64_t count = 0, d_qk = 0, d_v = 0;
};

struct Setting {
  DType dtype = DType::bf16;
  Heads heads{2, 64, 64};
  std::int64_t page_tokens = 16;
  bool dense = false;
  bool loose = false;  // gaps between heads, tokens, pages and sequences
};

// A tensor of 16-bit elements in host memory and on the device.
struct Tensor {
  std::vector<std::byte> host;
  View view;  // over the device's copy
  test::DeviceBuffer device;

  Tensor(DType dtype, std::initializer_list<std::int64_t> shape, bool loose) {
    view = contiguous<void*>(nullptr, dtype, shape);
    std::int64_t stride = 1;
    for (int i = view.rank - 1; i >= 0; --i) {
      view.stride[index(i)] = stride;
      stride = stride * view.shape[index(i)] + (loose ? kGap : 0);
    }
    host.assign(index((stride + 2 * kGap) * kElementBytes), kSentinel);
  }
  void upload() {
    device = test::DeviceBuffer(host);
    view.data = static_cast<std::byte*>(device.data()) + kGap * kElementBytes;
  }
  std::byte* at(std::int64_t row) { return host.data() + (kGap + row) * kElementBytes; }
};

// Sequences with pages in random order, their new tokens, and what the cache must hold afterwards.
class Cache {
 public:
  Cache(const Setting& setting, const std::vector<Lengths>& lengths, unsigned seed = 1)
      : setting_(setting), lengths_(lengths), random_(seed), batch_(std::ssize(lengths)) {
    place_pages();
    const Heads& heads = setting.heads;
    const std::int64_t pages = std::ssize(order_);
    cache_.emplace_back(
        setting.dtype,
        std::initializer_list<std::int64_t>{pages, setting.page_tokens, heads.count, heads.d_qk},
        setting.loose);
    cache_.emplace_back(
        setting.dtype,
        std::initializer_list<std::int64_t>{pages, setting.page_tokens, heads.count, heads.d_v},
        setting.loose);
    make_new_tokens();
    for (Tensor& tensor : cache_) tensor.upload();
    append.batch = batch_;
    append.k = cache_[0].view;
    append.v = cache_[1].view;
    upload_lengths();
  }
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  // What the page table and the lengths say from the next upload_lengths on.
  std::int32_t& entry(std::int64_t sequence, std::int64_t page) {
    return table_[index(sequence * stride_ + page)];
  }
  Lengths& lengths(std::int64_t sequence) { return lengths_[index(sequence)]; }

  // Into the same memory each time.
  void upload_lengths() {
    std::vector<std::int32_t> tokens, begin{0};
    for (const Lengths& l : lengths_) {
      tokens.push_back(static_cast<std::int32_t>(l.kv_tokens));
      begin.push_back(begin.back() + static_cast<std::int32_t>(l.new_tokens));
    }
    append.kv_tokens = upload(kv_tokens_, tokens);
    append.page_table = upload(page_table_, table_);
    append.page_table_stride = stride_;
    if (!setting_.dense) append.new_begin = upload(new_begin_, begin);
  }

  // Waits, and compares every byte.
  void expect_written() {
    test::synchronize_device();
    std::int64_t row = 0;
    for (std::int64_t s = 0; s < batch_; ++s) {
      const Lengths& l = lengths_[index(s)];
      for (std::int64_t i = 0; i < l.new_tokens; ++i, ++row) write(s, l.kv_tokens - l.new_tokens + i, row, i);
    }
    for (const Tensor& tensor : cache_) {
      std::vector<std::byte> got(tensor.host.size());
      tensor.device.download(got.data(), got.size());
      EXPECT_TRUE(got == tensor.host)
          << "first difference at byte "
          << std::mismatch(got.begin(), got.end(), tensor.host.begin()).first - got.begin();
      EXPECT_TRUE(tensor.device.guards_intact());
    }
  }

  std::int64_t written() const { return written_; }
  std::int64_t pages() const { return std::ssize(order_); }

  cuda::Append append;

 private:
  static const std::int32_t* upload(test::DeviceBuffer& to, const std::vector<std::int32_t>& from) {
    const std::size_t bytes = from.size() * sizeof(std::int32_t);
    if (to.data() == nullptr) to = test::DeviceBuffer(bytes);
    to.upload(from.data(), bytes);
    return static_cast<const std::int32_t*>(to.data());
  }

  void place_pages() {
    std::int64_t pages = 2;  // the first and the last belong to nobody
    for (const Lengths& l : lengths_) {
      const std::int64_t count = (l.kv_tokens + setting_.page_tokens - 1) / setting_.page_tokens;
      pages += count;
      stride_ = std::max(stride_, count + 1);
    }
    order_.resize(index(pages));
    std::iota(order_.begin(), order_.end(), 0);
    std::shuffle(order_.begin() + 1, order_.end() - 1, random_);
    table_.assign(index(batch_ * stride_), kNoEntry);
    std::size_t next = 1;
    for (std::int64_t s = 0; s < batch_; ++s) {
      for (std::int64_t page = 0; page * setting_.page_tokens < lengths_[index(s)].kv_tokens; ++page)
        entry(s, page) = order_[next++];
    }
  }

  void make_new_tokens() {
    std::int64_t rows = 0;
    for (const Lengths& l : lengths_) rows += l.new_tokens;
    const Heads& heads = setting_.heads;
    for (const std::int64_t d : {heads.d_qk, heads.d_v}) {
      if (setting_.dense)
        new_.emplace_back(setting_.dtype,
                          std::initializer_list<std::int64_t>{batch_, rows / batch_, heads.count, d},
                          setting_.loose);
      else  // and some rows that belong to no sequence
        new_.emplace_back(setting_.dtype, std::initializer_list<std::int64_t>{rows + 3, heads.count, d},
                          setting_.loose);
      for (std::byte& byte : new_.back().host) byte = static_cast<std::byte>(random_());
      new_.back().upload();
    }
    append.new_k = new_[0].view;
    append.new_v = new_[1].view;
  }

  // One token, in host memory.
  void write(std::int64_t sequence, std::int64_t position, std::int64_t row, std::int64_t token) {
    const std::int64_t slot = position / setting_.page_tokens;
    if (position < 0 || slot >= stride_) return;
    const std::int32_t page = entry(sequence, slot);
    if (page < 0 || page >= pages()) return;
    ++written_;
    for (std::size_t side = 0; side < 2; ++side) {
      const View &from = new_[side].view, &to = cache_[side].view;
      for (std::int64_t h = 0; h < setting_.heads.count; ++h) {
        const std::int64_t source =
            setting_.dense ? sequence * from.stride[0] + token * from.stride[1] + h * from.stride[2]
                           : row * from.stride[0] + h * from.stride[1];
        const std::int64_t target =
            page * to.stride[0] + position % setting_.page_tokens * to.stride[1] + h * to.stride[2];
        std::memcpy(cache_[side].at(target), new_[side].at(source), index(to.shape[3] * kElementBytes));
      }
    }
  }

  Setting setting_;
  std::vector<Lengths> lengths_;
  std::mt19937 random_;
  std::int64_t batch_ = 0, stride_ = 1, written_ = 0;
  std::vector<std::int32_t> order_, table_;
  std::vector<Tensor> cache_, new_;  // k, v
  test::DeviceBuffer kv_tokens_, page_table_, new_begin_;
};

class CudaAppend : public CudaTest {};

std::vector<std::int32_t> downloaded(const test::DeviceBuffer& buffer) {
  std::vector<std::int32_t> values(buffer.bytes() / sizeof(std::int32_t));
  buffer.download(values.data(), buffer.bytes());
  return values;
}

void expect_appended(const Setting& setting, const std::vector<Lengths>& lengths) {
  SCOPED_TRACE(testing::Message() << name(setting.dtype) << ", " << setting.heads.count << " heads of "
                                  << setting.heads.d_qk << " and " << setting.heads.d_v << ", pages of "
                                  << setting.page_tokens << (setting.dense ? ", dense" : "")
                                  << (setting.loose ? ", loose" : ""));
  Cache cache(setting, lengths);
  cuda::append(cache.append, nullptr);
  cache.expect_written();
}

TEST_F(CudaAppend, EveryPageSizeAndLayout) {
  const std::vector<Lengths> ragged = {{1, 1},     {0, 50}, {5, 5}, {300, 1000},
                                       {17, 4097}, {3, 2},  {0, 0}, {1, 256}};
  const std::vector<Lengths> dense = {{4, 4}, {4, 300}, {4, 1000}, {4, 2}, {4, 0}};
  for (const std::int64_t page_tokens : {1, 2, 3, 16, 64, 100, 256, 1024}) {
    for (const bool loose : {false, true}) {
      expect_appended({.page_tokens = page_tokens, .loose = loose}, ragged);
      expect_appended({.dtype = DType::f16, .page_tokens = page_tokens, .dense = true, .loose = loose},
                      dense);
    }
  }
}

TEST_F(CudaAppend, EveryHeadSize) {
  for (const Heads& heads : {Heads{1, 8, 8},
                             {1, 64, 128},
                             {8, 128, 128},
                             {8, 64, 64},
                             {3, 72, 256},
                             {1, 576, 512},
                             {40, 192, 128},
                             {5, 2048, 8}}) {
    for (const bool loose : {false, true})
      expect_appended({.heads = heads, .loose = loose}, {{1, 40}, {33, 65}, {0, 3}, {7, 7}});
  }
}

TEST_F(CudaAppend, ManySequences) {
  std::mt19937 random(3);
  for (const std::int64_t batch : {1, 2, 31, 32, 33, 64, 65, 1000, 1023, 1024, 1025, 3000}) {
    SCOPED_TRACE(batch);
    std::vector<Lengths> lengths(index(batch));
    const auto below = [&](std::int64_t end) { return static_cast<std::int64_t>(random()) % end; };
    for (Lengths& l : lengths) {
      l.new_tokens = below(4);
      l.kv_tokens = l.new_tokens + below(40);
    }
    expect_appended({.heads = {1, 8, 16}, .page_tokens = 4}, lengths);
    for (Lengths& l : lengths) l = {1, 1 + l.kv_tokens};
    expect_appended({.heads = {1, 8, 16}, .page_tokens = 4, .dense = true}, lengths);
  }
}

TEST_F(CudaAppend, EntriesThatAreNoPagesAreNotWritten) {
  for (const bool dense : {false, true}) {
    Cache cache({.page_tokens = 16, .dense = dense}, {{40, 40}, {40, 90}, {40, 64}});
    cache.entry(0, 1) = -1;
    cache.entry(0, 2) = std::numeric_limits<std::int32_t>::min();
    cache.entry(1, 4) = static_cast<std::int32_t>(cache.pages());
    cache.entry(2, 2) = std::numeric_limits<std::int32_t>::max();
    cache.upload_lengths();
    cuda::append(cache.append, nullptr);
    cache.expect_written();
    EXPECT_EQ(cache.written(), 120 - 16 - 8 - 16 - 16);
  }
}

TEST_F(CudaAppend, LengthsBeyondThePageTableAreNotWritten) {
  // Seven pages and an entry behind them for each sequence: 132 tokens reach into the next sequence's entries.
  Cache cache({.page_tokens = 16}, {{8, 40}, {8, 100}, {8, 60}});
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  for (const std::vector<std::int64_t>& tokens : {std::vector<std::int64_t>{132, 132, 132},
                                                  {kMost, kMost, kMost},
                                                  {-1, -kMost - 1, -kMost},
                                                  {7, 0, 3}}) {
    for (std::int64_t s = 0; s < 3; ++s) cache.lengths(s).kv_tokens = tokens[index(s)];
    cache.upload_lengths();
    cuda::append(cache.append, nullptr);
    cache.expect_written();
  }
  EXPECT_EQ(cache.written(), 7 + 0 + 3);
}

TEST_F(CudaAppend, NothingToAppendAndNowhereToPutIt) {
  expect_appended({}, {{0, 5}, {0, 0}});
  expect_appended({.dense = true}, {{0, 5}, {0, 0}});
  Cache cache({}, {{2, 5}});
  cache.append.k.shape[0] = cache.append.v.shape[0] = 0;
  cuda::append(cache.append, nullptr);
  cache.append.k.shape[0] = cache.append.v.shape[0] = cache.pages();
  cache.entry(0, 0) = -1;
  cache.upload_lengths();
  cuda::append(cache.append, nullptr);
  cache.expect_written();
  EXPECT_EQ(cache.written(), 0);
}

// A captured launch is replayed with other lengths and pages in the same buffers, on a stream of its own.
TEST_F(CudaAppend, ReplaysWithOtherLengths) {
  Cache cache({.page_tokens = 16}, {{40, 300}, {40, 300}, {40, 300}});
  test::synchronize_device();
  cudaStream_t stream = nullptr;
  expect_success(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cuda::append(cache.append, stream);  // loads the kernel
  cache.expect_written();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  expect_success(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  cuda::append(cache.append, stream);
  expect_success(cudaStreamEndCapture(stream, &graph));
  expect_success(cudaGraphInstantiate(&replay, graph, 0));
  expect_success(cudaGraphDestroy(graph));
  const std::vector<std::vector<Lengths>> others = {{{1, 1}, {1, 300}, {0, 100}},
                                                    {{0, 0}, {0, 0}, {0, 0}},
                                                    {{0, 17}, {120, 250}, {0, 300}},
                                                    {{60, 60}, {1, 33}, {59, 200}}};
  for (const std::vector<Lengths>& lengths : others) {
    for (std::int64_t s = 0; s < 3; ++s) cache.lengths(s) = lengths[index(s)];
    std::swap(cache.entry(0, 0), cache.entry(1, 2));
    cache.upload_lengths();
    test::synchronize_device();
    expect_success(cudaGraphLaunch(replay, stream));
    cache.expect_written();
  }
  expect_success(cudaGraphExecDestroy(replay));
  expect_success(cudaStreamDestroy(stream));
}

// The same bits as over a cache that held the keys from the beginning.
TEST_F(CudaAppend, ForwardSeesWhatWasAppended) {
  for (const DType dtype : kStorages) {
    for (const std::int64_t page_tokens : {1, 16, 64, 256}) {
      SCOPED_TRACE(page_tokens);
      Shape shape;
      shape.dtype = dtype;
      shape.d_qk = 128;
      shape.d_v = 72;
      shape.spec.mask = {.window = 700, .sink_tokens = 4};
      const std::vector<Part> parts = {{1, 1, 1}, {2, 1, 1500}, {3, 0, 20}, {4, 3, 900}, {5, 200, 300}};
      const Problem problem(shape, parts, {.page_tokens = page_tokens, .loose = true});
      OnDevice device(problem);
      device.launch();
      const Bits want = device.bits();

      // New tokens in tensors of their own, one row for each query row; the cache forgets them.
      const auto& f = device.forward;
      const std::int64_t rows = f.q.shape[0];
      const std::vector<std::int32_t> table = downloaded(device.page_table),
                                      begin = downloaded(device.q_begin);
      cuda::Append append;
      std::vector<test::DeviceBuffer> sources;
      for (const Kind kind : {Kind::k, Kind::v}) {
        test::DeviceBuffer& pages = kind == Kind::k ? device.k : device.v;
        const ConstView& view = kind == Kind::k ? f.k : f.v;
        const std::int64_t offset =
            (static_cast<const std::byte*>(view.data) - static_cast<const std::byte*>(pages.data())) /
            kElementBytes;
        std::vector<std::uint16_t> cached(pages.bytes() / kElementBytes);
        pages.download(cached.data(), pages.bytes());
        const std::int64_t d = view.shape[3], token = shape.h_kv * d;
        std::vector<std::uint16_t> source(index(rows * token), 0xffff);
        for (std::size_t s = 0; s < parts.size(); ++s) {
          for (std::int64_t i = 0; i < parts[s].q_tokens; ++i) {
            const std::int64_t p = parts[s].kv_tokens - parts[s].q_tokens + i;
            const std::int64_t page = table[s * index(f.page_table_stride) + index(p / page_tokens)];
            for (std::int64_t h = 0; h < shape.h_kv; ++h) {
              const auto from = cached.begin() + offset + page * view.stride[0] +
                                p % page_tokens * view.stride[1] + h * view.stride[2];
              std::copy(from, from + d, source.begin() + (begin[s] + i) * token + h * d);
              std::fill(from, from + d, std::uint16_t{0xffff});  // NaN
            }
          }
        }
        pages.upload(cached.data(), pages.bytes());
        sources.emplace_back(source);
        const auto fresh = contiguous<const void*>(sources.back().data(), dtype, {rows, shape.h_kv, d});
        const View to{const_cast<void*>(view.data), dtype, 4, view.shape, view.stride};
        (kind == Kind::k ? append.new_k : append.new_v) = fresh;
        (kind == Kind::k ? append.k : append.v) = to;
      }
      append.batch = f.batch;
      append.new_begin = f.q_begin;
      append.kv_tokens = f.kv_tokens;
      append.page_table = f.page_table;
      append.page_table_stride = f.page_table_stride;
      device.reset();
      device.launch();
      EXPECT_NE(device.bits(), want);  // they are gone indeed
      device.reset();
      cuda::append(append, nullptr);
      device.launch();
      EXPECT_EQ(device.bits(), want);
    }
  }
}

}  // namespace
}  // namespace basin::attention::cuda_tests
