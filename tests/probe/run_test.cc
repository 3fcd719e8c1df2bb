// A run that is cut off goes on and gives the same bytes; what was damaged in between is said, with what to remove.
#include "probe/run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <numeric>

#include "basin/base/error.h"
#include "models/checkpoint.h"

namespace basin::probe {
namespace {

namespace fs = std::filesystem;

std::string content(const fs::path& path) {
  std::string bytes(fs::file_size(path), '\0');
  std::ifstream(path, std::ios::binary).read(bytes.data(), std::ssize(bytes));
  return bytes;
}

void replace(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

class Run : public testing::Test {
 protected:
  Run()
      : loaded_(models::load(test::golden_model("llama"))),
        layers_(std::ssize(loaded_.model->config().layers)),
        root_(fs::temp_directory_path() / ("basin_run_" + std::to_string(getpid()))) {
    tokens_.resize(70);
    for (std::size_t i = 0; i < tokens_.size(); ++i)
      tokens_[i] = static_cast<std::int32_t>(i * 37 + 11) % 300;
  }
  ~Run() override { fs::remove_all(root_); }

  // Stops before the layer after `stop_after` is done, as a kill would; 0 = at the end. Gives the layers that were there.
  std::int64_t go(const std::string& folder, std::int64_t stop_after = 0) {
    RunOptions options;
    options.compute = ops::Compute::fp32;
    options.layer.map_bins = 16;
    options.folder = root_ / folder;
    std::atomic<bool> cancel = false;
    std::int64_t before = 0;
    const auto on_progress = [&](std::int64_t done, std::int64_t) {
      cancel = stop_after > 0 && done == stop_after * std::ssize(tokens_);
    };
    try {
      before = run(*loaded_.model, tokens_, options, pool_, on_progress, &cancel);
      EXPECT_EQ(stop_after, 0);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::cancelled) throw;
    }
    return before;
  }

  std::map<std::string, std::string> files(const std::string& folder) const {
    std::map<std::string, std::string> all;
    for (const auto& entry : fs::directory_iterator(root_ / folder))
      all[entry.path().filename()] = content(entry);
    return all;
  }

  void expect_damage_is_said(const std::string& folder, const std::string& file) {
    try {
      go(folder);
      ADD_FAILURE() << file << " is damaged";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt) << error.what();
      EXPECT_THAT(error.what(), testing::HasSubstr(root_ / folder / file));
      EXPECT_THAT(error.hint(), testing::HasSubstr("remove " + (root_ / folder).string()));
    }
  }

  models::Loaded loaded_;
  std::int64_t layers_;
  fs::path root_;
  std::vector<std::int32_t> tokens_;
  ThreadPool pool_{2};
};

TEST_F(Run, GoesOnBehindTheLastLayerWhereverItWasCutOff) {
  EXPECT_EQ(go("whole"), 0);
  for (std::int64_t layer = 1; layer < layers_; ++layer) {
    const std::string folder = "cut_" + std::to_string(layer);
    go(folder, layer);
    EXPECT_EQ(go(folder), layer);
    EXPECT_EQ(files(folder), files("whole"));
    EXPECT_EQ(go(folder), layers_) << "nothing is left to do";
  }
}

TEST_F(Run, ACutRunKeepsEveryByteOfItsLayers) {
  go("cut", 1);
  const std::string first = content(layer_file(root_ / "cut", 0));
  go("cut", 2);
  EXPECT_EQ(content(layer_file(root_ / "cut", 0)), first);
}

TEST_F(Run, DamageNamesWhatToRemove) {
  go("cut", 2);
  const std::map<std::string, std::string> good = files("cut");
  for (const std::string file : {"state.safetensors", "layer_000.npz", "layer_001.npz"}) {
    const std::string& whole = good.at(file);
    ASSERT_GT(whole.size(), 1000u);
    std::vector<std::string> damaged = {"", whole.substr(0, whole.size() / 2),
                                        whole.substr(0, whole.size() - 1), whole};
    damaged.back()[whole.size() / 2] = static_cast<char>(damaged.back()[whole.size() / 2] ^ 0x11);
    for (const std::string& bad : damaged) {
      replace(root_ / "cut" / file, bad);
      expect_damage_is_said("cut", file);
    }
    fs::remove(root_ / "cut" / file);
    if (file == "state.safetensors") {
      EXPECT_EQ(go("cut"), 0) << "without a state the run starts anew";
      fs::remove_all(root_ / "cut");
      go("cut", 2);
    } else {
      expect_damage_is_said("cut", file);
    }
    replace(root_ / "cut" / file, whole);
  }
  EXPECT_EQ(go("cut"), 2) << "nothing was lost by the refusals";
}

TEST_F(Run, AStateOfMoreLayersThanTheModelHasIsRefused) {
  go("cut", 1);
  const fs::path state = root_ / "cut" / "state.safetensors";
  std::string text = content(state);
  const std::size_t at = text.find("\"layers\":\"1\"");
  ASSERT_NE(at, std::string::npos);
  for (const char count : {'0', '9', '-', 'x'}) {
    text[at + 10] = count;
    replace(state, text);
    expect_damage_is_said("cut", "state.safetensors");
  }
}

}  // namespace
}  // namespace basin::probe
