#include "probe/layer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "base/scratch_buffer.h"
#include "basin/attention/cpu.h"
#include "basin/attention/mask.h"
#include "basin/base/error.h"
#include "probe/cpu/kernel.h"

namespace basin::probe {
namespace {

using attention::Forward;
using attention::Sequence;

constexpr double kLog2E = 1.442695040888963407359925;
constexpr double kLn2 = 0.693147180559945309417232;
// Parts of the queries with sums of their own, added up in order: threads never change a result.
constexpr std::int64_t kStrips = 8;

struct Shape {
  std::int64_t tokens, heads, kv_heads, group, d_qk;
  std::int64_t bins, bin_tokens;
  std::vector<std::int64_t> sink_counts, windows;
  std::int64_t cut_count() const { return static_cast<std::int64_t>(sink_counts.size() + windows.size()); }
  std::int64_t pairs() const { return static_cast<std::int64_t>((sink_counts.size() + 1) * windows.size()); }
};

// Sums over the queries of a strip.
struct Strip {
  std::vector<double> position;    // [heads, tokens]
  std::vector<double> distance;    // [heads, tokens] from the farthest to 0
  std::vector<double> early;       // [heads, kEarlyTokens]
  std::vector<double> sink_mass;   // [n, heads] over queries that see more than n keys
  std::vector<double> local_mass;  // [w, heads]
  std::vector<double> retained;    // [n + 1, w, heads] of shares
  double largest_row_error = 0.0;

  void resize(const Shape& s) {
    const auto heads = static_cast<std::size_t>(s.heads), tokens = static_cast<std::size_t>(s.tokens);
    position.assign(heads * tokens, 0.0);
    distance.assign(heads * tokens, 0.0);
    early.assign(heads * kEarlyTokens, 0.0);
    sink_mass.assign(s.sink_counts.size() * heads, 0.0);
    local_mass.assign(s.windows.size() * heads, 0.0);
    retained.assign(static_cast<std::size_t>(s.pairs()) * heads, 0.0);
  }
};

// Consecutive queries of one bin.
struct Queries {
  std::int64_t first;
  int count;
};

// Per-thread memory of one block of rows.
struct Workspace {
  ScratchBuffer<float> kernel_scratch, queries, sink_queries;
  std::vector<attention::cpu::Visible> visible;
  std::vector<float> denominator, keep;
  std::vector<std::int64_t> cuts, list_count;
  std::vector<int> cut_order;  // [queries, cut_count] which cut stands where
  std::vector<double> mass, information, mean_information, below_cut, early;
  std::unique_ptr<float[]> list_memory, mean;
  std::size_t list_floats = 0, mean_floats = 0;
  std::vector<float*> list;
  std::vector<std::int32_t> order;
};

Workspace& workspace() {
  thread_local Workspace memory;
  return memory;
}

float* at_least(std::unique_ptr<float[]>& memory, std::size_t& size, std::size_t count) {
  if (size < count) {
    memory = std::make_unique_for_overwrite<float[]>(count);
    size = count;
  }
  return memory.get();
}

Storage storage(DType dtype) {
  return dtype == DType::f16 ? Storage::f16 : dtype == DType::bf16 ? Storage::bf16 : Storage::f32;
}

class Layer {
 public:
  Layer(const Forward& problem, const LayerOptions& options) : problem_(problem), options_(options) {
    check();
    const std::int64_t tokens = problem.sequences[0].q_tokens;
    shape_ = {tokens, problem.q.shape[1],  problem.k.shape[problem.k.rank == 4 ? 2 : 1],
              0,      problem.q.shape[2],  0,
              0,      sink_counts(tokens), windows(tokens)};
    shape_.group = shape_.heads / shape_.kv_heads;
    if (shape_.group > cpu::kMaxGroup) {
      throw Error(ErrorCode::unsupported,
                  fmt::format("{} query heads share a key head; the probe has up to {}", shape_.group,
                              cpu::kMaxGroup));
    }
    shape_.bin_tokens = (tokens + options.map_bins - 1) / options.map_bins;
    shape_.bins = (tokens + shape_.bin_tokens - 1) / shape_.bin_tokens;
  }

