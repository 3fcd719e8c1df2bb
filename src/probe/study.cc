#include "probe/study.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>

#include "basin/base/error.h"

namespace basin::probe {
namespace {

constexpr std::int64_t kGroup = kBlocks.back();     // queries whose bitsets are in memory at a time
constexpr std::int64_t kSpan = 2048;                // queries over which a key counts as absolute or not
constexpr std::int64_t kSampledQueries = 256;       // for overlaps between layers and between lags
constexpr std::int64_t kSampleBytes = 512'000'000;  // of the samples' bitsets, all layers together

using Words = std::vector<std::uint64_t>;

std::int64_t common(const std::uint64_t* a, const std::uint64_t* b, std::int64_t words) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < words; ++i) count += std::popcount(a[i] & b[i]);
  return count;
}

// Everything that the layers share.
struct Frame {
  const Trace& trace;
  std::int64_t topk, keys, words;
  std::int64_t skipped;         // queries before the studied ones; those behind them are skipped, too
  std::int64_t first, queries;  // studied positions
  std::int64_t map_rows, map_columns, row_queries, column_keys;
  std::vector<std::int64_t> lags;
  std::vector<std::int64_t> samples;  // studied queries, counted from the first
};

class LayerPass {
 public:
  LayerPass(const Frame& frame, std::int64_t layer, const std::atomic<bool>* cancel)
      : f_(frame),
        layer_(layer),
        cancel_(cancel),
        rows_(frame.trace.load(layer)),
        row_(static_cast<std::size_t>(frame.topk)) {}

  LayerStudy run(std::uint64_t* sample_bits) {
    LayerStudy& r = result_;
    r.number = f_.trace.number(layer_);
    check_skipped(0, f_.skipped);
    const auto keys = static_cast<std::size_t>(f_.keys);
    selected_.assign(keys, 0);
    age_.assign(keys, 0);
    r.map.assign(static_cast<std::size_t>(f_.map_rows * f_.map_columns), 0.0f);
    spans_.assign(static_cast<std::size_t>((f_.queries + kSpan - 1) / kSpan), {});
    for (std::size_t i = 0; i < kBlocks.size() && kBlocks[i] <= f_.queries; ++i) {
      r.blocks.push_back({kBlocks[i], {}, {}, {}});
    }
    multiplicity_.assign(static_cast<std::size_t>(kGroup), 0.0);

    bits_.assign(static_cast<std::size_t>(kGroup * f_.words), 0);
    for (std::int64_t begin = 0; begin < f_.queries; begin += kGroup) {
      if (cancel_ != nullptr && cancel_->load(std::memory_order_relaxed))
        throw Error(ErrorCode::cancelled, "cancelled");
      const std::int64_t count = std::min(kGroup, f_.queries - begin);
      read_group(begin, count, sample_bits);
      release(f_.skipped + begin, count);
    }
    check_skipped(f_.skipped + f_.queries, f_.trace.queries());
    finish_frequencies();
    measure_absolute();
    measure_mass();
    if (f_.queries > 1) measure_lags();
    release(0, f_.trace.queries());  // what these two have read again
    return std::move(result_);
  }

 private:
  // Copies the row of a query, counted from the trace's first, into row_.
  void read_row(std::int64_t query) {
    std::memcpy(row_.data(), rows_.data + query * rows_.stride, row_.size() * 4);
  }
  // Rows that are not needed soon: a layer may be larger than memory.
  void release(std::int64_t query, std::int64_t count) const {
    if (!rows_.array.mapped) return;
    release_pages(rows_.data + query * rows_.stride, static_cast<std::uint64_t>(count * rows_.stride));
  }
  void read(std::int64_t query) { read_row(f_.skipped + query); }  // a studied query

  void check_skipped(std::int64_t begin, std::int64_t end) {
    Words bits(static_cast<std::size_t>(f_.trace.positions().back() / 64 + 1), 0);
    for (std::int64_t q = begin; q < end; ++q) {
      read_row(q);
      std::fill(bits.begin(), bits.end(), 0);
      check_row(row_, f_.trace.positions()[static_cast<std::size_t>(q)], result_.number, q, bits.data());
    }
    release(begin, end - begin);
  }

