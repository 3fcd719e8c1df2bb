// Generation and perplexity: counted, scored and ended as their contracts say.
#include "engine/tasks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "basin/base/error.h"
#include "engine/runs.h"
#include "models/checkpoint.h"
#include "models/model.h"

namespace basin::test {
namespace {

using engine::FinishReason;
using engine::GenerateOptions;
using engine::Stream;
using engine::StreamOptions;

class Tasks : public testing::Test {
 protected:
  models::Loaded loaded = models::load(golden_model("llama"));
  models::Model& model = *loaded.model;
  const std::int64_t vocabulary = model.config().vocabulary;
  ThreadPool pool{2};

  std::vector<std::int32_t> text(std::int64_t count) const {
    std::vector<std::int32_t> tokens;
    for (std::int64_t i = 0; i < count; ++i)
      tokens.push_back(static_cast<std::int32_t>((i * i * 31 + i * 17 + 5) % vocabulary));
    return tokens;
  }

  double nll(const std::vector<float>& logits, std::int64_t row, std::int32_t target) const {
    const float* x = logits.data() + row * vocabulary;
    long double sum = 0;
    for (std::int64_t i = 0; i < vocabulary; ++i) sum += std::exp(static_cast<long double>(x[i]));
    return static_cast<double>(std::log(sum)) - static_cast<double>(x[target]);
  }
};

TEST_F(Tasks, PerplexityScoresEveryTokenButTheFirst) {
  const auto tokens = text(1300);
  const auto logits = all_logits(model, {}, tokens);
  std::vector<double> want;
  for (std::int64_t i = 1; i < 1300; ++i)
    want.push_back(nll(logits, i - 1, tokens[static_cast<std::size_t>(i)]));
  Stream stream(model, {}, pool);
  const auto result = engine::perplexity(stream, tokens, nullptr, {}, nullptr);
  ASSERT_EQ(result.nll.size(), want.size());
  double sum = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    EXPECT_NEAR(static_cast<double>(result.nll[i]), want[i], 1e-4);
    sum += want[i];
  }
  EXPECT_EQ(result.tokens, 1300);
  EXPECT_EQ(result.scored_tokens, 1299);
  EXPECT_FALSE(result.bos);
  EXPECT_NEAR(result.mean_nll, sum / 1299, 1e-5);
  EXPECT_NEAR(result.perplexity, std::exp(sum / 1299), 1e-3 * std::exp(sum / 1299));
  ASSERT_EQ(result.curve.size(), 3u);
  EXPECT_EQ(result.curve[0].tokens_seen, 513);
  EXPECT_EQ(result.curve[1].tokens_seen, 1025);
  EXPECT_EQ(result.curve[2].tokens_seen, 1300);
  double last = 0;
  for (std::size_t i = want.size() - 512; i < want.size(); ++i) last += want[i] / 512;
  EXPECT_NEAR(result.curve[2].mean_nll, last, 1e-5);
}

TEST_F(Tasks, BosIsFedAndNeverScored) {
  const auto tokens = text(20);
  std::vector<std::int32_t> with_bos = {1};
  for (const std::int32_t id : tokens) with_bos.push_back(id);
  const auto logits = all_logits(model, {}, with_bos);
  Stream stream(model, {}, pool);
  const std::int32_t bos = 1;
  const auto result = engine::perplexity(stream, tokens, &bos, {}, nullptr);
  EXPECT_TRUE(result.bos);
  EXPECT_EQ(result.tokens, 20);
  ASSERT_EQ(result.scored_tokens, 20);
  for (std::int64_t i = 0; i < 20; ++i) {
    EXPECT_NEAR(static_cast<double>(result.nll[static_cast<std::size_t>(i)]),
                nll(logits, i, tokens[static_cast<std::size_t>(i)]), 1e-4);
  }
}

TEST_F(Tasks, PerplexityRefusesWhatCannotBeScored) {
  Stream stream(model, {}, pool);
  EXPECT_THROW(engine::perplexity(stream, text(1), nullptr, {}, nullptr), Error);
  EXPECT_THROW(engine::perplexity(stream, text(model.config().context + 2), nullptr, {}, nullptr), Error);
  EXPECT_EQ(stream.lengths().logical_position, 0);
  const std::int32_t bad[] = {1, static_cast<std::int32_t>(vocabulary)};
  EXPECT_THROW(engine::perplexity(stream, bad, nullptr, {}, nullptr), Error) << "only scored, but outside";
  std::atomic<bool> cancel = true;
  try {
    engine::perplexity(stream, text(50), nullptr, {}, &cancel);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::cancelled);
  }
}

