// What the reduction order on sm_90 takes for granted about the tensor cores (src/attention/cuda/sm90/order.cuh), bit for bit:
// no manual promises it. Where one of these fails, prefill and decode no longer agree.
#include <bit>
#include <numeric>
#include <random>
#include <stdexcept>

#include "attention/cuda/fixture.h"
#include "attention/cuda/sm90/tensor_map.h"
#include "attention/cuda/tensor_core.h"
#include "basin/tensor/view.h"

namespace basin::attention::cuda_tests {
namespace {

constexpr int kRows = 64, kStep = 16;
constexpr int kWidths[] = {8, 16, 32, 64, 128, 256};
constexpr Operand kFirst[] = {Operand::k_major, Operand::mn_major, Operand::registers};
constexpr Operand kSecond[] = {Operand::k_major, Operand::mn_major, Operand::plain};

void expect_success(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

std::size_t index(int i) {
  return static_cast<std::size_t>(i);
}

struct Matrix {
  int rows = 0, depth = 0;
  std::vector<std::uint16_t> bits{};  // [rows, depth] of bf16 or f16

  std::uint16_t& at(int row, int k) { return bits[index(row * depth + k)]; }
  std::uint16_t at(int row, int k) const { return bits[index(row * depth + k)]; }
};

std::uint16_t rounded(DType dtype, float x) {
  return dtype == DType::bf16 ? to_bf16(x).bits : to_f16(x).bits;
}

// Numbers of either sign whose sizes differ by up to 2^(high - low).
Matrix mixed(DType dtype, int rows, int depth, unsigned seed, int low = -16, int high = 8) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> digits(1, 2);
  std::uniform_int_distribution<int> exponent(low, high), sign(0, 1);
  Matrix matrix{rows, depth, std::vector<std::uint16_t>(index(rows * depth))};
  for (std::uint16_t& bits : matrix.bits)
    bits = rounded(dtype, std::ldexp(sign(random) == 0 ? digits(random) : -digits(random), exponent(random)));
  return matrix;
}

Matrix rows_of(const Matrix& from, int first, int count) {
  const auto begin = from.bits.begin() + first * from.depth;
  return {count, from.depth, {begin, begin + count * from.depth}};
}

// Column k of the result is column order[k], or zeros where that is negative.
Matrix columns_of(const Matrix& from, const std::vector<int>& order) {
  Matrix result{from.rows, static_cast<int>(order.size()), {}};
  for (int row = 0; row < from.rows; ++row) {
    for (const int k : order) result.bits.push_back(k < 0 ? std::uint16_t{0} : from.at(row, k));
  }
  return result;
}

std::vector<int> ascending(int count) {
  std::vector<int> order(index(count));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

struct Form {
  Operand a = Operand::k_major, b = Operand::k_major;
};

struct Steps {
  int first = 0;
  int last = -1;  // -1: all
  const std::vector<float>* continued = nullptr;
};

// [64, b.rows] = a b^T.
std::vector<float> multiply(DType dtype, const Matrix& a, const Matrix& b, Form form = {}, Steps steps = {}) {
  if (a.rows != kRows || a.depth != b.depth || a.depth % kStep != 0) throw std::logic_error("shapes");
  const void* kernel = product_kernel(dtype, b.rows, form.a, form.b);
  if (kernel == nullptr) throw std::logic_error("there is no such form");
  const test::DeviceBuffer on_a(a.bits), on_b(b.bits);
  test::DeviceBuffer on_c, on_d(index(kRows * b.rows) * sizeof(float));
  if (steps.continued != nullptr) on_c = test::DeviceBuffer(*steps.continued);
  ProductArguments arguments{on_a.data(),
                             on_b.data(),
                             static_cast<const float*>(on_c.data()),
                             static_cast<float*>(on_d.data()),
                             a.depth,
                             steps.first,
                             steps.last < 0 ? a.depth / kStep : steps.last};
  void* list[] = {&arguments};
  const int bytes = product_bytes(a.depth, b.rows);
  expect_success(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  expect_success(cudaLaunchKernel(kernel, dim3(1), dim3(128), list, index(bytes), nullptr));
  test::synchronize_device();
  EXPECT_TRUE(on_d.guards_intact());
  std::vector<float> result(index(kRows * b.rows));
  on_d.download(result.data(), on_d.bytes());
  return result;
}

// Elements whose bits differ; `want(row, column)` names the other side's.
template <typename Want>
int differences(const std::vector<float>& got, int columns, const Want& want) {
  int count = 0;
  for (int i = 0; i < static_cast<int>(got.size()); ++i) {
    const float other = want(i / columns, i % columns);
    EXPECT_TRUE(std::isfinite(other));
    count += std::bit_cast<std::uint32_t>(got[index(i)]) != std::bit_cast<std::uint32_t>(other);
  }
  return count;
}

int differences(const std::vector<float>& got, const std::vector<float>& want) {
  if (got.size() != want.size()) throw std::logic_error("results of different sizes");
  return differences(got, kRows, [&](int row, int column) { return want[index(row * kRows + column)]; });
}

class CudaTensorCore : public CudaTest, public testing::WithParamInterface<DType> {
 protected:
  DType dtype() const { return GetParam(); }
};

TEST_P(CudaTensorCore, NeitherWidthNorPlaceOfTheOperandsMatters) {
  constexpr int kColumns = 256, kDepth = 256;
  const Matrix a = mixed(dtype(), kRows, kDepth, 1), b = mixed(dtype(), kColumns, kDepth, 2);
  const std::vector<float> want = multiply(dtype(), a, b);
  int forms = 0;
  for (const int width : kWidths) {
    for (const Operand first : kFirst) {
      for (const Operand second : kSecond) {
        if (product_kernel(dtype(), width, first, second) == nullptr) continue;
        ++forms;
        for (const int column : {0, (kColumns - width) / 2, kColumns - width}) {
          const auto got = multiply(dtype(), a, rows_of(b, column, width), {first, second});
          EXPECT_EQ(differences(got, width,
                                [&](int row, int i) { return want[index(row * kColumns + column + i)]; }),
                    0)
              << "width " << width << ", operands " << static_cast<int>(first) << " and "
              << static_cast<int>(second) << ", column " << column;
        }
      }
    }
  }
  EXPECT_EQ(forms, 3 * (3 * 2 + 3 * 3));
}

// Prefill has queries in rows and keys in columns; decode the other way round.
TEST_P(CudaTensorCore, OperandsMayBeExchanged) {
  constexpr int kDepth = 128;
  const Matrix queries = mixed(dtype(), kRows, kDepth, 3), keys = mixed(dtype(), 128, kDepth, 4);
  const std::vector<float> want = multiply(dtype(), queries, keys);
  for (const int width : {8, 16, 32, 64}) {
    for (const int key : {0, 64}) {
      const auto got = multiply(dtype(), rows_of(keys, key, 64), rows_of(queries, kRows - width, width));
      EXPECT_EQ(
          differences(got, width,
                      [&](int row, int i) { return want[index((kRows - width + i) * 128 + key + row)]; }),
          0)
          << width << " queries, keys from " << key;
    }
  }
}

TEST_P(CudaTensorCore, ARowDoesNotKnowItsIndex) {
  constexpr int kColumns = 64, kDepth = 128;
  const Matrix a = mixed(dtype(), kRows, kDepth, 5), b = mixed(dtype(), kColumns, kDepth, 6);
  const std::vector<float> want = multiply(dtype(), a, b);
  for (const int shift : {1, 8, 23, 32}) {
    Matrix moved = a;
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kDepth; ++k) moved.at(row, k) = a.at((row + shift) % kRows, k);
    }
    for (const Operand first : kFirst) {
      EXPECT_EQ(differences(multiply(dtype(), moved, b, {first, Operand::k_major}), kColumns,
                            [&](int row, int column) {
                              return want[index((row + shift) % kRows * kColumns + column)];
                            }),
                0)
          << shift;
    }
  }
}

TEST_P(CudaTensorCore, TheOrderInsideAStepDoesNotMatter) {
  constexpr int kDepth = 128;
  const Matrix a = mixed(dtype(), kRows, kDepth, 7), b = mixed(dtype(), kRows, kDepth, 8);
  const std::vector<float> want = multiply(dtype(), a, b);
  for (unsigned seed = 0; seed < 8; ++seed) {
    std::vector<int> order = ascending(kDepth);
    std::mt19937 random(seed);
    for (int step = 0; step < kDepth; step += kStep)
      std::shuffle(order.begin() + step, order.begin() + step + kStep, random);
    EXPECT_EQ(differences(multiply(dtype(), columns_of(a, order), columns_of(b, order)), want), 0) << seed;
  }
}

// A tile without a visible key may be multiplied or skipped; P = 0 against any finite V, and steps beyond the head size.
TEST_P(CudaTensorCore, StepsOfZerosChangeNothing) {
  constexpr int kSteps = 6;
  const Matrix a = mixed(dtype(), kRows, kSteps * kStep, 9), b = mixed(dtype(), kRows, kSteps * kStep, 10);
  const std::vector<float> want = multiply(dtype(), a, b);
  const Form forms[] = {{Operand::k_major, Operand::k_major},
                        {Operand::registers, Operand::mn_major},
                        {Operand::mn_major, Operand::plain}};
  for (const Form form : forms) {
    for (int at = 0; at <= kSteps; ++at) {
      for (const int zeros : {1, 3}) {
        // Zeros in one operand meet numbers of all sizes in the other.
        std::vector<int> with_zeros, with_numbers;
        for (int step = 0; step < kSteps + zeros; ++step) {
          const bool added = step >= at && step < at + zeros;
          const int from = added ? (step - at) % kSteps : step < at ? step : step - zeros;
          for (int k = 0; k < kStep; ++k) {
            with_zeros.push_back(added ? -1 : from * kStep + k);
            with_numbers.push_back(from * kStep + k);
          }
        }
        EXPECT_EQ(differences(multiply(dtype(), columns_of(a, with_zeros), columns_of(b, with_numbers), form),
                              want),
                  0)
            << zeros << " steps at " << at << ", zeros in the first";
        EXPECT_EQ(differences(multiply(dtype(), columns_of(a, with_numbers), columns_of(b, with_zeros), form),
                              want),
                  0)
            << zeros << " steps at " << at << ", zeros in the second";
      }
    }
  }
}

// What one row masks does not concern the others: P is 0 in some rows of a step and not in others.
TEST_P(CudaTensorCore, ARowMaySkipStepsOfItsOwn) {
  constexpr int kSteps = 8, kColumns = 64;
  const Matrix b = mixed(dtype(), kColumns, kSteps * kStep, 12), full = mixed(dtype(), kRows, b.depth, 11);
  Matrix masked = full;
  const auto skips = [](int row, int step) { return (row * 7 + step * 5) % 3 == 0; };
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < b.depth; ++k) {
      if (skips(row, k / kStep)) masked.at(row, k) = 0;
    }
  }
  const auto got = multiply(dtype(), masked, b, {Operand::registers, Operand::mn_major});
  for (int row = 0; row < kRows; ++row) {
    std::vector<int> order;
    for (int k = 0; k < b.depth; ++k) {
      if (!skips(row, k / kStep)) order.push_back(k);
    }
    const auto want = multiply(dtype(), columns_of(full, order), columns_of(b, order));
    for (int column = 0; column < kColumns; ++column)
      ASSERT_EQ(got[index(row * kColumns + column)], want[index(row * kColumns + column)]) << row;
  }
}