  LayerProfile run(ThreadPool& pool) {
    prepare();
    const std::int64_t strips = std::min(kStrips, shape_.bins);
    strips_.resize(static_cast<std::size_t>(strips));
    for (Strip& strip : strips_) strip.resize(shape_);
    // Recorded sets need all heads of a query at hand; otherwise heads are spread over threads too.
    const std::int64_t per_strip = options_.topk > 0 ? 1 : shape_.kv_heads;
    pool.parallel_for(strips * per_strip, [&](std::int64_t item, int) {
      const std::int64_t strip = item / per_strip, head = item % per_strip;
      for (std::int64_t bin = strip; bin < shape_.bins; bin += strips) {
        run_bin(bin, head, options_.topk > 0 ? shape_.kv_heads : head + 1,
                strips_[static_cast<std::size_t>(strip)]);
      }
    });
    finish_maps(pool);
    return finish();
  }

 private:
  void check() const {
    const Forward& p = problem_;
    if (const std::string reason = attention::cpu::supported(p); !reason.empty()) {
      throw Error(ErrorCode::unsupported, reason);
    }
    if (p.sequences.size() != 1 || p.sequences[0].q_tokens < 1 ||
        p.sequences[0].q_tokens != p.sequences[0].kv_tokens || !p.spec.mask.causal || p.lse == nullptr ||
        p.lse_with_sink == nullptr) {
      throw Error(ErrorCode::invalid_argument,
                  "the probe takes one causal sequence with as many queries as keys, and its lse");
    }
    if (options_.map_bins < 1 || options_.topk < 0) {
      throw Error(ErrorCode::invalid_argument, "map_bins must be 1 or more, and topk 0 or more");
    }
  }

  void prepare() {
    const auto heads = static_cast<std::size_t>(shape_.heads), bins = static_cast<std::size_t>(shape_.bins);
    LayerProfile& r = result_;
    r.tokens = shape_.tokens;
    r.heads = shape_.heads;
    r.kv_heads = shape_.kv_heads;
    r.window = problem_.spec.mask.window;
    r.sink_tokens = problem_.spec.mask.sink_tokens;
    r.sink_logit = problem_.sink_logit != nullptr;
    r.bin_tokens = shape_.bin_tokens;
    r.bins = shape_.bins;
    r.sink_counts = shape_.sink_counts;
    r.windows = shape_.windows;
    map_sums_.assign(heads * bins * bins, 0.0f);
    r.entropy.assign(heads * bins, 0.0f);
    r.group_entropy.assign(static_cast<std::size_t>(shape_.kv_heads) * bins, 0.0f);
    r.budget.assign(kBudgetShares.size() * heads * bins, 0.0f);
    r.group_budget.assign(kBudgetShares.size() * static_cast<std::size_t>(shape_.kv_heads) * bins, 0.0f);
    r.learned_sink.assign(heads * bins, 0.0f);
    r.sink_by_query.assign(shape_.sink_counts.size() * heads * bins, 0.0f);
    if (options_.topk > 0) {
      r.topk_width = options_.topk;
      r.topk.assign(static_cast<std::size_t>(shape_.tokens * options_.topk), -1);
      r.topk_mass.assign(static_cast<std::size_t>(shape_.tokens), 0.0f);
    }
  }

  // Queries of a bin, for kv heads [head_begin, head_end).
  void run_bin(std::int64_t bin, std::int64_t head_begin, std::int64_t head_end, Strip& strip) {
    const std::int64_t end = std::min((bin + 1) * shape_.bin_tokens, shape_.tokens);
    for (std::int64_t first = bin * shape_.bin_tokens; first < end;) {
      std::int64_t stop = std::min(first + cpu::kMaxQueries, end);
      if (first < kEarlyTokens) stop = std::min(stop, kEarlyTokens);
      const Queries queries{first, static_cast<int>(stop - first)};
      float* mean = nullptr;
      if (options_.topk > 0) {
        Workspace& memory = workspace();
        const auto floats = static_cast<std::size_t>(queries.count * shape_.tokens);
        mean = at_least(memory.mean, memory.mean_floats, floats);
        std::fill_n(mean, floats, 0.0f);
      }
      for (std::int64_t head = head_begin; head < head_end; ++head) {
        run_block(bin, queries, head, mean, strip);
      }
      for (int q = 0; mean != nullptr && q < queries.count; ++q) {
        select(queries.first + q, mean + q * shape_.tokens);
      }
      first = stop;
    }
  }

