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

PrefixCache::PrefixCache(PagePool& pool) : pool_(pool), most_nodes_(4 * pool.pages().limit()) {
  nodes_[kRoot];
  pool_.pages().on_reclaim([this](std::int32_t page) {
    const Node node = node_of_page_.at(static_cast<std::size_t>(page));
    lose_page(node);
    erase_if_unused(node);
  });
}

PrefixCache::~PrefixCache() {
  clear();
  pool_.pages().on_reclaim({});
}

Policy PrefixCache::mask_of_page(std::int64_t depth, const Policy& policy) const {
  const bool sees_all =
      policy.window == 0 || depth * pool_.shape().page_tokens <= policy.sink_tokens + policy.window;
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
  const std::int64_t page_tokens = pool_.shape().page_tokens;
  const std::int64_t most = (static_cast<std::int64_t>(tokens.size()) - 1) / page_tokens;
  std::vector<Node> chain;
  for (Node node = kRoot; static_cast<std::int64_t>(chain.size()) < most;) {
    const auto depth = static_cast<std::int64_t>(chain.size()) + 1;
    const auto page = tokens.subspan(static_cast<std::size_t>((depth - 1) * page_tokens),
                                     static_cast<std::size_t>(page_tokens));
    const Policy mask = mask_of_page(depth, policy);
    node = child(node, page, mask, hash_page(page, mask));
    if (node == kRoot) break;
    chain.push_back(node);
  }
  Match match;
  // The longest chain whose needed pages are all there. Needed are the sinks and the window before the end.
  while (!chain.empty()) {
    const auto pages = static_cast<std::int64_t>(chain.size());
    std::int64_t missing = pages - 1;
    while (missing >= 0 && (nodes_.at(chain[static_cast<std::size_t>(missing)]).page >= 0 ||
                            !needs_page(policy, page_tokens, missing, pages * page_tokens)))
      --missing;
    if (missing < 0) break;
    chain.resize(
        static_cast<std::size_t>(missing));  // nothing longer can do without this page, or it is a sink
  }
  if (chain.empty()) return match;
  match.node = chain.back();
  match.tokens = static_cast<std::int64_t>(chain.size()) * page_tokens;
  for (std::size_t i = 0; i < chain.size(); ++i) {
    const bool needed = needs_page(policy, page_tokens, static_cast<std::int64_t>(i), match.tokens);
    match.pages.push_back(needed ? nodes_.at(chain[i]).page : -1);
    match.idle_pages += needed && pool_.pages().owners(match.pages.back()) == 0;
  }
  return match;
}

PrefixCache::Node PrefixCache::advance(Node node, std::span<const std::int32_t> tokens, const Policy& policy,
                                       std::int32_t page) {
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
    nodes_[next] = {node, depth, hash, {tokens.begin(), tokens.end()}, mask, -1, 0, 0};
    ++nodes_.at(node).children;
  }
  Entry& entry = nodes_.at(next);
  if (entry.page < 0 && page >= 0) {  // else another sequence has filled such a page already
    const auto index = static_cast<std::size_t>(page);
    if (node_of_page_.size() <= index) node_of_page_.resize(index + 1, kRoot);
    if (node_of_page_[index] == kRoot) {
      entry.page = page;
      node_of_page_[index] = next;
      pool_.pages().keep(page);
      ++known_pages_;
    }
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

void PrefixCache::lose_page(Node node) {
  Entry& entry = nodes_.at(node);
  node_of_page_[static_cast<std::size_t>(entry.page)] = kRoot;
  entry.page = -1;
  --known_pages_;
}

void PrefixCache::erase_if_unused(Node node) {
  while (node != kRoot) {
    const Entry& entry = nodes_.at(node);
    if (entry.page >= 0 || entry.children > 0 || entry.sequences > 0) return;
    const Node parent = entry.parent;
    const auto key = children_.find({parent, entry.hash});
    if (key != children_.end() && key->second == node) children_.erase(key);
    nodes_.erase(node);
    --nodes_.at(parent).children;
    node = parent;
  }
}

void PrefixCache::clear() {
  for (std::size_t page = 0; page < node_of_page_.size(); ++page) {
    const Node node = node_of_page_[page];
    if (node == kRoot) continue;
    lose_page(node);
    pool_.pages().forget(static_cast<std::int32_t>(page));
    erase_if_unused(node);
  }
}

void PrefixCache::check_invariants() const {
  std::int64_t pages = 0;
  std::unordered_map<Node, std::int64_t> children;
  for (const auto& [node, entry] : nodes_) {
    if (node == kRoot) continue;
    ++children[entry.parent];
    pages += entry.page >= 0;
    if (entry.page >= 0 && node_of_page_.at(static_cast<std::size_t>(entry.page)) != node)
      throw Error(ErrorCode::internal, fmt::format("page {} is known twice", entry.page));
    if (entry.page < 0 && entry.children == 0 && entry.sequences == 0)
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
