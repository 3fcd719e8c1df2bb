// The study of selections: sets with known answers, the reference's table, damaged rows, payloads.
#include "probe/study.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <span>

#include "basin/base/error.h"
#include "probe/npz.h"
#include "probe/png.h"
#include "weights/weights.h"

namespace basin::probe {
namespace {

using Rows = std::vector<std::int32_t>;

Study run(const Trace& trace, std::int64_t first = 0, int threads = 2, std::int64_t last = 0) {
  ThreadPool pool(threads);
  StudyOptions options;
  options.first = first;
  options.last = last;
  return study(trace, options, pool, {}, nullptr);
}

// min(topk, t + 1) keys of every query: the first `sinks`, then every `stride`-th key back from the query, then others
// by chance, in mixed order.
Rows synthetic(std::int64_t queries, std::int64_t topk, std::int64_t sinks, std::int64_t strided,
               std::int64_t stride, unsigned seed) {
  std::mt19937 random(seed);
  Rows rows(static_cast<std::size_t>(queries * topk), -1);
  for (std::int64_t t = 0; t < queries; ++t) {
    std::set<std::int32_t> keys;
    const auto wanted = static_cast<std::size_t>(std::min(topk, t + 1));
    const auto add = [&](std::int64_t key) {
      if (key >= 0 && key <= t && keys.size() < wanted) keys.insert(static_cast<std::int32_t>(key));
    };
    for (std::int64_t i = 0; i < sinks; ++i) add(i);
    for (std::int64_t i = 0; i < strided; ++i) add(t - i * stride);
    while (keys.size() < wanted) add(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(t + 1)));
    Rows row(keys.begin(), keys.end());
    std::shuffle(row.begin(), row.end(), random);
    std::copy(row.begin(), row.end(), rows.begin() + t * topk);
  }
  return rows;
}

double mean(const std::vector<float>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

TEST(Study, ConstantSelection) {
  constexpr std::int64_t kTopk = 40;
  Rows rows;
  for (int t = 0; t < 600; ++t) {
    for (std::int32_t key = 0; key < kTopk; ++key) rows.push_back(key);
  }
  const Study s = run(make_trace({rows}, kTopk, kTopk));
  ASSERT_EQ(s.layers[0].blocks.size(), kBlocks.size());
  for (const BlockCounts& counts : s.layers[0].blocks) {
    EXPECT_THAT(counts.intersection, testing::Each(kTopk));
    EXPECT_THAT(counts.united, testing::Each(kTopk));
    EXPECT_EQ(static_cast<std::int64_t>(counts.united.size()), 600 / counts.block);
  }
  EXPECT_THAT(s.layers[0].multiplicity, testing::Each(kTopk));
  EXPECT_FLOAT_EQ(s.layers[0].pairwise_128, 1.0f);
  EXPECT_FLOAT_EQ(s.layers[0].absolute_share, 1.0f);
  EXPECT_EQ(s.layers[0].absolute_keys, kTopk);
}

// Sinks and a window: |intersection| = n + max(0, w - B + 1), |union| = n + w + B - 1.
TEST(Study, SinksAndWindow) {
  constexpr std::int64_t kSinks = 10, kWindow = 50, kTopk = kSinks + kWindow;
  const Study s = run(make_trace({synthetic(1000, kTopk, kSinks, kWindow, 1, 1)}, kTopk, 0), kTopk);
  for (const BlockCounts& counts : s.layers[0].blocks) {
    EXPECT_THAT(counts.intersection,
                testing::Each(kSinks + std::max<std::int64_t>(0, kWindow - counts.block + 1)));
    EXPECT_THAT(counts.united, testing::Each(kSinks + kWindow + counts.block - 1));
  }
  EXPECT_EQ(s.layers[0].absolute_keys, kSinks);
  EXPECT_NEAR(static_cast<double>(s.layers[0].absolute_share), 10.0 / 60.0, 1e-6);
  EXPECT_FLOAT_EQ(s.layers[0].sink_kept[1], 1.0f);  // the first 4
}

TEST(Study, PlantedSinksAndStridesAreFound) {
  constexpr std::int64_t kTopk = 128, kQueries = 3000;
  const Study s = run(make_trace({synthetic(kQueries, kTopk, 8, 60, 17, 2)}, kTopk, 0));
  const LayerStudy& l = s.layers[0];
  for (std::size_t key = 0; key < 8; ++key) EXPECT_FLOAT_EQ(l.frequency[key], 1.0f) << key;
  EXPECT_EQ(l.absolute_keys, 8);
  EXPECT_THAT(l.span_keys, testing::Each(8.0f));
  for (std::size_t a = 0; a < 17u * 60; a += 17) EXPECT_GT(l.age[a], 0.99f) << a;
  for (std::size_t a = 1; a < 16; ++a) EXPECT_LT(l.age[a], 0.3f) << a;
  // Relative selections follow the query: moved along, sets agree more.
  EXPECT_GT(l.shifted[0], l.overlap[0] + 0.3f);
}

// Property: intersections and unions by hand, for random sets of any length.
TEST(Study, SetAlgebraAgainstSets) {
  for (const std::int64_t queries : {131, 256, 300}) {
    constexpr std::int64_t kTopk = 24;
    const Rows rows = synthetic(queries, kTopk, 2, 5, 3, static_cast<unsigned>(queries));
    const Study s = run(make_trace({rows}, kTopk, 0));
    const auto set = [&](std::int64_t t) {
      std::set<std::int32_t> keys(rows.begin() + t * kTopk, rows.begin() + (t + 1) * kTopk);
      keys.erase(-1);
      return keys;
    };
    for (const BlockCounts& counts : s.layers[0].blocks) {
      for (std::size_t b = 0; b < counts.position.size(); ++b) {
        std::set<std::int32_t> all = set(counts.position[b]), any = all;
        for (std::int64_t t = counts.position[b]; t < counts.position[b] + counts.block; ++t) {
          std::set<std::int32_t> both;
          const std::set<std::int32_t> next = set(t);
          std::set_intersection(all.begin(), all.end(), next.begin(), next.end(),
                                std::inserter(both, both.end()));
          all = both;
          any.insert(next.begin(), next.end());
        }
        EXPECT_EQ(counts.intersection[b], static_cast<float>(all.size()));
        EXPECT_EQ(counts.united[b], static_cast<float>(any.size()));
        if (counts.block == 2) {
          EXPECT_EQ(counts.intersection[b] + counts.united[b], 2 * kTopk);
        }
      }
    }
    if (queries >= 24 + 128) {  // one curve holds both
      double united = 0.0, intersection = 0.0, groups = 0.0;
      for (std::size_t b = 0; b < s.layers[0].blocks.back().position.size(); ++b, ++groups) {
        united += static_cast<double>(s.layers[0].blocks.back().united[b]);
        intersection += static_cast<double>(s.layers[0].blocks.back().intersection[b]);
      }
      EXPECT_NEAR(static_cast<double>(s.layers[0].multiplicity.front()), united / groups, 1e-3);
      EXPECT_NEAR(static_cast<double>(s.layers[0].multiplicity.back()), intersection / groups, 1e-3);
    }
  }
}

// The table of the null models: k = 2048, positions 2048 .. 8191.
TEST(Study, NullModelsMatchTheReferenceTable) {
  const NullCounts random = random_counts(2048, 6144, 2048);
  const double random_i[] = {946, 320, 113, 48, 22, 9, 1},
               random_u[] = {3150, 4243, 4922, 5113, 5134, 5150, 5182};
  const double rope_i[] = {1822, 1442, 1035, 639, 332, 173, 62},
               rope_u[] = {2274, 2671, 3169, 3756, 4349, 4820, 5081};
  const double first[] = {2046, 2042, 2028, 1970, 1804, 1510, 853},
               last[] = {1728, 1200, 713, 329, 131, 65, 1};
  const Study rope = run(make_trace({rope_selections(2048, 6144, 2048, deepseek_frequencies())}, 2048, 2048));
  for (std::size_t i = 0; i < kBlocks.size(); ++i) {
    EXPECT_NEAR(random.intersection[i], random_i[i], 0.51) << kBlocks[i];
    EXPECT_NEAR(random.united[i], random_u[i], 0.51) << kBlocks[i];
    const BlockCounts& counts = rope.layers[0].blocks[i];
    EXPECT_NEAR(mean(counts.intersection), rope_i[i], 0.51) << kBlocks[i];
    EXPECT_NEAR(mean(counts.united), rope_u[i], 0.51) << kBlocks[i];
    EXPECT_EQ(counts.intersection.front(), first[i]) << kBlocks[i];
    EXPECT_EQ(counts.intersection.back(), last[i]) << kBlocks[i];
  }
}

TEST(Study, PeaksOfTheRotaryTerm) {
  EXPECT_THAT(rope_peaks(257, 11, deepseek_frequencies()),
              testing::ElementsAre(6, 12, 18, 25, 32, 44, 57, 76, 101, 134, 177));
  const double one[] = {0.5};  // a period of 12.57
  EXPECT_THAT(rope_peaks(40, 10, one), testing::ElementsAre(13, 25, 38));
  EXPECT_THAT(rope_peaks(40, 2, one), testing::SizeIs(2));
}

// The same table from sets that were drawn: within three standard deviations of a mean over blocks, which is below that of
// independent keys.
TEST(Study, DrawnSetsMatchTheReferenceTable) {
  constexpr std::int64_t kTopk = 2048, kFirst = 2048, kQueries = 6144;
  std::mt19937 random(11);
  Rows rows(static_cast<std::size_t>(kQueries * kTopk)), keys(static_cast<std::size_t>(kFirst + kQueries));
  std::iota(keys.begin(), keys.end(), 0);
  for (std::int64_t q = 0; q < kQueries; ++q) {
    const std::int64_t visible = kFirst + q + 1;
    std::sort(keys.begin(), keys.begin() + visible);  // all of them, whatever the last draw left
    for (std::int64_t i = 0; i < kTopk; ++i) {
      const auto other = i + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(visible - i));
      std::swap(keys[static_cast<std::size_t>(i)], keys[static_cast<std::size_t>(other)]);
    }
    std::copy_n(keys.begin(), kTopk, rows.begin() + q * kTopk);
  }
  const Study drawn = run(make_trace({std::move(rows)}, kTopk, kFirst));
  const double intersection[] = {946, 320, 113, 48, 22, 9, 1},
               united[] = {3150, 4243, 4922, 5113, 5134, 5150, 5182};
  for (std::size_t i = 0; i < kBlocks.size(); ++i) {
    const BlockCounts& counts = drawn.layers[0].blocks[i];
    const auto blocks = static_cast<double>(counts.intersection.size());
    EXPECT_NEAR(mean(counts.intersection), intersection[i], 3.0 * std::sqrt(intersection[i] / blocks) + 0.5)
        << kBlocks[i];
    EXPECT_NEAR(mean(counts.united), united[i], 3.0 * std::sqrt(united[i] / blocks) + 0.5) << kBlocks[i];
  }
}

// While a query has no more keys than it may select, it selects all: a block has in common what its first query sees.
TEST(Study, QueriesThatSelectEverything) {
  constexpr std::int64_t kTopk = 300;
  const Study s = run(make_trace({synthetic(400, kTopk, 0, 0, 1, 3)}, kTopk, 0), 1, 2, 256);
  EXPECT_EQ(s.first, 1);
  EXPECT_EQ(s.queries, 256);
  for (const BlockCounts& counts : s.layers[0].blocks) {
    for (std::size_t b = 0; b < counts.position.size(); ++b) {
      EXPECT_EQ(counts.intersection[b], static_cast<float>(counts.position[b] + 1));
      EXPECT_EQ(counts.united[b], static_cast<float>(counts.position[b] + counts.block));
    }
  }
  EXPECT_THAT(s.layers[0].age, testing::Each(1.0f));
}

TEST(Study, ARangeIsTheTraceThatHoldsNoMore) {
  constexpr std::int64_t kTopk = 24;
  const Rows all = synthetic(500, kTopk, 3, 6, 5, 8);
  const Rows part(all.begin(), all.begin() + 400 * kTopk);
  const Study a = run(make_trace({all}, kTopk, 0), 100, 2, 399), b = run(make_trace({part}, kTopk, 0), 100);
  EXPECT_EQ(a.queries, 300);
  EXPECT_EQ(a.layers[0].map, b.layers[0].map);
  EXPECT_EQ(a.layers[0].overlap, b.layers[0].overlap);
  EXPECT_EQ(a.layers[0].frequency, b.layers[0].frequency);
  EXPECT_EQ(a.layers[0].blocks.back().united, b.layers[0].blocks.back().united);
  for (const auto& [first, last] :
       {std::pair<std::int64_t, std::int64_t>{100, 500}, {100, 100}, {300, 200}}) {
    EXPECT_THROW(run(make_trace({all}, kTopk, 0), first, 2, last), Error) << first << " to " << last;
  }
  // Rows outside the range are checked all the same.
  Rows bad = all;
  bad[450 * kTopk] = bad[450 * kTopk + 1];
  EXPECT_THROW(run(make_trace({bad}, kTopk, 0), 100, 2, 399), Error);
}

TEST(Study, ChanceLooksLikeChance) {
  constexpr std::int64_t kTopk = 256, kQueries = 1280;
  const Study s = run(make_trace({synthetic(kQueries, kTopk, 0, 0, 1, 5)}, kTopk, 0));
  const NullCounts expected = random_counts(kTopk, kQueries - kTopk, kTopk);
  for (std::size_t i = 0; i < kBlocks.size(); ++i) {
    const BlockCounts& counts = s.layers[0].blocks[i];
    const double blocks = static_cast<double>(counts.intersection.size());
    EXPECT_NEAR(mean(counts.intersection), expected.intersection[i],
                3.0 * std::sqrt(expected.intersection[i] / blocks) + 0.1);
    EXPECT_NEAR(mean(counts.united), expected.united[i], 3.0 * std::sqrt(expected.united[i] / blocks));
  }
}

TEST(Study, LayersAreCompared) {
  constexpr std::int64_t kTopk = 32;
  const Rows a = synthetic(400, kTopk, 4, 8, 2, 1), b = synthetic(400, kTopk, 4, 8, 2, 9);
  const Study s = run(make_trace({a, a, b}, kTopk, 0));
  EXPECT_FLOAT_EQ(s.between[1], 1.0f);
  EXPECT_LT(s.between[2], 1.0f);
  EXPECT_GT(s.between[2], 11.0f / 32.0f);
  EXPECT_EQ(s.between[2], s.between[6]);
}

TEST(Study, ThreadsDoNotChangeABit) {
  std::vector<Rows> layers;
  for (unsigned i = 0; i < 4; ++i) layers.push_back(synthetic(300, 16, 2, 4, 3, i));
  const Study a = run(make_trace(layers, 16, 0), 0, 1), b = run(make_trace(layers, 16, 0), 0, 4);
  EXPECT_EQ(a.between, b.between);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    EXPECT_EQ(a.layers[i].map, b.layers[i].map);
    EXPECT_EQ(a.layers[i].overlap, b.layers[i].overlap);
  }
}