  attention::cpu::KeyRows key_rows(std::int64_t kv_head) const {
    const ConstView& view = problem_.k;
    const Sequence& sequence = problem_.sequences[0];
    const std::int64_t size = block_bytes(view.dtype);
    const auto* base = static_cast<const std::byte*>(view.data);
    attention::cpu::KeyRows rows;
    if (view.rank == 4) {
      rows.base = base + kv_head * view.stride[2] * size;
      rows.row_bytes = view.stride[1] * size;
      rows.page_bytes = view.stride[0] * size;
      rows.page_tokens = view.shape[1];
      rows.pages = sequence.pages;
    } else {
      rows.base = base + (sequence.kv_begin * view.stride[0] + kv_head * view.stride[1]) * size;
      rows.row_bytes = view.stride[0] * size;
    }
    return rows;
  }

  const void* pack(const ConstView& view, const Queries& queries, std::int64_t kv_head,
                   ScratchBuffer<float>& buffer) const {
    std::array<const std::byte*, cpu::kMaxQueries * cpu::kMaxGroup> row;
    const int rows = queries.count * static_cast<int>(shape_.group);
    const std::int64_t q_begin = problem_.sequences[0].q_begin;
    for (int r = 0; r < rows; ++r) {
      const std::int64_t token = q_begin + queries.first + r / shape_.group;
      const std::int64_t head = kv_head * shape_.group + r % shape_.group;
      row[static_cast<std::size_t>(r)] =
          static_cast<const std::byte*>(view.data) +
          (token * view.stride[0] + head * view.stride[1]) * block_bytes(view.dtype);
    }
    float* to = buffer.at_least(static_cast<std::size_t>(rows * shape_.d_qk));
    cpu::kernel().pack_queries(storage(view.dtype), static_cast<int>(shape_.d_qk), rows, row.data(), to);
    return to;
  }

  double sink_share(std::int64_t head, std::int64_t query) const {
    if (problem_.sink_logit == nullptr) return 0.0;
    const double lse = static_cast<double>(problem_.lse[lse_index(head, query)]);
    return 1.0 / (1.0 + std::exp(lse - static_cast<double>(problem_.sink_logit[head])));
  }
  std::int64_t lse_index(std::int64_t head, std::int64_t query) const {
    return head * problem_.q.shape[0] + problem_.sequences[0].q_begin + query;
  }

  // The positions up to which mass is summed: the first n keys, and the keys before the last w.
  std::int64_t cut_position(std::int64_t cut, std::int64_t position) const {
    const auto n = static_cast<std::int64_t>(shape_.sink_counts.size());
    return cut < n ? shape_.sink_counts[static_cast<std::size_t>(cut)]
                   : position + 1 - shape_.windows[static_cast<std::size_t>(cut - n)];
  }

