// Conversations as the models were trained on them: messages to token ids, and generated token ids back to what the
// assistant says, thinks and calls. Templates are programs; Basin does not run them but knows their formats.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace basin::text {

class Tokenizer;

/// A call of one of the tools by the assistant.
struct ToolCall {
  std::string id;         // of the API, to find the answer's call; no format writes it
  std::string name;       // of the function
  std::string arguments;  // JSON
};

struct Message {
  std::string role;  // "system", "developer", "user", "assistant", "tool"
  std::string content;
  std::string reasoning = {};             // assistant: what it thought before it answered
  std::vector<ToolCall> tool_calls = {};  // assistant
  std::string tool_call_id = {};  // tool: the call that it answers; empty = the latest one not answered
};

struct ChatOptions {
  /// JSON objects in the form of OpenAI's API, {"type": "function", "function": {"name": ..., ...}}, with their keys in the
  /// order in which the model shall read them.
  std::vector<std::string> tools = {};
  bool thinking = true;  // false: the answer comes at once; Error(unsupported) of models that always think
  std::string reasoning_effort = {};  // "low", "medium", "high" where the format has it; empty = "medium"
  std::string date = {};              // "2026-11-30"; empty = the format's own, or none
  bool default_system = true;         // without a system message, the template's own comes first
};

/// What one token adds to the answer. Pieces of text are whole characters.
struct ChatDelta {
  enum Kind {
    content,
    reasoning,
    tool_call,       // a call starts; `text` is the name
    tool_arguments,  // a piece of the JSON of the call that started last
  } kind;
  std::string text;
  std::int32_t index = 0;  // tool_call, tool_arguments: which call of the answer, from 0

  bool operator==(const ChatDelta&) const = default;
};

/// Reads an answer token by token. Whatever a model writes has a meaning: nothing throws but ids outside the model's
/// vocabulary. The token that ends the turn may be pushed or left out.
class ChatParser {
 public:
  virtual ~ChatParser() = default;
  virtual std::vector<ChatDelta> push(std::int32_t id) = 0;
  /// What was held back. Nothing may be pushed afterwards.
  virtual std::vector<ChatDelta> finish() = 0;
};

/// Stateless but for its tokenizer, which must outlive it; its parsers must not outlive it.
class ChatFormat {
 public:
  virtual ~ChatFormat() = default;

  virtual std::string_view name() const = 0;  // "chatml", "qwen", "llama3", "gemma", "harmony"

  /// The ids of a conversation, BOS included where the format has it, up to the opened turn of the assistant. Contents are
  /// never parsed for special tokens. Throws Error(invalid_argument) for roles or an order that the format cannot write,
  /// and for tools or arguments that are no JSON; Error(unsupported) for what it does not have.
  virtual std::vector<std::int32_t> render(std::span<const Message> messages,
                                           const ChatOptions& options) const = 0;

  /// For the answer to what render() made with these options.
  virtual std::unique_ptr<ChatParser> parser(const ChatOptions& options) const = 0;
};

/// The format of a model, by its chat template (may be empty) and its special tokens. `architecture` as in
/// models::ModelConfig, for the message only. Throws Error(unsupported) that says what the template was recognised by and
/// what to do instead.
std::unique_ptr<ChatFormat> find_chat_format(const Tokenizer& tokenizer, std::string_view chat_template,
                                             std::string_view architecture);

/// For a text that is no chat: everything is content.
std::unique_ptr<ChatParser> make_plain_parser(const Tokenizer& tokenizer);

}  // namespace basin::text
