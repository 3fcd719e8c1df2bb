// Cuts text into the pieces that BPE works on.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/pattern.h"

namespace basin::text {

enum class SplitBehaviour { isolated, removed, merged_with_previous, merged_with_next, contiguous };

struct SplitStep {
  Pattern pattern;
  SplitBehaviour behaviour = SplitBehaviour::isolated;
  bool invert = false;        // what lies between the matches counts as the match
  bool prefix_space = false;  // a piece that does not start with a space gets one before it is split
};

/// Spaces become U+2581, and one is put before a text that does not begin with one.
enum class Metaspace { none, prefix_never, prefix_first, prefix_always };

class PreTokenizer {
 public:
  PreTokenizer() = default;
  /// `final_prefix_space`: as SplitStep::prefix_space, after the last step. `metaspace` comes before the first step.
  explicit PreTokenizer(std::vector<SplitStep> steps, bool final_prefix_space = false,
                        Metaspace metaspace = Metaspace::none)
      : steps_(std::move(steps)), final_prefix_space_(final_prefix_space), metaspace_(metaspace) {}

  /// Non-empty pieces in order. `first`: the text is the start of the whole, with no token before it.
  std::vector<std::string> split(std::string_view text, bool first) const;

 private:
  std::string start(std::string_view text, bool first) const;

  std::vector<SplitStep> steps_;
  bool final_prefix_space_ = false;
  Metaspace metaspace_ = Metaspace::none;
};

/// Text into at most a few pieces by one pattern; `spans` as Pattern::find returns them.
std::vector<Span> join_spans(std::vector<Span> spans, SplitBehaviour behaviour);

}  // namespace basin::text
