#include "basin/tensor/view.h"

#include <gmock/gmock.h>

#include <cstdint>

namespace basin {
namespace {

TEST(View, ContiguousIsRowMajor) {
  float data[24];
  const View view = contiguous<void*>(data, DType::f32, {2, 3, 4});
  EXPECT_EQ(view.rank, 3);
  EXPECT_THAT(view.shape, testing::ElementsAre(2, 3, 4, 0));
  EXPECT_THAT(view.stride, testing::ElementsAre(12, 4, 1, 0));
}

TEST(View, StridesPassTwoToThe31) {
  char byte = 0;
  const View view = contiguous<void*>(&byte, DType::u8, {2, 1 << 20, 1 << 12});
  EXPECT_EQ(view.stride[0], std::int64_t{1} << 32);
}

TEST(View, AnAbsentTensorIsFalse) {
  EXPECT_FALSE(View());
  EXPECT_FALSE(ConstView());
}

TEST(View, AMutableViewConvertsToAConstOne) {
  double data[2];
  const View view = contiguous<void*>(data, DType::f64, {2});
  const ConstView read = view;
  EXPECT_EQ(read.data, data);
  EXPECT_EQ(read.dtype, DType::f64);
  EXPECT_EQ(read.stride, view.stride);
}

}  // namespace
}  // namespace basin
