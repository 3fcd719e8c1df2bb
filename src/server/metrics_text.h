// Prometheus' text format.
#pragma once

#include <cstdint>
#include <string>

#include "engine/metrics.h"
#include "server/request_log.h"

namespace basin::server {

/// `page_bytes`: of keys and values on one page.
std::string metrics_text(const engine::Metrics& metrics, const RequestLog::Counts& requests,
                         std::int64_t page_bytes);

}  // namespace basin::server