  void run_block(std::int64_t bin, const Queries& queries, std::int64_t kv_head, float* mean, Strip& strip) {
    Workspace& memory = workspace();
    const Forward& p = problem_;
    const Sequence& sequence = p.sequences[0];
    const auto group = static_cast<int>(shape_.group);
    const int rows = queries.count * group;
    const auto cut_count = static_cast<int>(shape_.cut_count());
    const std::int64_t last = queries.first + queries.count;  // keys of the longest row

    attention::cpu::Block block{};
    block.storage = storage(p.q.dtype);
    block.d_qk = static_cast<int>(shape_.d_qk);
    block.heads = 1;
    block.rows = rows;
    block.sink_tokens = p.spec.mask.sink_tokens;
    block.k = block.v = key_rows(kv_head);
    if (p.spec.softcap != 0.0) {
      block.score_scale = static_cast<float>(p.spec.scale / p.spec.softcap);
      block.softcap = static_cast<float>(p.spec.softcap * kLog2E);
    } else {
      block.score_scale = static_cast<float>(p.spec.scale * kLog2E);
    }
    block.q = pack(p.q, queries, kv_head, memory.queries);
    if (p.q_sink && block.sink_tokens > 0)
      block.q_sink = pack(p.q_sink, queries, kv_head, memory.sink_queries);

    const auto row_count = static_cast<std::size_t>(rows);
    const auto lists = row_count + static_cast<std::size_t>(queries.count);
    memory.visible.resize(row_count);
    memory.denominator.resize(row_count);
    memory.keep.assign(lists, 0.0f);
    memory.list_count.assign(lists, 0);
    memory.mass.assign(row_count, 0.0);
    memory.information.assign(row_count, 0.0);
    memory.mean_information.assign(static_cast<std::size_t>(queries.count), 0.0);
    memory.below_cut.assign(row_count * static_cast<std::size_t>(cut_count), 0.0);
    memory.cuts.resize(static_cast<std::size_t>(queries.count * cut_count));
    memory.cut_order.resize(memory.cuts.size());
    const std::size_t list_stride = static_cast<std::size_t>(last) + kLanes;
    float* list = at_least(memory.list_memory, memory.list_floats, lists * list_stride);
    memory.list.resize(lists);
    for (std::size_t i = 0; i < lists; ++i) memory.list[i] = list + i * list_stride;
    block.visible = memory.visible.data();

    for (int q = 0; q < queries.count; ++q) {
      const std::int64_t position = queries.first + q;
      const attention::VisibleKeys keys = attention::visible_keys(p.spec.mask, position, sequence.kv_tokens);
      double group_mass = 0.0;
      for (int h = 0; h < group; ++h) {
        const auto r = static_cast<std::size_t>(q * group + h);
        const std::int64_t head = kv_head * group + h;
        memory.visible[r] = {keys.sinks.end, keys.recent.begin, keys.recent.end};
        memory.denominator[r] =
            static_cast<float>(static_cast<double>(p.lse_with_sink[lse_index(head, position)]) * kLog2E);
        // All keys below `keep` together hold at most half of what the largest share leaves.
        const double mass = 1.0 - sink_share(head, position);
        group_mass += mass;
        memory.keep[r] = least_kept(mass, keys.size());
      }
      memory.keep[row_count + static_cast<std::size_t>(q)] = least_kept(group_mass / group, keys.size());
      int* order = memory.cut_order.data() + q * cut_count;
      std::iota(order, order + cut_count, 0);
      std::sort(order, order + cut_count,
                [&](int a, int b) { return cut_position(a, position) < cut_position(b, position); });
      for (int c = 0; c < cut_count; ++c) {
        memory.cuts[static_cast<std::size_t>(q * cut_count + c)] = cut_position(order[c], position);
      }
    }

    const bool early = queries.first < kEarlyTokens;
    if (early) memory.early.assign(static_cast<std::size_t>(group * shape_.tokens), 0.0);
    const std::int64_t first_head = kv_head * shape_.group;
    cpu::Gather gather{};
    gather.block = &block;
    gather.queries = queries.count;
    gather.group = group;
    gather.first_position = queries.first;
    gather.denominator = memory.denominator.data();
    gather.cuts = memory.cuts.data();
    gather.cut_count = cut_count;
    gather.position = early ? memory.early.data() : strip.position.data() + first_head * shape_.tokens;
    gather.distance = strip.distance.data() + first_head * shape_.tokens;
    gather.key_stride = shape_.tokens;
    gather.map = map_sums_.data() + (first_head * shape_.bins + bin) * shape_.bins;
    gather.map_stride = shape_.bins * shape_.bins;
    gather.key_bin = shape_.bin_tokens;
    gather.mass = memory.mass.data();
    gather.information = memory.information.data();
    gather.mean_information = memory.mean_information.data();
    gather.below_cut = memory.below_cut.data();
    gather.keep = memory.keep.data();
    gather.list = memory.list.data();
    gather.list_count = memory.list_count.data();
    gather.mean = mean;
    gather.mean_stride = shape_.tokens;
    gather.mean_factor = 1.0f / static_cast<float>(shape_.heads);
    cpu::kernel().gather(gather, last,
                         memory.kernel_scratch.at_least(cpu::kernel().scratch_bytes / sizeof(float) + 16));

    for (int h = 0; early && h < group; ++h) {
      for (std::int64_t key = 0; key < last; ++key) {
        const double sum = memory.early[static_cast<std::size_t>(h * shape_.tokens + key)];
        strip.position[static_cast<std::size_t>((first_head + h) * shape_.tokens + key)] += sum;
        strip.early[static_cast<std::size_t>((first_head + h) * kEarlyTokens + key)] += sum;
      }
    }
    for (int r = 0; r < rows; ++r) finish_row(bin, queries, kv_head, r, memory, strip);
    for (int q = 0; q < queries.count; ++q) {
      double mass = 0.0, sink = 0.0;
      for (int h = 0; h < group; ++h) {
        mass += memory.mass[static_cast<std::size_t>(q * group + h)];
        sink += sink_share(first_head + h, queries.first + q) / group;
      }
      const auto i = row_count + static_cast<std::size_t>(q);
      result_.group_entropy[static_cast<std::size_t>(kv_head * shape_.bins + bin)] +=
          static_cast<float>(-kLn2 * memory.mean_information[static_cast<std::size_t>(q)] -
                             (sink > 0.0 ? sink * std::log(sink) : 0.0));
      const auto counts = budgets(memory.list[i], memory.list_count[i], mass / group);
      for (std::size_t share = 0; share < counts.size(); ++share) {
        result_.group_budget[(share * static_cast<std::size_t>(shape_.kv_heads) +
                              static_cast<std::size_t>(kv_head)) *
                                 static_cast<std::size_t>(shape_.bins) +
                             static_cast<std::size_t>(bin)] += static_cast<float>(counts[share]);
      }
    }
  }

