// A pass over chunks of several sequences: every row has the bits that it has alone, and no cache takes part in another's.
#include <gtest/gtest.h>

#include <map>

#include "basin/base/error.h"
#include "engine/runs.h"
#include "models/checkpoint.h"
#include "models/model.h"
#include "support/golden.h"

namespace basin::test {
namespace {

using engine::StreamOptions;
using ops::Compute;

// A sequence that is read in chunks of `chunk` tokens, from pass `starts` on.
struct Reader {
  StreamOptions options;
  std::int64_t tokens, chunk;
  int starts;
};

std::vector<Reader> some_readers(Compute compute) {
  std::vector<Reader> readers = {
      {{}, 90, 30, 0}, {{}, 40, 1, 1}, {{}, 75, 25, 0}, {{}, 60, 7, 2}, {{}, 3, 1, 5}};
  readers[1].options.window = 20;
  readers[2].options.window = 12, readers[2].options.sink_tokens = 4;
  readers[3].options.window = 17, readers[3].options.sink_tokens = 2;
  readers[3].options.positions = engine::PositionMode::absolute;
  for (std::size_t i = 0; i < readers.size(); ++i) {
    readers[i].options.compute = compute;
    readers[i].options.page_tokens = i % 2 == 0 ? 16 : 5;
  }
  return readers;
}

std::vector<std::int32_t> tokens_of(std::size_t reader, std::int64_t count, std::int64_t vocabulary) {
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < count; ++i) {
    tokens.push_back(static_cast<std::int32_t>(
        (i * i * 31 + (static_cast<std::int64_t>(reader) + 3) * i + 5) % vocabulary));
  }
  return tokens;
}

class Pass : public testing::TestWithParam<std::filesystem::path> {};

TEST_P(Pass, EveryRowHasItsBits) {
  const models::Loaded loaded = models::load(GetParam());
  models::Model& model = *loaded.model;
  const std::int64_t vocabulary = model.config().vocabulary;
  ThreadPool pool(2);
  for (const Compute compute : {Compute::fp32, Compute::fast}) {
    const auto readers = some_readers(compute);
    std::vector<kv::SequenceCache> caches;
    std::vector<std::vector<std::int32_t>> texts;
    for (std::size_t i = 0; i < readers.size(); ++i) {
      caches.push_back(engine::make_cache(readers[i].options, model.config()));
      texts.push_back(tokens_of(i, readers[i].tokens, vocabulary));
    }
    std::vector<std::vector<float>> logits(readers.size());
    for (int pass = 0; pass < 100; ++pass) {
      std::vector<models::Chunk> chunks;
      std::vector<std::size_t> owners;
      for (std::size_t i = 0; i < readers.size(); ++i) {
        const std::int64_t begin = caches[i].logical_position(), left = readers[i].tokens - begin;
        if (pass < readers[i].starts || left == 0) continue;
        const std::int64_t size = std::min(readers[i].chunk, left);
        chunks.push_back(
            {std::span(texts[i]).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(size)),
             &caches[i], models::LogitsRows::all});
        owners.push_back(i);
      }
      if (chunks.empty()) break;
      model.forward(
          chunks, {compute},
          [&](std::size_t chunk, std::int64_t first, std::int64_t rows, std::span<const float> run) {
            std::vector<float>& mine = logits[owners[chunk]];
            const std::int64_t position = chunks[chunk].cache->logical_position() + first;
            EXPECT_EQ(static_cast<std::int64_t>(mine.size()), position * vocabulary);
            EXPECT_EQ(static_cast<std::int64_t>(run.size()), rows * vocabulary);
            mine.insert(mine.end(), run.begin(), run.end());
          },
          pool);
    }
    for (std::size_t i = 0; i < readers.size(); ++i) {
      EXPECT_TRUE(same_bits(logits[i], all_logits(model, readers[i].options, texts[i], 1)))
          << "sequence " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(golden, Pass, testing::ValuesIn(supported_golden_models()),
                         [](const auto& i) { return folder_name(i.param); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Pass);

class PassOfLlama : public testing::Test {
 protected:
  models::Loaded loaded = models::load(golden_model("llama"));
  models::Model& model = *loaded.model;
  std::vector<std::int32_t> text = tokens_of(0, 100, model.config().vocabulary);
  ThreadPool pool{1};

  kv::SequenceCache cache(Compute compute = Compute::fast) {
    StreamOptions options;
    options.compute = compute;
    return engine::make_cache(options, model.config());
  }
};

TEST_F(PassOfLlama, RowsThatAreWantedOfEachChunk) {
  kv::SequenceCache all = cache(), last = cache(), none = cache();
  const auto tokens = std::span<const std::int32_t>(text);
  const models::Chunk chunks[] = {{tokens.first(70), &all, models::LogitsRows::all},
                                  {tokens.first(20), &none, models::LogitsRows::none},
                                  {tokens.first(70), &last, models::LogitsRows::last}};
  std::map<std::size_t, std::vector<float>> found;
  std::map<std::size_t, std::int64_t> rows_of;
  model.forward(
      chunks, {},
      [&](std::size_t chunk, std::int64_t first, std::int64_t rows, std::span<const float> logits) {
        EXPECT_EQ(first, chunk == 0 ? rows_of[chunk] : 69);
        rows_of[chunk] += rows;
        found[chunk].insert(found[chunk].end(), logits.begin(), logits.end());
      },
      pool);
  EXPECT_EQ(rows_of, (std::map<std::size_t, std::int64_t>{{0, 70}, {2, 1}}));
  EXPECT_TRUE(same_bits(found[2], {found[0].end() - model.config().vocabulary, found[0].end()}));
  EXPECT_EQ(none.logical_position(), 20);
}

TEST_F(PassOfLlama, APassThatThrowsLeavesEveryCache) {
  kv::SequenceCache a = cache(), b = cache();
  const auto tokens = std::span<const std::int32_t>(text);
  const models::Chunk chunks[] = {{tokens.first(40), &a}, {tokens.first(30), &b}};
  int calls = 0;
  const auto fail_at_second = [&](std::size_t, std::int64_t, std::int64_t, std::span<const float>) {
    if (++calls == 2) throw std::runtime_error("the disk is full");
  };
  EXPECT_THROW(model.forward(chunks, {}, fail_at_second, pool), std::runtime_error);
  EXPECT_EQ(a.logical_position(), 0);
  EXPECT_EQ(b.logical_position(), 0);
  EXPECT_EQ(a.full().allocated_pages() + b.full().allocated_pages(), 0);

  const models::Chunk twice[] = {{tokens.first(4), &a}, {tokens.first(3), &a}};
  EXPECT_THROW(model.forward(twice, {}, {}, pool), Error);
  kv::SequenceCache other = cache(Compute::fp32);
  const models::Chunk mixed[] = {{tokens.first(4), &a}, {tokens.first(3), &other}};
  EXPECT_THROW(model.forward(mixed, {}, {}, pool), Error);
  const models::Chunk empty[] = {{tokens.first(4), &a}, {{}, &b}};
  EXPECT_THROW(model.forward(empty, {}, {}, pool), Error);
  EXPECT_THROW(model.forward({}, {}, {}, pool), Error);
  EXPECT_EQ(a.logical_position(), 0);
  EXPECT_EQ(other.logical_position(), 0);
}

}  // namespace
}  // namespace basin::test