// --- Refusals ---

void expect_refused(const std::vector<Rows>& layers, std::int64_t topk, const std::string& message) {
  try {
    run(make_trace(layers, topk, 0), 4, 4);
    FAIL() << "expected: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::corrupt);
    EXPECT_THAT(error.what(), testing::HasSubstr(message));
  }
}

TEST(TraceRows, TheFirstBadOneIsNamed) {
  const Rows good = synthetic(300, 16, 2, 4, 3, 1);
  const auto changed = [&](std::int64_t query, std::int64_t slot, std::int32_t value) {
    Rows rows = good;
    rows[static_cast<std::size_t>(query * 16 + slot)] = value;
    return rows;
  };
  const std::int32_t other = good[200 * 16 + 3];
  expect_refused({good, changed(200, 4, other)}, 16, "layer 1, query 200 at position 200: key");
  expect_refused({changed(200, 4, other)}, 16, "is there twice");
  expect_refused({changed(100, 0, 101)}, 16,
                 "layer 0, query 100 at position 100: key 101 comes after the query");
  expect_refused({changed(100, 0, -2)}, 16, "key -2 is negative");
  expect_refused({changed(100, 0, -1)}, 16, "it has 15 keys; it must have 16");
  expect_refused({changed(2, 15, 0)}, 16,
                 "query 2 at position 2: key 0 is there twice");  // before the studied ones
  // The lowest bad layer is named, whatever the threads did.
  expect_refused({good, changed(290, 0, -1), changed(3, 0, -1), changed(3, 0, -1)}, 16, "layer 1, query 290");
}

