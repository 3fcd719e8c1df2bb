// The page at /: src/server/page.html, compiled in.
#pragma once

#include <string_view>

namespace basin::server {

extern const std::string_view kPage;

}  // namespace basin::server
