// A captured launch is replayed with other lengths in the same buffers; launches go to any stream.
#include <stdexcept>

#include "attention/cuda/fixture.h"

namespace basin::attention::cuda_tests {
namespace {

class CudaAttentionGraph : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (!HasFatalFailure()) expect_success(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  void TearDown() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  static void expect_success(cudaError_t status) {
    if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
  }

  // (The stream waits for nothing that other streams do, so the tests wait for the device on both sides of it.)
  cudaGraphExec_t captured(OnDevice& device) {
    test::synchronize_device();
    device.launch(stream_);  // loads the kernel
    test::synchronize_device();
    expect_success(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    device.launch(stream_);
    cudaGraph_t graph = nullptr;
    expect_success(cudaStreamEndCapture(stream_, &graph));
    cudaGraphExec_t replay = nullptr;
    expect_success(cudaGraphInstantiate(&replay, graph, 0));
    expect_success(cudaGraphDestroy(graph));
    return replay;
  }

  // The rows of `parts`, computed by replays of a graph that was captured for `most`.
  void expect_replays(const Shape& shape, const std::vector<Part>& most,
                      const std::vector<std::vector<Part>>& others) {
    const Layout layout{.page_tokens = 64,
                        .shared_keys = true};  // (shared: no page is gone, whatever the lengths)
    const Problem problem(shape, most, layout);
    OnDevice device(problem);
    cudaGraphExec_t replay = captured(device);
    for (const std::vector<Part>& parts : others) {
      const Problem small(shape, parts, layout);
      OnDevice fresh(small);
      fresh.launch();
      const Bits want = fresh.bits();
      // Same keys, other queries and lengths.
      expect_success(cudaMemcpy(device.q.data(), fresh.q.data(), std::min(device.q.bytes(), fresh.q.bytes()),
                                cudaMemcpyDeviceToDevice));
      if (shape.q_sink) {
        expect_success(cudaMemcpy(device.q_sink.data(), fresh.q_sink.data(),
                                  std::min(device.q_sink.bytes(), fresh.q_sink.bytes()),
                                  cudaMemcpyDeviceToDevice));
      }
      expect_success(cudaMemcpy(device.q_begin.data(), fresh.q_begin.data(), fresh.q_begin.bytes(),
                                cudaMemcpyDeviceToDevice));
      expect_success(cudaMemcpy(device.kv_tokens.data(), fresh.kv_tokens.data(), fresh.kv_tokens.bytes(),
                                cudaMemcpyDeviceToDevice));
      device.reset();
      test::synchronize_device();
      expect_success(cudaGraphLaunch(replay, stream_));
      const Bits got = device.bits();
      ASSERT_GE(got.size(), want.size());
      for (std::size_t row = 0; row < got.size(); ++row) {
        if (row < want.size()) {
          EXPECT_EQ(got[row], want[row]) << row;
        } else {  // this row belongs to nobody now
          EXPECT_EQ(got[row].front(), 0x5a5au) << row;
          EXPECT_EQ(got[row].back(), 0x5a5a5a5au) << row;
        }
      }
    }
    expect_success(cudaGraphExecDestroy(replay));
  }

  cudaStream_t stream_ = nullptr;
};

TEST_F(CudaAttentionGraph, DecodeReplaysWithOtherLengths) {
  Shape shape;
  shape.spec.mask = {.window = 3000, .sink_tokens = 4};
  expect_replays(shape, {{1, 2, 5000}, {2, 2, 5000}, {3, 2, 5000}},
                 {{{1, 2, 5000}, {2, 2, 4999}, {3, 2, 1024}},
                  {{1, 2, 17}, {2, 2, 4097}, {3, 2, 0}},
                  {{1, 1, 1}, {2, 0, 100}, {3, 2, 5000}},
                  {{1, 0, 0}, {2, 0, 0}, {3, 0, 0}},
                  {{1, 2, 5000}, {2, 2, 5000}, {3, 2, 5000}}});
}

TEST_F(CudaAttentionGraph, PrefillReplaysWithOtherLengths) {
  Shape shape;
  shape.spec.mask = {.window = 900, .sink_tokens = 4};
  expect_replays(shape, {{1, 400, 1500}, {2, 400, 1500}, {3, 400, 1500}},
                 {{{1, 400, 1500}, {2, 400, 700}, {3, 1, 1024}},
                  {{1, 7, 17}, {2, 300, 300}, {3, 193, 100}},
                  {{1, 0, 0}, {2, 0, 100}, {3, 200, 1500}},
                  {{1, 0, 0}, {2, 0, 0}, {3, 0, 0}},
                  {{1, 400, 1500}, {2, 400, 1500}, {3, 400, 1500}}});
}

// Running totals of wide heads lie in the workspace, which the captured launch keeps.
TEST_F(CudaAttentionGraph, PrefillOfWideHeadsReplaysWithOtherLengths) {
  Shape shape;
  shape.h_q = 4;
  shape.d_qk = shape.d_v = 256;
  expect_replays(
      shape, {{1, 150, 4500}, {2, 150, 4500}},
      {{{1, 150, 4500}, {2, 10, 2100}}, {{1, 0, 0}, {2, 150, 300}}, {{1, 1, 4097}, {2, 150, 4500}}});
}

TEST_F(CudaAttentionGraph, ExtendReplaysWithOtherLengths) {
  Shape shape;
  shape.q_sink = true;
  shape.spec.mask = {.sink_tokens = 130};
  expect_replays(shape, {{1, 40, 18000}, {2, 40, 3000}, {3, 40, 3000}},
                 {{{1, 40, 18000}, {2, 40, 2999}, {3, 7, 1024}},
                  {{1, 40, 17}, {2, 0, 0}, {3, 40, 40}},
                  {{1, 1, 1}, {2, 0, 100}, {3, 40, 3000}},
                  {{1, 40, 18000}, {2, 40, 3000}, {3, 40, 3000}}});
}

// An error says what is wrong and launches nothing.
TEST_F(CudaAttentionGraph, AWorkspaceThatIsTooSmallIsRefused) {
  const Problem problem(Shape{}, {{0, 1, 3000}});
  OnDevice device(problem);
  const std::size_t bytes = cuda::workspace_bytes(device.forward);
  const test::DeviceBuffer small(bytes);
  for (const std::size_t given : {std::size_t{0}, bytes - 1})
    EXPECT_THROW(cuda::forward(device.forward, small.data(), given, stream_), std::runtime_error);
  EXPECT_THROW(cuda::forward(device.forward, nullptr, bytes, stream_), std::runtime_error);
  EXPECT_THROW(cuda::forward(device.forward, static_cast<char*>(small.data()) + 4, bytes, stream_),
               std::runtime_error);
  for (const auto& row : device.bits()) EXPECT_EQ(row.front(), 0x5a5au);
}

}  // namespace
}  // namespace basin::attention::cuda_tests
