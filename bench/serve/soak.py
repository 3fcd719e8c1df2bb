#!/usr/bin/env python3
"""Many short requests on many connections, then clients that go at random, then a look at what is left.

Every answer is checked against the one that the same request got alone before: a token lost, doubled or of another request
shows, streamed or not. Fails on any difference, on any status of 500 or more, and when memory or pages do not come back."""
import argparse
import http.client
import json
import random
import sys
import threading
import time

from client import Server, resident_bytes


def requests_of(count, vocabulary):
    rng = random.Random(1)
    made = []
    for i in range(count):
        body = {"prompt": [rng.randrange(vocabulary // 10, vocabulary) for _ in range(rng.randint(1, 60))], "seed": i,
                "max_tokens": rng.randint(1, 24), "temperature": rng.choice([0, 1.0]), "ignore_eos": True}
        if rng.random() < 0.3:
            body.update(sink_tokens=2, window=rng.randint(4, 30))
        made.append(body)
    return made


class Soak:
    def __init__(self, arguments):
        self.arguments = arguments
        self.server = Server(arguments.url, timeout=300)
        self.bodies = requests_of(200, self.server.get("/tokenizer_info")["vocab_size"])
        self.problems = []
        self.lock = threading.Lock()
        self.done = self.killed = 0
        self.wanted = [self.server.post("/v1/completions", body)["choices"][0]["text"] for body in self.bodies]

    def problem(self, text):
        with self.lock:
            self.problems.append(text)

    def one(self, connection, rng, may_go=False):
        """One request; False when the client has gone in the middle of it."""
        i = rng.randrange(len(self.bodies))
        stream = rng.random() < 0.5
        connection.request("POST", "/v1/completions", json.dumps({**self.bodies[i], "stream": stream}), {"Content-Type": "application/json"})
        if may_go and rng.random() < 0.5:
            if rng.random() < 0.5:
                time.sleep(rng.random() * 0.05)
            elif stream:
                connection.getresponse().read(rng.randint(1, 400))
            with self.lock:
                self.killed += 1
            return False
        response = connection.getresponse()
        data = response.read()
        if response.status != 200:
            self.problem(f"status {response.status}: {data[:200]}")
            return True
        if stream:
            parts = data.decode().split("\n\n")
            if parts[-2:] != ["data: [DONE]", ""]:
                self.problem(f"a stream without its end: {data[-200:]}")
            text = "".join(json.loads(part[6:])["choices"][0]["text"] for part in parts[:-2])
        else:
            text = json.loads(data)["choices"][0]["text"]
        if text != self.wanted[i]:
            self.problem(f"request {i}: {text!r} instead of {self.wanted[i]!r}")
        with self.lock:
            self.done += 1
        return True

    def run(self, clients, work):
        def client(number):
            try:
                work(random.Random(number))
            except (OSError, http.client.HTTPException) as error:
                self.problem(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def many(self, rng, requests=None):
        connection = self.server.connect()
        for _ in range((requests or self.arguments.requests) // self.arguments.connections):
            self.one(connection, rng)
        connection.close()

    def kills(self, rng):
        end = time.monotonic() + self.arguments.kill_seconds
        while time.monotonic() < end:
            connection = self.server.connect()
            while time.monotonic() < end and self.one(connection, rng, may_go=True):
                pass
            connection.close()

    def state(self):
        for _ in range(200):  # what has been broken off ends with the step that runs
            metrics = self.server.metrics()
            if metrics["basin_running_sequences"] + metrics["basin_waiting_sequences"] == 0:
                break
            time.sleep(0.05)
        self.server.post("/flush_cache", {})
        time.sleep(0.2)
        metrics = self.server.metrics()
        return resident_bytes(self.arguments.pid), metrics


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, required=True, help="of the server")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--first-requests", type=int, help="of the round before (default: as many)")
    parser.add_argument("--kill-seconds", type=float, default=300)
    parser.add_argument("--kill-clients", type=int, default=64)
    arguments = parser.parse_args()
    soak = Soak(arguments)
    # The first round fills what a server keeps: buffers, threads' memory.
    soak.run(arguments.connections, lambda rng: soak.many(rng, arguments.first_requests))
    first, soak.done = soak.done, 0
    before, _ = soak.state()
    begin = time.monotonic()
    soak.run(arguments.connections, soak.many)
    seconds = time.monotonic() - begin
    print(f"{soak.done} requests on {arguments.connections} connections in {seconds:.1f} s (and {first} before)", flush=True)
    middle, _ = soak.state()
    soak.done = 0
    soak.run(arguments.kill_clients, soak.kills)
    after, metrics = soak.state()
    held = metrics['basin_kv_pages{state="held"}']
    kept = metrics['basin_kv_pages{state="kept"}']
    failed = sum(value for name, value in metrics.items() if name.startswith("basin_http_requests_total") and 'status="5' in name)
    print(f"{soak.killed} clients went and {soak.done} stayed in {arguments.kill_seconds:.0f} s; resident {before / 1e6:.1f} MB, "
          f"{middle / 1e6:.1f} MB, {after / 1e6:.1f} MB at the end; held pages {held:.0f}, kept {kept:.0f}; "
          f"{failed:.0f} answers of status 5xx; {len(soak.problems)} problems")
    for problem in soak.problems[:5]:
        print(problem)
    if soak.problems or failed or held or kept or after > before + 16e6:
        sys.exit(1)


if __name__ == "__main__":
    main()