TEST_F(Tasks, GreedyFollowsTheLargestLogit) {
  const auto prompt = text(40);
  Stream stream(model, {}, pool);
  GenerateOptions options;
  options.max_tokens = 12;
  std::vector<std::int32_t> seen;
  const auto result = engine::generate(
      stream, prompt, options, [&](std::int32_t id) { seen.push_back(id); }, {}, nullptr);
  EXPECT_EQ(result.finish_reason, FinishReason::length);
  EXPECT_EQ(result.prompt_tokens, 40);
  ASSERT_EQ(result.token_ids.size(), 12u);
  EXPECT_EQ(seen, result.token_ids);
  std::vector<std::int32_t> whole = prompt;
  for (const std::int32_t id : result.token_ids) whole.push_back(id);
  const auto logits = all_logits(model, {}, whole);
  for (std::int64_t i = 0; i < 12; ++i) {
    const float* row = logits.data() + (39 + i) * vocabulary;
    EXPECT_EQ(std::max_element(row, row + vocabulary) - row, result.token_ids[static_cast<std::size_t>(i)]);
  }

  // The fourth token as a stop: it ends the text and is no part of it.
  options.stops.push_back(result.token_ids[3]);
  Stream again(model, {}, pool);
  const auto stopped = engine::generate(again, prompt, options, {}, {}, nullptr);
  EXPECT_EQ(stopped.finish_reason, FinishReason::stop);
  const auto first = std::find(result.token_ids.begin(), result.token_ids.end(), result.token_ids[3]);
  EXPECT_THAT(stopped.token_ids, testing::ElementsAreArray(result.token_ids.begin(), first));
}

// Every token in turn against the definition: logits of the whole text, and the set of all its tokens.
TEST_F(Tasks, RepetitionPenaltyCountsPromptAndText) {
  GenerateOptions options;
  options.max_tokens = 30;
  options.sampling.repetition_penalty = 3.0;
  std::vector<std::int32_t> whole = text(40);
  Stream stream(model, {}, pool);
  const auto result = engine::generate(stream, whole, options, {}, {}, nullptr);
  ASSERT_EQ(result.token_ids.size(), 30u);
  const std::size_t prompt_tokens = whole.size();
  whole.insert(whole.end(), result.token_ids.begin(), result.token_ids.end());
  const auto logits = all_logits(model, {}, whole);
  for (std::size_t i = prompt_tokens; i < whole.size(); ++i) {
    const auto row = logits.begin() + static_cast<std::ptrdiff_t>(i - 1) * vocabulary;
    const std::vector<float> last(row, row + vocabulary);
    ops::SeenTokens seen;
    seen.add(std::span(whole).first(i));
    EXPECT_EQ(ops::sample(last, options.sampling, seen, static_cast<std::int64_t>(i)), whole[i]) << i;
  }
  options.sampling.repetition_penalty = 1.0;
  Stream free(model, {}, pool);
  EXPECT_NE(engine::generate(free, text(40), options, {}, {}, nullptr).token_ids, result.token_ids);
}

TEST_F(Tasks, SamplingDoesNotDependOnTheSchedule) {
  const auto prompt = text(1200);
  GenerateOptions options;
  options.max_tokens = 20;
  options.sampling.temperature = 1.5;
  options.sampling.seed = 7;
  std::vector<std::vector<std::int32_t>> runs;
  for (const std::int64_t chunk : {33, 512, 1 << 20}) {
    StreamOptions stream_options;
    stream_options.chunk_tokens = chunk;
    stream_options.sink_tokens = 4;
    stream_options.window = 60;
    Stream stream(model, stream_options, pool);
    runs.push_back(engine::generate(stream, prompt, options, {}, {}, nullptr).token_ids);
  }
  EXPECT_EQ(runs[0], runs[1]);
  EXPECT_EQ(runs[0], runs[2]);
  options.sampling.seed = 8;
  Stream other(model, {}, pool);
  EXPECT_NE(engine::generate(other, prompt, options, {}, {}, nullptr).token_ids, runs[0]);
}

TEST_F(Tasks, GenerationEndsAtTheContextOrWhenCancelled) {
  const std::int64_t context = model.config().context;
  GenerateOptions options;
  Stream full(model, {}, pool);
  const auto result = engine::generate(full, text(context - 2), options, {}, {}, nullptr);
  EXPECT_EQ(result.finish_reason, FinishReason::length);
  EXPECT_EQ(result.token_ids.size(), 3u) << "two that fit, and the one that the last of them predicts";

  std::atomic<bool> cancel = false;
  Stream stream(model, {}, pool);
  const auto cancelled = engine::generate(
      stream, text(5), options, [&](std::int32_t) { cancel = true; }, {}, &cancel);
  EXPECT_EQ(cancelled.finish_reason, FinishReason::cancelled);
  EXPECT_EQ(cancelled.token_ids.size(), 1u);

  // In the prompt: seen after 512 tokens at the latest, whatever the chunk.
  for (const std::int64_t chunk : {100, 512, 1 << 20}) {
    StreamOptions long_chunks;
    long_chunks.chunk_tokens = chunk;
    Stream reading(model, long_chunks, pool);
    cancel = true;
    EXPECT_EQ(engine::generate(reading, text(2000), options, {}, {}, &cancel).finish_reason,
              FinishReason::cancelled);
    EXPECT_LE(reading.lengths().logical_position, 512);
    EXPECT_EQ(reading.token_history().size(), static_cast<std::size_t>(reading.lengths().logical_position));
  }

  EXPECT_THROW(engine::generate(stream, {}, options, {}, {}, nullptr), Error);
  options.max_tokens = -1;
  EXPECT_THROW(engine::generate(stream, text(3), options, {}, {}, nullptr), Error);
}

}  // namespace
}  // namespace basin::test