TEST(TraceRows, PaddingMayStandAnywhere) {
  constexpr std::int64_t kTopk = 160;
  Rows sorted = synthetic(500, kTopk, 2, 20, 3, 1);
  for (std::int64_t t = 0; t < 500; ++t)
    std::sort(sorted.begin() + t * kTopk, sorted.begin() + t * kTopk + std::min(kTopk, t + 1));
  Rows mixed = sorted;
  std::mt19937 random(1);
  for (std::int64_t t = 0; t < 500; ++t)
    std::shuffle(mixed.begin() + t * kTopk, mixed.begin() + (t + 1) * kTopk, random);
  ASSERT_NE(mixed, sorted);
  // From the fourth query on: most of the first rows are padded.
  const LayerStudy a = run(make_trace({sorted}, kTopk, 0), 4).layers[0],
                   b = run(make_trace({mixed}, kTopk, 0), 4).layers[0];
  for (std::size_t i = 0; i < kBlocks.size(); ++i) {
    EXPECT_EQ(a.blocks[i].intersection, b.blocks[i].intersection);
    EXPECT_EQ(a.blocks[i].united, b.blocks[i].united);
  }
  EXPECT_EQ(a.map, b.map);
  EXPECT_EQ(a.age, b.age);
  EXPECT_EQ(a.frequency, b.frequency);
  EXPECT_EQ(a.multiplicity, b.multiplicity);
  EXPECT_EQ(a.overlap, b.overlap);
  EXPECT_EQ(a.shifted, b.shifted);
  EXPECT_EQ(a.absolute_by_query, b.absolute_by_query);
}

