// Values of products: against double, and against double on the activations that the fast path really uses.
#include <fmt/format.h>
#include <rapidcheck.h>

#include <cmath>
#include <cstring>

#include "basin/base/cpu_target.h"
#include "ops/linear.h"
#include "ops/weights.h"

namespace basin::ops::tests {
namespace {

// Activations as `compute` sees them, decoded to double.
std::vector<double> seen_activations(const std::vector<float>& x, DType weight, Compute compute) {
  std::vector<double> seen(x.begin(), x.end());
  if (compute == Compute::fp32) return seen;
  if (weight == DType::bf16 && cpu_target() >= CpuTarget::avx512_bf16) {
    for (std::size_t i = 0; i < x.size(); ++i) seen[i] = static_cast<double>(to_float(to_bf16(x[i])));
  }
  if (!is_quantised(weight)) return seen;
  for (std::size_t block = 0; block < x.size(); block += 32) {
    float largest = 0;
    for (std::size_t i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(x[block + i]));
    const float d = largest / 127.0f;
    const float inverse = 127.0f / largest;
    for (std::size_t i = 0; i < 32; ++i) {
      seen[block + i] = static_cast<double>(d) * static_cast<double>(std::nearbyint(x[block + i] * inverse));
    }
  }
  return seen;
}

// Each output against double over the terms that the path sums.
void expect_close(const Weights& weights, const std::vector<float>& x, std::int64_t tokens, Compute compute,
                  const std::vector<float>& y, const float* bias = nullptr) {
  const std::int64_t n = weights.matrix.outputs, k = weights.matrix.inputs;
  const std::vector<double> seen = seen_activations(x, weights.matrix.dtype, compute);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t r = 0; r < n; ++r) {
      double exact = bias == nullptr ? 0.0 : static_cast<double>(bias[r]), magnitude = std::fabs(exact);
      for (std::int64_t i = 0; i < k; ++i) {
        const double term =
            weights.values[static_cast<std::size_t>(r * k + i)] * seen[static_cast<std::size_t>(t * k + i)];
        exact += term;
        magnitude += std::fabs(term);
      }
      // 16 lanes: a chain of k / 16 roundings, the fold and the scales; bf16 pair dots round products in pairs.
      const double bound = (static_cast<double>(k) / 16 + 16) * 0x1p-24 * magnitude;
      ASSERT_NEAR(static_cast<double>(y[static_cast<std::size_t>(t * n + r)]), exact, bound)
          << name(weights.matrix.dtype) << " t " << t << " r " << r << " k " << k;
    }
  }
}

class Linear : public KernelTest {};

TEST_F(Linear, EqualsDoubleOverTheTermsItSums) {
  ThreadPool pool(2);
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t at_least : {32, 96, 128, 576}) {
      const std::int64_t inputs = whole_blocks(dtype, at_least);
      for (const std::int64_t tokens : {1, 2, 3, 4, 5, 9, 33}) {
        const Weights weights(dtype, 37, inputs, 1);
        const auto x = random_floats(tokens * inputs, 2);
        for (const Compute compute : {Compute::fp32, Compute::fast}) {
          expect_close(weights, x, tokens, compute, multiply(x, tokens, weights.matrix, compute, pool));
        }
      }
    }
  }
}

TEST_F(Linear, PlainTypesTakeAnyWidth) {
  ThreadPool pool(1);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (std::int64_t inputs = 1; inputs <= 70; ++inputs) {
      const Weights weights(dtype, 6, inputs, 3);
      const auto x = random_floats(5 * inputs, 4);
      for (const Compute compute : {Compute::fp32, Compute::fast}) {
        expect_close(weights, x, 5, compute, multiply(x, 5, weights.matrix, compute, pool));
      }
    }
  }
}

TEST_F(Linear, RandomShapes) {
  ThreadPool pool(2);
  const bool ok = rc::check("linear equals double", [&] {
    const DType dtype =
        *rc::gen::elementOf(std::vector<DType>(std::begin(kWeightTypes), std::end(kWeightTypes)));
    const std::int64_t inputs = whole_blocks(dtype, 32 * *rc::gen::inRange(1, 12));
    const std::int64_t outputs = *rc::gen::inRange(1, 90), tokens = *rc::gen::inRange(1, 40);
    const Weights weights(dtype, outputs, inputs, *rc::gen::arbitrary<std::uint64_t>());
    const auto x = random_floats(tokens * inputs, *rc::gen::arbitrary<std::uint64_t>());
    const Compute compute = *rc::gen::element(Compute::fp32, Compute::fast);
    expect_close(weights, x, tokens, compute, multiply(x, tokens, weights.matrix, compute, pool));
  });
  EXPECT_TRUE(ok);
}

