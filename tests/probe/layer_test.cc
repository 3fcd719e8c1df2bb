// The second pass against a naive double implementation, on random and adversarial maps.
#include "probe/layer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "base/kernel_words.h"
#include "basin/attention/attention.h"
#include "basin/attention/mask.h"
#include "basin/attention/sparse.h"
#include "probe/run.h"

namespace basin::probe {
namespace {

struct Setting {
  std::int64_t tokens = 150, h_q = 4, h_kv = 2, d = 32;
  DType dtype = DType::f32;
  attention::Mask mask;
  bool sink_logit = false;
  bool second_query = false;
  double softcap = 0.0;
  float spread = 1.0f;  // of the queries: 0 = flat rows, large = one-hot rows
  std::int64_t page_tokens = 0;
  std::int64_t map_bins = 512;
  std::int64_t topk = 0;
};

// One sequence with everything the probe takes.
class Problem {
 public:
  explicit Problem(const Setting& s) : setting(s) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, std::int64_t heads, float spread) {
      values.resize(static_cast<std::size_t>(s.tokens * heads * s.d));
      for (float& x : values) x = round(normal(random) * spread);
    };
    fill(q, s.h_q, s.spread);
    fill(q_sink, s.h_q, s.spread);
    fill(k, s.h_kv, 1.0f);
    fill(v, s.h_kv, 1.0f);
    for (std::int64_t h = 0; h < s.h_q; ++h) sink.push_back(static_cast<float>(h) - 1.0f);
    problem.spec.mask = s.mask;
    problem.spec.scale = 1.0 / std::sqrt(static_cast<double>(s.d));
    problem.spec.softcap = s.softcap;
    sequence.q_tokens = sequence.kv_tokens = s.tokens;
    problem.sequences = {&sequence, 1};
    problem.q = store(q, s.h_q);
    if (s.second_query) problem.q_sink = store(q_sink, s.h_q);
    problem.k = store(k, s.h_kv);
    problem.v = store(v, s.h_kv);
    if (s.page_tokens > 0) paginate();
    if (s.sink_logit) problem.sink_logit = sink.data();
    out.resize(static_cast<std::size_t>(s.tokens * s.h_q * s.d));
    lse.resize(static_cast<std::size_t>(s.tokens * s.h_q));
    lse_with_sink.resize(lse.size());
    problem.out = contiguous(static_cast<void*>(out.data()), DType::f32, {s.tokens, s.h_q, s.d});
    problem.lse = lse.data();
    problem.lse_with_sink = lse_with_sink.data();
    ThreadPool pool(2);
    attention::forward(problem, attention::Backend::cpu, pool);
  }

