// For the oracle test: reads {"text": ..., "special": bool} lines, writes {"ids": [...], "text": decoded} lines.
// Usage: encode_tool MODEL, a directory with tokenizer.json or a .gguf file.
#include <exception>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "text/tokenizer.h"
#include "weights/gguf.h"

int main(int argc, char** argv) {
  try {
    if (argc != 2) throw std::runtime_error("usage: encode_tool MODEL");
    const std::filesystem::path model = argv[1];
    const auto tokenizer = model.extension() == ".gguf"
                               ? basin::text::Tokenizer::from_gguf(basin::weights::read_gguf(model))
                               : basin::text::Tokenizer::from_directory(model);
    std::string line;
    while (std::getline(std::cin, line)) {
      const auto request = nlohmann::json::parse(line);
      const auto ids =
          tokenizer.encode(request.at("text").get<std::string>(), request.at("special").get<bool>());
      std::cout << nlohmann::json{{"ids", ids}, {"text", tokenizer.decode(ids, true)}}.dump() << '\n';
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "encode_tool: " << error.what() << '\n';
    return 1;
  }
}
