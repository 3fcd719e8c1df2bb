#include "text/pretokenizer.h"

#include <algorithm>

#include "text/normalizer.h"

namespace basin::text {
namespace {

std::vector<Span> merged_with_previous(const std::vector<Span>& spans) {
  std::vector<Span> out;
  bool after_match = false;
  for (const Span& span : spans) {
    if (span.match && !after_match && !out.empty()) {
      out.back().end = span.end;
    } else {
      out.push_back(span);
    }
    after_match = span.match;
  }
  return out;
}

std::vector<Span> merged_with_next(const std::vector<Span>& spans) {
  std::vector<Span> out;  // from the back
  bool before_match = false;
  for (auto span = spans.rbegin(); span != spans.rend(); ++span) {
    if (span->match && !before_match && !out.empty()) {
      out.back().begin = span->begin;
    } else {
      out.push_back(*span);
    }
    before_match = span->match;
  }
  std::reverse(out.begin(), out.end());
  return out;
}

std::vector<Span> contiguous(const std::vector<Span>& spans) {
  std::vector<Span> out;
  for (const Span& span : spans) {
    if (!out.empty() && out.back().match == span.match) {
      out.back().end = span.end;
    } else {
      out.push_back(span);
    }
  }
  return out;
}

std::string with_prefix_space(const std::string& piece) {
  std::string spaced;
  if (!piece.starts_with(' ')) spaced.push_back(' ');
  return spaced.append(piece);
}

void apply(const SplitStep& step, const std::string& piece, std::vector<std::string>& out) {
  const std::string spaced = step.prefix_space ? with_prefix_space(piece) : std::string();
  const std::string& text = step.prefix_space ? spaced : piece;
  std::vector<Span> spans = step.pattern.find(text);
  if (step.invert) {
    for (Span& span : spans) span.match = !span.match;
  }
  for (const Span& span : join_spans(std::move(spans), step.behaviour)) {
    if (span.begin < span.end) out.push_back(text.substr(span.begin, span.end - span.begin));
  }
}

}  // namespace

std::vector<Span> join_spans(std::vector<Span> spans, SplitBehaviour behaviour) {
  switch (behaviour) {
    case SplitBehaviour::isolated:
      break;
    case SplitBehaviour::removed:
      std::erase_if(spans, [](const Span& span) { return span.match; });
      break;
    case SplitBehaviour::merged_with_previous:
      return merged_with_previous(spans);
    case SplitBehaviour::merged_with_next:
      return merged_with_next(spans);
    case SplitBehaviour::contiguous:
      return contiguous(spans);
  }
  return spans;
}

std::string PreTokenizer::start(std::string_view text, bool first) const {
  if (metaspace_ == Metaspace::none) return std::string(text);
  std::string spaced = replace_all(text, " ", kMetaspace);
  const bool prefix =
      metaspace_ == Metaspace::prefix_always || (metaspace_ == Metaspace::prefix_first && first);
  if (prefix && !spaced.starts_with(kMetaspace)) spaced.insert(0, kMetaspace);
  return spaced;
}

std::vector<std::string> PreTokenizer::split(std::string_view text, bool first) const {
  std::vector<std::string> pieces;
  if (!text.empty()) pieces.push_back(start(text, first));
  for (const SplitStep& step : steps_) {
    std::vector<std::string> finer;
    for (const std::string& piece : pieces) apply(step, piece, finer);
    pieces = std::move(finer);
  }
  if (final_prefix_space_) {
    for (std::string& piece : pieces) piece = with_prefix_space(piece);
  }
  return pieces;
}

}  // namespace basin::text
