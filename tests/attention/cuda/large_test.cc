// Tensors of more than 2^31 elements: the same bits as in small ones.
#include <stdexcept>

#include "attention/cuda/fixture.h"

namespace basin::attention::cuda_tests {
namespace {

constexpr std::int64_t kElementBytes = 2;
constexpr std::int64_t kManyElements = (std::int64_t{1} << 31) + 4096;

void copy(void* to, const void* from, std::int64_t bytes) {
  const cudaError_t status = cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice);
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

test::DeviceBuffer large(std::int64_t elements) {
  return test::DeviceBuffer(static_cast<std::size_t>(elements * kElementBytes));
}

class CudaAttentionLarge : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (HasFatalFailure()) return;
    std::size_t available = 0, total = 0;
    ASSERT_EQ(cudaMemGetInfo(&available, &total), cudaSuccess);
    if (available < std::size_t{20} << 30)
      GTEST_SKIP() << "needs 20 GiB of device memory; free are " << available;
  }
};

// Moves the pages of k or v behind kManyElements of NaN.
test::DeviceBuffer moved_back(ConstView& view, std::int64_t extra_pages) {
  const std::int64_t page = view.stride[0];
  test::DeviceBuffer buffer = large((extra_pages + view.shape[0]) * page);
  copy(static_cast<char*>(buffer.data()) + extra_pages * page * kElementBytes, view.data,
       view.shape[0] * page * kElementBytes);
  view.data = buffer.data();
  view.shape[0] += extra_pages;
  return buffer;
}

TEST_F(CudaAttentionLarge, MoreThanTwoToThe31Elements) {
  for (const std::int64_t q_tokens : {2, 130}) {
    SCOPED_TRACE(q_tokens);
    Shape shape;
    shape.spec.mask = {.window = 300, .sink_tokens = 4};
    const Problem problem(shape, {{1, q_tokens, 1500}, {2, q_tokens, 40}, {3, q_tokens, 2100}},
                          {.page_tokens = 256, .dense = true});
    OnDevice device(problem);
    device.launch();
    const Bits want = device.bits();

    cuda::Forward& forward = device.forward;
    const std::int64_t extra_pages = kManyElements / forward.k.stride[0] + 1;
    ASSERT_GT(extra_pages * forward.k.stride[0], std::int64_t{1} << 31);
    const test::DeviceBuffer k = moved_back(forward.k, extra_pages), v = moved_back(forward.v, extra_pages);
    std::vector<std::int32_t> table(device.page_table.bytes() / sizeof(std::int32_t));
    device.page_table.download(table.data(), device.page_table.bytes());
    for (std::int32_t& page : table) {
      if (page >= 0) page += static_cast<std::int32_t>(extra_pages);
    }
    device.page_table.upload(table.data(), device.page_table.bytes());

    // The third sequence's queries and results stand beyond 2^31 elements.
    const std::int64_t stride = kManyElements / 2, rows = forward.q.stride[0];
    ASSERT_GT(2 * stride, std::int64_t{1} << 31);
    const test::DeviceBuffer q = large(2 * stride + rows), out = large(2 * stride + rows);
    const auto at = [](const test::DeviceBuffer& buffer, std::int64_t element) {
      return static_cast<char*>(buffer.data()) + element * kElementBytes;
    };
    for (std::int64_t s = 0; s < 3; ++s)
      copy(at(q, s * stride), at(device.q, s * rows), rows * kElementBytes);
    forward.q.data = q.data();
    forward.out.data = out.data();
    forward.q.stride[0] = forward.out.stride[0] = stride;
    device.reset();
    device.launch();
    for (std::int64_t s = 0; s < 3; ++s)
      copy(at(device.out, s * rows), at(out, s * stride), rows * kElementBytes);
    EXPECT_EQ(want, device.bits());
    for (const auto* buffer : {&k, &v, &q, &out}) EXPECT_TRUE(buffer->guards_intact());
  }
}

// Pages further apart than 2^31 elements, and new rows that stand as far from each other.
TEST_F(CudaAttentionLarge, AppendsBeyondTwoToThe31Elements) {
  constexpr std::int64_t kHead = 64, kTokens = 2;
  const test::DeviceBuffer pages = large(kManyElements + 2 * kHead * kTokens);
  test::DeviceBuffer fresh = large(kManyElements + kHead);
  std::vector<std::uint16_t> row(kHead);
  for (std::size_t i = 0; i < row.size(); ++i) row[i] = static_cast<std::uint16_t>(1000 + i);
  fresh.upload(row.data(), kHead * kElementBytes, kManyElements * kElementBytes);
  cuda::Append append;
  append.batch = 1;
  append.new_k = contiguous<const void*>(fresh.data(), DType::bf16, {2, 1, kHead});
  append.new_k.stride[0] = kManyElements;
  append.new_v = append.new_k;
  append.k = contiguous<void*>(pages.data(), DType::bf16, {2, kTokens, 1, kHead});
  append.k.stride[0] = kManyElements;
  append.v = append.k;
  append.v.data = static_cast<char*>(pages.data()) + kTokens * kHead * kElementBytes;
  const test::DeviceBuffer begin(std::vector<std::int32_t>{0, 2}), tokens(std::vector<std::int32_t>{3}),
      table(std::vector<std::int32_t>{0, 1});
  append.new_begin = static_cast<const std::int32_t*>(begin.data());
  append.kv_tokens = static_cast<const std::int32_t*>(tokens.data());
  append.page_table = static_cast<const std::int32_t*>(table.data());
  append.page_table_stride = 2;
  cuda::append(append, nullptr);
  test::synchronize_device();
  // Token 2 is the first of page 1; all else is as it was.
  std::vector<std::uint16_t> got(2 * kHead * kTokens), want(got.size(), 0xffff);
  pages.download(got.data(), got.size() * kElementBytes, kManyElements * kElementBytes);
  for (const std::size_t side : {std::size_t{0}, std::size_t{kTokens * kHead}})
    std::copy(row.begin(), row.end(), want.begin() + static_cast<std::ptrdiff_t>(side));
  EXPECT_EQ(got, want);
  EXPECT_TRUE(pages.guards_intact());
}

}  // namespace
}  // namespace basin::attention::cuda_tests