  // A[query, key] of a head, and the learned sink's in `sink_weight`; 0 where not visible.
  std::vector<double> weights(std::int64_t head, std::vector<double>& sink_weight) const {
    const Setting& s = setting;
    std::vector<double> a(static_cast<std::size_t>(s.tokens * s.tokens), 0.0);
    sink_weight.assign(static_cast<std::size_t>(s.tokens), 0.0);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      double* row = a.data() + t * s.tokens;
      double sum = s.sink_logit ? std::exp(static_cast<double>(sink[static_cast<std::size_t>(head)])) : 0.0;
      sink_weight[static_cast<std::size_t>(t)] = sum;
      for (std::int64_t j = 0; j <= t; ++j) {
        if (!attention::visible(s.mask, t, j)) continue;
        const std::vector<float>& query = s.second_query && j < s.mask.sink_tokens ? q_sink : q;
        double dot = 0.0;
        for (std::int64_t i = 0; i < s.d; ++i) {
          dot += static_cast<double>(query[static_cast<std::size_t>((t * s.h_q + head) * s.d + i)]) *
                 static_cast<double>(
                     k[static_cast<std::size_t>((j * s.h_kv + head / (s.h_q / s.h_kv)) * s.d + i)]);
        }
        double x = dot * problem.spec.scale;
        if (s.softcap != 0.0) x = s.softcap * std::tanh(x / s.softcap);
        row[j] = std::exp(x);
        sum += row[j];
      }
      for (std::int64_t j = 0; j <= t; ++j) row[j] /= sum;
      sink_weight[static_cast<std::size_t>(t)] /= sum;
    }
    return a;
  }

  double value(std::int64_t key, std::int64_t kv_head, std::int64_t i) const {
    return static_cast<double>(v[static_cast<std::size_t>((key * setting.h_kv + kv_head) * setting.d + i)]);
  }

  Setting setting;
  attention::Forward problem;

 private:
  float round(float x) const { return setting.dtype == DType::bf16 ? to_float(to_bf16(x)) : x; }

  ConstView store(const std::vector<float>& values, std::int64_t heads) {
    const void* data = values.data();
    if (setting.dtype == DType::bf16) {
      std::vector<bf16>& copy = halves.emplace_back();
      for (const float x : values) copy.push_back(to_bf16(x));
      data = copy.data();
    }
    return contiguous(data, setting.dtype, {setting.tokens, heads, setting.d});
  }

  // The same keys and values on pages in reverse order.
  void paginate() {
    const std::int64_t count = (setting.tokens + setting.page_tokens - 1) / setting.page_tokens;
    for (std::int64_t i = 0; i < count; ++i) table.push_back(static_cast<std::int32_t>(count - 1 - i));
    sequence.pages = table.data();
    for (ConstView* view : {&problem.k, &problem.v}) {
      const auto row = static_cast<std::size_t>(setting.h_kv * setting.d * block_bytes(setting.dtype));
      std::vector<std::byte>& bytes =
          pages.emplace_back(static_cast<std::size_t>(count * setting.page_tokens) * row);
      for (std::int64_t j = 0; j < setting.tokens; ++j) {
        const std::int64_t slot =
            table[static_cast<std::size_t>(j / setting.page_tokens)] * setting.page_tokens +
            j % setting.page_tokens;
        std::copy_n(static_cast<const std::byte*>(view->data) + static_cast<std::size_t>(j) * row, row,
                    bytes.data() + static_cast<std::size_t>(slot) * row);
      }
      *view = contiguous(static_cast<const void*>(bytes.data()), setting.dtype,
                         {count, setting.page_tokens, setting.h_kv, setting.d});
    }
  }

  std::vector<float> q, q_sink, k, v, sink, out, lse, lse_with_sink;
  std::vector<std::vector<bf16>> halves;
  std::vector<std::vector<std::byte>> pages;
  std::vector<std::int32_t> table;
  attention::Sequence sequence;
};

// Smallest count of a row's largest weights that hold the share.
std::int64_t naive_budget(std::vector<double> row, double share) {
  std::sort(row.begin(), row.end(), std::greater<>());
  const double target = share * std::accumulate(row.begin(), row.end(), 0.0);
  double sum = 0.0;
  std::int64_t count = 0;
  while (count < static_cast<std::int64_t>(row.size()) && sum < target) {
    sum += row[static_cast<std::size_t>(count++)];
  }
  return count;
}

void expect_equal(const std::vector<float>& found, const std::vector<double>& expected, double tolerance,
                  const char* what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(found[i]), expected[i], tolerance * (1.0 + std::abs(expected[i])))
        << what << " " << i;
  }
}

// Whole numbers: where the border of a share falls between two weights that tie to rounding, a count may differ by one.
// Flat rows tie everywhere.
void expect_counts(const std::vector<float>& found, const std::vector<double>& expected, bool flat,
                   const char* what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  std::size_t different = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double difference = std::abs(static_cast<double>(found[i]) - expected[i]);
    ASSERT_LT(difference, 1.001) << what << " " << i;
    different += difference > 1e-3 ? 1 : 0;
  }
  if (!flat) {
    EXPECT_LE(different, found.size() / 100) << what;
  }
}

