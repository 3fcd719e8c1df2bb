#!/usr/bin/env python3
"""Speed of `basin bench` beside that of a llama-bench of your own, on the same GGUF files and with the same threads.

Both programs take turns, so that a slow moment of the machine meets both. Of each run the best repeat counts, of several
turns the median. llama-bench runs with and without its flash attention, and the faster of the two is compared.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys


def run_json(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nfailed with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def ours(args, model):
    command = [args.basin, "bench", model, "--json", "--threads", str(args.threads)]
    found = run_json(command + (["--depth", str(args.depth)] if args.depth else []))
    return {"prefill": found["prefill"]["tokens_per_s"], "decode": found["decode"]["tokens_per_s"],
            "GB/s": found["decode"]["gb_per_s"], "read GB/s": found["ceilings"]["read_gb_per_s"]}


def theirs(args, model, flash):
    def best(*options):
        tests = run_json([args.llama_bench, "-m", model, "-t", str(args.threads), "-r", "2", "-fa", flash, "-o", "json",
                          *options])
        return max(tests[0]["samples_ts"])

    return {"prefill": best("-p", "512", "-n", "0"), "decode": best("-p", "0", "-n", "64", "-d", str(args.depth))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("basin", help="the program basin")
    parser.add_argument("llama_bench", help="the program llama-bench")
    parser.add_argument("models", nargs="+", help="GGUF files")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--depth", type=int, default=0, help="tokens before those whose decoding is measured")
    args = parser.parse_args()
    print("| file | what | Basin, tokens/s | llama.cpp | ratio | decode, GB/s of read |\n| --- | --- | --- | --- | --- | --- |")
    for model in args.models:
        turns = [(ours(args, model), theirs(args, model, "1"), theirs(args, model, "0")) for _ in range(args.turns)]

        def median(who, key):
            return statistics.median(turn[who][key] for turn in turns)

        for key in ("prefill", "decode"):
            speed, peer = median(0, key), max(median(1, key), median(2, key))
            bytes_of = f"{median(0, 'GB/s'):.1f} of {median(0, 'read GB/s'):.1f}" if key == "decode" else ""
            print(f"| {os.path.basename(model)} | {key} | {speed:.1f} | {peer:.1f} | {speed / peer:.2f} | {bytes_of} |",
                  flush=True)


if __name__ == "__main__":
    main()