  void read_group(std::int64_t begin, std::int64_t count, std::uint64_t* sample_bits) {
    std::fill(bits_.begin(), bits_.end(), 0);
    counts_.assign(static_cast<std::size_t>(f_.keys), 0);
    std::vector<std::uint32_t>& span = spans_[static_cast<std::size_t>(begin / kSpan)];
    if (span.empty()) span.assign(static_cast<std::size_t>(f_.keys), 0);
    for (std::int64_t q = 0; q < count; ++q) {
      const std::int64_t query = begin + q, position = f_.first + query;
      std::uint64_t* bits = bits_.data() + q * f_.words;
      read(query);
      check_row(row_, position, result_.number, f_.skipped + query, bits);
      float* map = result_.map.data() + query / f_.row_queries * f_.map_columns;
      for (const std::int32_t key : row_) {
        if (key < 0) continue;
        ++counts_[static_cast<std::size_t>(key)];
        ++age_[static_cast<std::size_t>(position - key)];
        map[key / f_.column_keys] += 1.0f;
      }
      const auto sample = std::lower_bound(f_.samples.begin(), f_.samples.end(), query);
      if (sample != f_.samples.end() && *sample == query) {
        std::copy_n(bits, f_.words, sample_bits + (sample - f_.samples.begin()) * f_.words);
      }
    }
    for (std::size_t key = 0; key < counts_.size(); ++key) {
      selected_[key] += counts_[key];
      span[key] += counts_[key];
    }
    if (count == kGroup) {
      std::array<std::int64_t, kGroup + 1> times{};
      for (const std::uint32_t c : counts_) ++times[c];
      std::int64_t at_least = 0;
      for (std::int64_t m = kGroup; m >= 1; --m) {
        at_least += times[static_cast<std::size_t>(m)];
        multiplicity_[static_cast<std::size_t>(m - 1)] += static_cast<double>(at_least);
      }
      // Over all ordered pairs of the group, a key in m sets is common to m (m - 1) of them.
      double pairs = 0.0;
      for (std::int64_t m = 2; m <= kGroup; ++m) {
        pairs += static_cast<double>(times[static_cast<std::size_t>(m)] * m * (m - 1));
      }
      pairwise_ += pairs / static_cast<double>(kGroup * (kGroup - 1));
      ++groups_;
    }
    join(begin, count);
  }

  // One tree over the group: nodes of B queries from two of B / 2. bits_ becomes the intersections, united_ the unions.
  void join(std::int64_t begin, std::int64_t count) {
    united_ = bits_;
    std::int64_t nodes = count;
    for (BlockCounts& counts : result_.blocks) {
      nodes /= 2;
      for (std::int64_t i = 0; i < nodes; ++i) {
        std::uint64_t* all = bits_.data() + i * f_.words;
        std::uint64_t* any = united_.data() + i * f_.words;
        const std::uint64_t *a = bits_.data() + 2 * i * f_.words, *b = a + f_.words;
        const std::uint64_t *c = united_.data() + 2 * i * f_.words, *d = c + f_.words;
        std::int64_t in_all = 0, in_any = 0;
        for (std::int64_t w = 0; w < f_.words; ++w) {
          all[w] = a[w] & b[w];
          any[w] = c[w] | d[w];
          in_all += std::popcount(all[w]);
          in_any += std::popcount(any[w]);
        }
        counts.position.push_back(f_.first + begin + i * counts.block);
        counts.intersection.push_back(static_cast<float>(in_all));
        counts.united.push_back(static_cast<float>(in_any));
      }
    }
  }

  // Studied queries of [0, count) at or after a key, resp. as old as an age.
  std::int64_t seen_by(std::int64_t key, std::int64_t begin, std::int64_t end) const {
    return std::max<std::int64_t>(0, f_.first + end - std::max(key, f_.first + begin));
  }

