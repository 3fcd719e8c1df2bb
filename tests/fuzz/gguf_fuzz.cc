// Any bytes either load as GGUF, with every byte of every tensor readable and a tokenizer that is refused or works, or
// give one Error.
#include "basin/base/error.h"
#include "fuzz/memory_file.h"
#include "text/tokenizer.h"
#include "weights/gguf.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const basin::fuzz::MemoryFile bytes(data, size);
  try {
    const basin::weights::GgufFile file = basin::weights::read_gguf(bytes.path());
    std::uint64_t total = 0;
    for (const auto& [name, tensor] : file.tensors) {
      basin::fuzz::touch(tensor.data, tensor.bytes);
      total += tensor.bytes;
    }
    basin::fuzz::require(total <= size);
    const auto tokenizer = basin::text::Tokenizer::from_gguf(file);
    for (const std::int32_t id : tokenizer.encode("the cat, 12 \xc3\xa9\n", true))
      basin::fuzz::require(id >= 0 && id < tokenizer.vocabulary());
  } catch (const basin::Error&) {
  }
  return 0;
}
