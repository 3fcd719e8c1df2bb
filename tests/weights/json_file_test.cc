// JSON beside a model: what is wrong is refused by name, above all what readers would disagree about.
#include "weights/json_file.h"

#include <nlohmann/json.hpp>

#include "weights/files.h"

namespace basin::weights {
namespace {

using test::expect_error;
using test::TemporaryDirectory;

TEST(JsonFile, ReadsAnObject) {
  const TemporaryDirectory directory;
  // The same key in two objects, in an object and in its parent, and in neighbours of a list is no repetition.
  const std::string text = R"({"a": {"k": 1}, "k": [{"k": 2}, {"k": {"k": null}}], "b": {"a": 3}})";
  EXPECT_EQ(read_json_object(directory.file("a.json", text), text.size()), nlohmann::json::parse(text));
}

TEST(JsonFile, DuplicateKeysAreNamed) {
  const TemporaryDirectory directory;
  const struct {
    const char* text;
    std::initializer_list<std::string> named;
  } cases[] = {
      {R"({"theta": 1, "theta": 2})", {"a.json", "'theta' twice"}},
      {R"({"theta": 1, "theta": 1})", {"'theta' twice"}},
      {R"({"theta": 1, "b": {}, "\u0074heta": 2})", {"'theta' twice"}},
      {R"({"": 1, "": 2})", {"'' twice"}},
      {R"({"rope": {"factor": 1, "x": {"factor": 3}, "factor": 2}})", {"'factor' twice, in 'rope'"}},
      {R"({"a": [1, {"b": {"c": 1, "c": 2}}]})", {"'c' twice, in 'a.b'", "a.json"}},
      {"{\"a\\n\": 1, \"a\\n\": 2}", {"'a?' twice"}},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.text);
    expect_error([&] { read_json_object(directory.file("a.json", c.text), 1000); }, ErrorCode::corrupt,
                 c.named);
  }
  const std::string huge(100'000, 'k');
  expect_error(
      [&] { read_json_object(directory.file("a.json", "{\"" + huge + "\":1,\"" + huge + "\":2}"), 1 << 20); },
      ErrorCode::corrupt, {"twice"});
}

TEST(JsonFile, EverythingElseThatIsWrong) {
  const TemporaryDirectory directory;
  const auto refused = [&](const std::string& text, ErrorCode code, const std::string& named) {
    SCOPED_TRACE(text.substr(0, 40));
    expect_error([&] { read_json_object(directory.file("a.json", text), 200'000); }, code, {"a.json", named});
  };
  for (const char* text : {"", "{", "{\"a\": }", "\xff", "{\"a\": \"\xff\"}", "{\"a\": 1e999}", "{} x"})
    refused(text, ErrorCode::corrupt, "is not JSON");
  for (const char* text : {"[]", "3", "null", "\"a\""})
    refused(text, ErrorCode::corrupt, "not a JSON object");
  refused(std::string(100'000, '['), ErrorCode::corrupt, "64 levels");
  refused("{" + std::string(200'000, ' ') + "}", ErrorCode::corrupt, "200002 bytes");
  expect_error([&] { read_json_object(directory.path() / "none.json", 10); }, ErrorCode::not_found,
               {"none.json"});
  expect_error([&] { read_json_object(directory.path(), 10); }, ErrorCode::io, {directory.path().string()});
}

}  // namespace
}  // namespace basin::weights