  void finish_frequencies() {
    LayerStudy& r = result_;
    r.frequency.resize(selected_.size());
    r.age.resize(selected_.size());
    for (std::size_t i = 0; i < selected_.size(); ++i) {
      const std::int64_t seen = seen_by(static_cast<std::int64_t>(i), 0, f_.queries);
      r.frequency[i] = seen > 0 ? static_cast<float>(selected_[i]) / static_cast<float>(seen) : 0.0f;
      r.age[i] = seen > 0 ? static_cast<float>(age_[i]) / static_cast<float>(seen) : 0.0f;
    }
    for (std::size_t i = 0; i < kSinkCounts.size(); ++i) {
      const auto count = static_cast<std::size_t>(std::min(kSinkCounts[i], f_.keys));
      double sum = 0.0;
      for (std::size_t key = 0; key < count; ++key) sum += static_cast<double>(r.frequency[key]);
      r.sink_kept[i] = static_cast<float>(sum / static_cast<double>(count));
    }
    for (double& m : multiplicity_) {
      if (groups_ > 0) r.multiplicity.push_back(static_cast<float>(m / static_cast<double>(groups_)));
    }
    if (groups_ > 0) {
      r.pairwise_128 =
          static_cast<float>(pairwise_ / static_cast<double>(groups_) / static_cast<double>(f_.topk));
    }
    for (std::int64_t row = 0; row < f_.map_rows; ++row) {
      const std::int64_t begin = row * f_.row_queries, end = std::min(begin + f_.row_queries, f_.queries);
      for (std::int64_t column = 0; column < f_.map_columns; ++column) {
        const std::int64_t low = column * f_.column_keys, high = std::min(low + f_.column_keys, f_.keys);
        std::int64_t visible = 0;
        for (std::int64_t q = begin; q < end; ++q) {
          visible += std::max<std::int64_t>(0, std::min(high, f_.first + q + 1) - low);
        }
        float& cell = r.map[static_cast<std::size_t>(row * f_.map_columns + column)];
        cell = visible > 0 ? cell / static_cast<float>(visible) : 0.0f;
      }
    }
  }

  void measure_mass() {
    const std::vector<float> mass = f_.trace.mass(layer_);
    if (mass.empty()) return;
    double all = 0.0;
    for (std::int64_t begin = 0; begin < f_.queries; begin += f_.row_queries) {
      const std::int64_t end = std::min(begin + f_.row_queries, f_.queries);
      double sum = 0.0;
      for (std::int64_t q = begin; q < end; ++q)
        sum += static_cast<double>(mass[static_cast<std::size_t>(f_.skipped + q)]);
      result_.mass_by_query.push_back(static_cast<float>(sum / static_cast<double>(end - begin)));
      all += sum;
    }
    result_.mass = static_cast<float>(all / static_cast<double>(f_.queries));
  }

