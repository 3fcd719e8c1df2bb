// The batch without a model: thousands of steps of random work, and every answer the one that its request gets alone.
#include "engine/batch.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>

#include "basin/base/error.h"
#include "engine/fake_runner.h"

namespace basin::test {
namespace {

using engine::Batch;
using engine::BatchOptions;
using engine::Event;
using engine::FinishReason;
using engine::Request;

constexpr std::int64_t kVocabulary = 24, kPageTokens = 4;

struct Answer {
  std::vector<std::int32_t> tokens;
  std::vector<double> logprobs;
  std::vector<engine::TokenLogprob> prompt_logprobs;
  std::optional<FinishReason> reason;
  std::optional<engine::Failure> failure;
  engine::Usage usage;
  std::int64_t ends = 0;
};

// A batch with a clock that moves a millisecond with every look at it.
class Bench {
 public:
  Bench(std::int64_t pages, BatchOptions options, std::int64_t local_window = 0)
      : runner(kVocabulary, kPageTokens, pages, local_window) {
    options.check_each_step = true;
    options.now_us = [this] { return now_us += 1000; };
    batch.emplace(runner, threads, nullptr, options);
  }

  void add(std::uint64_t id, Request request) {
    request.on_event = [this, id](Event&& event) {
      Answer& answer = answers[{id, event.choice}];
      if (event.token) answer.tokens.push_back(*event.token);
      if (event.logprob) answer.logprobs.push_back(event.logprob->logprob);
      for (const auto& logprob : event.prompt_logprobs) answer.prompt_logprobs.push_back(logprob);
      if (!event.finish_reason && !event.failure) return;
      ++answer.ends;
      answer.reason = event.finish_reason;
      answer.failure = event.failure;
      answer.usage = event.usage;
    };
    batch->check(request);
    batch->add(id, std::move(request), now_us);
  }

  /// Steps until nothing is left; false when that takes more than `most`.
  bool run(std::int64_t most) {
    for (std::int64_t step = 0; step < most && !batch->empty(); ++step) batch->step();
    return batch->empty();
  }

  std::int64_t held() const {
    std::int64_t held = 0;
    for (const kv::LayerKind& kind : runner.kinds()) held += kind.pool->pages().held();
    return held;
  }

