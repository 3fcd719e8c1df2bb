// Oniguruma's syntax as far as tokenizers use it, written for PCRE2. What could mean something else is refused.
#include <fmt/format.h>

#include <array>

#include "basin/base/error.h"
#include "text/newer_unicode.h"
#include "text/pattern.h"

namespace basin::text {
namespace {

// White_Space; PCRE2's own \s adds U+180E.
constexpr std::string_view kSpace =
    "\\x{9}-\\x{d} \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";

bool is_alphanumeric(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

class Translator {
 public:
  explicit Translator(std::string_view expression) : in_(expression) {}

  std::string run() {
    while (at_ < in_.size()) {
      const char c = in_[at_];
      if (c == '\\') {
        escape();
      } else if (in_class_) {
        class_character(c);
      } else {
        plain_character(c);
      }
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(std::string_view construct) const {
    throw Error(ErrorCode::unsupported,
                fmt::format("regular expression '{}': '{}' is not supported", in_, construct),
                "only constructs that the known pre-tokenisers use are read");
  }

  void take(std::size_t n) {
    out_.append(in_.substr(at_, n));
    at_ += n;
  }

  void class_character(char c) {
    if (c == '[' || in_.substr(at_, 2) == "&&") refuse(in_.substr(at_, 2));
    if (c == ']') in_class_ = false;
    take(1);
  }

  void plain_character(char c) {
    if (c == '^' || c == '#') refuse(in_.substr(at_, 1));
    if (c == '$') {  // the end of any line, as Oniguruma has it
      out_ += "(?=\\n|\\z)";
      ++at_;
      return;
    }
    if (c == '[') {
      in_class_ = true;
      const bool negated = in_.substr(at_, 2) == "[^";
      take(negated ? 2 : 1);
      if (at_ < in_.size() && in_[at_] == ']') refuse("[]");
      return;
    }
    if (c == '}' && in_.substr(at_, 2) == "}+") refuse("}+");  // possessive in PCRE2, a repeat in Oniguruma
    if (in_.substr(at_, 2) == "(?") {
      static constexpr std::array<std::string_view, 7> kGroups = {
          "(?i:", "(?:", "(?!", "(?=", "(?<=", "(?<!", "(?>"};
      for (const std::string_view group : kGroups) {
        if (in_.substr(at_, group.size()) == group) return take(group.size());
      }
      refuse(in_.substr(at_, 4));
    }
    if (in_.substr(at_, 2) == "(*") refuse("(*");
    take(1);
  }

  void put_class(std::string_view members, bool negated) {
    if (!in_class_) {
      out_ += negated ? "[^" : "[";
      out_ += members;
      out_ += "]";
    } else if (!negated) {
      out_ += members;
    } else {
      refuse("a negated class inside a class");
    }
  }

  void escape() {
    if (at_ + 1 == in_.size()) refuse("\\");
    const char c = in_[at_ + 1];
    if (c == 's' || c == 'S') {
      put_class(kSpace, c == 'S');
      at_ += 2;
    } else if (c == 'd' || c == 'D') {
      put_class(fmt::format("\\p{{Nd}}{}", newer_members("Nd")), c == 'D');
      at_ += 2;
    } else if (c == 'p' || c == 'P') {
      property(c == 'P');
    } else if (c == 'x' || c == 'n' || c == 'r' || c == 't' || c == 'f') {
      take(2);
    } else if (is_alphanumeric(c)) {
      refuse(in_.substr(at_, 2));
    } else {
      take(2);
    }
  }

  void property(bool negated) {
    const std::size_t close = in_.find('}', at_);
    if (at_ + 2 >= in_.size() || in_[at_ + 2] != '{' || close == std::string_view::npos)
      refuse(in_.substr(at_, 3));
    std::string_view name = in_.substr(at_ + 3, close - at_ - 3);
    if (!name.empty() && name[0] == '^') {
      negated = !negated;
      name.remove_prefix(1);
    }
    put_class(fmt::format("\\p{{{}}}{}", name, newer_members(name)), negated);
    at_ = close + 1;
  }

  std::string_view in_;
  std::string out_;
  std::size_t at_ = 0;
  bool in_class_ = false;
};

}  // namespace

std::string pcre2_expression(std::string_view expression) {
  return Translator(expression).run();
}

}  // namespace basin::text