TEST_P(CudaTensorCore, AChainMayBeCutAnywhere) {
  constexpr int kSteps = 16;
  const Matrix a = mixed(dtype(), kRows, kSteps * kStep, 13), b = mixed(dtype(), kRows, kSteps * kStep, 14);
  const std::vector<float> want = multiply(dtype(), a, b);
  for (const Operand first : kFirst) {
    for (int cut = 1; cut < kSteps; ++cut) {
      const Form form{first, Operand::k_major};
      const auto begun = multiply(dtype(), a, b, form, {.last = cut});
      EXPECT_GT(differences(begun, want), 0);
      EXPECT_EQ(differences(multiply(dtype(), a, b, form, {.first = cut, .continued = &begun}), want), 0)
          << cut;
    }
  }
}

// Head sizes below an instance's, and rows behind the last: the copy engine fills up with zeros.
TEST_P(CudaTensorCore, FillingUpWithZerosChangesNothing) {
  constexpr int kHeads = 2, kQueries = 50, kKeys = 100, kWide = 128;
  for (const int d : {8, 16, 72, 80, 120, 128}) {
    SCOPED_TRACE(d);
    const Matrix a = mixed(dtype(), kQueries * kHeads, d, 15), b = mixed(dtype(), kKeys * kHeads, d, 16);
    // Behind the tensors lies NaN.
    const auto uploaded = [](const Matrix& matrix) {
      test::DeviceBuffer buffer(matrix.bits.size() * 2 + 65536);
      buffer.upload(matrix.bits.data(), matrix.bits.size() * 2);
      return buffer;
    };
    const test::DeviceBuffer on_a = uploaded(a), on_b = uploaded(b), on_d(kRows * kWide * sizeof(float));
    CUtensorMap a_map = sm90::tensor_map(contiguous<const void*>(on_a.data(), dtype(), {kQueries, kHeads, d}),
                                         kRows, 1, on_a.data());
    CUtensorMap b_map = sm90::tensor_map(contiguous<const void*>(on_b.data(), dtype(), {kKeys, kHeads, d}),
                                         kWide, 1, on_b.data());
    void* result = on_d.data();
    void* list[] = {&a_map, &b_map, &result};
    const void* kernel = loaded_product_kernel(dtype());
    expect_success(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kLoadedProductBytes));
    expect_success(cudaLaunchKernel(kernel, dim3(1), dim3(128), list, kLoadedProductBytes, nullptr));
    test::synchronize_device();
    std::vector<float> got(kRows * kWide);
    on_d.download(got.data(), on_d.bytes());

    // The same numbers by hand: head 1, and zeros only up to the next step.
    const auto head = [&](const Matrix& from, int rows, int tokens) {
      Matrix filled{rows, (d + kStep - 1) / kStep * kStep, {}};
      filled.bits.assign(index(rows * filled.depth), 0);
      for (int row = 0; row < tokens; ++row) {
        for (int k = 0; k < d; ++k) filled.at(row, k) = from.at(row * kHeads + 1, k);
      }
      return filled;
    };
    const auto want = multiply(dtype(), head(a, kRows, kQueries), head(b, kWide, kKeys));
    EXPECT_EQ(differences(got, kWide, [&](int row, int column) { return want[index(row * kWide + column)]; }),
              0);
    EXPECT_EQ(got[index(kQueries * kWide)], 0.0f);
    EXPECT_NE(got[index((kQueries - 1) * kWide + kKeys - 1)], 0.0f);
    EXPECT_EQ(got[index((kQueries - 1) * kWide + kKeys)], 0.0f);
  }
}

