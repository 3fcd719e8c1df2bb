#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/pattern.h"

#include <fmt/format.h>
#include <pcre2.h>

#include <array>

#include "basin/base/error.h"
#include "text/newer_unicode.h"

namespace basin::text {
namespace {

template <auto Free>
struct Deleter {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};
using Code = std::unique_ptr<pcre2_code, Deleter<pcre2_code_free>>;
using MatchData = std::unique_ptr<pcre2_match_data, Deleter<pcre2_match_data_free>>;
using MatchContext = std::unique_ptr<pcre2_match_context, Deleter<pcre2_match_context_free>>;
using JitStack = std::unique_ptr<pcre2_jit_stack, Deleter<pcre2_jit_stack_free>>;

std::string error_text(int code) {
  std::array<PCRE2_UCHAR, 256> buffer{};
  pcre2_get_error_message(code, buffer.data(), buffer.size());
  std::string text;
  for (const PCRE2_UCHAR c : buffer) {
    if (c == 0) break;
    text.push_back(static_cast<char>(c));
  }
  return text;
}

PCRE2_SPTR code_units(std::string_view text) {
  return reinterpret_cast<PCRE2_SPTR>(text.empty() ? "" : text.data());
}

// What one thread needs to match; kept, since the jit stack is mapped memory.
struct Workspace {
  MatchContext context{pcre2_match_context_create(nullptr)};
  JitStack stack{pcre2_jit_stack_create(64 * 1024, 64 * 1024 * 1024, nullptr)};
  Workspace() {
    if (!context || !stack) throw Error(ErrorCode::internal, "no memory for the regular expression matcher");
    pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
    pcre2_set_match_limit(context.get(), 100'000'000);  // one step per character must fit for long inputs
  }
};

Workspace& workspace() {
  thread_local Workspace instance;
  return instance;
}

}  // namespace

struct Pattern::Compiled {
  std::string expression;
  Code code;
};

Pattern::Pattern(std::unique_ptr<Compiled> compiled) : compiled_(std::move(compiled)) {}
Pattern::Pattern(Pattern&&) noexcept = default;
Pattern& Pattern::operator=(Pattern&&) noexcept = default;
Pattern::~Pattern() = default;

Pattern::Pattern(std::string_view expression) : compiled_(std::make_unique<Compiled>()) {
  compiled_->expression = expression;
  const std::string translated = pcre2_expression(expression);
  int code = 0;
  PCRE2_SIZE offset = 0;
  compiled_->code.reset(pcre2_compile(code_units(translated), translated.size(),
                                      PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code, &offset,
                                      nullptr));
  if (!compiled_->code) {
    throw Error(ErrorCode::corrupt, fmt::format("regular expression '{}': {}", expression, error_text(code)));
  }
  // Without a JIT on this machine the interpreter matches the same.
  const int jit = pcre2_jit_compile(compiled_->code.get(), PCRE2_JIT_COMPLETE);
  if (jit != 0 && jit != PCRE2_ERROR_JIT_BADOPTION && jit != PCRE2_ERROR_NOMEMORY) {
    throw Error(ErrorCode::internal, fmt::format("regular expression '{}': {}", expression, error_text(jit)));
  }
}

Pattern Pattern::literal(std::string_view text) {
  std::string expression;
  for (const char c : text) {
    if (std::string_view("\\^$.[]|()?*+{}#&-").find(c) != std::string_view::npos) expression.push_back('\\');
    expression.push_back(c);
  }
  return Pattern(expression);
}

Pattern Pattern::digits(bool individual) {
  return Pattern(fmt::format("[\\p{{N}}{}]{}", newer_members("numeric"), individual ? "" : "+"));
}

std::vector<Span> Pattern::find(std::string_view text) const {
  std::vector<Span> spans;
  const MatchData data(pcre2_match_data_create(1, nullptr));
  if (!data) throw Error(ErrorCode::internal, "no memory for the regular expression matcher");
  const PCRE2_SIZE* range = pcre2_get_ovector_pointer(data.get());
  std::size_t covered = 0, from = 0;
  bool after_match = false;
  while (from <= text.size()) {
    const int rc = pcre2_match(compiled_->code.get(), code_units(text), text.size(), from, PCRE2_NO_UTF_CHECK,
                               data.get(), workspace().context.get());
    if (rc == PCRE2_ERROR_NOMATCH) break;
    if (rc < 0) {
      throw Error(ErrorCode::unsupported,
                  fmt::format("regular expression '{}' fails at byte {} of {}: {}", compiled_->expression,
                              from, text.size(), error_text(rc)));
    }
    const std::size_t begin = range[0], end = range[1];
    const bool repeats_end = begin == end && after_match && begin == covered;
    if (!repeats_end) {
      if (begin > covered) spans.push_back({covered, begin, false});
      spans.push_back({begin, end, true});
      covered = end;
      after_match = true;
    }
    from = end;
    if (begin == end) {  // step over one character
      ++from;
      while (from < text.size() && (static_cast<unsigned char>(text[from]) & 0xc0) == 0x80) ++from;
    }
  }
  if (covered < text.size()) spans.push_back({covered, text.size(), false});
  return spans;
}

}  // namespace basin::text