  void measure_absolute() {
    LayerStudy& r = result_;
    // A key that few queries saw may be selected by all of them because it is recent.
    const auto is_absolute = [&](std::int64_t key, std::int64_t count, std::int64_t begin, std::int64_t end) {
      const std::int64_t seen = seen_by(key, begin, end);
      return seen >= std::max<std::int64_t>(1, (end - begin) / 2) &&
             static_cast<double>(count) >= kAbsoluteShare * static_cast<double>(seen);
    };
    std::vector<bool> absolute(selected_.size(), false);
    for (std::size_t key = 0; key < selected_.size(); ++key) {
      absolute[key] = is_absolute(static_cast<std::int64_t>(key), selected_[key], 0, f_.queries);
      r.absolute_keys += absolute[key] ? 1 : 0;
    }
    r.absolute_by_query.assign(static_cast<std::size_t>(f_.map_rows), 0.0f);
    double share = 0.0;
    for (std::int64_t row = 0; row < f_.map_rows; ++row) {
      const std::int64_t begin = row * f_.row_queries, end = std::min(begin + f_.row_queries, f_.queries);
      const std::int64_t step =
          std::max<std::int64_t>(1, (end - begin) / 4);  // a few queries of each row stand for it
      std::int64_t hits = 0, read_queries = 0, selected = 0;
      for (std::int64_t q = begin; q < end; q += step, ++read_queries) {
        read(q);
        for (const std::int32_t key : row_) {
          if (key < 0) continue;
          ++selected;
          hits += absolute[static_cast<std::size_t>(key)] ? 1 : 0;
        }
      }
      const float value = selected > 0 ? static_cast<float>(hits) / static_cast<float>(selected) : 0.0f;
      r.absolute_by_query[static_cast<std::size_t>(row)] = value;
      share += static_cast<double>(value) * static_cast<double>(end - begin);
    }
    r.absolute_share = static_cast<float>(share / static_cast<double>(f_.queries));

    std::vector<std::vector<bool>> sets;
    for (std::size_t s = 0; s < spans_.size(); ++s) {
      const std::int64_t begin = static_cast<std::int64_t>(s) * kSpan,
                         end = std::min(begin + kSpan, f_.queries);
      std::vector<bool> set(selected_.size(), false);
      std::int64_t count = 0;
      for (std::size_t key = 0; key < set.size(); ++key) {
        set[key] = is_absolute(static_cast<std::int64_t>(key), spans_[s][key], begin, end);
        count += set[key] ? 1 : 0;
      }
      r.span_position.push_back(f_.first + begin);
      r.span_keys.push_back(static_cast<float>(count));
      sets.push_back(std::move(set));
    }
    for (std::size_t s = 0; s < sets.size(); ++s) {
      float stay = std::numeric_limits<float>::quiet_NaN();
      if (s + 1 < sets.size() && r.span_keys[s] > 0.0f) {
        std::int64_t both = 0;
        for (std::size_t key = 0; key < sets[s].size(); ++key)
          both += sets[s][key] && sets[s + 1][key] ? 1 : 0;
        stay = static_cast<float>(both) / r.span_keys[s];
      }
      r.span_stay.push_back(stay);
    }
  }

  void measure_lags() {
    LayerStudy& r = result_;
    r.lags = f_.lags;
    Words bits(static_cast<std::size_t>(f_.words));
    std::vector<double> plain(f_.lags.size(), 0.0), shifted(f_.lags.size(), 0.0);
    std::vector<std::int64_t> pairs(f_.lags.size(), 0);
    for (const std::int64_t query : f_.samples) {
      std::fill(bits.begin(), bits.end(), 0);
      read(query);
      for (const std::int32_t key : row_) {
        if (key >= 0) bits[static_cast<std::size_t>(key) / 64] |= std::uint64_t{1} << (key % 64);
      }
      const auto has = [&](std::int64_t key) {
        return key >= 0 && (bits[static_cast<std::size_t>(key) / 64] >> (key % 64) & 1) != 0;
      };
      for (std::size_t i = 0; i < f_.lags.size(); ++i) {
        if (query + f_.lags[i] >= f_.queries) break;
        read(query + f_.lags[i]);
        std::int64_t same = 0, moved = 0;
        for (const std::int32_t key : row_) {
          if (key < 0) continue;
          same += has(key) ? 1 : 0;
          moved += has(key - f_.lags[i]) ? 1 : 0;
        }
        plain[i] += static_cast<double>(same);
        shifted[i] += static_cast<double>(moved);
        ++pairs[i];
      }
    }
    for (std::size_t i = 0; i < f_.lags.size(); ++i) {
      const double all = static_cast<double>(pairs[i] * f_.topk);
      r.overlap.push_back(pairs[i] > 0 ? static_cast<float>(plain[i] / all)
                                       : std::numeric_limits<float>::quiet_NaN());
      r.shifted.push_back(pairs[i] > 0 ? static_cast<float>(shifted[i] / all)
                                       : std::numeric_limits<float>::quiet_NaN());
    }
  }

  const Frame& f_;
  std::int64_t layer_;
  const std::atomic<bool>* cancel_;
  TraceLayer rows_;
  std::vector<std::int32_t> row_;
  LayerStudy result_;
  Words bits_, united_;
  std::vector<std::uint32_t> counts_, selected_, age_;
  std::vector<std::vector<std::uint32_t>> spans_;  // [spans][keys]
  std::vector<double> multiplicity_;
  double pairwise_ = 0.0;
  std::int64_t groups_ = 0;
};

