// A load that must fail, and what its error must say.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "basin/base/error.h"
#include "models/model.h"

namespace basin::test {

inline void expect_error(const std::filesystem::path& model, ErrorCode code, const std::string& named) {
  try {
    models::load(model);
    ADD_FAILURE() << "loaded; expected an error that names '" << named << "'";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what() + (" " + error.hint()), testing::HasSubstr(named));
  }
}

}  // namespace basin::test