// --- Payloads ---

class PayloadTest : public testing::Test {
 protected:
  PayloadTest()
      : path_(std::filesystem::temp_directory_path() / ("basin_trace_" + std::to_string(getpid()))) {}
  ~PayloadTest() override { std::filesystem::remove(path_); }

  void write(const std::string& content) const { std::ofstream(path_, std::ios::binary) << content; }

  // [tokens, layers, topk]
  static Rows interleave(const std::vector<Rows>& layers, std::int64_t topk) {
    Rows all;
    for (std::size_t t = 0; t < layers[0].size() / static_cast<std::size_t>(topk); ++t) {
      for (const Rows& rows : layers) {
        const auto* from = rows.data() + static_cast<std::int64_t>(t) * topk;
        all.insert(all.end(), from, from + topk);
      }
    }
    return all;
  }
  static std::string as_bytes(const Rows& rows) {
    return {reinterpret_cast<const char*>(rows.data()), rows.size() * 4};
  }
  void expect_rows(const Trace& trace, const std::vector<Rows>& layers) const {
    ASSERT_EQ(trace.layers(), static_cast<std::int64_t>(layers.size()));
    for (std::int64_t layer = 0; layer < trace.layers(); ++layer) {
      const TraceLayer rows = trace.load(layer);
      for (std::int64_t q = 0; q < trace.queries(); ++q) {
        EXPECT_EQ(std::memcmp(rows.data + q * rows.stride,
                              layers[static_cast<std::size_t>(layer)].data() + q * trace.topk(),
                              static_cast<std::size_t>(trace.topk()) * 4),
                  0);
      }
    }
  }

