#!/usr/bin/env python3
"""Long answers in a window: how much of each 512 tokens is new (the share of distinct 4-grams), and what memory it takes.

Starts one streamed request for each seed, all at once, and watches the server's resident memory and pages. With --gate it fails
unless 8,192 to 16,384 tokens are at least 0.9 as varied as 4,096 to 8,192 and memory stays flat from the time that every
window is full."""
import argparse
import json
import statistics
import sys
import threading
import time

from client import Server, resident_bytes


def distinct(tokens):
    grams = [tuple(tokens[i:i + 4]) for i in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, required=True, help="of the server")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--sink-tokens", type=int, default=1024)
    parser.add_argument("--window", type=int, default=7168)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--prompt", default="Write a long story about a sailor who finds an island.")
    parser.add_argument("--out", help="writes tokens and memory here, as JSON")
    parser.add_argument("--gate", action="store_true")
    arguments = parser.parse_args()
    server = Server(arguments.url)
    chosen = {seed: [] for seed in arguments.seeds}
    memory = []  # [fewest tokens of an answer so far, resident bytes, held pages]

    def ask(seed):
        connection = server.connect()
        body = {"messages": [{"role": "user", "content": arguments.prompt}], "max_tokens": arguments.max_tokens, "seed": seed,
                "temperature": arguments.temperature, "ignore_eos": True, "sink_tokens": arguments.sink_tokens,
                "window": arguments.window, "stream": True, "logprobs": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                chosen[seed] += [entry["token"] for entry in (choice["logprobs"] or {"content": []})["content"]]

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in arguments.seeds]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(1)
        least = min(map(len, chosen.values()))
        if not memory or least >= memory[-1][0] + 256:
            memory.append([least, resident_bytes(arguments.pid), server.metrics()['basin_kv_pages{state="held"}']])
    seconds = time.monotonic() - begin

    curve = []
    for start in range(0, arguments.max_tokens, 512):
        curve.append(statistics.mean(distinct(tokens[start:start + 512]) for tokens in chosen.values()))
    early = {seed: statistics.mean(distinct(t[s:s + 512]) for s in range(4096, 8192, 512)) for seed, t in chosen.items()}
    late = {seed: statistics.mean(distinct(t[s:s + 512]) for s in range(8192, arguments.max_tokens, 512)) for seed, t in chosen.items()}
    full = [entry for entry in memory if entry[0] >= arguments.sink_tokens + arguments.window]
    growth = full[-1][1] / full[0][1]
    ratio = statistics.mean(late.values()) / statistics.mean(early.values())
    print("tokens  distinct 4-grams of 512, mean over seeds")
    for i in range(0, len(curve), 2):
        print(f"{512 * i:6}  {statistics.mean(curve[i:i + 2]):.3f}")
    print("seed: 8K-16K over 4K-8K:", ", ".join(f"{seed}: {late[seed] / early[seed]:.3f}" for seed in chosen))
    print(f"all seeds: {ratio:.3f}; {seconds:.0f} s; resident {full[0][1] / 1e6:.0f} MB when the windows are full, {full[-1][1] / 1e6:.0f} MB at "
          f"the end ({growth:.3f}); held pages {full[0][2]:.0f}, {full[-1][2]:.0f}")
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump({"curve": curve, "memory": memory, "tokens": chosen, "ratio": ratio}, file)
    if arguments.gate and (ratio < 0.9 or growth > 1.05):
        sys.exit("the gate does not hold")


if __name__ == "__main__":
    main()