  static float least_kept(double mass, std::int64_t keys) {
    const double left = 0.5 * (1.0 - kBudgetShares.back()) * mass / static_cast<double>(keys);
    return std::max(static_cast<float>(left), std::numeric_limits<float>::min());
  }

  void finish_row(std::int64_t bin, const Queries& queries, std::int64_t kv_head, int row,
                  const Workspace& memory, Strip& strip) {
    const auto r = static_cast<std::size_t>(row);
    const std::int64_t query = row / shape_.group;
    const std::int64_t position = queries.first + query;
    const auto head = static_cast<std::size_t>(kv_head * shape_.group + row % shape_.group);
    const auto heads = static_cast<std::size_t>(shape_.heads), bins = static_cast<std::size_t>(shape_.bins);
    const double mass = memory.mass[r];
    const double sink = sink_share(static_cast<std::int64_t>(head), position);
    const std::size_t at = head * bins + static_cast<std::size_t>(bin);

    const double error = std::abs(mass + sink - 1.0);
    if (!(error <= strip.largest_row_error)) strip.largest_row_error = error;  // a NaN stays
    result_.entropy[at] +=
        static_cast<float>(-kLn2 * memory.information[r] - (sink > 0.0 ? sink * std::log(sink) : 0.0));
    result_.learned_sink[at] += static_cast<float>(sink);
    const auto counts = budgets(memory.list[r], memory.list_count[r], mass);
    for (std::size_t share = 0; share < counts.size(); ++share) {
      result_.budget[share * heads * bins + at] += static_cast<float>(counts[share]);
    }

    const auto cut_count = static_cast<std::size_t>(shape_.cut_count());
    thread_local std::vector<double> below;  // by cut, not by its place
    below.resize(cut_count);
    for (std::size_t c = 0; c < cut_count; ++c) {
      below[static_cast<std::size_t>(memory.cut_order[static_cast<std::size_t>(query) * cut_count + c])] =
          memory.below_cut[r * cut_count + c];
    }
    const std::size_t n_count = shape_.sink_counts.size(), w_count = shape_.windows.size();
    for (std::size_t n = 0; n < n_count; ++n) {
      if (position >= shape_.sink_counts[n]) strip.sink_mass[n * heads + head] += below[n];
      result_.sink_by_query[n * heads * bins + at] += static_cast<float>(below[n]);
    }
    for (std::size_t w = 0; w < w_count; ++w) {
      const double local = mass - below[n_count + w];
      strip.local_mass[w * heads + head] += local;
      for (std::size_t n = 0; n <= n_count; ++n) {
        const std::int64_t first = n == 0 ? 0 : shape_.sink_counts[n - 1];
        if (position + 1 <= first + shape_.windows[w]) continue;
        const double kept = local + (n == 0 ? 0.0 : below[n - 1]);
        strip.retained[(n * w_count + w) * heads + head] += kept / mass;
      }
    }
  }

