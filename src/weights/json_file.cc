#include "weights/json_file.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <unordered_set>
#include <vector>

#include "basin/base/error.h"
#include "weights/printable.h"
#include "weights/weights.h"

namespace basin::weights {
namespace {

using nlohmann::json;

// nlohmann's destructor is not recursive, but dump() is, and messages show values.
constexpr std::size_t kMaxDepth = 64;

// Follows the parser through the objects and lists that are open.
class Nesting {
 public:
  explicit Nesting(std::string where) : where_(std::move(where)) {}

  void see(json::parse_event_t event, const json& parsed) {
    using Event = json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) {
      const bool in_list = !open_.empty() && open_.back().is_list;
      open_.push_back({in_list ? std::string() : last_key_, event == Event::array_start, {}});
      if (open_.size() > kMaxDepth)
        throw Error(ErrorCode::corrupt,
                    fmt::format("{}: its JSON is nested more than {} levels deep", where_, kMaxDepth));
    } else if (event == Event::object_end || event == Event::array_end) {
      open_.pop_back();
    } else if (event == Event::key) {
      last_key_ = parsed.get<std::string>();
      if (!open_.back().keys.insert(last_key_).second) throw twice();
    }
  }

 private:
  struct Level {
    std::string name;  // the key that the object or list belongs to; empty in a list
    bool is_list;
    std::unordered_set<std::string> keys;  // of an object, so far
  };

  Error twice() const {
    std::string inside;
    for (const Level& level : open_) {
      if (!level.name.empty()) inside += (inside.empty() ? "" : ".") + level.name;
    }
    return Error(ErrorCode::corrupt,
                 fmt::format("{} has the key '{}' twice{}", where_, printable(last_key_),
                             inside.empty() ? "" : fmt::format(", in '{}'", printable(inside))),
                 "keep the one that is meant");
  }

  std::string where_, last_key_;
  std::vector<Level> open_;
};

}  // namespace

json read_json_object(const std::filesystem::path& path, std::uint64_t max_bytes) {
  const MappedFile file(path);
  if (file.size() > max_bytes) {
    throw Error(ErrorCode::corrupt, fmt::format("{} has {} bytes; such a file has at most {}", path.string(),
                                                file.size(), max_bytes));
  }
  const char* text = reinterpret_cast<const char*>(file.data());
  Nesting nesting(path.string());
  const auto see = [&](int, json::parse_event_t event, json& parsed) {
    nesting.see(event, parsed);
    return true;
  };
  try {
    json object = json::parse(text, text + file.size(), see);
    if (!object.is_object())
      throw Error(ErrorCode::corrupt, fmt::format("{} is not a JSON object", path.string()));
    return object;
  } catch (const json::exception& error) {
    throw Error(ErrorCode::corrupt,
                fmt::format("{} is not JSON: {}", path.string(), std::string(error.what()).substr(0, 200)));
  }
}

}  // namespace basin::weights
