// One function per sub-command. Each returns the exit code, or throws.
#pragma once

#include "cli/args.h"

namespace basin::cli {

int run(const ShowText& args);
int run(const GenerateArgs& args);
int run(const PerplexityArgs& args);
int run(const LogitsArgs& args);
int run(const TokenizeArgs& args);
int run(const ConvertArgs& args);
int run(const InfoArgs& args);
int run(const BenchArgs& args);
int run(const ProbeArgs& args);
int run(const ServeArgs& args);
int run(const ChatArgs& args);
int run(const BenchServeArgs& args);

}  // namespace basin::cli
