// The frame of ChatML, which several formats fill.
#pragma once

#include <cstdint>
#include <string_view>

namespace basin::text {

class ChatWriter;
class Tokenizer;

class ChatmlFrame {
 public:
  explicit ChatmlFrame(const Tokenizer& tokenizer);
  void open(ChatWriter& writer, std::string_view role) const;
  void close(ChatWriter& writer) const;
  void turn(ChatWriter& writer, std::string_view role, std::string_view content) const;

 private:
  std::int32_t start_, end_;
};

}  // namespace basin::text
