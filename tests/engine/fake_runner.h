// A runner without a model. What it "computes" for a token depends on everything the token sees through its cache, as in a
// deep model, so a page that is wrong, stale or computed under another mask changes what follows.
#pragma once

#include <cmath>
#include <vector>

#include "basin/attention/mask.h"
#include "basin/base/error.h"
#include "engine/runner.h"

namespace basin::test {

class FakeRunner : public engine::Runner {
 public:
  /// `local_window`: of a second layer, if above 0.
  FakeRunner(std::int64_t vocabulary, std::int64_t page_tokens, std::int64_t pages,
             std::int64_t local_window = 0)
      : vocabulary_(vocabulary), windows_{0} {
    if (local_window > 0) windows_.push_back(local_window);
    for (const std::int64_t window : windows_) {
      const kv::Shape shape{1, 1, 1, DType::f32, page_tokens};
      kinds_.push_back({window, std::make_shared<kv::PagePool>(shape, window == 0 ? pages : 200)});
      kinds_.back().pool->poison_freed_pages(true);
    }
  }

  std::int64_t vocabulary() const override { return vocabulary_; }
  std::span<const kv::LayerKind> kinds() const override { return kinds_; }
  kv::SequenceCache make_cache(const kv::Policy& policy) const override {
    if (policy.sink_tokens == no_cache_for) throw std::bad_alloc();
    return {kinds_, policy, windows_};
  }

  /// The pass after so many others throws.
  std::int64_t fails_after = -1;
  /// There is no memory for sequences with so many sinks.
  std::int64_t no_cache_for = -1;
  std::int64_t runs = 0, most_tokens = 0;

  void run(std::span<const engine::RunnerWork> work, const OnLogits& on_logits) override {
    if (runs++ == fails_after) throw Error(ErrorCode::internal, "the runner fails");
    std::int64_t tokens = 0;
    for (std::size_t index = 0; index < work.size(); ++index) {
      tokens += static_cast<std::int64_t>(work[index].tokens.size());
      run_one(work[index],
              [&](std::int64_t row, std::span<const float> logits) { on_logits(index, row, 1, logits); });
    }
    most_tokens = std::max(most_tokens, tokens);
  }

 private:
  static std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
    hash = (hash ^ value) * 0xff51afd7ed558ccdu;
    return hash ^ (hash >> 33);
  }

  // Of every key that position p sees: its token, and what was seen there. The last key's token is `token`.
  std::uint64_t look(const kv::Cache& cache, std::int64_t p, float token) const {
    const kv::Policy& policy = cache.policy();
    std::uint64_t hash =
        policy.in_cache_positions && p >= policy.sink_tokens + policy.window && policy.window > 0;
    const auto* keys = static_cast<const float*>(cache.keys(0).data);
    const auto* values = static_cast<const float*>(cache.values(0).data);
    const std::int64_t page_tokens = cache.shape().page_tokens;
    for (std::int64_t j = 0; j < p; ++j) {
      if (policy.window > 0 && j >= policy.sink_tokens && p - j >= policy.window) continue;
      const std::int32_t page = cache.pages()[j / page_tokens];
      if (page < 0) throw Error(ErrorCode::internal, "a visible page is not there");
      const std::int64_t row = page * page_tokens + j % page_tokens;
      if (std::isnan(keys[row]) || std::isnan(values[row]))
        throw Error(ErrorCode::internal, "a freed page is read");
      hash = mix(mix(hash, static_cast<std::uint64_t>(keys[row])), static_cast<std::uint64_t>(values[row]));
    }
    return mix(mix(hash, static_cast<std::uint64_t>(token)), static_cast<std::uint64_t>(p));
  }

  void run_one(const engine::RunnerWork& work, const auto& on_row) {
    const auto count = static_cast<std::int64_t>(work.tokens.size());
    const std::int64_t first = work.cache->logical_position();
    kv::Step step;
    step.begin(*work.cache, count);
    std::vector<float> k(work.tokens.size()), v(work.tokens.size());
    std::vector<float> logits(static_cast<std::size_t>(vocabulary_));
    for (std::int64_t t = 0; t < count; ++t) {
      const auto at = static_cast<std::size_t>(t);
      k[at] = static_cast<float>(work.tokens[at]);
      std::uint64_t seen = 0;
      for (std::size_t kind = 0; kind < kinds_.size(); ++kind)
        seen = mix(seen, look(work.cache->kind(kind), first + t, k[at]));
      v[at] = static_cast<float>(seen & 0xffffff);  // a float holds 24 bits exactly
      // Later rows of the step are overwritten when their turn comes.
      for (std::size_t kind = 0; kind < kinds_.size(); ++kind)
        work.cache->kind(kind).append(0, k.data(), v.data());
      const bool wanted =
          work.rows == models::LogitsRows::all || (work.rows == models::LogitsRows::last && t == count - 1);
      if (!wanted) continue;
      for (std::size_t id = 0; id < logits.size(); ++id)
        logits[id] = static_cast<float>(mix(seen, id) & 0xffff) / 8192.0f;
      on_row(t, logits);
    }
    step.end();
  }

  std::int64_t vocabulary_;
  std::vector<std::int64_t> windows_;
  std::vector<kv::LayerKind> kinds_;
};

}  // namespace basin::test