// Not taken for granted, because it is not so. That these two differ also shows that the tests above can fail.
TEST_P(CudaTensorCore, TheOrderOfStepsMatters) {
  constexpr int kDepth = 128;
  const Matrix a = mixed(dtype(), kRows, kDepth, 17), b = mixed(dtype(), kRows, kDepth, 18);
  std::vector<int> order = ascending(kDepth);
  for (int& k : order) k = (kDepth / kStep - 1 - k / kStep) * kStep + k % kStep;
  EXPECT_GT(
      differences(multiply(dtype(), columns_of(a, order), columns_of(b, order)), multiply(dtype(), a, b)), 0);
}

// A step is no chain of fp32 operations and is not rounded to nearest, so that no other processor computes the same bits.
TEST_P(CudaTensorCore, AStepIsNotRoundedToNearest) {
  const Matrix a = mixed(dtype(), kRows, kStep, 19, -4, 4), b = mixed(dtype(), kRows, kStep, 20, -4, 4);
  const auto number = [&](std::uint16_t bits) {
    return static_cast<double>(dtype() == DType::bf16 ? to_float(bf16{bits}) : to_float(f16{bits}));
  };
  const auto exact = [&](int row, int column) {  // products have 22 bits, their sums at most 43
    double sum = 0;
    for (int k = 0; k < kStep; ++k) sum += number(a.at(row, k)) * number(b.at(column, k));
    return static_cast<float>(sum);
  };
  EXPECT_GT(differences(multiply(dtype(), a, b), kRows, exact), 0);
}

INSTANTIATE_TEST_SUITE_P(storages, CudaTensorCore, testing::ValuesIn(kStorages),
                         [](const auto& instance) { return std::string(name(instance.param)); });

}  // namespace
}  // namespace basin::attention::cuda_tests