void compare(const Setting& setting) {
  const Problem problem(setting);
  LayerOptions options;
  options.map_bins = setting.map_bins;
  options.topk = setting.topk;
  ThreadPool pool(2);
  const LayerProfile found = profile(problem.problem, options, pool);

  const std::int64_t tokens = setting.tokens, heads = setting.h_q, bins = found.bins;
  const std::int64_t group = setting.h_q / setting.h_kv;
  const std::int64_t head_tokens = (bins + kHeadBins - 1) / kHeadBins * found.bin_tokens;
  EXPECT_EQ(found.head_bins, (tokens + head_tokens - 1) / head_tokens);
  const auto n_count = static_cast<std::int64_t>(found.sink_counts.size());
  const auto w_count = static_cast<std::int64_t>(found.windows.size());
  const auto size = [](std::int64_t a, std::int64_t b = 1, std::int64_t c = 1) {
    return std::vector<double>(static_cast<std::size_t>(a * b * c), 0.0);
  };
  std::vector<double> position = size(heads, tokens), distance = position, early = size(heads, kEarlyTokens),
                      map = size(bins, bins), head_map = size(heads, found.head_bins, found.head_bins),
                      entropy = size(heads, bins), learned = entropy, budget = size(3, heads, bins),
                      group_budget = size(3, setting.h_kv, bins), group_entropy = size(setting.h_kv, bins),
                      group_sink = size(tokens), sink_mass = size(n_count, heads),
                      sink_by_query = size(n_count, heads, bins), local = size(w_count, heads),
                      retained = size(n_count + 1, w_count, heads);
  std::vector<std::vector<double>> mean(static_cast<std::size_t>(tokens), std::vector<double>(size(tokens)));
  std::vector<std::vector<double>> group_mean = mean;
  const auto at = [](std::vector<double>& values, std::int64_t i) -> double& {
    return values[static_cast<std::size_t>(i)];
  };
  for (std::int64_t h = 0; h < heads; ++h) {
    std::vector<double> sink;
    const std::vector<double> a = problem.weights(h, sink);
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::vector<double> row(a.begin() + t * tokens, a.begin() + (t + 1) * tokens);
      const std::int64_t bin = t / found.bin_tokens;
      const double queries = static_cast<double>(std::min(found.bin_tokens, tokens - bin * found.bin_tokens));
      const auto sum = [&](std::int64_t begin, std::int64_t end) {
        double total = 0.0;
        for (std::int64_t j = std::max<std::int64_t>(begin, 0); j < std::min(end, t + 1); ++j) {
          total += row[static_cast<std::size_t>(j)];
        }
        return total;
      };
      const double mass = sum(0, tokens), sink_weight = sink[static_cast<std::size_t>(t)];
      at(learned, h * bins + bin) += sink_weight / queries;
      at(group_sink, t) =
          (h % group == 0 ? 0.0 : at(group_sink, t)) + sink_weight / static_cast<double>(group);
      if (sink_weight > 0.0) at(entropy, h * bins + bin) -= sink_weight * std::log(sink_weight) / queries;
      for (std::int64_t j = 0; j <= t; ++j) {
        const double x = row[static_cast<std::size_t>(j)];
        at(position, h * tokens + j) += x;
        at(distance, h * tokens + t - j) += x;
        if (t < kEarlyTokens) at(early, h * kEarlyTokens + j) += x;
        at(map, bin * bins + j / found.bin_tokens) += x / queries / static_cast<double>(heads);
        at(head_map, (h * found.head_bins + t / head_tokens) * found.head_bins + j / head_tokens) +=
            x / static_cast<double>(std::min(head_tokens, tokens - t / head_tokens * head_tokens));
        if (x > 0.0) at(entropy, h * bins + bin) -= x * std::log(x) / queries;
        mean[static_cast<std::size_t>(t)][static_cast<std::size_t>(j)] += x;
        double& of_group = group_mean[static_cast<std::size_t>(t)][static_cast<std::size_t>(j)];
        of_group = (h % group == 0 ? 0.0 : of_group) + x;
      }
      if (h % group == group - 1) {
        double& sum_of = at(group_entropy, h / group * bins + bin);
        const auto add = [&](double share) {
          sum_of -= share > 0.0 ? share * std::log(share) / queries : 0.0;
        };
        for (const double x : group_mean[static_cast<std::size_t>(t)]) add(x / static_cast<double>(group));
        add(at(group_sink, t));
      }
      for (std::int64_t s = 0; s < 3; ++s) {
        const double share = kBudgetShares[static_cast<std::size_t>(s)];
        at(budget, (s * heads + h) * bins + bin) += static_cast<double>(naive_budget(row, share)) / queries;
        if (h % group == group - 1) {
          at(group_budget, (s * setting.h_kv + h / group) * bins + bin) +=
              static_cast<double>(naive_budget(group_mean[static_cast<std::size_t>(t)], share)) / queries;
        }
      }
      for (std::int64_t n = 0; n < n_count; ++n) {
        const std::int64_t count = found.sink_counts[static_cast<std::size_t>(n)];
        at(sink_by_query, (n * heads + h) * bins + bin) += sum(0, count) / queries;
        if (t >= count) at(sink_mass, n * heads + h) += sum(0, count) / static_cast<double>(tokens - count);
      }
      for (std::int64_t w = 0; w < w_count; ++w) {
        const std::int64_t window = found.windows[static_cast<std::size_t>(w)];
        at(local, w * heads + h) += sum(t + 1 - window, t + 1) / static_cast<double>(tokens);
        for (std::int64_t n = 0; n <= n_count; ++n) {
          const std::int64_t count = n == 0 ? 0 : found.sink_counts[static_cast<std::size_t>(n - 1)];
          if (t + 1 <= count + window) continue;
          at(retained, (n * w_count + w) * heads + h) += (sum(0, count) + sum(t + 1 - window, t + 1)) / mass /
                                                         static_cast<double>(tokens - count - window);
        }
      }
    }
  }
  for (std::int64_t i = 0; i < (n_count + 1) * w_count * heads; ++i) {
    const std::int64_t n = i / heads / w_count, w = i / heads % w_count;
    const std::int64_t count = n == 0 ? 0 : found.sink_counts[static_cast<std::size_t>(n - 1)];
    if (count + found.windows[static_cast<std::size_t>(w)] >= tokens) at(retained, i) = 1.0;
  }

  // Weights come from scores and an lse in float, whose step grows with them: e^-200 and the like in one-hot rows.
  const double tolerance = setting.spread > 10.0f ? 2e-4 : 2e-5;
  EXPECT_LT(found.largest_row_error, tolerance / 2);
  expect_equal(found.position, position, tolerance, "position");
  expect_equal(found.distance, distance, tolerance, "distance");
  expect_equal(found.early, early, tolerance, "early");
  expect_equal(found.map, map, tolerance, "map");
  expect_equal(found.head_map, head_map, tolerance, "maps of heads");
  expect_equal(found.entropy, entropy, tolerance, "entropy");
  expect_equal(found.group_entropy, group_entropy, tolerance, "entropy of a group's mean");
  expect_equal(found.learned_sink, learned, tolerance, "learned sink");
  expect_equal(found.sink_mass, sink_mass, tolerance, "sink mass");
  expect_equal(found.sink_by_query, sink_by_query, tolerance, "sink mass by query");
  expect_equal(found.local_mass, local, tolerance, "local mass");
  expect_equal(found.retained, retained, tolerance, "retained");
  const bool flat = setting.spread == 0.0f;
  expect_counts(found.budget, budget, flat, "budget");
  expect_counts(found.group_budget, group_budget, flat, "group budget");

  for (std::int64_t t = 0; t < tokens && setting.topk > 0; ++t) {
    const std::vector<double>& row = mean[static_cast<std::size_t>(t)];
    const std::int32_t* keys = found.topk.data() + t * setting.topk;
    std::int64_t visible = 0;
    for (std::int64_t j = 0; j <= t; ++j) visible += attention::visible(setting.mask, t, j) ? 1 : 0;
    const std::int64_t count = std::min(setting.topk, visible);
    double chosen = 0.0, best = 0.0;
    for (std::int64_t i = 0; i < setting.topk; ++i) {
      if (i >= count) {
        EXPECT_EQ(keys[i], -1);
        continue;
      }
      ASSERT_TRUE(keys[i] >= 0 && keys[i] <= t && attention::visible(setting.mask, t, keys[i]));
      ASSERT_TRUE(i == 0 || keys[i] > keys[i - 1]);
      chosen += row[static_cast<std::size_t>(keys[i])];
    }
    std::vector<double> sorted = row;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    for (std::int64_t i = 0; i < count; ++i) best += sorted[static_cast<std::size_t>(i)];
    ASSERT_NEAR(chosen, best, 1e-5);
    const double all = std::accumulate(row.begin(), row.end(), 0.0);
    ASSERT_NEAR(static_cast<double>(found.topk_mass[static_cast<std::size_t>(t)]), chosen / all, 1e-5);
  }
}

