// basin convert: the same weights as another type or in another format.
#include <fmt/format.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "basin/base/error.h"
#include "basin/base/thread_pool.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "models/convert.h"

namespace basin::cli {

int run(const ConvertArgs& args) {
  const auto start = std::chrono::steady_clock::now();
  ThreadPool pool(args.threads);
  Progress progress("convert", "MB");
  const models::ConvertReport report =
      models::convert(args.in, args.out, args.type, pool, [&](std::int64_t done, std::int64_t total) {
        throw_if_interrupted();
        progress.update(done, total);
      });
  const std::string type(args.type ? name(*args.type) : "same");
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (args.json) {
    nlohmann::ordered_json object;
    object["out"] = args.out;
    object["type"] = type;
    object["tensors"] = report.tensors;
    object["converted"] = report.converted;
    object["bytes"] = report.bytes;
    object["seconds"] = seconds;
    write_json(object);
  } else {
    std::string what = fmt::format("{} of them converted to ", report.converted);
    if (args.type && args.type != DType::f32) what += type + " or ";
    write_stdout(fmt::format("{}: {} tensors, {}f32, {} bytes, {:.1f} s\n", one_line(args.out),
                             report.tensors, what, report.bytes, seconds));
  }
  return 0;
}

}  // namespace basin::cli