  // The topk visible keys of the largest value, the smaller index first among equals.
  void select(std::int64_t query, const float* value) {
    std::vector<std::int32_t>& order = workspace().order;
    order.clear();
    const attention::VisibleKeys keys =
        attention::visible_keys(problem_.spec.mask, query, problem_.sequences[0].kv_tokens);
    for (const attention::KeyRange& range : {keys.sinks, keys.recent}) {
      for (std::int64_t key = range.begin; key < range.end; ++key)
        order.push_back(static_cast<std::int32_t>(key));
    }
    const auto before = [&](std::int32_t a, std::int32_t b) {
      return value[a] != value[b] ? value[a] > value[b] : a < b;
    };
    const auto count = std::min(options_.topk, static_cast<std::int64_t>(order.size()));
    if (count < static_cast<std::int64_t>(order.size())) {
      std::nth_element(order.begin(), order.begin() + count - 1, order.end(), before);
    }
    double held = 0.0, all = 0.0;
    for (std::size_t i = 0; i < order.size(); ++i) {
      all += static_cast<double>(value[order[i]]);
      if (static_cast<std::int64_t>(i) < count) held += static_cast<double>(value[order[i]]);
    }
    result_.topk_mass[static_cast<std::size_t>(query)] = static_cast<float>(held / all);
    std::sort(order.begin(), order.begin() + count);
    std::copy_n(order.begin(), count, result_.topk.begin() + query * options_.topk);
  }

  std::int64_t queries_in(std::int64_t bin, std::int64_t bin_tokens) const {
    return std::min(bin_tokens, shape_.tokens - bin * bin_tokens);
  }

  // Turns sums over the queries of a bin into shares of a query's mass: of all heads together, and of each in bins that
  // hold `merged` of the others, so that every cell stands for equally many tokens.
  void finish_maps(ThreadPool& pool) {
    LayerProfile& r = result_;
    const std::int64_t bins = shape_.bins, merged = (bins + kHeadBins - 1) / kHeadBins;
    r.head_bins = (bins + merged - 1) / merged;
    r.map.resize(static_cast<std::size_t>(bins * bins));
    r.head_map.assign(static_cast<std::size_t>(shape_.heads * r.head_bins * r.head_bins), 0.0f);
    pool.parallel_for(r.head_bins, [&](std::int64_t row, int) {
      const std::int64_t end = std::min((row + 1) * merged, bins);
      std::vector<double> sum(static_cast<std::size_t>(bins));
      for (std::int64_t i = row * merged; i < end; ++i) {
        std::fill(sum.begin(), sum.end(), 0.0);
        for (std::int64_t h = 0; h < shape_.heads; ++h) {
          const float* from = map_sums_.data() + (h * bins + i) * bins;
          float* to = r.head_map.data() + (h * r.head_bins + row) * r.head_bins;
          for (std::int64_t j = 0; j < bins; ++j) {
            sum[static_cast<std::size_t>(j)] += static_cast<double>(from[j]);
            to[j / merged] += from[j];
          }
        }
        const double factor = 1.0 / static_cast<double>(queries_in(i, shape_.bin_tokens) * shape_.heads);
        for (std::int64_t j = 0; j < bins; ++j) {
          r.map[static_cast<std::size_t>(i * bins + j)] =
              static_cast<float>(sum[static_cast<std::size_t>(j)] * factor);
        }
      }
      const auto queries = static_cast<float>(queries_in(row, merged * shape_.bin_tokens));
      for (std::int64_t h = 0; h < shape_.heads; ++h) {
        float* to = r.head_map.data() + (h * r.head_bins + row) * r.head_bins;
        for (std::int64_t j = 0; j < r.head_bins; ++j) to[j] /= queries;
      }
    });
  }