  std::filesystem::path path_;
  std::vector<Rows> layers_ = {synthetic(40, 6, 1, 2, 3, 1), synthetic(40, 6, 1, 2, 3, 2),
                               synthetic(40, 6, 0, 2, 3, 3)};
};

TEST_F(PayloadTest, SglangTextAndAnswer) {
  const std::string payload = base64(as_bytes(interleave(layers_, 6)));
  write(payload + "\n");
  expect_rows(open_trace(path_, {3, 6}), layers_);
  write("{\"text\":\"x\",\"meta_info\":{\"id\":1,\"indexer_topk\":\"" + payload + "\"}}");
  expect_rows(open_trace(path_, {3, 6}), layers_);
  EXPECT_THROW(open_trace(path_, {}), Error);
  EXPECT_THROW(open_trace(path_, {7, 6}), Error);
}

TEST_F(PayloadTest, VllmNpy) {
  const std::int64_t shape[] = {40, 3, 6};
  const std::string npy = npy_header(DType::i32, shape) + as_bytes(interleave(layers_, 6));
  write("\"" + base64(npy) + "\"");
  expect_rows(open_trace(path_, {}), layers_);
  EXPECT_THROW(open_trace(path_, {4, 0}), Error);
}

TEST_F(PayloadTest, ArraysByName) {
  NpzWriter writer(path_);
  const std::int64_t shape[] = {40, 6}, one[] = {40};
  for (const std::size_t i : {1u, 0u, 2u}) {
    writer.add("topk/layer_" + std::to_string(10 * i), shape, std::span<const std::int32_t>(layers_[i]));
  }
  Rows positions(40);
  std::iota(positions.begin(), positions.end(), 0);
  writer.add("q_pos", one, std::span<const std::int32_t>(positions));
  const double rope[] = {1.0, 0.25};
  const std::int64_t pairs[] = {2};
  writer.add("rope", DType::f64, pairs, rope);
  writer.finish();
  const Trace trace = open_trace(path_, {});
  expect_rows(trace, layers_);
  EXPECT_EQ(trace.number(2), 20);
  EXPECT_THAT(trace.rope(), testing::ElementsAre(1.0, 0.25));
  ThreadPool pool(1);
  EXPECT_TRUE(study(trace, {}, pool, {}, nullptr).own_rope);
}