TEST(LayerProfile, RandomMaps) {
  compare({});
}
TEST(LayerProfile, BinsOfSeveralTokens) {
  Setting setting;
  setting.tokens = 333;
  setting.map_bins = 17;
  compare(setting);
}
TEST(LayerProfile, Bf16OnPagesWithGroupsOfFive) {
  Setting setting;
  setting.dtype = DType::bf16;
  setting.h_q = 10;
  setting.page_tokens = 16;
  setting.d = 64;
  compare(setting);
}
TEST(LayerProfile, LearnedSinkAndSoftcap) {
  Setting setting;
  setting.sink_logit = true;
  setting.softcap = 3.0;
  compare(setting);
}
TEST(LayerProfile, StreamingMaskWithTwoQueries) {
  Setting setting;
  setting.mask.sink_tokens = 5;
  setting.mask.window = 40;
  setting.second_query = true;
  setting.sink_logit = true;
  setting.topk = 16;
  compare(setting);
}
TEST(LayerProfile, FlatRows) {  // every weight of a row is equal
  Setting setting;
  setting.spread = 0.0f;
  compare(setting);
}
TEST(LayerProfile, OneHotRows) {
  Setting setting;
  setting.spread = 60.0f;
  setting.topk = 8;
  compare(setting);
}
TEST(LayerProfile, OneToken) {
  Setting setting;
  setting.tokens = 1;
  compare(setting);
}
TEST(LayerProfile, RecordedSets) {
  Setting setting;
  setting.topk = 33;
  setting.map_bins = 20;
  compare(setting);
}