  LayerProfile finish() {
    LayerProfile& r = result_;
    const auto heads = static_cast<std::size_t>(shape_.heads), bins = static_cast<std::size_t>(shape_.bins);
    const auto add_up = [&](std::vector<double> Strip::*member) {
      std::vector<float> sum;
      sum.reserve((strips_[0].*member).size());
      for (std::size_t i = 0; i < (strips_[0].*member).size(); ++i) {
        double total = 0.0;
        for (const Strip& strip : strips_) total += (strip.*member)[i];
        sum.push_back(static_cast<float>(total));
      }
      return sum;
    };
    r.position = add_up(&Strip::position);
    r.distance = add_up(&Strip::distance);
    for (std::int64_t h = 0; h < shape_.heads; ++h) {
      std::reverse(r.distance.begin() + h * shape_.tokens, r.distance.begin() + (h + 1) * shape_.tokens);
    }
    r.early = add_up(&Strip::early);
    r.sink_mass = add_up(&Strip::sink_mass);
    r.local_mass = add_up(&Strip::local_mass);
    r.retained = add_up(&Strip::retained);
    for (const Strip& strip : strips_) {
      if (!(strip.largest_row_error <= r.largest_row_error)) r.largest_row_error = strip.largest_row_error;
    }

    const auto average = [&](std::vector<float>& sums) {  // [..., bins]
      for (std::size_t i = 0; i < sums.size(); ++i) {
        const auto bin = static_cast<std::int64_t>(i % bins);
        sums[i] /= static_cast<float>(queries_in(bin, shape_.bin_tokens));
      }
    };
    for (std::vector<float>* sums :
         {&r.entropy, &r.group_entropy, &r.budget, &r.group_budget, &r.learned_sink, &r.sink_by_query}) {
      average(*sums);
    }
    for (std::size_t i = 0; i < r.sink_mass.size(); ++i) {
      r.sink_mass[i] /= static_cast<float>(shape_.tokens - shape_.sink_counts[i / heads]);
    }
    for (float& mass : r.local_mass) mass /= static_cast<float>(shape_.tokens);
    const std::size_t w_count = shape_.windows.size();
    for (std::size_t i = 0; i < r.retained.size(); ++i) {
      const std::size_t n = i / heads / w_count, w = i / heads % w_count;
      const std::int64_t shown = (n == 0 ? 0 : shape_.sink_counts[n - 1]) + shape_.windows[w];
      r.retained[i] =
          shown < shape_.tokens ? r.retained[i] / static_cast<float>(shape_.tokens - shown) : 1.0f;
    }
    return std::move(result_);
  }

  const Forward& problem_;
  const LayerOptions& options_;
  Shape shape_;
  LayerProfile result_;
  std::vector<float> map_sums_;  // [heads, bins, bins] of A, query bin by key bin
  std::vector<Strip> strips_;
};

}  // namespace

std::vector<std::int64_t> sink_counts(std::int64_t tokens) {
  std::vector<std::int64_t> counts;
  for (std::int64_t n = 1; n <= 1024 && n < tokens; n *= 4) counts.push_back(n);
  return counts;
}

std::vector<std::int64_t> windows(std::int64_t tokens) {
  std::vector<std::int64_t> counts;
  for (std::int64_t w = 16; w < tokens || w == 16; w *= 2) counts.push_back(w);
  return counts;
}

LayerProfile profile(const Forward& problem, const LayerOptions& options, ThreadPool& pool) {
  return Layer(problem, options).run(pool);
}

}  // namespace basin::probe
