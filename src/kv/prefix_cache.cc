#include "kv/prefix_cache.h"

#include <fmt/format.h>

#include <algorithm>

#include "basin/base/error.h"

namespace basin::kv {
namespace {

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * 0xff51afd7ed558ccdu;
  return hash ^ (hash >> 33);
}

std::uint64_t hash_page(std::span<const std::int32_t> tokens, const Policy& mask) {
  std::uint64_t hash =
      mix(static_cast<std::uint64_t>(mask.sink_tokens), static_cast<std::uint64_t>(mask.window));
  hash = mix(hash, mask.in_cache_positions);
  for (const std::int32_t token : tokens) hash = mix(hash, static_cast<std::uint32_t>(token));
  return hash;
}

bool same(const Policy& a, const Policy& b) {
  return a.sink_tokens == b.sink_tokens && a.window == b.window &&
         a.in_cache_positions == b.in_cache_positions;
}

}  // namespace

PrefixCache::PrefixCache(std::span<const LayerKind> kinds)
    : kinds_(kinds.begin(), kinds.end()),
      page_tokens_(kinds.front().pool->shape().page_tokens),
      most_nodes_(4 * kinds.front().pool->pages().limit()),
      node_of_page_(kinds.size()) {
  nodes_[kRoot];
  for (std::size_t kind = 0; kind < kinds_.size(); ++kind) {
    kinds_[kind].pool->pages().on_reclaim([this, kind](std::int32_t page) {
      const Node node = node_of_page_[kind].at(static_cast<std::size_t>(page));
      lose_page(kind, node);
      erase_if_unused(node);
    });
  }
}

PrefixCache::~PrefixCache() {
  clear();
  for (const LayerKind& kind : kinds_) kind.pool->pages().on_reclaim({});
}

Policy PrefixCache::mask_of_page(std::int64_t depth, const Policy& policy) const {
  const bool sees_all = policy.window == 0 || depth * page_tokens_ <= policy.sink_tokens + policy.window;
  return sees_all ? Policy{} : policy;
}

PrefixCache::Node PrefixCache::child(Node parent, std::span<const std::int32_t> tokens, const Policy& mask,
                                     std::uint64_t hash) const {
  const auto found = children_.find({parent, hash});
  if (found == children_.end()) return kRoot;
  const Entry& entry = nodes_.at(found->second);
  return std::ranges::equal(entry.tokens, tokens) && same(entry.mask, mask) ? found->second : kRoot;
}

PrefixCache::Match PrefixCache::find(std::span<const std::int32_t> tokens, const Policy& policy) const {
  const std::int64_t most = (static_cast<std::int64_t>(tokens.size()) - 1) / page_tokens_;
  std::vector<Node> chain;
  for (Node node = kRoot; static_cast<std::int64_t>(chain.size()) < most;) {
    const auto depth = static_cast<std::int64_t>(chain.size()) + 1;
    const auto page = tokens.subspan(static_cast<std::size_t>((depth - 1) * page_tokens_),
                                     static_cast<std::size_t>(page_tokens_));
    const Policy mask = mask_of_page(depth, policy);
    node = child(node, page, mask, hash_page(page, mask));
    if (node == kRoot) break;
    chain.push_back(node);
  }
  // The longest chain whose needed pages are all there. Needed are the sinks and the window before the end, of each kind.
  const auto needed = [&](std::size_t kind, std::size_t page) {
    return needs_page(kinds_[kind].policy(policy), page_tokens_, static_cast<std::int64_t>(page),
                      static_cast<std::int64_t>(chain.size()) * page_tokens_);
  };
  // One more than the last page that is needed and not there, 0 when all are.
  const auto missing = [&](std::size_t kind) {
    std::size_t page = chain.size();
    while (page > 0 && (nodes_.at(chain[page - 1]).pages[kind] >= 0 || !needed(kind, page - 1))) --page;
    return page;
  };
  for (std::size_t kind = 0; kind < kinds_.size();) {
    const std::size_t page = missing(kind);
    if (page == 0) {
      ++kind;
      continue;
    }
    chain.resize(page - 1);  // nothing longer can do without this page, or it is a sink
    kind = 0;
  }
  Match match;
  if (chain.empty()) return match;
  match.node = chain.back();
  match.tokens = static_cast<std::int64_t>(chain.size()) * page_tokens_;
  for (std::size_t kind = 0; kind < kinds_.size(); ++kind) {
    std::vector<std::int32_t>& pages = match.pages.emplace_back();
    for (std::size_t i = 0; i < chain.size(); ++i)
      pages.push_back(needed(kind, i) ? nodes_.at(chain[i]).pages[kind] : -1);
  }
  for (const std::int32_t page : match.pages.front()) {
    if (page < 0) continue;
    ++(kinds_.front().pool->pages().owners(page) == 0 ? match.idle_pages : match.held_pages);
  }
  return match;
}

