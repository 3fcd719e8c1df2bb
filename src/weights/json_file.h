// The JSON files beside a model's weights. Hostile until checked.
#pragma once

#include <cstdint>
#include <filesystem>

#include <nlohmann/json_fwd.hpp>

namespace basin::weights {

/// The object that a file holds. Throws Error(not_found | io), and Error(corrupt) naming the file: more than `max_bytes`,
/// not JSON, no object, nested more than 64 levels deep, or a key that stands twice in one object, where readers would
/// disagree about which one counts.
nlohmann::json read_json_object(const std::filesystem::path& path, std::uint64_t max_bytes);

}  // namespace basin::weights