TEST(LayerProfile, ThreadsDoNotChangeABit) {
  Setting setting;
  setting.tokens = 500;
  setting.map_bins = 64;
  const Problem problem(setting);
  LayerOptions options;
  options.map_bins = 64;
  ThreadPool one(1), four(4);
  const LayerProfile a = profile(problem.problem, options, one), b = profile(problem.problem, options, four);
  options.topk = 4;  // another way of spreading the work
  const LayerProfile c = profile(problem.problem, options, four);
  for (const LayerProfile* other : {&b, &c}) {
    EXPECT_EQ(a.position, other->position);
    EXPECT_EQ(a.distance, other->distance);
    EXPECT_EQ(a.map, other->map);
    EXPECT_EQ(a.head_map, other->head_map);
    EXPECT_EQ(a.retained, other->retained);
    EXPECT_EQ(a.group_budget, other->group_budget);
  }
}

// Every pair's error against attention over its keys in double, on the queries that the header promises: spread over those
// from which every pair of this window hides something.
void compare_errors(const Setting& setting) {
  const Problem problem(setting);
  ThreadPool pool(2);
  LayerResult result;
  measure_errors(problem.problem, pool, result);
  ASSERT_FALSE(result.pairs.empty());
  const std::int64_t tokens = setting.tokens, d = setting.d;
  const auto heads = static_cast<std::size_t>(setting.h_q);
  std::vector<std::vector<double>> weights(heads), sinks(heads);
  for (std::size_t h = 0; h < heads; ++h)
    weights[h] = problem.weights(static_cast<std::int64_t>(h), sinks[h]);
  for (std::size_t i = 0; i < result.pairs.size(); ++i) {
    const Pair& pair = result.pairs[i];
    std::int64_t first = 0;
    for (const Pair& other : result.pairs) {
      if (other.window == pair.window) first = std::max(first, other.sink_tokens + other.window);
    }
    const std::int64_t count = std::min<std::int64_t>(32, tokens - first);
    std::vector<double> of_head(heads, 0.0);
    double of_all = 0.0;
    for (std::int64_t q = 0; q < count; ++q) {
      const std::int64_t t = first + (2 * q + 1) * (tokens - first) / (2 * count);
      double error_all = 0.0, size_all = 0.0;
      for (std::size_t h = 0; h < heads; ++h) {
        const double* a = weights[h].data() + t * tokens;
        const std::int64_t kv = static_cast<std::int64_t>(h) / (setting.h_q / setting.h_kv);
        double kept = sinks[h][static_cast<std::size_t>(t)], error = 0.0, size = 0.0;
        const auto shown = [&](std::int64_t j) { return j < pair.sink_tokens || j > t - pair.window; };
        for (std::int64_t j = 0; j <= t; ++j) kept += shown(j) ? a[j] : 0.0;
        for (std::int64_t x = 0; x < d; ++x) {
          double whole = 0.0, part = 0.0;
          for (std::int64_t j = 0; j <= t; ++j) {
            const double value = a[j] * problem.value(j, kv, x);
            whole += value;
            part += shown(j) ? value / kept : 0.0;
          }
          error += std::pow(part - whole, 2);
          size += std::pow(whole, 2);
        }
        of_head[h] += std::sqrt(error / size) / static_cast<double>(count);
        error_all += error;
        size_all += size;
      }
      of_all += std::sqrt(error_all / size_all) / static_cast<double>(count);
    }
    const auto close = [&](float found, double expected) {
      EXPECT_NEAR(static_cast<double>(found), expected, 2e-5 * (1.0 + expected))
          << pair.sink_tokens << " + " << pair.window;
    };
    close(result.pair_error_all[i], of_all);
    for (std::size_t h = 0; h < heads; ++h) close(result.pair_error[i * heads + h], of_head[h]);
  }
}

