// What a model's chat template says beyond ChatML's frame. Templates are programs; Basin reads one thing out of them.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace basin::text {

/// The system message that a ChatML template puts first when the user gives none, if the template spells one out: the
/// text between the opening of a system turn and its end, whole inside one string literal or in the template's plain text.
/// Else empty.
std::string default_system(std::string_view chat_template);

/// The template of a directory in the Hugging Face layout: chat_template.jinja, else chat_template of
/// tokenizer_config.json (of several, the one named "default"). Empty when there is none. Throws Error(corrupt | io).
std::string read_chat_template(const std::filesystem::path& directory);

}  // namespace basin::text
