// Any bytes either open as recorded selections, with every row readable, or give one Error; a study of them likewise.
#include "basin/base/error.h"
#include "fuzz/memory_file.h"
#include "probe/study.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const basin::fuzz::MemoryFile file(data, size);
  for (const basin::probe::TraceShape& shape : {basin::probe::TraceShape{}, basin::probe::TraceShape{2, 4}}) {
    try {
      const basin::probe::Trace trace = basin::probe::open_trace(file.path(), shape);
      basin::fuzz::require(trace.layers() >= 1 && trace.queries() >= 1 && trace.topk() >= 1);
      for (std::int64_t layer = 0; layer < trace.layers(); ++layer) {
        const basin::probe::TraceLayer rows = trace.load(layer);
        for (std::int64_t query = 0; query < trace.queries(); ++query) {
          basin::fuzz::touch(rows.data + query * rows.stride, static_cast<std::uint64_t>(4 * trace.topk()));
        }
      }
      basin::ThreadPool pool(1);
      basin::probe::StudyOptions options;
      options.map_bins = 16;
      basin::probe::study(trace, options, pool, {}, nullptr);
    } catch (const basin::Error&) {
    }
  }
  return 0;
}
