#include "engine/model_runner.h"

namespace basin::engine {

kv::Shape cache_shape(const models::ModelConfig& config, ops::Compute compute, std::int64_t page_tokens) {
  kv::Shape shape;
  shape.layers = static_cast<std::int64_t>(config.layers.size());
  shape.h_kv = config.h_kv;
  shape.d_head = config.d_head;
  shape.dtype = compute == ops::Compute::fp32 ? DType::f32 : DType::bf16;
  shape.page_tokens = page_tokens;
  return shape;
}

ModelRunner::ModelRunner(models::Model& model, ThreadPool& threads, ops::Compute compute,
                         std::int64_t page_tokens, std::int64_t pages)
    : model_(model),
      threads_(threads),
      compute_(compute),
      pool_(std::make_shared<kv::PagePool>(cache_shape(model.config(), compute, page_tokens), pages)) {}

void ModelRunner::run(std::span<const RunnerWork> work, const OnLogits& on_logits) {
  for (std::size_t index = 0; index < work.size(); ++index) {
    const models::Chunk chunk{work[index].tokens, work[index].cache->logical_position()};
    const models::PassOptions options{compute_, attention::Backend::automatic, work[index].rows};
    const auto hand_on = [&](std::int64_t first_row, std::int64_t rows, std::span<const float> logits) {
      on_logits(index, first_row, rows, logits);
    };
    model_.forward(chunk, *work[index].cache, options, hand_on, threads_);
  }
}

}  // namespace basin::engine
