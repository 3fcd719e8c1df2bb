#include "text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "basin/base/error.h"

namespace basin::text {

std::string to_nfc(std::string_view text) {
  // Nothing below U+0300 changes on its own, and in UTF-8 that is every character with a lead byte below 0xcc.
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0xcc; })) {
    return std::string(text);
  }
  utf8proc_uint8_t* composed = nullptr;
  const auto size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                 static_cast<utf8proc_ssize_t>(text.size()), &composed,
                                 static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(composed, &std::free);
  if (size < 0) throw Error(ErrorCode::internal, std::string("NFC normalisation: ") + utf8proc_errmsg(size));
  return std::string(reinterpret_cast<const char*>(composed), static_cast<std::size_t>(size));
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = text.find(from); at != std::string_view::npos; at = text.find(from)) {
    out.append(text.substr(0, at)).append(to);
    text.remove_prefix(at + from.size());
  }
  return out.append(text);
}

std::string Normalizer::apply(std::string_view text) const {
  std::string out(text);
  for (const NormalizerStep& step : steps_) {
    switch (step.kind) {
      case NormalizerStep::nfc:
        out = to_nfc(out);
        break;
      case NormalizerStep::replace:
        out = replace_all(out, step.from, step.to);
        break;
      case NormalizerStep::prepend:
        if (!out.empty()) out.insert(0, step.to);
        break;
    }
  }
  return out;
}

}  // namespace basin::text