PrefixCache::Node PrefixCache::advance(Node node, std::span<const std::int32_t> tokens, const Policy& policy,
                                       std::span<const std::int32_t> pages) {
  if (node == kNowhere) return kNowhere;
  const std::int64_t depth = nodes_.at(node).depth + 1;
  const Policy mask = mask_of_page(depth, policy);
  const std::uint64_t hash = hash_page(tokens, mask);
  Node next = child(node, tokens, mask, hash);
  if (next == kRoot && nodes() >= most_nodes_) {
    leave(node);
    return kNowhere;
  }
  if (next == kRoot) {
    if (children_.contains({node, hash})) {  // two pages of one hash: the chain becomes a private one
      next = next_++;
    } else {
      next = next_++;
      children_[{node, hash}] = next;
    }
    nodes_[next] = {
        node, depth, hash, {tokens.begin(), tokens.end()}, mask, std::vector<std::int32_t>(kinds_.size(), -1),
        0,    0};
    ++nodes_.at(node).children;
  }
  Entry& entry = nodes_.at(next);
  for (std::size_t kind = 0; kind < kinds_.size(); ++kind) {
    const std::int32_t page = pages[kind];
    if (entry.pages[kind] >= 0 || page < 0) continue;  // another sequence has filled such a page already
    std::vector<Node>& node_of_page = node_of_page_[kind];
    const auto index = static_cast<std::size_t>(page);
    if (node_of_page.size() <= index) node_of_page.resize(index + 1, kRoot);
    if (node_of_page[index] != kRoot) continue;
    entry.pages[kind] = page;
    node_of_page[index] = next;
    kinds_[kind].pool->pages().keep(page);
    ++known_pages_;
  }
  enter(next);
  leave(node);
  return next;
}

void PrefixCache::leave(Node node) {
  if (node == kNowhere) return;
  --nodes_.at(node).sequences;
  erase_if_unused(node);
}

void PrefixCache::lose_page(std::size_t kind, Node node) {
  Entry& entry = nodes_.at(node);
  node_of_page_[kind][static_cast<std::size_t>(entry.pages[kind])] = kRoot;
  entry.pages[kind] = -1;
  --known_pages_;
}

void PrefixCache::erase_if_unused(Node node) {
  while (node != kRoot) {
    const Entry& entry = nodes_.at(node);
    const bool has_page = std::ranges::any_of(entry.pages, [](std::int32_t page) { return page >= 0; });
    if (has_page || entry.children > 0 || entry.sequences > 0) return;
    const Node parent = entry.parent;
    const auto key = children_.find({parent, entry.hash});
    if (key != children_.end() && key->second == node) children_.erase(key);
    nodes_.erase(node);
    --nodes_.at(parent).children;
    node = parent;
  }
}

void PrefixCache::forget(std::size_t kind, std::int32_t page) {
  const auto index = static_cast<std::size_t>(page);
  if (index >= node_of_page_[kind].size() || node_of_page_[kind][index] == kRoot) return;
  const Node node = node_of_page_[kind][index];
  lose_page(kind, node);
  kinds_[kind].pool->forget(page);
  erase_if_unused(node);
}

void PrefixCache::clear() {
  for (std::size_t kind = 0; kind < kinds_.size(); ++kind) {
    for (std::size_t page = 0; page < node_of_page_[kind].size(); ++page)
      forget(kind, static_cast<std::int32_t>(page));
  }
}

void PrefixCache::check_invariants() const {
  std::int64_t pages = 0;
  std::unordered_map<Node, std::int64_t> children;
  for (const auto& [node, entry] : nodes_) {
    if (node == kRoot) continue;
    ++children[entry.parent];
    std::int64_t own = 0;
    for (std::size_t kind = 0; kind < kinds_.size(); ++kind) {
      const std::int32_t page = entry.pages[kind];
      own += page >= 0;
      if (page >= 0 && node_of_page_[kind].at(static_cast<std::size_t>(page)) != node)
        throw Error(ErrorCode::internal, fmt::format("page {} is known twice", page));
    }
    pages += own;
    if (own == 0 && entry.children == 0 && entry.sequences == 0)
      throw Error(ErrorCode::internal, "the prefix cache remembers a chain that leads nowhere");
  }
  for (const auto& [node, entry] : nodes_) {
    const auto found = children.find(node);
    if (entry.children != (found == children.end() ? 0 : found->second))
      throw Error(ErrorCode::internal, "the prefix cache has lost count of a chain");
  }
  if (pages != known_pages_) throw Error(ErrorCode::internal, "the prefix cache has lost count of its pages");
}

}  // namespace basin::kv
