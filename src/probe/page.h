// The page of a report, without its data (page.html, compiled in).
#pragma once

#include <string_view>

namespace basin::probe {

extern const std::string_view kPage;

}  // namespace basin::probe
