#include "kv/prefix_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "basin/base/error.h"

namespace basin::kv {
namespace {

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

bool PrefixCache::goes_before(const Label& a, const Label& b) {
  const auto of = [](const Policy& mask) {
    return std::tuple(mask.sink_tokens, mask.window, mask.in_cache_positions);
  };
  return of(a.mask) != of(b.mask) ? of(a.mask) < of(b.mask)
                                  : std::ranges::lexicographical_compare(a.tokens, b.tokens);
}

std::vector<PrefixCache::Node>::const_iterator PrefixCache::place(const Entry& parent,
                                                                  const Label& label) const {
  return std::ranges::lower_bound(parent.children, label, goes_before,
                                  [&](Node node) { return nodes_.at(node).label(); });
}

PrefixCache::Node PrefixCache::child(Node parent, const Label& label) const {
  const Entry& entry = nodes_.at(parent);
  const auto found = place(entry, label);
  if (found == entry.children.end()) return kRoot;
  return goes_before(label, nodes_.at(*found).label()) ? kRoot : *found;
}

// In their order, those that agree longest with the label stand beside its place.
PrefixCache::Part PrefixCache::find_part(Node parent, const Label& label) const {
  const std::vector<Node>& children = nodes_.at(parent).children;
  const auto found = place(nodes_.at(parent), label);
  Part longest;
  for (auto each = found - (found != children.begin()); each != children.end() && each <= found; ++each) {
    const Entry& entry = nodes_.at(*each);
    if (!same(entry.mask, label.mask) || std::ranges::find(entry.pages, -1) != entry.pages.end()) continue;
    const std::int64_t tokens = std::ranges::mismatch(label.tokens, entry.tokens).in1 - label.tokens.begin();
    if (tokens > longest.tokens) longest = {*each, tokens};
  }
  return longest;
}

PrefixCache::Match PrefixCache::find(std::span<const std::int32_t> tokens, const Policy& policy) const {
  tokens = tokens.first(tokens.size() - 1);
  const auto page_of = [&](std::size_t page) {
    const auto size = static_cast<std::size_t>(page_tokens_), begin = page * size;
    return Label{mask_of_page(static_cast<std::int64_t>(page) + 1, policy),
                 tokens.subspan(begin, std::min(size, tokens.size() - begin))};
  };
  std::vector<Node> chain;
  for (Node node = kRoot;
       (static_cast<std::int64_t>(chain.size()) + 1) * page_tokens_ <= std::ssize(tokens);) {
    node = child(node, page_of(chain.size()));
    if (node == kRoot) break;
    chain.push_back(node);
  }
  // The longest chain whose needed pages are all there. Needed are the sinks and the window before the end, of each kind.
  const auto needed = [&](std::size_t kind, std::size_t page, std::int64_t position) {
    return needs_page(kinds_[kind].policy(policy), page_tokens_, static_cast<std::int64_t>(page), position);
  };
  // One more than the last page that is needed and not there, 0 when all are.
  const auto missing = [&](std::size_t kind) {
    const std::int64_t end = static_cast<std::int64_t>(chain.size()) * page_tokens_;
    std::size_t page = chain.size();
    while (page > 0 && (nodes_.at(chain[page - 1]).pages[kind] >= 0 || !needed(kind, page - 1, end))) --page;
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
  match.node = chain.empty() ? kRoot : chain.back();
  const Part part = find_part(match.node, page_of(chain.size()));
  match.tokens = static_cast<std::int64_t>(chain.size()) * page_tokens_ + part.tokens;
  if (match.tokens == 0) return match;
  for (std::size_t kind = 0; kind < kinds_.size(); ++kind) {
    std::vector<std::int32_t>& pages = match.pages.emplace_back();
    for (std::size_t i = 0; i < chain.size(); ++i)
      pages.push_back(needed(kind, i, match.tokens) ? nodes_.at(chain[i]).pages[kind] : -1);
    if (kind == 0) {
      for (const std::int32_t page : pages) {
        if (page < 0) continue;
        ++(kinds_.front().pool->pages().owners(page) == 0 ? match.idle_pages : match.held_pages);
      }
    }
    if (part.tokens > 0) pages.push_back(nodes_.at(part.node).pages[kind]);
  }
  return match;
}

// The child of this label, with these pages if it has none of its own; kRoot once there are too many nodes.
PrefixCache::Node PrefixCache::know(Node parent, const Label& label, std::span<const std::int32_t> pages) {
  Node node = child(parent, label);
  if (node == kRoot) {
    if (nodes() >= most_nodes_) return kRoot;
    node = next_++;
    Entry& above = nodes_.at(parent);
    const std::int64_t depth = above.depth + 1;
    nodes_[node] = {parent,
                    depth,
                    label.mask,
                    {label.tokens.begin(), label.tokens.end()},
                    std::vector<std::int32_t>(kinds_.size(), -1),
                    {},
                    0};
    above.children.insert(place(above, label), node);
  }
  Entry& entry = nodes_.at(node);
  for (std::size_t kind = 0; kind < kinds_.size(); ++kind) {
    const std::int32_t page = pages[kind];
    if (entry.pages[kind] >= 0 || page < 0) continue;  // another sequence has filled such a page already
    std::vector<Node>& node_of_page = node_of_page_[kind];
    const auto index = static_cast<std::size_t>(page);
    if (node_of_page.size() <= index) node_of_page.resize(index + 1, kRoot);
    if (const Node part = node_of_page[index]; part != kRoot) {  // it was known by its beginning
      lose_page(kind, part);
      erase_if_unused(part);
    }
    entry.pages[kind] = page;
    node_of_page[index] = node;
    kinds_[kind].pool->pages().keep(page);
    ++known_pages_;
  }
  return node;
}

PrefixCache::Node PrefixCache::advance(Node node, std::span<const std::int32_t> tokens, const Policy& policy,
                                       std::span<const std::int32_t> pages) {
  if (node == kNowhere) return kNowhere;
  const Node next = know(node, {mask_of_page(nodes_.at(node).depth + 1, policy), tokens}, pages);
  if (next != kRoot) enter(next);
  leave(node);
  return next == kRoot ? kNowhere : next;
}

void PrefixCache::remember_part(Node node, std::span<const std::int32_t> tokens, const Policy& policy,
                                std::span<const std::int32_t> pages) {
  if (node == kNowhere) return;
  const Label label{mask_of_page(nodes_.at(node).depth + 1, policy), tokens};
  if (find_part(node, label).tokens < std::ssize(tokens)) know(node, label, pages);
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
    if (has_page || !entry.children.empty() || entry.sequences > 0) return;
    const Node parent = entry.parent;
    Entry& above = nodes_.at(parent);
    above.children.erase(place(above, entry.label()));
    nodes_.erase(node);
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
  const auto refuse = [](const std::string& what) { throw Error(ErrorCode::internal, what); };
  std::int64_t pages = 0, children = 0;
  for (const auto& [node, entry] : nodes_) {
    children += std::ssize(entry.children);
    for (std::size_t i = 0; i < entry.children.size(); ++i) {
      const Entry& child = nodes_.at(entry.children[i]);
      if (child.parent != node || child.depth != entry.depth + 1)
        refuse("a chain of the prefix cache is torn");
      if (i > 0 && !goes_before(nodes_.at(entry.children[i - 1]).label(), child.label()))
        refuse("the prefix cache has lost the order of its pages");
    }
    if (node == kRoot) continue;
    std::int64_t own = 0;
    for (std::size_t kind = 0; kind < kinds_.size(); ++kind) {
      const std::int32_t page = entry.pages[kind];
      own += page >= 0;
      if (page >= 0 && node_of_page_[kind].at(static_cast<std::size_t>(page)) != node)
        refuse(fmt::format("page {} is known twice", page));
    }
    pages += own;
    const bool leads_on = !entry.children.empty() || entry.sequences > 0;
    if (own == 0 && !leads_on) refuse("the prefix cache remembers a chain that leads nowhere");
    if (std::ssize(entry.tokens) < page_tokens_ && leads_on) refuse("a page that is not full is gone beyond");
  }
  if (children != nodes() - 1) refuse("the prefix cache has lost count of its chains");
  if (pages != known_pages_) refuse("the prefix cache has lost count of its pages");
}

}  // namespace basin::kv