TEST_F(PayloadTest, FrequenciesThatAreNoneAreRefused) {
  const auto expect_refused = [&](DType dtype, std::int64_t count, const void* data) {
    NpzWriter writer(path_);
    const std::int64_t shape[] = {40, 6}, pairs[] = {count};
    writer.add("topk/layer_0", shape, std::span<const std::int32_t>(layers_[0]));
    writer.add("rope", dtype, pairs, data);
    writer.finish();
    EXPECT_THROW(open_trace(path_, {}), Error);
  };
  const double bad[] = {1.0, std::numeric_limits<double>::infinity()}, negative[] = {-0.1};
  const std::vector<double> many(5000, 0.1);
  const float narrow[] = {1.0f};
  expect_refused(DType::f64, 2, bad);
  expect_refused(DType::f64, 1, negative);
  expect_refused(DType::f64, 0, negative);
  expect_refused(DType::f64, 5000, many.data());
  expect_refused(DType::f32, 1, narrow);
}

TEST_F(PayloadTest, MassBesideTheRowsIsStudied) {
  const auto write = [&](std::vector<float> mass, std::int64_t queries) {
    NpzWriter writer(path_);
    const std::int64_t shape[] = {40, 6}, one[] = {queries};
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      writer.add("topk/layer_" + std::to_string(i), shape, std::span<const std::int32_t>(layers_[i]));
      writer.add("mass/layer_" + std::to_string(i), one, std::span<const float>(mass));
    }
    writer.finish();
    ThreadPool pool(1);
    StudyOptions options;
    options.map_bins = 10;
    return study(open_trace(path_, {}), options, pool, {}, nullptr);
  };
  std::vector<float> mass(40, 1.0f);
  for (std::size_t q = 6; q < 40; ++q) mass[q] = q % 2 == 0 ? 0.5f : 0.25f;
  const Study found = write(mass, 40);
  for (const LayerStudy& layer : found.layers) {
    EXPECT_FLOAT_EQ(layer.mass, 0.375f);  // of the 34 studied queries
    EXPECT_EQ(layer.mass_by_query.size(), static_cast<std::size_t>(found.map_rows));
    EXPECT_FLOAT_EQ(layer.mass_by_query[0], 0.375f);
  }
  EXPECT_THROW(write(std::vector<float>(39, 0.5f), 39), Error);
  mass[3] = 1.5f;
  EXPECT_THROW(write(mass, 40), Error);
  mass[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(write(mass, 40), Error);
}

