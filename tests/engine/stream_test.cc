// What a stream promises beyond parity: bits that do not depend on the schedule, nothing stale, options refused by name.
#include "engine/stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "basin/base/error.h"
#include "engine/runs.h"
#include "kv/sequence_cache.h"
#include "models/checkpoint.h"
#include "models/model.h"

namespace basin::test {
namespace {

using engine::PositionMode;
using engine::Stream;
using engine::StreamOptions;
using ops::Compute;

std::vector<std::int32_t> some_tokens(std::int64_t count, std::int64_t vocabulary) {
  std::vector<std::int32_t> tokens;
  std::uint64_t x = 88172645463325252u;
  for (std::int64_t i = 0; i < count; ++i) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    tokens.push_back(static_cast<std::int32_t>(x % static_cast<std::uint64_t>(vocabulary)));
  }
  return tokens;
}

class StreamOfFamily : public testing::TestWithParam<const char*> {
 protected:
  models::Loaded loaded = models::load(golden_model(GetParam()));
  models::Model& model = *loaded.model;
};

TEST_P(StreamOfFamily, PrefillEqualsDecodeBitForBit) {
  const auto tokens = some_tokens(150, model.config().vocabulary);
  for (const Compute compute : {Compute::fp32, Compute::fast}) {
    for (const std::int64_t window : {0, 40}) {
      StreamOptions options;
      options.compute = compute;
      if (window > 0) options.window = window, options.sink_tokens = 5;
      options.chunk_tokens = 1;
      const auto decode = all_logits(model, options, tokens, 1);
      for (const std::int64_t chunk : {7, 64, 150}) {
        options.chunk_tokens = chunk;
        options.page_tokens = chunk == 7 ? 64 : 3;
        EXPECT_TRUE(same_bits(all_logits(model, options, tokens), decode))
            << "chunk " << chunk << " window " << window << " fast " << (compute == Compute::fast);
      }
    }
  }
}

TEST_P(StreamOfFamily, FastIsNearFp32) {
  const auto tokens = some_tokens(100, model.config().vocabulary);
  StreamOptions options;
  const auto fast = all_logits(model, options, tokens);
  options.compute = Compute::fp32;
  const auto exact = all_logits(model, options, tokens);
  double error = 0, size = 0;
  for (std::size_t i = 0; i < fast.size(); ++i) {
    error += std::pow(fast[i] - exact[i], 2);
    size += std::pow(exact[i], 2);
  }
  EXPECT_GT(error, 0) << "fast must be another arithmetic";
  // Gemma's norms scale up what each layer adds, and bf16's rounding with it: measured are 0.052, and 0.015 for the others.
  EXPECT_LT(std::sqrt(error / size), model.config().architecture == "gemma3_text" ? 0.1 : 0.03);
}

TEST_P(StreamOfFamily, AWindowOfTheLengthIsNoWindow) {
  const auto tokens = some_tokens(120, model.config().vocabulary);
  StreamOptions options;
  options.chunk_tokens = 50;
  const auto dense = all_logits(model, options, tokens);
  for (const PositionMode mode : {PositionMode::in_cache, PositionMode::absolute}) {
    for (const std::int64_t window : {120, 121, 200}) {
      for (const std::int64_t sinks : {0, 4, 33}) {
        options.positions = mode;
        options.window = window;
        options.sink_tokens = sinks;
        EXPECT_TRUE(same_bits(all_logits(model, options, tokens), dense)) << window << " " << sinks;
      }
    }
  }
}

// Freed pages are NaN: one stale read would spread to the logits.
TEST_P(StreamOfFamily, PoisonedPagesNeverShow) {
  const models::ModelConfig& c = model.config();
  const auto tokens = some_tokens(300, c.vocabulary);
  ThreadPool pool(2);
  for (const Compute compute : {Compute::fp32, Compute::fast}) {
    for (const auto backend : {attention::Backend::cpu, attention::Backend::reference}) {
      for (const std::int64_t page : {1, 5, 16}) {
        const auto run = [&](bool poison) {
          StreamOptions options;
          options.compute = compute;
          options.page_tokens = page;
          options.sink_tokens = 3;
          options.window = 20;
          kv::SequenceCache cache = engine::make_cache(options, c);
          cache.poison_freed_pages(poison);
          std::vector<float> logits;
          for (std::size_t begin = 0; begin < tokens.size(); begin += 30) {
            const models::Chunk chunk{std::span(tokens).subspan(begin, 30), &cache};
            const auto keep = [&](std::size_t, std::int64_t, std::int64_t, std::span<const float> rows) {
              logits.insert(logits.end(), rows.begin(), rows.end());
            };
            model.forward({&chunk, 1}, {compute, backend}, keep, pool);
          }
          return logits;
        };
        const auto clean = run(false), poisoned = run(true);
        EXPECT_EQ(largest_difference(poisoned, clean), 0.0f) << "page " << page;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Family, StreamOfFamily, testing::Values("llama", "qwen3", "gpt_oss", "gemma3_text"),
                         [](const auto& i) { return std::string(i.param); });

class StreamChecks : public testing::Test {
 protected:
  models::Loaded loaded = models::load(golden_model("llama"));
  ThreadPool pool{1};

  void expect_refused(const StreamOptions& options, const std::string& named) {
    try {
      Stream stream(*loaded.model, options, pool);
      ADD_FAILURE() << "accepted; expected a refusal that names " << named;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_THAT(error.what() + (" " + error.hint()), testing::HasSubstr(named));
    }
  }
};

TEST_F(StreamChecks, OptionsAreRefusedByName) {
  const std::int64_t context = loaded.model->config().context;
  StreamOptions o;
  o.window = 0;
  expect_refused(o, "--window");
  o.window = -3;
  expect_refused(o, "--window");
  o = {};
  o.sink_tokens = 4;
  expect_refused(o, "--sink-tokens");
  o.sink_tokens = -1;
  expect_refused(o, "--sink-tokens");
  o = {};
  o.chunk_tokens = 0;
  expect_refused(o, "--chunk-tokens");
  o = {};
  o.page_tokens = 0;
  expect_refused(o, "--page-tokens");
  o = {};
  o.sink_tokens = 4;
  o.window = context - 3;
  expect_refused(o, "trained context");
  o.window = context - 4;
  EXPECT_NO_THROW(Stream(*loaded.model, o, pool));
}

TEST_F(StreamChecks, TextBeyondTheContextIsRefusedBeforeAnythingIsRead) {
  const std::int64_t context = loaded.model->config().context;
  const auto tokens = some_tokens(context + 1, loaded.model->config().vocabulary);
  Stream stream(*loaded.model, {}, pool);
  EXPECT_TRUE(stream.has_room(context));
  EXPECT_FALSE(stream.has_room(context + 1));
  try {
    stream.feed(tokens, models::LogitsRows::none, {});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr(std::to_string(context)));
    for (const char* flag : {"--window", "--sink-tokens", "--max-tokens"})
      EXPECT_THAT(error.hint(), testing::HasSubstr(flag));
  }
  EXPECT_EQ(stream.lengths().logical_position, 0);
}

TEST_F(StreamChecks, IdsOutsideTheVocabularyAreRefused) {
  Stream stream(*loaded.model, {}, pool);
  for (const std::int32_t bad : {-1, static_cast<std::int32_t>(loaded.model->config().vocabulary)}) {
    const std::int32_t tokens[] = {1, bad};
    EXPECT_THROW(stream.feed(tokens, models::LogitsRows::none, {}), Error);
  }
  EXPECT_TRUE(stream.token_history().empty());
}

TEST_F(StreamChecks, RowsOfLogitsAreThoseAskedFor) {
  const auto tokens = some_tokens(100, loaded.model->config().vocabulary);
  const auto all = all_logits(*loaded.model, {}, tokens);
  StreamOptions options;
  options.chunk_tokens = 30;
  Stream stream(*loaded.model, options, pool);
  std::vector<float> last;
  std::int64_t position = -1;
  stream.feed(tokens, models::LogitsRows::last,
              [&](std::int64_t first, std::int64_t rows, std::span<const float> logits) {
                EXPECT_EQ(rows, 1);
                position = first;
                last.insert(last.end(), logits.begin(), logits.end());
                return true;
              });
  EXPECT_EQ(position, 99);
  EXPECT_TRUE(same_bits(last, std::vector<float>(all.end() - loaded.model->config().vocabulary, all.end())));
  EXPECT_THAT(stream.token_history(), testing::ElementsAreArray(tokens));

  // false stops after the running chunk.
  Stream stopped(*loaded.model, options, pool);
  stopped.feed(tokens, models::LogitsRows::all,
               [](std::int64_t, std::int64_t, std::span<const float>) { return false; });
  EXPECT_EQ(stopped.lengths().logical_position, 30);
}

// Fails in the middle of a pass when it is told to: keys of the first layer are written by then.
class FailingModel : public models::Model {
 public:
  explicit FailingModel(models::Model& model) : model_(model) {}
  bool fails = false;

  const models::ModelConfig& config() const override { return model_.config(); }
  std::int64_t parameters() const override { return model_.parameters(); }
  std::int64_t weight_bytes() const override { return model_.weight_bytes(); }
  std::int64_t token_weight_bytes() const override { return model_.token_weight_bytes(); }
  attention::Ran forward(std::span<const models::Chunk> chunks, const models::PassOptions& options,
                         const models::OnLogits& on_logits, ThreadPool& threads) override {
    if (!fails) return model_.forward(chunks, options, on_logits, threads);
    const auto tokens = static_cast<std::int64_t>(chunks[0].tokens.size());
    kv::SequenceCache& cache = *chunks[0].cache;
    kv::Step step;
    step.begin(cache, tokens);
    const std::vector<float> junk(static_cast<std::size_t>(tokens * config().h_kv * config().d_head), 1e30f);
    cache.layer(0).cache->append(cache.layer(0).index, junk.data(), junk.data());
    throw Error(ErrorCode::unsupported, "this pass was meant to fail");
  }

 private:
  models::Model& model_;
};

TEST_F(StreamChecks, AChunkThatThrowsIsUnreadAndTheStreamGoesOn) {
  const auto tokens = some_tokens(200, loaded.model->config().vocabulary);
  const std::span<const std::int32_t> all(tokens);
  for (const std::int64_t window : {0, 40}) {
    StreamOptions options;
    options.chunk_tokens = 30;
    options.page_tokens = 16;
    if (window > 0) options.window = window, options.sink_tokens = 5;
    const auto want = all_logits(*loaded.model, options, tokens);

    FailingModel model(*loaded.model);
    Stream stream(model, options, pool);
    std::vector<float> found;
    int calls = 0;
    const auto keep = [&](std::int64_t, std::int64_t, std::span<const float> logits) {
      if (++calls == 3) throw std::runtime_error("the disk is full");
      found.insert(found.end(), logits.begin(), logits.end());
      return true;
    };
    // The receiver of the third chunk's logits throws: two chunks of 30 are read.
    EXPECT_THROW(stream.feed(all, models::LogitsRows::all, keep), std::runtime_error);
    ASSERT_EQ(stream.lengths().logical_position, 60);
    EXPECT_EQ(stream.token_history().size(), 60u);
    // The model itself throws, and nothing at all is read.
    const engine::StreamLengths before = stream.lengths();
    const engine::StreamReport report = stream.report();
    model.fails = true;
    for (int i = 0; i < 3; ++i)
      EXPECT_THROW(stream.feed(all.subspan(60), models::LogitsRows::none, {}), Error);
    model.fails = false;
    EXPECT_EQ(stream.lengths().logical_position, 60);
    EXPECT_EQ(stream.lengths().kept_tokens, before.kept_tokens);
    EXPECT_EQ(stream.lengths().write_slot, before.write_slot);
    EXPECT_EQ(stream.report().kept_tokens_max, report.kept_tokens_max);
    EXPECT_THAT(stream.token_history(), testing::ElementsAreArray(all.first(60)));
    // What follows has the bits of a stream that never failed.
    stream.feed(all.subspan(60), models::LogitsRows::all, keep);
    EXPECT_TRUE(same_bits(found, want)) << "window " << window;
    EXPECT_THAT(stream.token_history(), testing::ElementsAreArray(tokens));
  }
}

TEST_F(StreamChecks, LengthsAreSevenNumbers) {
  StreamOptions options;
  options.sink_tokens = 4;
  options.window = 30;
  options.page_tokens = 16;
  options.chunk_tokens = 25;
  Stream stream(*loaded.model, options, pool);
  stream.feed(some_tokens(200, loaded.model->config().vocabulary), models::LogitsRows::none, {});
  const engine::StreamLengths lengths = stream.lengths();
  EXPECT_EQ(lengths.logical_position, 200);
  EXPECT_EQ(lengths.cache_position, 33);
  EXPECT_EQ(lengths.attention_tokens, 34);
  EXPECT_EQ(lengths.ring_offset, 171 % 16);
  EXPECT_EQ(lengths.kept_tokens, 16 + 200 - 160) << "the sinks' page, and pages from token 160 on";
  EXPECT_EQ(lengths.write_slot % 16, 200 % 16);
  EXPECT_EQ(stream.token_history().size(), 200u);
  EXPECT_EQ(stream.report().kept_tokens_max, 34);
}

}  // namespace
}  // namespace basin::test
