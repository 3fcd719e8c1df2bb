#!/usr/bin/env python3
"""Small sums in words, asked as SGLang's gsm8k benchmark asks: eight worked examples before each question, all questions at
once, greedy, up to 512 new tokens of /generate. Reports accuracy, answers without a number, latency and output tokens/s."""
import argparse
import random
import re
import threading
import time

from client import Server, quantile

NAMES = ["Ann", "Ben", "Cora", "Dan", "Eva", "Finn", "Gail", "Hugo"]
THINGS = ["apples", "books", "coins", "pens", "shells", "stamps"]


def problem(rng):
    """A question and its answer, written out as the examples write it."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b, c = rng.randint(2, 20), rng.randint(2, 9), rng.randint(1, 9)
    kind = rng.randrange(3)
    if kind == 0:
        question = f"{name} has {a} {thing}. A friend gives {name} {b} more, and then {c} more. How many {thing} does {name} have?"
        working, answer = f"{a} + {b} = {a + b}. {a + b} + {c} = {a + b + c}.", a + b + c
    elif kind == 1:
        question = f"{name} buys {b} boxes with {a} {thing} in each, and finds {c} more. How many {thing} does {name} have?"
        working, answer = f"{b} * {a} = {a * b}. {a * b} + {c} = {a * b + c}.", a * b + c
    else:
        question = f"{name} had {a + b + c} {thing}, lost {b} and gave {c} away. How many {thing} are left?"
        working, answer = f"{a + b + c} - {b} = {a + c}. {a + c} - {c} = {a}.", a
    return question, working, answer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--parallel", type=int, default=1000)
    parser.add_argument("--shots", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    server = Server(arguments.url)
    rng = random.Random(arguments.seed)
    shots = "".join(f"Question: {question}\nAnswer: {working}\n#### {answer}\n\n"
                    for question, working, answer in (problem(rng) for _ in range(arguments.shots)))
    asked = [problem(rng) for _ in range(arguments.questions)]
    said = [None] * len(asked)
    latency = [0.0] * len(asked)
    turn = iter(range(len(asked)))
    lock = threading.Lock()

    def ask():
        while True:
            with lock:
                i = next(turn, None)
            if i is None:
                return
            begin = time.monotonic()
            parameters = {"max_new_tokens": arguments.max_new_tokens, "temperature": 0, "stop": ["Question", "Assistant:", "<|separator|>"]}
            said[i] = server.post("/generate", {"text": f"{shots}Question: {asked[i][0]}\nAnswer:", "sampling_params": parameters})
            latency[i] = time.monotonic() - begin

    begin = time.monotonic()
    threads = [threading.Thread(target=ask) for _ in range(min(arguments.parallel, len(asked)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.monotonic() - begin

    right = invalid = tokens = 0
    for (_, _, answer), got in zip(asked, said):
        numbers = re.findall(r"-?\d+", got["text"].replace(",", ""))  # the last one, as SGLang reads it
        invalid += not numbers
        right += bool(numbers) and int(numbers[-1]) == answer
        tokens += got["meta_info"]["completion_tokens"]
    print(f"accuracy {right / len(asked):.3f}, invalid {invalid / len(asked):.3f}, {wall:.1f} s, {tokens / wall:.1f} output tokens/s "
          f"({tokens} tokens), latency p50 {quantile(latency, 0.5):.1f} s, p99 {quantile(latency, 0.99):.1f} s")


if __name__ == "__main__":
    main()