// A trace may be larger than memory: what is not read yet is not there, and what was read has gone.
TEST_F(PayloadTest, SafetensorsAreReadAPartAtATime) {
  constexpr std::int64_t kTokens = 4096, kTopk = 1024, kLayers = 6;
  const auto resident = [] {
    std::int64_t pages = 0, all = 0;
    std::ifstream("/proc/self/statm") >> all >> pages;
    return pages * sysconf(_SC_PAGESIZE);
  };
  const Rows rows = synthetic(kTokens, kTopk, 4, 500, 1, 1);
  const std::int64_t layer_bytes = std::ssize(rows) * 4;
  const std::filesystem::path path = path_.string() + ".safetensors";
  std::vector<weights::Tensor> tensors;
  for (std::int64_t i = 0; i < kLayers; ++i)
    tensors.push_back({"topk/layer_" + std::to_string(i),
                       DType::i32,
                       {kTokens, kTopk},
                       reinterpret_cast<const std::byte*>(rows.data()),
                       static_cast<std::uint64_t>(layer_bytes)});
  weights::write_safetensors(path, tensors);
  const std::int64_t before = resident();
  const Trace trace = open_trace(path, {});
  EXPECT_LT(resident() - before, layer_bytes);
  const Study s = run(trace, 2048, 1);
  EXPECT_LT(resident() - before, 2 * layer_bytes) << "of " << kLayers << " layers";
  EXPECT_EQ(s.layers.size(), 6u);
  std::filesystem::remove(path);
}

TEST_F(PayloadTest, DamageIsRefusedOrRead) {
  const std::string answer = "{\"indexer_topk\":\"" + base64(as_bytes(interleave(layers_, 6))) + "\"}";
  std::mt19937 random(4);
  for (int i = 0; i < 400; ++i) {
    std::string bad = answer;
    if (i % 2 == 0) bad.resize(random() % bad.size());
    if (!bad.empty()) bad[random() % bad.size()] = static_cast<char>(random());
    write(bad);
    try {
      const Trace trace = open_trace(path_, {3, 6});
      run(trace, 6);
    } catch (const Error&) {
    }
  }
  for (const char* text :
       {"", "  \n", "AAA", "AA=A", "AAAA====", "{", "[[[[", "{\"indexer_topk\": 5}", "\""}) {
    write(text);
    EXPECT_THROW(open_trace(path_, {1, 1}), Error) << text;
  }
}

TEST(Base64, RoundTrip) {
  for (std::size_t length = 0; length < 20; ++length) {
    std::string bytes;
    for (std::size_t i = 0; i < length; ++i) bytes += static_cast<char>(37 * i + 200);
    const std::vector<std::byte> back = decode_base64(base64(bytes));
    EXPECT_TRUE(std::ranges::equal(back, std::as_bytes(std::span(bytes))));
  }
}

}  // namespace
}  // namespace basin::probe
