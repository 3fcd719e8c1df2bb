// Finds pages that an earlier sequence has filled with what a new one would compute.
//
// Keys and values above the first layer depend on what every earlier token saw. So a page is known by the chain of all
// tokens up to its end and by the mask: (sink_tokens, window, positions). Pages that end within the first
// sink_tokens + window tokens saw everything before them whatever the mask, and all settings share those.
//
// Between whole pages two texts may part, and a prompt may end: then the pages that begin alike are looked through, and the one
// that agrees longest is copied.
//
// A model whose layers have windows of their own keeps a page of each kind of layers for the same tokens. Each kind needs
// what its own later queries see: a window's layers the last pages, full attention those of the request's policy.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "kv/sequence_cache.h"

namespace basin::kv {

class PrefixCache {
 public:
  using Node = std::int64_t;  // a known chain of whole pages
  static constexpr Node kRoot = 0;
  static constexpr Node kNowhere = -1;  // of a sequence whose pages are not remembered any more

  /// Keeps pages of the pools, full attention first. A chain has a node for each page, whether or not the page is still there,
  /// and a windowed stream makes ever longer ones: beyond four nodes for each page of the first pool no chain grows.
  explicit PrefixCache(std::span<const LayerKind> kinds);
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  struct Match {
    Node node = kRoot;        // of the whole pages
    std::int64_t tokens = 0;  // may end within the last page
    std::int64_t held_pages = 0,
                 idle_pages = 0;  // whole ones of full attention: held by others now, and by nobody
    std::vector<std::vector<std::int32_t>> pages;  // of each kind, for SequenceCache::adopt
  };
  /// The longest start of `tokens` that is there, leaving at least one token to compute. It stays there until a page is
  /// taken.
  Match find(std::span<const std::int32_t> tokens, const Policy& policy) const;

  /// A sequence says where it stands; the chain up to there stays known.
  void enter(Node node) {
    if (node != kNowhere) ++nodes_.at(node).sequences;
  }
  void leave(Node node);
  /// The sequence at `node` has filled its next page, `pages` of each kind, with `tokens` [page_tokens]; -1 where it has left
  /// the window again. Gives where it stands now: kNowhere once there are too many nodes.
  Node advance(Node node, std::span<const std::int32_t> tokens, const Policy& policy,
               std::span<const std::int32_t> pages);
  /// It has begun its next page with `tokens`, fewer than a page, and stays where it is. What it writes behind them is its own.
  void remember_part(Node node, std::span<const std::int32_t> tokens, const Policy& policy,
                     std::span<const std::int32_t> pages);

  /// What the page holds is not worth finding. Those who hold it go on.
  void forget(std::size_t kind, std::int32_t page);
  /// Forgets every page. Sequences keep what they hold.
  void clear();

  std::int64_t known_pages() const { return known_pages_; }  // of all kinds
  std::int64_t nodes() const { return static_cast<std::int64_t>(nodes_.size()); }
  void check_invariants() const;

 private:
  // What a page is known by, under the page before it.
  struct Label {
    Policy mask;  // {} where every mask sees the same
    std::span<const std::int32_t> tokens;
  };
  struct Entry {
    Node parent = kRoot;
    std::int64_t depth = 0;  // pages up to its end
    Policy mask;
    std::vector<std::int32_t> tokens;  // of its page; fewer: of the page's beginning, and nothing follows
    std::vector<std::int32_t> pages;   // of each kind; -1: handed out for something else
    std::vector<Node> children;        // by their labels
    std::int64_t sequences = 0;
    Label label() const { return {mask, tokens}; }
  };
  struct Part {
    Node node = kRoot;
    std::int64_t tokens = 0;
  };
  static bool goes_before(const Label& a, const Label& b);
  Policy mask_of_page(std::int64_t depth, const Policy& policy) const;
  // Where a child of this label stands among the others, or would.
  std::vector<Node>::const_iterator place(const Entry& parent, const Label& label) const;
  Node child(Node parent, const Label& label) const;
  Part find_part(Node parent, const Label& label) const;
  Node know(Node parent, const Label& label, std::span<const std::int32_t> pages);
  void lose_page(std::size_t kind, Node node);
  void erase_if_unused(Node node);

  std::vector<LayerKind> kinds_;
  std::int64_t page_tokens_;
  std::int64_t most_nodes_;
  Node next_ = 1;
  std::unordered_map<Node, Entry> nodes_;
  std::vector<std::vector<Node>> node_of_page_;  // of each kind; kRoot: none
  std::int64_t known_pages_ = 0;
};

}  // namespace basin::kv