Frame make_frame(const Trace& trace, const StudyOptions& options) {
  const std::int64_t begin = trace.positions().front(), back = trace.positions().back();
  const std::int64_t wanted = std::max(options.first > 0 ? options.first : trace.topk(), begin);
  const std::int64_t end = (options.last > 0 ? options.last : back) + 1;
  if (end - wanted < 2 || end > back + 1) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("the queries stand at positions {} to {}, and the study is of {} to {}", begin,
                            back, wanted, end - 1),
                "record a longer text, or set --from-query and --to-query");
  }
  Frame f{trace, trace.topk(), end, (end + 63) / 64, wanted - begin, wanted, end - wanted, 0, 0, 0,
          0,     {},           {}};
  f.row_queries = (f.queries + options.map_bins - 1) / options.map_bins;
  f.map_rows = (f.queries + f.row_queries - 1) / f.row_queries;
  f.column_keys = (f.keys + options.map_bins - 1) / options.map_bins;
  f.map_columns = (f.keys + f.column_keys - 1) / f.column_keys;
  for (std::int64_t lag = 1; lag <= 4096 && lag < f.queries; lag *= 2) f.lags.push_back(lag);
  const std::int64_t room = std::max<std::int64_t>(8, kSampleBytes / (trace.layers() * f.words * 8));
  const std::int64_t samples = std::min({kSampledQueries, room, f.queries});
  for (std::int64_t i = 0; i < samples; ++i) f.samples.push_back((2 * i + 1) * f.queries / (2 * samples));
  return f;
}

}  // namespace

Study study(const Trace& trace, const StudyOptions& options, ThreadPool& pool,
            const std::function<void(std::int64_t done, std::int64_t total)>& on_progress,
            const std::atomic<bool>* cancel) {
  const Frame f = make_frame(trace, options);
  Study study;
  study.topk = f.topk;
  study.keys = f.keys;
  study.first = f.first;
  study.queries = f.queries;
  study.map_rows = f.map_rows;
  study.map_columns = f.map_columns;
  study.row_queries = f.row_queries;
  study.column_keys = f.column_keys;
  study.own_rope = !trace.rope().empty();
  study.rope = study.own_rope ? trace.rope() : deepseek_frequencies();
  const std::int64_t layers = trace.layers();
  study.layers.resize(static_cast<std::size_t>(layers));
  const std::int64_t of_layer = static_cast<std::int64_t>(f.samples.size()) * f.words;
  Words samples(static_cast<std::size_t>(layers * of_layer), 0);
  std::mutex mutex;
  std::int64_t done = 0;
  // The bad row that is reported is that of the lowest layer, whichever thread met its own first.
  std::int64_t bad_layer = layers;
  std::exception_ptr error;
  pool.parallel_for(layers, [&](std::int64_t layer, int) {
    {
      const std::lock_guard lock(mutex);
      if (layer > bad_layer) return;
    }
    try {
      study.layers[static_cast<std::size_t>(layer)] =
          LayerPass(f, layer, cancel).run(samples.data() + layer * of_layer);
      const std::lock_guard lock(mutex);
      ++done;
      if (on_progress) on_progress(done * f.queries, layers * f.queries);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (layer >= bad_layer) return;
      bad_layer = layer;
      error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
  study.between.assign(static_cast<std::size_t>(layers * layers), 1.0f);
  pool.parallel_for(layers, [&](std::int64_t a, int) {
    for (std::int64_t b = 0; b < a; ++b) {
      const std::int64_t both =
          common(samples.data() + a * of_layer, samples.data() + b * of_layer, of_layer);
      const float share =
          static_cast<float>(both) / static_cast<float>(static_cast<std::int64_t>(f.samples.size()) * f.topk);
      study.between[static_cast<std::size_t>(a * layers + b)] =
          study.between[static_cast<std::size_t>(b * layers + a)] = share;
    }
  });
  return study;
}

}  // namespace basin::probe