// What int8 activations cost against the unrounded input: half a step of each block, at random signs.
TEST_F(Linear, QuantisedActivationsCostLittle) {
  ThreadPool pool(1);
  for (const DType dtype : kQuantisedTypes) {
    const std::int64_t inputs = 1536, tokens = 8, outputs = 64;
    const Weights weights(dtype, outputs, inputs, 5);
    const auto x = random_floats(tokens * inputs, 6);
    const auto y = multiply(x, tokens, weights.matrix, Compute::fast, pool);
    double error = 0, norm = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t r = 0; r < outputs; ++r) {
        double exact = 0;
        for (std::int64_t i = 0; i < inputs; ++i) {
          exact += weights.values[static_cast<std::size_t>(r * inputs + i)] *
                   static_cast<double>(x[static_cast<std::size_t>(t * inputs + i)]);
        }
        const double difference = static_cast<double>(y[static_cast<std::size_t>(t * outputs + r)]) - exact;
        error += difference * difference;
        norm += exact * exact;
      }
    }
    const double relative = std::sqrt(error / norm);
    EXPECT_LT(relative, 0.01) << name(dtype);
    EXPECT_GT(relative, 1e-4) << name(dtype) << ": int8 activations were not used";
  }
}

TEST_F(Linear, BiasIsAdded) {
  ThreadPool pool(1);
  for (const DType dtype : kWeightTypes) {
    const std::int64_t inputs = whole_blocks(dtype, 64);
    const Weights weights(dtype, 11, inputs, 7);
    const auto x = random_floats(3 * inputs, 8), bias = random_floats(11, 9);
    std::vector<float> y(33);
    const LinearOutput output{&weights.matrix, bias.data(), y.data(), 11};
    linear(x.data(), inputs, 3, {&output, 1}, Compute::fp32, pool);
    expect_close(weights, x, 3, Compute::fp32, y, bias.data());
  }
}

TEST_F(Linear, WideningIsExact) {
  for (const DType dtype : kWeightTypes) {
    const auto inputs = static_cast<std::size_t>(whole_blocks(dtype, 96));
    const Weights weights(dtype, 3, whole_blocks(dtype, 96), 10);
    std::vector<float> row(inputs);
    for (std::int64_t r = 0; r < 3; ++r) {
      widen_row(weights.matrix, r, row.data());
      for (std::size_t i = 0; i < inputs; ++i) {
        // d q + m has more bits than a float only in the sum, which is rounded once.
        const double value = weights.values[static_cast<std::size_t>(r) * inputs + i];
        EXPECT_EQ(row[i], static_cast<float>(value)) << name(dtype) << " element " << i;
      }
    }
  }
}

TEST_F(Linear, ProductsOfDifferentTypesShareACall) {
  ThreadPool pool(2);
  std::vector<std::unique_ptr<Weights>> weights;
  std::vector<std::vector<float>> results;
  for (const DType dtype : kWeightTypes) {
    weights.push_back(std::make_unique<Weights>(dtype, 20, 256, 11));
    results.emplace_back(5 * 20);
  }
  std::vector<LinearOutput> outputs;
  for (std::size_t i = 0; i < weights.size(); ++i)
    outputs.push_back({&weights[i]->matrix, nullptr, results[i].data(), 20});
  const auto x = random_floats(5 * 256, 12);
  linear(x.data(), 256, 5, outputs, Compute::fast, pool);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    EXPECT_EQ(results[i], multiply(x, 5, weights[i]->matrix, Compute::fast, pool));
  }
}

// As experts are: inputs of different lengths and widths, one of them twice, and what follows named.
TEST_F(Linear, SeveralInputsInOneCallAreWhatEachIsAlone) {
  struct Part {
    DType dtype;
    std::int64_t outputs, inputs, tokens;
  };
  const Part parts[] = {{DType::mxfp4, 70, 256, 1}, {DType::mxfp4, 70, 256, 1}, {DType::q8_0, 3, 128, 40},
                        {DType::bf16, 130, 128, 7}, {DType::f32, 5, 64, 1},     {DType::q4_k, 65, 512, 2}};
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    for (const bool only_single : {false, true}) {
      std::vector<std::unique_ptr<Weights>> weights;
      std::vector<std::vector<float>> xs, ys;
      std::vector<LinearOutput> outputs;
      NextMatrices next;
      for (const Part& part : parts) {
        if (only_single && part.tokens > 1) continue;
        weights.push_back(std::make_unique<Weights>(part.dtype, part.outputs, part.inputs, 21));
        xs.push_back(random_floats(part.tokens * part.inputs, 22));
        ys.emplace_back(static_cast<std::size_t>(part.tokens * part.outputs), -1.0f);
        outputs.push_back({&weights.back()->matrix, nullptr, ys.back().data(), part.outputs});
        next.push_back(&weights.back()->matrix);
      }
      std::vector<LinearInput> inputs;
      for (std::size_t i = 0; i < xs.size(); ++i) {
        const std::int64_t width = weights[i]->matrix.inputs;
        const float* x = i == 1 ? xs[0].data() : xs[i].data();  // the first two share theirs
        inputs.push_back({x, width, std::ssize(xs[i]) / width, {&outputs[i], 1}});
      }
      linear(inputs, Compute::fast, pool, next);
      for (std::size_t i = 0; i < xs.size(); ++i) {
        const auto& x = i == 1 ? xs[0] : xs[i];
        EXPECT_EQ(ys[i], multiply(x, inputs[i].tokens, weights[i]->matrix, Compute::fast, pool)) << i;
      }
    }
  }
}

}  // namespace
}  // namespace basin::ops::tests
