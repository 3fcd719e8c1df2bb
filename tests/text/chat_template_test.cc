// The one thing that is read out of a chat template, and the places where templates lie.
#include "text/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "basin/base/error.h"

namespace basin::text {
namespace {

using nlohmann::json;

// As SmolLM2-Instruct has it.
const char* const kSmolLM2 =
    R"({% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %})"
    R"({{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }})"
    R"({% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %})"
    R"({% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %})";
const char* const kSmolLM2System = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";

TEST(ChatTemplate, TheDefaultSystemMessage) {
  EXPECT_EQ(default_system(kSmolLM2), kSmolLM2System);
  EXPECT_EQ(default_system(""), "");
  EXPECT_EQ(default_system("{{ '<|im_start|>user\\n' }}"), "");
  // Qwen3 puts none first: its openings are joined with the user's own message.
  EXPECT_EQ(default_system(R"({{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }})"), "");
  // Qwen2.5: the branch with tools comes first and is put together by code.
  EXPECT_EQ(default_system(R"({%- if tools %}{{- '<|im_start|>system\n' }}{{- 'You are Qwen.' }}
{{- "</tools><|im_end|>\n" }}{%- else %}{{- '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}{%- endif %})"),
            "You are Qwen.");
  EXPECT_EQ(default_system(R"({{ "<|im_start|>system\nIt's \"new\".\nSay \\n.<|im_end|>" }})"),
            "It's \"new\".\nSay \\n.");
  EXPECT_EQ(default_system(R"({{ '<|im_start|>system\nIt\'s.<|im_end|>' }})"), "It's.");
  EXPECT_EQ(default_system("{% if x %}<|im_start|>system\nYou're \\n plain.<|im_end|>\n{% endif %}"),
            "You're \\n plain.");
  EXPECT_EQ(default_system("<|im_start|>system\n{{ system }}<|im_end|>"), "");
  EXPECT_EQ(default_system("<|im_start|>system\n{% if a %}b{% endif %}<|im_end|>"), "");
  // Cut short, or escaped in a way that is not known: no guess.
  EXPECT_EQ(default_system("{{ '<|im_start|>system\\nYou are"), "");
  EXPECT_EQ(default_system(R"({{ '<|im_start|>system\nA\x41<|im_end|>' }})"), "");
  EXPECT_EQ(default_system(R"({{ '<|im_start|>system\nA\<|im_end|>' }})"), "");
}

class Directory : public testing::Test {
 protected:
  Directory() {
    std::string name = (std::filesystem::temp_directory_path() / "basin-template-XXXXXX").string();
    path = mkdtemp(name.data());
  }
  ~Directory() override { std::filesystem::remove_all(path); }
  void write(const char* file, const std::string& text) const { std::ofstream(path / file) << text; }
  void expect_corrupt(const std::string& named) const {
    try {
      read_chat_template(path);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt);
      EXPECT_THAT(error.what(), testing::HasSubstr(named));
    }
  }
  std::filesystem::path path;
};

TEST_F(Directory, WhereTemplatesLie) {
  EXPECT_EQ(read_chat_template(path), "");
  write("tokenizer_config.json", "{}");
  EXPECT_EQ(read_chat_template(path), "");
  write("tokenizer_config.json", R"({"chat_template": null})");
  EXPECT_EQ(read_chat_template(path), "");
  write("tokenizer_config.json", json{{"chat_template", kSmolLM2}}.dump());
  EXPECT_EQ(read_chat_template(path), kSmolLM2);
  write(
      "tokenizer_config.json",
      R"({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}, 3]})");
  EXPECT_EQ(read_chat_template(path), "d");
  write("tokenizer_config.json", R"({"chat_template": [{"name": "tool_use", "template": "t"}]})");
  EXPECT_EQ(read_chat_template(path), "");
  write("chat_template.jinja", "j\n");
  EXPECT_EQ(read_chat_template(path), "j\n");
}

TEST_F(Directory, DamagedTemplatesAreRefused) {
  write("tokenizer_config.json", R"({"chat_template": 3})");
  expect_corrupt("tokenizer_config.json: 'chat_template'");
  write("tokenizer_config.json", R"({"chat_template": "a", "chat_template": "b"})");
  expect_corrupt("'chat_template' twice");
  write("chat_template.jinja", "\xff");
  expect_corrupt("chat_template.jinja");
  write("chat_template.jinja", std::string((1 << 20) + 1, 'x'));
  expect_corrupt("chat_template.jinja");
}

}  // namespace
}  // namespace basin::text
