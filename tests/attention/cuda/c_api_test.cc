// The C interface on the device: the same bits as the C++ interface. (Compiled in, not from the shared library, so that the
// program still runs where there is a driver and nothing else.)
#include <gmock/gmock.h>

#include <cstring>
#include <stdexcept>

#include "attention/cuda/fixture.h"
#include "basin/attention/cuda_c_api.h"

namespace basin::attention::cuda_tests {
namespace {

void expect_success(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

template <typename Tensor, typename Pointer>
Tensor tensor_of(const BasicView<Pointer>& view) {
  Tensor tensor{};
  tensor.data = view.data;
  tensor.dtype = view.dtype == DType::bf16 ? BASIN_BF16 : BASIN_F16;
  tensor.rank = view.rank;
  std::copy(view.shape.begin(), view.shape.end(), tensor.shape);
  std::copy(view.stride.begin(), view.stride.end(), tensor.stride);
  return tensor;
}

basin_attention_cuda_forward_args args_of(const cuda::Forward& f, cudaStream_t stream) {
  basin_attention_cuda_forward_args args;
  EXPECT_EQ(basin_attention_cuda_forward_init(&args, sizeof args), BASIN_OK);
  args.spec.stream = stream;
  args.spec.causal = f.spec.mask.causal ? 1 : 0;
  args.spec.window = f.spec.mask.window;
  args.spec.window_right = f.spec.mask.window_right;
  args.spec.sink_tokens = f.spec.mask.sink_tokens;
  args.spec.scale = f.spec.scale;
  args.spec.softcap = f.spec.softcap;
  args.batch = f.batch;
  args.max_q_tokens = f.max_q_tokens;
  args.max_kv_tokens = f.max_kv_tokens;
  args.q = tensor_of<basin_const_tensor>(f.q);
  if (f.q_sink) args.q_sink = tensor_of<basin_const_tensor>(f.q_sink);
  args.k = tensor_of<basin_const_tensor>(f.k);
  args.v = tensor_of<basin_const_tensor>(f.v);
  args.q_begin = f.q_begin;
  args.kv_begin = f.kv_begin;
  args.kv_tokens = f.kv_tokens;
  args.page_table = f.page_table;
  args.page_table_stride = f.page_table_stride;
  args.sink_logit = f.sink_logit;
  args.out = tensor_of<basin_tensor>(f.out);
  args.lse = f.lse;
  args.lse_with_sink = f.lse_with_sink;
  return args;
}

class CudaCInterface : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (!HasFatalFailure()) expect_success(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  void TearDown() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  // Every field of the problem changes something, so each must have arrived.
  void expect_same(const Shape& shape, const std::vector<Part>& parts, const Layout& layout) {
    const Problem problem(shape, parts, layout);
    OnDevice device(problem);
    device.launch();
    const Bits want = device.bits();
    device.reset();
    const auto args = args_of(device.forward, stream_);
    EXPECT_EQ(basin_attention_cuda_forward_supported(&args), BASIN_OK);
    std::size_t bytes = 0;
    ASSERT_EQ(basin_attention_cuda_workspace_bytes(&args, &bytes), BASIN_OK);
    EXPECT_EQ(bytes, cuda::workspace_bytes(device.forward));
    test::DeviceBuffer workspace(bytes);
    workspace.fill(0);
    test::synchronize_device();
    ASSERT_EQ(basin_attention_cuda_forward(&args, workspace.data(), bytes), BASIN_OK)
        << basin_attention_cuda_error_message();
    EXPECT_EQ(device.bits(), want);
    EXPECT_TRUE(workspace.guards_intact());
  }

  cudaStream_t stream_ = nullptr;
};

TEST_F(CudaCInterface, ForwardIsThatOfCpp) {
  Shape shape;
  shape.sink_logit = {0.5f, -1, 2, 0, 1, -2, 3, 0.25f};
  shape.spec.mask = {.window = 700, .sink_tokens = 4};
  expect_same(shape, {{1, 1, 3000}, {2, 1, 40}}, {.page_tokens = 16, .loose = true});
  expect_same(shape, {{1, 1, 3000}, {2, 1, 3000}}, {.dense = true});
  shape.spec.softcap = 20;
  shape.dtype = DType::f16;
  expect_same(shape, {{1, 300, 500}, {2, 100, 1100}}, {.loose = true});
  shape.spec.mask = {.causal = false, .window = 100, .window_right = 30};
  expect_same(shape, {{1, 300, 500}, {2, 100, 1100}}, {});
  shape = Shape{};
  shape.q_sink = true;
  shape.spec.mask = {.window = 700, .sink_tokens = 4};
  expect_same(shape, {{1, 1, 3000}, {2, 2, 40}}, {.page_tokens = 64});
}

TEST_F(CudaCInterface, BackwardIsThatOfCpp) {
  constexpr std::int64_t kRows = 100, kHeads = 4, kKeyHeads = 2, kHead = 64;
  const std::vector<std::uint16_t> rows(kRows * kHeads * kHead, 0x3e80);  // 0.25
  const std::vector<float> row_sums(kRows * kHeads, 2.0f);
  const test::DeviceBuffer q(rows), k(rows), lse(row_sums), dlse(row_sums),
      sink(std::vector<float>{0.5f, -1.0f, 2.0f, 0.0f}), begin(std::vector<std::int32_t>{0, 30, kRows}),
      tokens(std::vector<std::int32_t>{30, 60});
  const auto gradients = [&](const auto& launch) {
    test::DeviceBuffer dq(rows.size() * 2), dk(rows.size()), dv(rows.size()), dsink(kHeads * sizeof(float));
    const auto input = [&](const test::DeviceBuffer& buffer, std::int64_t heads) {
      return contiguous<const void*>(buffer.data(), DType::bf16, {kRows, heads, kHead});
    };
    const auto output = [&](test::DeviceBuffer& buffer, std::int64_t heads) {
      return contiguous<void*>(buffer.data(), DType::bf16, {kRows, heads, kHead});
    };
    cuda::Backward backward;
    cuda::Forward& forward = backward.forward;
    forward.spec.scale = 0.3;
    forward.spec.mask = {.window = 20, .sink_tokens = 2};
    forward.batch = 2;
    forward.max_q_tokens = forward.max_kv_tokens = 70;
    forward.q = input(q, kHeads);
    forward.k = forward.v = input(k, kKeyHeads);
    forward.q_begin = forward.kv_begin = static_cast<const std::int32_t*>(begin.data());
    forward.kv_tokens = static_cast<const std::int32_t*>(tokens.data());
    forward.sink_logit = static_cast<const float*>(sink.data());
    forward.out = contiguous<void*>(const_cast<void*>(q.data()), DType::bf16, {kRows, kHeads, kHead});
    forward.lse_with_sink = static_cast<float*>(const_cast<void*>(lse.data()));
    backward.dout = forward.q;
    backward.dlse_with_sink = static_cast<const float*>(dlse.data());
    backward.dq = output(dq, kHeads);
    backward.dk = output(dk, kKeyHeads);
    backward.dv = output(dv, kKeyHeads);
    backward.dsink_logit = static_cast<float*>(dsink.data());
    test::DeviceBuffer workspace(cuda::workspace_bytes(backward));
    test::synchronize_device();
    launch(backward, workspace);
    test::synchronize_device();
    std::vector<std::uint16_t> result;
    for (const auto* buffer : {&dq, &dk, &dv, &dsink}) {
      std::vector<std::uint16_t> bits(buffer->bytes() / 2);
      buffer->download(bits.data(), buffer->bytes());
      result.insert(result.end(), bits.begin(), bits.end());
    }
    return result;
  };
  const auto want = gradients([](const cuda::Backward& backward, test::DeviceBuffer& workspace) {
    cuda::backward(backward, workspace.data(), workspace.bytes(), nullptr);
  });
  const auto got = gradients([&](const cuda::Backward& backward, test::DeviceBuffer& workspace) {
    const cuda::Forward& f = backward.forward;
    basin_attention_cuda_backward_args args;
    EXPECT_EQ(basin_attention_cuda_backward_init(&args, sizeof args), BASIN_OK);
    args.spec = args_of(f, stream_).spec;
    args.batch = f.batch;
    args.max_q_tokens = f.max_q_tokens;
    args.max_kv_tokens = f.max_kv_tokens;
    args.q = tensor_of<basin_const_tensor>(f.q);
    args.k = tensor_of<basin_const_tensor>(f.k);
    args.v = tensor_of<basin_const_tensor>(f.v);
    args.q_begin = f.q_begin;
    args.kv_begin = f.kv_begin;
    args.kv_tokens = f.kv_tokens;
    args.sink_logit = f.sink_logit;
    args.out = tensor_of<basin_const_tensor>(ConstView(f.out));
    args.lse_with_sink = f.lse_with_sink;
    args.dout = tensor_of<basin_const_tensor>(backward.dout);
    args.dlse_with_sink = backward.dlse_with_sink;
    args.dq = tensor_of<basin_tensor>(backward.dq);
    args.dk = tensor_of<basin_tensor>(backward.dk);
    args.dv = tensor_of<basin_tensor>(backward.dv);
    args.dsink_logit = backward.dsink_logit;
    EXPECT_EQ(basin_attention_cuda_backward_supported(&args), BASIN_OK);
    std::size_t bytes = 0;
    EXPECT_EQ(basin_attention_cuda_backward_workspace_bytes(&args, &bytes), BASIN_OK);
    EXPECT_EQ(bytes, workspace.bytes());
    EXPECT_EQ(basin_attention_cuda_backward(&args, workspace.data(), bytes), BASIN_OK)
        << basin_attention_cuda_error_message();
  });
  EXPECT_EQ(got, want);
  EXPECT_NE(std::count(want.begin(), want.end(), 0xffff), std::ssize(want));
}

TEST_F(CudaCInterface, AppendIsThatOfCpp) {
  constexpr std::int64_t kHeads = 2, kHead = 64, kPage = 16, kPages = 8, kRows = 20;
  std::vector<std::uint16_t> rows(kRows * kHeads * kHead);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::uint16_t>(i);
  const test::DeviceBuffer fresh(rows), begin(std::vector<std::int32_t>{0, 3, kRows}),
      tokens(std::vector<std::int32_t>{30, 40}), table(std::vector<std::int32_t>{5, 1, -1, 4, 7, 2});
  const auto appended = [&](const auto& launch) {
    test::DeviceBuffer pages(2 * kPages * kPage * kHeads * kHead * sizeof(std::uint16_t));
    cuda::Append append;
    append.batch = 2;
    append.new_k = append.new_v = contiguous<const void*>(fresh.data(), DType::bf16, {kRows, kHeads, kHead});
    append.new_begin = static_cast<const std::int32_t*>(begin.data());
    append.k = append.v = contiguous<void*>(pages.data(), DType::bf16, {kPages, kPage, kHeads, kHead});
    append.v.data = static_cast<std::byte*>(pages.data()) + pages.bytes() / 2;
    append.kv_tokens = static_cast<const std::int32_t*>(tokens.data());
    append.page_table = static_cast<const std::int32_t*>(table.data());
    append.page_table_stride = 3;
    test::synchronize_device();
    launch(append);
    test::synchronize_device();
    std::vector<std::uint16_t> result(pages.bytes() / sizeof(std::uint16_t));
    pages.download(result.data(), pages.bytes());
    return result;
  };
  const auto want = appended([](const cuda::Append& append) { cuda::append(append, nullptr); });
  const auto got = appended([&](const cuda::Append& append) {
    basin_attention_cuda_append_args args;
    EXPECT_EQ(basin_attention_cuda_append_init(&args, sizeof args), BASIN_OK);
    args.stream = stream_;
    args.batch = append.batch;
    args.new_k = tensor_of<basin_const_tensor>(append.new_k);
    args.new_v = tensor_of<basin_const_tensor>(append.new_v);
    args.new_begin = append.new_begin;
    args.k = tensor_of<basin_tensor>(append.k);
    args.v = tensor_of<basin_tensor>(append.v);
    args.kv_tokens = append.kv_tokens;
    args.page_table = append.page_table;
    args.page_table_stride = append.page_table_stride;
    EXPECT_EQ(basin_attention_cuda_append_supported(&args), BASIN_OK);
    EXPECT_EQ(basin_attention_cuda_append(&args), BASIN_OK) << basin_attention_cuda_error_message();
  });
  EXPECT_EQ(got, want);
  EXPECT_NE(std::count(want.begin(), want.end(), 0xffff), std::ssize(want));
}

TEST_F(CudaCInterface, WhatTheDeviceCannotDoIsSaid) {
  const Problem problem(Shape{}, {{0, 1, 3000}});
  OnDevice device(problem);
  auto args = args_of(device.forward, stream_);
  std::size_t bytes = 0;
  ASSERT_EQ(basin_attention_cuda_workspace_bytes(&args, &bytes), BASIN_OK);
  const test::DeviceBuffer workspace(bytes);
  int devices = 0, before = -1, after = -1;
  expect_success(cudaGetDeviceCount(&devices));
  expect_success(cudaGetDevice(&before));
  const auto expect_refused = [&](void* memory, std::size_t given, const char* words) {
    EXPECT_EQ(basin_attention_cuda_forward(&args, memory, given), BASIN_INVALID_ARGUMENT);
    EXPECT_THAT(basin_attention_cuda_error_message(), testing::HasSubstr(words));
  };
  expect_refused(workspace.data(), bytes - 1, "the workspace has");
  expect_refused(nullptr, bytes, "the workspace has");
  args.spec.device_index = devices;
  expect_refused(workspace.data(), bytes, "device_index is");
  expect_success(cudaGetDevice(&after));
  EXPECT_EQ(before, after);
  for (const auto& row : device.bits()) EXPECT_EQ(row.front(), 0x5a5au);
}

// Where there are two devices: the call runs on the one that it names, and leaves the thread's own alone.
TEST_F(CudaCInterface, AnotherDeviceThanTheCurrentOne) {
  int devices = 0;
  expect_success(cudaGetDeviceCount(&devices));
  if (devices < 2) GTEST_SKIP() << "one device only";
  const Problem problem(Shape{}, {{0, 1, 3000}});
  const Bits want = run_bits(Shape{}, {{0, 1, 3000}});
  expect_success(cudaSetDevice(1));
  {
    OnDevice device(problem);
    auto args = args_of(device.forward, nullptr);
    args.spec.device_index = 1;
    std::size_t bytes = 0;
    ASSERT_EQ(basin_attention_cuda_workspace_bytes(&args, &bytes), BASIN_OK);
    test::DeviceBuffer workspace(bytes);
    workspace.fill(0);
    test::synchronize_device();
    expect_success(cudaSetDevice(0));
    EXPECT_EQ(basin_attention_cuda_forward(&args, workspace.data(), bytes), BASIN_OK);
    int current = -1;
    expect_success(cudaGetDevice(&current));
    EXPECT_EQ(current, 0);
    expect_success(cudaSetDevice(1));
    EXPECT_EQ(device.bits(), want);
  }
  expect_success(cudaSetDevice(0));
}

}  // namespace
}  // namespace basin::attention::cuda_tests