TEST(OutputErrors, RandomMaps) {
  compare_errors({});
}
TEST(OutputErrors, LearnedSinkSoftcapAndPages) {
  Setting setting;
  setting.tokens = 70;  // pairs beside the largest window hide one key, or none
  setting.sink_logit = true;
  setting.softcap = 3.0;
  setting.page_tokens = 16;
  compare_errors(setting);
}
TEST(OutputErrors, AreNotMeasuredWhereTheLayerHasAWindow) {
  Setting setting;
  setting.mask = {true, 20, -1, 0};
  const Problem problem(setting);
  ThreadPool pool(1);
  LayerResult result;
  measure_errors(problem.problem, pool, result);
  ASSERT_FALSE(result.pair_error_all.empty());
  for (const float error : result.pair_error_all) EXPECT_TRUE(std::isnan(error));
}

// What selections of a sparse model hold, against sums of the weights in double.
TEST(SelectionMass, IsThatOfTheDenseWeights) {
  for (const bool streaming : {false, true}) {
    Setting setting;
    setting.h_kv = 1;
    setting.sink_logit = true;  // takes part in neither
    if (streaming) {
      setting.mask = {true, 60, -1, 5};
      setting.second_query = true;
    }
    const Problem problem(setting);
    constexpr std::int64_t kTopk = 20;
    std::mt19937 random(3);
    std::vector<std::int32_t> indices(static_cast<std::size_t>(setting.tokens * kTopk), -1);
    for (std::int64_t t = 0; t < setting.tokens; ++t) {
      std::vector<std::int32_t> keys;
      for (std::int32_t j = 0; j <= t; ++j) {
        if (attention::visible(setting.mask, t, j)) keys.push_back(j);
      }
      std::shuffle(keys.begin(), keys.end(), random);
      std::copy_n(keys.begin(), std::min<std::int64_t>(kTopk, std::ssize(keys)), indices.begin() + t * kTopk);
    }
    attention::Forward sparse = problem.problem;
    std::vector<float> lse(static_cast<std::size_t>(setting.tokens * setting.h_q));
    sparse.lse = lse.data();
    sparse.lse_with_sink = nullptr;
    ThreadPool pool(2);
    attention::forward(sparse, {indices.data(), kTopk, nullptr}, attention::Backend::cpu, pool);
    const std::vector<float> found = mass_of_selections(sparse, pool);
    ASSERT_EQ(std::ssize(found), setting.tokens);
    std::vector<double> expected(found.size(), 0.0);
    for (std::int64_t h = 0; h < setting.h_q; ++h) {
      std::vector<double> sink;
      const std::vector<double> a = problem.weights(h, sink);
      for (std::int64_t t = 0; t < setting.tokens; ++t) {
        double held = 0.0, all = 0.0;
        for (std::int64_t j = 0; j <= t; ++j) {
          const std::int32_t* row = indices.data() + t * kTopk;
          const double weight = a[static_cast<std::size_t>(t * setting.tokens + j)];
          all += weight;
          if (std::find(row, row + kTopk, static_cast<std::int32_t>(j)) != row + kTopk) held += weight;
        }
        expected[static_cast<std::size_t>(t)] += held / all / static_cast<double>(setting.h_q);
      }
    }
    expect_equal(found, expected, 1e-5, "mass");
    EXPECT_LT(*std::min_element(found.begin(), found.end()), 0.9f) << "something is left out";
  }
}