  FakeRunner runner;
  ThreadPool threads{1};
  std::int64_t now_us = 0;
  std::map<std::pair<std::uint64_t, std::int64_t>, Answer> answers;
  std::optional<Batch> batch;
};

BatchOptions options(std::int64_t max_sequences, std::int64_t max_batch_tokens, bool prefix_cache = true) {
  BatchOptions options;
  options.max_sequences = max_sequences;
  options.max_batch_tokens = max_batch_tokens;
  options.prefix_cache = prefix_cache;
  return options;
}

std::vector<std::int32_t> text(std::int64_t seed, std::int64_t count) {
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < count; ++i)
    tokens.push_back(static_cast<std::int32_t>((i * i * 5 + i * (seed + 3) + seed) % kVocabulary));
  return tokens;
}

Request request(std::vector<std::int32_t> prompt, std::int64_t max_tokens) {
  Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.sampling.options.temperature = 1.0;
  return request;
}

Answer alone(const Request& asked, std::int64_t choice = 0, std::int64_t local_window = 0) {
  Bench bench(4096, options(8, 64, false), local_window);
  bench.add(1, asked);
  EXPECT_TRUE(bench.run(10'000));
  return bench.answers.at({1, choice});
}

std::int64_t between(std::int64_t low, std::int64_t high) {
  return *rc::gen::inRange<std::int64_t>(low, high + 1);
}

Request random_request() {
  // Few different beginnings, so that prompts share pages, also under unequal masks.
  std::vector<std::int32_t> prompt = text(between(0, 1), between(1, 60));
  const std::int64_t own = between(0, 8);
  for (std::int64_t i = 0; i < own; ++i)
    prompt.push_back(static_cast<std::int32_t>(between(0, kVocabulary - 1)));
  Request asked = request(std::move(prompt), between(0, 30));
  if (between(0, 1) == 1) asked.policy = {between(0, 6), between(1, 24), between(0, 1) == 1};
  asked.choices = between(0, 4) == 0 ? 3 : 1;
  asked.priority = between(-1, 1);
  asked.sampling.options.temperature = between(0, 2) == 0 ? 0.0 : 1.0;
  asked.sampling.options.seed = static_cast<std::uint64_t>(between(0, 3));
  if (between(0, 3) == 0) asked.sampling.frequency_penalty = 0.5;
  if (between(0, 3) == 0) asked.sampling.options.repetition_penalty = 1.3;
  if (between(0, 5) == 0) asked.prompt_logprobs = 2;
  if (between(0, 3) == 0) asked.stop_ids = {3};
  return asked;
}

RC_GTEST_PROP(Batch, AnswersAreThoseOfTheRequestAlone, ()) {
  // Seldom enough pages for all: the largest request needs 25.
  const std::int64_t max_sequences = between(1, 6), local_window = between(0, 1) * between(1, 14);
  Bench bench(between(26, 60), options(max_sequences, between(max_sequences, 40), between(0, 3) > 0),
              local_window);
  std::map<std::uint64_t, Request> asked;
  std::map<std::uint64_t, bool> cancelled;
  std::uint64_t next = 1;
  for (std::int64_t round = between(1, 40); round > 0; --round) {
    if (between(0, 2) > 0) {
      asked[next] = random_request();
      bench.add(next, asked[next]);
      ++next;
    }
    if (between(0, 9) == 0 && next > 1) {
      const auto id = static_cast<std::uint64_t>(between(1, static_cast<std::int64_t>(next) - 1));
      bench.batch->cancel(id);
      cancelled[id] = true;
    }
    if (between(0, 19) == 0) bench.batch->clear_prefix_cache();
    for (std::int64_t steps = between(0, 6); steps > 0 && !bench.batch->empty(); --steps) bench.batch->step();
  }
  RC_ASSERT(bench.run(20'000));
  RC_ASSERT(bench.held() == 0);
  bench.batch->check_invariants();
  RC_ASSERT(bench.runner.most_tokens <= 40);
  for (const auto& [id, what] : asked) {
    for (std::int64_t choice = 0; choice < what.choices; ++choice) {
      const Answer& got = bench.answers.at({id, choice});
      RC_ASSERT(got.ends == 1);
      RC_ASSERT(!got.failure.has_value());
      const Answer want = alone(what, choice, local_window);
      if (got.reason == FinishReason::cancelled) {
        RC_ASSERT(cancelled[id]);
        RC_ASSERT(got.tokens.size() <= want.tokens.size());
        RC_ASSERT(std::equal(got.tokens.begin(), got.tokens.end(), want.tokens.begin()));
        continue;
      }
      RC_ASSERT(got.tokens == want.tokens);
      RC_ASSERT(got.reason == want.reason);
      RC_ASSERT(got.usage.completion_tokens == static_cast<std::int64_t>(got.tokens.size()));
      RC_ASSERT(got.usage.kept_tokens == want.usage.kept_tokens);
      RC_ASSERT(got.prompt_logprobs.size() == want.prompt_logprobs.size());
      for (std::size_t i = 0; i < got.prompt_logprobs.size(); ++i) {
        RC_ASSERT(got.prompt_logprobs[i].id == want.prompt_logprobs[i].id);
        RC_ASSERT(got.prompt_logprobs[i].logprob == want.prompt_logprobs[i].logprob);
        RC_ASSERT(got.prompt_logprobs[i].top == want.prompt_logprobs[i].top);
      }
    }
  }
}

TEST(Batch, PreemptionChangesNoToken) {
  Bench bench(26, options(4, 32));
  for (std::uint64_t id = 1; id <= 4; ++id)
    bench.add(id, request(text(static_cast<std::int64_t>(id), 20), 60));
  ASSERT_TRUE(bench.run(10'000));
  std::int64_t preemptions = 0;
  for (std::uint64_t id = 1; id <= 4; ++id) {
    const Answer& answer = bench.answers.at({id, 0});
    preemptions += answer.usage.preemptions;
    EXPECT_EQ(answer.tokens, alone(request(text(static_cast<std::int64_t>(id), 20), 60)).tokens) << id;
  }
  EXPECT_GT(preemptions, 0);
  EXPECT_EQ(bench.batch->metrics().preemptions, preemptions);
}

TEST(Batch, WindowedSequencesAreCopiedOutAndNotComputedAgain) {
  // Each holds seven pages at its longest, five of them together 35.
  for (const bool prefix_cache : {true, false}) {
    Bench bench(26, options(5, 32, prefix_cache));
    std::map<std::uint64_t, Request> asked;
    for (std::uint64_t id = 1; id <= 5; ++id) {
      asked[id] = request(text(static_cast<std::int64_t>(id), 5), 90);
      asked[id].policy = {2, 20, id % 2 == 0};
      bench.add(id, asked[id]);
    }
    ASSERT_TRUE(bench.run(10'000));
    std::int64_t preemptions = 0;
    for (const auto& [id, what] : asked) {
      const Answer& answer = bench.answers.at({id, 0});
      EXPECT_EQ(answer.tokens, alone(what).tokens) << id;
      EXPECT_EQ(answer.usage.kept_tokens, 22);
      preemptions += answer.usage.preemptions;
    }
    EXPECT_GT(preemptions, 0);
    EXPECT_GT(bench.batch->metrics().copied_pages, 0);
    EXPECT_EQ(bench.batch->metrics().computed_tokens,
              5 * (5 + 89));  // the last token of an answer is not read
    EXPECT_EQ(bench.held(), 0);
  }
}

// A sequence that is copied back takes pages, and must not take those that one beside it has just found.
TEST(Batch, WhoStartsBesideACopiedSequenceFindsItsPages) {
  std::int64_t together = 0;  // copies went back in a step in which something was found
  for (std::int64_t pages = 11; pages < 24; ++pages) {
    for (std::int64_t later = 0; later < 40; later += 3) {
      Bench bench(pages, options(3, 16));
      std::map<std::uint64_t, Request> asked;
      for (std::uint64_t id = 1; id <= 4; ++id) {
        asked[id] = request(text(id == 1 ? 1 : 2, 17), id == 1 ? 30 : 40);
        asked[id].policy = {2, 20, true};
        asked[id].sampling.options.seed = id;
      }
      for (const std::uint64_t id : {1u, 2u}) bench.add(id, asked[id]);
      while (bench.batch->metrics().preemptions == 0 && !bench.batch->empty()) bench.batch->step();
      for (std::int64_t step = 0; step < later && !bench.batch->empty(); ++step) bench.batch->step();
      for (const std::uint64_t id : {3u, 4u}) bench.add(id, asked[id]);
      while (!bench.batch->empty()) {
        const engine::Metrics before = bench.batch->metrics();
        bench.batch->step();
        const engine::Metrics now = bench.batch->metrics();
        together += now.waiting + 2 <= before.waiting && now.prefix_hit_tokens > before.prefix_hit_tokens;
      }
      for (const auto& [id, what] : asked)
        ASSERT_EQ(bench.answers.at({id, 0}).tokens, alone(what).tokens) << pages << " " << later << " " << id;
      ASSERT_EQ(bench.held(), 0);
    }
  }
  EXPECT_GT(together, 0);
}

// Copies take no more memory than the pool has. What has no room for its own is computed again, under its mask and from its
// whole history, not from what its window holds.
TEST(Batch, AWindowedSequenceWithoutRoomForItsCopyIsComputedAgain) {
  std::map<std::uint64_t, Request> asked;
  const std::int64_t windows[] = {66, 46, 46, 46};
  for (std::uint64_t id = 1; id <= 4; ++id) {
    asked[id] = request(text(static_cast<std::int64_t>(id), 5), 150);
    asked[id].policy = {3, windows[id - 1], id == 2};
  }
  Bench bench(20, options(4, 16, false));
  for (const auto& [id, what] : asked) bench.add(id, what);
  ASSERT_TRUE(bench.run(10'000));
  std::int64_t preemptions = 0;
  for (const auto& [id, what] : asked) {
    const Answer& answer = bench.answers.at({id, 0});
    EXPECT_EQ(answer.tokens, alone(what).tokens) << id;
    preemptions += answer.usage.preemptions;
  }
  EXPECT_GE(preemptions, 3);
  EXPECT_GT(bench.batch->metrics().copied_pages, 0);
  EXPECT_GT(bench.batch->metrics().computed_tokens, 4 * (5 + 149));
  EXPECT_EQ(bench.held(), 0);
}

TEST(Batch, ACopiedOutSequenceCanBeCancelled) {
  Bench bench(14, options(3, 32));
  for (std::uint64_t id = 1; id <= 3; ++id) {
    Request asked = request(text(static_cast<std::int64_t>(id), 5), 1000);
    asked.policy = {2, 20, true};
    bench.add(id, std::move(asked));
  }
  while (bench.batch->metrics().copied_pages == 0) bench.batch->step();
  bench.batch->clear_prefix_cache();
  bench.batch->cancel_all();
  bench.batch->step();
  EXPECT_TRUE(bench.batch->empty());
  EXPECT_EQ(bench.held(), 0);
  for (std::uint64_t id = 1; id <= 3; ++id)
    EXPECT_EQ(bench.answers.at({id, 0}).reason, FinishReason::cancelled);
}

TEST(Batch, AWindowNeedsABoundedNumberOfPages) {
  // A pool of 9 pages holds a text of 500 pages.
  Request asked = request(text(1, 1000), 1000);
  asked.policy = {4, 12, true};
  Bench bench(9, options(1, 8));
  bench.add(1, asked);
  ASSERT_TRUE(bench.run(10'000));
  EXPECT_EQ(bench.answers.at({1, 0}).tokens, alone(asked).tokens);
  EXPECT_EQ(bench.answers.at({1, 0}).usage.kept_tokens, 16);
  EXPECT_GT(bench.batch->metrics().pages_left_window, 400);
}

TEST(Batch, AWindowedStreamTouchesItsPagesAndThoseOfItsPrompt) {
  Bench bench(400, options(2, 16));
  Request asked = request(text(1, 41), 4000);
  asked.policy = {2, 10, true};
  bench.add(1, asked);
  EXPECT_TRUE(bench.run(10'000));
  EXPECT_EQ(bench.answers.at({1, 0}).tokens.size(), 4000u);
  EXPECT_LE(bench.runner.pool().pages().used(), kv::page_bound(asked.policy, kPageTokens, 16) + 11);
  // The prompt is found again, and so is the whole text, by its end.
  bench.add(2, request(text(1, 41), 1));
  asked.max_tokens = 1;
  bench.add(3, asked);
  Request next = asked;
  const auto& said = bench.answers.at({1, 0}).tokens;
  next.prompt.insert(next.prompt.end(), said.begin(), said.end());
  bench.add(4, next);
  EXPECT_TRUE(bench.run(100));
  EXPECT_EQ(bench.answers.at({2, 0}).usage.cached_tokens, 12);  // what every mask sees
  EXPECT_EQ(bench.answers.at({3, 0}).usage.cached_tokens, 40);
  EXPECT_EQ(bench.answers.at({4, 0}).usage.cached_tokens, 4040);
}

TEST(Batch, EqualPromptsUnderUnequalMasksShareNothingTheySeeDifferently) {
  Request first = request(text(1, 40), 10);
  first.policy = {2, 10, true};
  for (const kv::Policy& policy :
       {kv::Policy{}, kv::Policy{2, 11, true}, kv::Policy{3, 10, true}, kv::Policy{2, 10, false}}) {
    Request second = first;
    second.policy = policy;
    Bench bench(100, options(4, 8));  // small passes: a page is known before the window has left it
    bench.add(1, first);
    ASSERT_TRUE(bench.run(1000));
    bench.add(2, second);
    ASSERT_TRUE(bench.run(1000));
    EXPECT_EQ(bench.answers.at({2, 0}).tokens, alone(second).tokens);
    // 12 tokens are seen in full by both: three pages.
    EXPECT_EQ(bench.answers.at({2, 0}).usage.cached_tokens, 12);
  }
}

TEST(Batch, TheSamePromptIsComputedOnce) {
  Bench bench(100, options(4, 64));
  for (std::uint64_t id = 1; id <= 3; ++id) {
    bench.add(id, request(text(1, 41), 5));
    ASSERT_TRUE(bench.run(1000));
  }
  EXPECT_EQ(bench.answers.at({1, 0}).usage.cached_tokens, 0);
  EXPECT_EQ(bench.answers.at({2, 0}).usage.cached_tokens, 40);
  EXPECT_EQ(bench.batch->metrics().prefix_hit_tokens, 80);
  EXPECT_EQ(bench.batch->metrics().computed_tokens, 41 + 1 + 1 + 3 * 4);
  bench.batch->clear_prefix_cache();
  bench.add(4, request(text(1, 41), 5));
  ASSERT_TRUE(bench.run(1000));
  EXPECT_EQ(bench.answers.at({4, 0}).usage.cached_tokens, 0);
  EXPECT_EQ(bench.answers.at({4, 0}).tokens, bench.answers.at({1, 0}).tokens);
}

// Whatever its length, and whatever the answers before it wrote behind it.
TEST(Batch, OfAPromptThatComesAgainTheLastTokenIsComputed) {
  const kv::Policy policies[] = {{}, {2, 5, true}, {2, 5, false}, {0, 1, true}, {6, 30, true}};
  for (const std::int64_t local_window : {0, 1, 5}) {
    for (const kv::Policy& policy : policies) {
      for (std::int64_t length = 1; length <= 5 * kPageTokens + 1; ++length) {
        for (const std::int64_t answer : {0, 1, 3, 9}) {
          Bench bench(64, options(4, 64), local_window);
          Request asked = request(text(1, length), answer);
          asked.policy = policy;
          asked.logprobs = 2;
          const Answer want = alone(asked, 0, local_window);
          for (std::uint64_t id = 1; id <= 3; ++id) {
            const std::int64_t before = bench.batch->metrics().computed_tokens;
            bench.add(id, asked);
            ASSERT_TRUE(bench.run(1000));
            const Answer& got = bench.answers.at({id, 0});
            ASSERT_EQ(got.tokens, want.tokens) << length;
            ASSERT_EQ(got.logprobs, want.logprobs) << length;
            const std::int64_t cached = id == 1 ? 0 : length - 1;
            ASSERT_EQ(got.usage.cached_tokens, cached) << length << " " << answer << " " << policy.window;
            ASSERT_EQ(bench.batch->metrics().computed_tokens - before,
                      length - cached + std::max<std::int64_t>(0, answer - 1));
            ASSERT_EQ(bench.held(), 0);
          }
          // Nothing of it is there under another mask, but for what every mask sees.
          asked.policy = {3, 4, true};
          bench.add(4, asked);
          ASSERT_TRUE(bench.run(1000));
          const std::int64_t sees_all =
              policy.window == 0 ? 7 : std::min<std::int64_t>(7, policy.sink_tokens + policy.window);
          ASSERT_LE(bench.answers.at({4, 0}).usage.cached_tokens, sees_all / kPageTokens * kPageTokens);
          ASSERT_EQ(bench.answers.at({4, 0}).tokens, alone(asked, 0, local_window).tokens);
        }
      }
    }
  }
}

// The copy of a page in part takes the page that would have been computed, and none beside it.
TEST(Batch, APromptThatFillsThePoolComesAgain) {
  for (std::int64_t length = 1; length <= 8 * kPageTokens; ++length) {
    Bench bench(8, options(4, 64));
    for (std::uint64_t id = 1; id <= 4; ++id) {
      bench.add(id, request(text(1, length), 8 * kPageTokens - length));
      if (id >= 2) bench.batch->step();
    }
    ASSERT_TRUE(bench.run(1000));
    const Answer want = alone(request(text(1, length), 8 * kPageTokens - length));
    for (std::uint64_t id = 1; id <= 4; ++id)
      ASSERT_EQ(bench.answers.at({id, 0}).tokens, want.tokens) << length;
    EXPECT_EQ(bench.held(), 0);
  }
}

TEST(Batch, EqualPromptsThatComeTogetherAreComputedOnce) {
  for (const std::int64_t pass : {8, 13, 64}) {
    for (const std::int64_t length : {2, 4, 15, 16, 17, 32}) {
      Bench bench(200, options(8, pass));
      for (std::uint64_t id = 1; id <= 8; ++id) bench.add(id, request(text(1, length), 1));
      ASSERT_TRUE(bench.run(1000));
      EXPECT_EQ(bench.batch->metrics().computed_tokens, length + 7) << pass << " " << length;
      for (std::uint64_t id = 2; id <= 8; ++id)
        EXPECT_EQ(bench.answers.at({id, 0}).tokens, bench.answers.at({1, 0}).tokens);
    }
  }
}

// Log-probabilities of a prompt are of all its tokens, and all are computed.
TEST(Batch, AnEchoedPromptIsComputedAgain) {
  Request asked = request(text(1, 16), 3);
  asked.prompt_logprobs = 2;
  const Answer want = alone(asked);
  Bench bench(64, options(4, 64));
  for (std::uint64_t id = 1; id <= 3; ++id) {
    Request plain = request(text(1, 16), 3);
    bench.add(id, id == 2 ? plain : asked);
    ASSERT_TRUE(bench.run(1000));
    const Answer& got = bench.answers.at({id, 0});
    EXPECT_EQ(got.tokens, want.tokens);
    EXPECT_EQ(got.usage.cached_tokens, id == 2 ? 15 : 0);
    if (id == 2) continue;
    ASSERT_EQ(got.prompt_logprobs.size(), 15u);
    for (std::size_t i = 0; i < 15; ++i)
      EXPECT_EQ(got.prompt_logprobs[i].logprob, want.prompt_logprobs[i].logprob);
  }
}

TEST(Batch, LayersWithWindowsOfTheirOwnShareBeginningsToo) {
  for (const std::int64_t pass : {8, 64}) {  // the window has left a page before its pass has ended, or not
    Bench bench(100, options(4, pass), 5);
    const auto ask = [&](std::uint64_t id, std::int64_t shared) {
      std::vector<std::int32_t> prompt = text(1, shared);
      for (std::uint64_t own = 0; own < 9; ++own)
        prompt.push_back(static_cast<std::int32_t>((id + own) % kVocabulary));
      const Request asked = request(std::move(prompt), 20);
      bench.add(id, asked);
      EXPECT_TRUE(bench.run(1000));
      EXPECT_EQ(bench.answers.at({id, 0}).tokens, alone(asked, 0, 5).tokens);
      return bench.answers.at({id, 0}).usage.cached_tokens;
    };
    EXPECT_EQ(ask(1, 41), 0);
    EXPECT_EQ(ask(2, 41), 41);
    EXPECT_EQ(ask(3, 17), 17);  // in the middle of the first
    // A whole conversation goes on.
    Request next = request(text(1, 41), 1);
    for (std::uint64_t own = 0; own < 9; ++own)
      next.prompt.push_back(static_cast<std::int32_t>((1 + own) % kVocabulary));
    const auto& said = bench.answers.at({1, 0}).tokens;
    next.prompt.insert(next.prompt.end(), said.begin(), said.end());
    bench.add(4, next);
    EXPECT_TRUE(bench.run(1000));
    EXPECT_EQ(bench.answers.at({4, 0}).usage.cached_tokens, 68);  // of 70
    EXPECT_EQ(bench.held(), 0);
  }
}

TEST(Batch, PromptsThatComeTogetherAreComputedOnce) {
  Bench bench(200, options(8, 16));
  for (std::uint64_t id = 1; id <= 8; ++id) {
    std::vector<std::int32_t> prompt = text(1, 80);
    prompt.push_back(static_cast<std::int32_t>(id));  // unlike ends
    bench.add(id, request(std::move(prompt), 2));
  }
  bench.add(9, request(text(2, 20), 2));  // has nothing to wait for
  for (int step = 0; step < 3; ++step) bench.batch->step();
  EXPECT_TRUE(bench.answers.contains({9, 0}));
  ASSERT_TRUE(bench.run(1000));
  for (std::uint64_t id = 2; id <= 8; ++id)
    EXPECT_EQ(bench.answers.at({id, 0}).usage.cached_tokens, 80) << id;
  EXPECT_EQ(bench.batch->metrics().computed_tokens, 81 + 7 * 1 + 20 + 9);
}

TEST(Batch, ChoicesShareThePromptAndDiffer) {
  for (std::int64_t length = 37; length <= 41;
       ++length) {  // its last page full in part or whole: each writes its own
    Request asked = request(text(1, length), 20);
    asked.choices = 4;
    Bench bench(100, options(4, 64));
    bench.add(1, asked);
    ASSERT_TRUE(bench.run(1000));
    for (std::int64_t choice = 0; choice < 4; ++choice) {
      Request single = request(text(1, length), 20);
      single.sampling.options.seed = static_cast<std::uint64_t>(choice);
      EXPECT_EQ(bench.answers.at({1, choice}).tokens, alone(single).tokens);
      EXPECT_EQ(bench.answers.at({1, choice}).usage.cached_tokens, choice == 0 ? 0 : length - 1);
    }
    EXPECT_NE(bench.answers.at({1, 0}).tokens, bench.answers.at({1, 1}).tokens);
    EXPECT_EQ(bench.batch->metrics().computed_tokens, length + 3 + 4 * 19);
  }
}

TEST(Batch, CancelledInAnyStateItHoldsNothing) {
  for (std::int64_t steps : {0, 1, 3, 12, 40}) {  // waiting, reading the prompt, writing
    Bench bench(40, options(1, 8));
    bench.add(1, request(text(1, 40), 60));
    bench.add(2, request(text(2, 40), 60));
    for (std::int64_t step = 0; step < steps; ++step) bench.batch->step();
    bench.batch->cancel(1);
    bench.batch->cancel(2);
    bench.batch->step();
    EXPECT_TRUE(bench.batch->empty());
    EXPECT_EQ(bench.held(), 0);
    for (std::uint64_t id : {1u, 2u}) {
      EXPECT_EQ(bench.answers.at({id, 0}).reason, FinishReason::cancelled);
      EXPECT_EQ(bench.answers.at({id, 0}).ends, 1);
    }
    bench.batch->cancel(1);  // of no concern any more
  }
}

TEST(Batch, ADeadlineEndsWhatWaitsAndWhatRuns) {
  Bench bench(40, options(1, 8));
  Request asked = request(text(1, 40), 100);
  asked.timeout_us = 30'000;
  bench.add(1, asked);
  bench.add(2, asked);
  ASSERT_TRUE(bench.run(1000));
  for (std::uint64_t id : {1u, 2u}) {
    ASSERT_TRUE(bench.answers.at({id, 0}).failure.has_value());
    EXPECT_EQ(bench.answers.at({id, 0}).failure->code, ErrorCode::cancelled);
  }
  EXPECT_EQ(bench.batch->metrics().timed_out, 2);
  EXPECT_EQ(bench.held(), 0);
}

TEST(Batch, AFailingPassFailsItsRequestsOnly) {
  Bench bench(40, options(2, 16));
  bench.runner.fails_after = 3;
  for (std::uint64_t id = 1; id <= 3; ++id) bench.add(id, request(text(1, 10), 20));
  ASSERT_TRUE(bench.run(1000));
  EXPECT_TRUE(bench.answers.at({1, 0}).failure.has_value());
  EXPECT_TRUE(bench.answers.at({2, 0}).failure.has_value());
  EXPECT_EQ(bench.answers.at({3, 0}).tokens, alone(request(text(1, 10), 20)).tokens);
  EXPECT_EQ(bench.held(), 0);
}

TEST(Batch, WhatGoesWrongForOneSequenceFailsThatOne) {
  Bench bench(64, options(4, 32));
  bench.runner.no_cache_for = 3;
  Request poor = request(text(0, 9), 5);
  poor.policy = {3, 8, true};
  bench.add(1, request(text(1, 9), 5));
  bench.add(2, poor);
  Request silent = request(text(2, 9), 5);
  silent.on_event = [](Event&&) { throw std::runtime_error("nobody listens"); };
  bench.batch->add(3, silent, bench.now_us);
  EXPECT_TRUE(bench.run(100));
  const auto failed = bench.answers.at({2, 0});
  ASSERT_TRUE(failed.failure);
  EXPECT_EQ(failed.failure->code, ErrorCode::internal);
  EXPECT_EQ(failed.ends, 1);
  EXPECT_EQ(bench.answers.at({1, 0}).tokens, alone(request(text(1, 9), 5)).tokens);
  EXPECT_EQ(bench.held(), 0);
}

TEST(Batch, AnEndOfAll) {
  Bench bench(64, options(1, 32));
  bench.add(1, request(text(1, 9), 50));
  bench.add(2, request(text(2, 9), 50));
  bench.batch->step();
  bench.batch->fail_all({ErrorCode::internal, "broken"});
  EXPECT_TRUE(bench.batch->empty());
  for (const std::uint64_t id : {1u, 2u}) EXPECT_EQ(bench.answers.at({id, 0}).ends, 1);
  EXPECT_EQ(bench.held(), 0);
  bench.add(3, request(text(1, 9), 5));
  EXPECT_TRUE(bench.run(100));
  EXPECT_EQ(bench.answers.at({3, 0}).tokens.size(), 5u);
}

TEST(Batch, RefusesWhatCouldNeverBeAnswered) {
  Bench bench(10, options(2, 16));
  EXPECT_THROW(bench.batch->check(request({}, 4)), Error);
  EXPECT_THROW(bench.batch->check(request({static_cast<std::int32_t>(kVocabulary)}, 4)), Error);
  EXPECT_THROW(bench.batch->check(request({-1}, 4)), Error);
  EXPECT_THROW(bench.batch->check(request(text(1, 20), 21)), Error);  // 11 pages
  EXPECT_NO_THROW(bench.batch->check(request(text(1, 20), 20)));
  Request bad = request(text(1, 4), 4);
  bad.sampling.logit_bias = {{kVocabulary, 1.0}};
  EXPECT_THROW(bench.batch->check(bad), Error);
  bad = request(text(1, 4), 4);
  bad.sampling.presence_penalty = 3.0;
  EXPECT_THROW(bench.batch->check(bad), Error);
  EXPECT_THROW(Bench(10, options(8, 7)), Error);
}

// While others keep coming, `asked` ends after at most `most` steps.
void expect_served(Request asked, const Request& others, std::int64_t most) {
  Bench bench(60, options(3, 16, false));
  std::uint64_t next = 2;
  for (int i = 0; i < 6; ++i) bench.add(next++, others);
  bench.add(1, std::move(asked));
  for (std::int64_t step = 0; step < most; ++step) {
    bench.batch->step();
    if (bench.answers.contains({1, 0}) && bench.answers.at({1, 0}).ends == 1) return;
    while (bench.batch->waiting() < 6) bench.add(next++, others);
  }
  FAIL() << "still not answered after " << most << " steps";
}

TEST(Batch, NobodyStarves) {
  Request long_prompt = request(text(1, 120), 10), short_prompt = request(text(2, 3), 10);
  expect_served(long_prompt, short_prompt, 200);
  expect_served(short_prompt, long_prompt, 200);
  short_prompt.priority = -1;  // ten seconds later: ten thousand looks at the clock
  expect_served(short_prompt, long_prompt, 20'000);
}

TEST(Batch, PrioritiesGoFirst) {
  Bench bench(60, options(1, 16));
  std::vector<std::uint64_t> order;
  for (std::uint64_t id = 1; id <= 3; ++id) {
    Request asked = request(text(1, 10), 3);
    asked.priority = id == 3 ? 1 : 0;
    bench.add(id, std::move(asked));
  }
  while (!bench.batch->empty()) {
    bench.batch->step();
    for (std::uint64_t id = 1; id <= 3; ++id) {
      const auto found = bench.answers.find({id, 0});
      if (found != bench.answers.end() && found->second.ends == 1 &&
          std::ranges::find(order, id) == order.end())
        order.push_back(id);
    }
  }
  EXPECT_EQ(order, (std::vector<std::uint64_t>{3, 1, 2}));
}

TEST(Batch, AShortPromptPassesALongOne) {
  Bench bench(200, options(4, 16));
  bench.add(1, request(text(1, 400), 1));
  bench.add(2, request(text(2, 8), 1));
  for (int step = 0; step < 2; ++step) bench.batch->step();
  EXPECT_TRUE(bench.answers.contains({2, 0}));
  EXPECT_FALSE(bench.answers.contains({1, 0}));
}

}  // namespace
}  // namespace basin::test