using Counts = std::array<std::int64_t, 3>;

Counts found_budgets(std::vector<float> weights, double mass) {
  const auto count = static_cast<std::int64_t>(weights.size());
  weights.resize(weights.size() + kLanes, std::numeric_limits<float>::quiet_NaN());
  return budgets(weights.data(), count, mass);
}

Counts naive_budgets(std::vector<float> weights, double mass) {
  std::sort(weights.begin(), weights.end(), std::greater<>());
  Counts counts;
  counts.fill(static_cast<std::int64_t>(weights.size()));
  for (std::size_t share = 0; share < counts.size(); ++share) {
    double sum = 0.0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      sum += static_cast<double>(weights[i]);
      if (sum < kBudgetShares[share] * mass) continue;
      counts[share] = static_cast<std::int64_t>(i + 1);
      break;
    }
  }
  return counts;
}

TEST(Budgets, CountsWithTies) {
  EXPECT_EQ(found_budgets({0.25f, 0.25f, 0.25f, 0.25f}, 1.0), (Counts{4, 4, 4}));
  EXPECT_EQ(found_budgets({0.06f, 0.9f, 0.035f, 0.005f}, 1.0), (Counts{2, 2, 3}));
  EXPECT_EQ(found_budgets({}, 0.0), (Counts{0, 0, 0}));
  EXPECT_EQ(found_budgets(std::vector<float>(1000, 0x1p-10f), 1000.0 / 1024.0), (Counts{900, 950, 990}));
  // The weights given hold less than the mass by rounding: all of them.
  EXPECT_EQ(found_budgets({0.5f, 0.25f}, 1.0), (Counts{2, 2, 2}));
}

// Every length around the widths of a register, and rows as heads have them: flat, steep, a sink and a tail, plateaus.
TEST(Budgets, EqualTheDefinitionToTheKey) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  std::vector<std::int64_t> lengths;
  for (std::int64_t n = 1; n <= 70; ++n) lengths.push_back(n);
  lengths.insert(lengths.end(), {127, 128, 129, 500, 1023, 4096, 20'000});
  for (const std::int64_t length : lengths) {
    for (int kind = 0; kind < 7; ++kind) {
      std::vector<float> scores;
      for (std::int64_t i = 0; i < length; ++i) {
        const float x = normal(random);
        scores.push_back(kind == 0   ? 0.0f                       // flat
                         : kind == 1 ? 0.01f * x                  // nearly
                         : kind == 2 ? x                          // as most heads
                         : kind == 3 ? 3.0f * x                   // steep
                         : kind == 4 ? std::round(2.0f * x)       // plateaus
                         : kind == 5 ? (i == 0 ? 9.0f : x)        // a sink and a tail
                                     : -8.0f * uniform(random));  // a long tail
      }
      double sum = 0.0;
      for (const float x : scores) sum += std::exp(static_cast<double>(x));
      std::vector<float> weights;
      double mass = 0.0;
      for (const float x : scores) {
        weights.push_back(static_cast<float>(std::exp(static_cast<double>(x)) / sum));
        mass += static_cast<double>(weights.back());
      }
      ASSERT_EQ(found_budgets(weights, mass), naive_budgets(weights, mass)) << length << " kind " << kind;
    }
  }
}

}  // namespace
}  // namespace basin::probe
