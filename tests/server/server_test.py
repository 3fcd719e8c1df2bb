"""basin serve through its HTTP: what it answers, what it refuses, and how it ends."""
import concurrent.futures
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.parse

from helpers import BINARY, Server, ServerTest, cli_helpers

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def text_of(events):
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


class Completions(ServerTest):
    def ask(self, prompt="hello the world", **fields):
        return self.server.post(COMPLETIONS, {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields})

    def test_the_text_is_that_of_basin_generate(self):
        for flags, fields in (
                (["--temperature", "0"], {"temperature": 0}),
                (["--temperature", "0.9", "--seed", "7"], {"temperature": 0.9, "seed": 7}),
                (["--temperature", "1.5", "--seed", "1", "--top-p", "0.7"], {"temperature": 1.5, "seed": 1, "top_p": 0.7}),
                (["--temperature", "1", "--top-k", "5", "--min-p", "0.1"], {"temperature": 1, "seed": 0, "top_k": 5, "min_p": 0.1}),
                (["--repetition-penalty", "1.4"], {"temperature": 0, "repetition_penalty": 1.4}),
                (["--sink-tokens", "2", "--window", "6"], {"temperature": 0, "sink_tokens": 2, "window": 6}),
                (["--sink-tokens", "2", "--window", "6", "--positions", "absolute"],
                 {"temperature": 0, "sink_tokens": 2, "window": 6, "positions": "absolute"})):
            want = self.basin_json("generate", self.model, "--prompt", "hello the world", "--max-tokens", "40", *flags)
            got = self.server.post(COMPLETIONS, {"prompt": "hello the world", "max_tokens": 40, **fields})
            self.assertEqual(got["choices"][0]["text"], want["text"], flags)
            self.assertEqual(got["choices"][0]["finish_reason"], want["finish_reason"], flags)
            self.assertEqual(got["usage"]["completion_tokens"], want["completion_tokens"], flags)
            self.assertEqual(got["usage"]["kept_tokens"], want["kept_tokens_max"], flags)

    def test_every_option_changes_the_answer(self):
        base = {"temperature": 1.0, "seed": 3, "max_tokens": 40}
        plain = self.ask(**base)["choices"][0]["text"]
        self.assertEqual(self.ask(**base)["choices"][0]["text"], plain)
        token = self.server.post("/tokenize", {"prompt": plain})["tokens"][-1]
        for name, value in {"temperature": 0.3, "seed": 4, "top_k": 2, "top_p": 0.2, "min_p": 0.5, "repetition_penalty": 2.0,
                            "presence_penalty": 2.0, "frequency_penalty": 2.0, "logit_bias": {str(token): -100},
                            "max_tokens": 3, "sink_tokens": 0, "window": 3, "stop": [plain[5:8]]}.items():
            fields = {**base, name: value}
            if name == "sink_tokens":
                fields["window"] = 4
            self.assertNotEqual(self.ask(**fields)["choices"][0]["text"], plain, name)

    def test_logit_bias_bans_and_forces(self):
        first = self.ask(max_tokens=1, logprobs=0)["choices"][0]["logprobs"]["tokens"][0]
        chosen = self.server.post("/generate", {"text": "hello the world", "sampling_params": {"max_new_tokens": 1, "temperature": 0}})["output_ids"][0]
        self.assertNotEqual(self.ask(max_tokens=1, logprobs=0, logit_bias={str(chosen): -100})["choices"][0]["logprobs"]["tokens"][0], first)
        self.assertEqual(self.ask(max_tokens=3, logit_bias={"104": 100})["choices"][0]["text"],
                         self.server.post("/detokenize", {"tokens": [104] * 3})["prompt"])

    def test_the_end_of_a_text_can_be_ignored(self):
        (end,) = self.server.post("/tokenize", {"prompt": "<|im_end|>", "add_special_tokens": False})["tokens"]
        fields = {"max_tokens": 5, "logit_bias": {str(end): 100}}
        got = self.ask(**fields, ignore_eos=False)
        self.assertEqual((got["choices"][0]["finish_reason"], got["choices"][0]["text"], got["usage"]["completion_tokens"]), ("stop", "", 0))
        got = self.ask(**fields, ignore_eos=True)
        self.assertEqual((got["choices"][0]["finish_reason"], got["usage"]["completion_tokens"]), ("length", 5))
        shown = self.ask(**fields, ignore_eos=True, skip_special_tokens=False)
        self.assertEqual((got["choices"][0]["text"], shown["choices"][0]["text"]), ("", "<|im_end|>" * 5))

    def test_a_stream_is_the_same_text(self):
        for fields in ({"temperature": 0}, {"temperature": 1.2, "seed": 5}, {"temperature": 1.2, "seed": 6, "stop": ["e"]}):
            whole = self.ask(max_tokens=60, **fields)
            events = self.server.events(COMPLETIONS, {"prompt": "hello the world", "ignore_eos": True, "max_tokens": 60, **fields})
            self.assertEqual(text_of(events), whole["choices"][0]["text"])
            self.assertTrue(all(len(event["choices"]) == 1 for event in events))  # no usage unless asked for
            reasons = [event["choices"][0]["finish_reason"] for event in events]
            self.assertEqual(reasons, [None] * (len(events) - 1) + [whole["choices"][0]["finish_reason"]])
            self.assertEqual(len({event["id"] for event in events}), 1)

    def test_usage_comes_last_and_on_request(self):
        events = self.server.events(COMPLETIONS, {"prompt": "hello", "max_tokens": 5, "stream_options": {"include_usage": True},
                                                  "temperature": 0, "ignore_eos": True})
        self.assertEqual(events[-1]["choices"], [])
        self.assertEqual(events[-1]["usage"]["completion_tokens"], 5)
        self.assertIsInstance(events[-1]["usage"]["kept_tokens"], int)
        self.assertTrue(all(event["usage"] is None for event in events[:-1]))

    def test_stop_strings_end_the_text_before_them(self):
        fields = {"max_tokens": 150, "temperature": 1.0, "seed": 3}
        text = self.ask(**fields)["choices"][0]["text"]
        for begin, size in ((10, 1), (12, 3), (20, 6)):
            stop = text[begin:begin + size]
            got = self.ask(**fields, stop=stop)["choices"][0]
            self.assertEqual(got["text"], text[:text.index(stop)])
            self.assertEqual((got["finish_reason"], got["stop_reason"]), ("stop", stop))
            kept = self.ask(**fields, stop=[stop, "never there"], include_stop_str_in_output=True)["choices"][0]
            self.assertEqual(kept["text"], text[:text.index(stop) + size])
        ids = self.server.post("/generate", {"text": "hello the world",
                                             "sampling_params": {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}})["output_ids"]
        got = self.ask(max_tokens=20, stop_token_ids=[ids[4]])["choices"][0]
        self.assertEqual((got["finish_reason"], got["stop_reason"]), ("stop", ids[4]))

    def test_several_prompts_and_choices(self):
        prompts = ["hello", "the hello", "hello the"]
        got = self.ask(prompts, max_tokens=12, n=2, temperature=1.0, seed=9)
        self.assertEqual([choice["index"] for choice in got["choices"]], list(range(6)))
        for i, prompt in enumerate(prompts):
            for c in range(2):
                want = self.ask(prompt, max_tokens=12, temperature=1.0, seed=9 + c)["choices"][0]["text"]
                self.assertEqual(got["choices"][2 * i + c]["text"], want)
        self.assertEqual(got["usage"]["completion_tokens"], 72)
        ids = self.server.post("/tokenize", {"prompt": "the hello"})["tokens"]
        self.assertEqual(self.ask(ids, max_tokens=9)["choices"][0]["text"], self.ask("the hello", max_tokens=9)["choices"][0]["text"])

    def test_echoed_log_probabilities_are_those_of_basin_logits(self):
        rng = random.Random(1)
        for count, flags, fields in ((30, [], {}), (70, ["--sink-tokens", "3", "--window", "11"], {"sink_tokens": 3, "window": 11}),
                                     (70, ["--sink-tokens", "3", "--window", "11", "--positions", "absolute"],
                                      {"sink_tokens": 3, "window": 11, "positions": "absolute"})):
            ids = [rng.randrange(250) for _ in range(count)]
            tokens = cli_helpers.write_tokens(os.path.join(self.folder.name, "t.safetensors"), ids)
            out = os.path.join(self.folder.name, "l.safetensors")
            subprocess.run([BINARY, "logits", self.model, "--tokens", tokens, "--out", out, "--compute", "fast", *flags], check=True,
                           stderr=subprocess.DEVNULL)
            shape, logits = cli_helpers.read_safetensors(out)["logits"]
            for attempt in range(2):  # the second time the pages are in the prefix cache
                got = self.ask(ids, max_tokens=1, echo=True, logprobs=3, **fields)["choices"][0]["logprobs"]
                self.assertEqual(len(got["token_logprobs"]), count + 1)
                self.assertIsNone(got["token_logprobs"][0])
                for i in range(1, count):
                    row = logits[(i - 1) * shape[1]:i * shape[1]]
                    peak = max(row)
                    total = peak + cli_helpers.math.log(sum(cli_helpers.math.exp(x - peak) for x in row))
                    self.assertAlmostEqual(got["token_logprobs"][i], row[ids[i]] - total, delta=1e-4)
                    self.assertAlmostEqual(max(got["top_logprobs"][i].values()), peak - total, delta=1e-4)

    def test_a_prompt_may_be_read_without_an_answer(self):
        got = self.ask("hello the", max_tokens=0, echo=True, logprobs=1)
        self.assertEqual(got["choices"][0]["text"], "hello the")
        self.assertEqual(got["usage"]["completion_tokens"], 0)
        self.assertEqual(got["choices"][0]["finish_reason"], "length")

    def test_prompts_are_found_again(self):
        for length in (1, 2, 15, 16, 17, 95, 96, 97, 100):  # a page has 16 tokens
            for fields in ({}, {"sink_tokens": 3, "window": 21}, {"sink_tokens": 3, "window": 21, "positions": "absolute"}):
                self.server.post("/flush_cache", {})
                prompt = list(range(length))
                first, *again = (self.ask(prompt, max_tokens=4, logprobs=5, **fields) for _ in range(3))
                self.assertEqual(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
                for each in again:
                    self.assertEqual(each["usage"]["prompt_tokens_details"]["cached_tokens"], length - 1)
                    self.assertEqual(each["choices"], first["choices"])
                choices = self.ask(prompt, max_tokens=4, logprobs=5, n=3, **fields)["choices"]
                self.assertEqual([choice["logprobs"] for choice in choices], [first["choices"][0]["logprobs"]] * 3)
                other = self.ask(prompt, max_tokens=4, sink_tokens=1, window=7)  # 8 tokens are less than a page
                self.assertEqual(other["usage"]["prompt_tokens_details"]["cached_tokens"], 0)

    def test_company_changes_no_token(self):
        rng = random.Random(2)
        mixes = []
        for i in range(64):
            fields = {"prompt": [rng.randrange(250) for _ in range(rng.randrange(1, 90))], "max_tokens": rng.randrange(1, 40),
                      "temperature": rng.choice([0, 0.7, 1.5]), "seed": i, "ignore_eos": True}
            if rng.random() < 0.5:
                fields.update(sink_tokens=rng.randrange(5), window=rng.randrange(1, 40), positions=rng.choice(["in-cache", "absolute"]))
            if rng.random() < 0.3:
                fields.update(frequency_penalty=0.5, top_p=0.9)
            mixes.append(fields)
        alone = [self.server.post(COMPLETIONS, fields)["choices"][0]["text"] for fields in mixes]
        self.server.post("/flush_cache", {})
        together = [None] * len(mixes)

        def ask(i):
            together[i] = self.server.post(COMPLETIONS, mixes[i])["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(i,)) for i in rng.sample(range(64), 64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(together, alone)

    def test_characters_are_never_cut(self):
        # Bytes of the alphabet are chosen at random: much of it is no UTF-8, and all of it must arrive as text.
        for seed in range(5):
            fields = {"prompt": "hello", "max_tokens": 120, "temperature": 3.0, "seed": seed, "ignore_eos": True}
            events = self.server.events(COMPLETIONS, fields)
            self.assertEqual(text_of(events), self.server.post(COMPLETIONS, fields)["choices"][0]["text"])


class Chat(ServerTest):
    def ask(self, **fields):
        return self.server.post(CHAT, {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, **fields})

    def test_the_answer_is_that_of_basin_generate(self):
        want = self.basin_json("generate", self.model, "--chat", "--prompt", "hello", "--max-tokens", "30")
        got = self.ask(max_tokens=30)
        self.assertEqual(got["choices"][0]["message"], {"role": "assistant", "content": want["text"]})
        self.assertEqual(got["usage"]["prompt_tokens"], want["prompt_tokens"])
        self.assertEqual(got["object"], "chat.completion")

    def test_parts_and_roles(self):
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        self.assertEqual(self.ask(max_tokens=9, messages=[{"role": "user", "content": parts}])["choices"], self.ask(max_tokens=9)["choices"])
        system = [{"role": "developer", "content": "the"}, {"role": "user", "content": "hello"}]
        want = self.basin_json("generate", self.model, "--chat", "--system", "the", "--prompt", "hello", "--max-tokens", "9")
        self.assertEqual(self.ask(max_tokens=9, messages=system)["choices"][0]["message"]["content"], want["text"])

    def test_a_stream_opens_with_the_role(self):
        whole = self.ask(max_completion_tokens=20, logprobs=True, top_logprobs=2)["choices"][0]
        events = self.server.events(CHAT, {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 20,
                                           "logprobs": True, "top_logprobs": 2})
        deltas = [event["choices"][0]["delta"] for event in events]
        self.assertEqual(deltas[0], {"role": "assistant", "content": ""})
        self.assertEqual("".join(delta.get("content", "") for delta in deltas), whole["message"]["content"])
        self.assertEqual(deltas[-1], {})
        self.assertEqual(events[-1]["choices"][0]["finish_reason"], whole["finish_reason"])
        logprobs = [entry for event in events if event["choices"][0]["logprobs"] for entry in event["choices"][0]["logprobs"]["content"]]
        self.assertEqual(logprobs, whole["logprobs"]["content"])
        self.assertEqual(len(logprobs[0]["top_logprobs"]), 2)
        self.assertEqual(logprobs[0]["token"], logprobs[0]["top_logprobs"][0]["token"])

    def test_choices_end_each_on_its_own(self):
        events = self.server.events(CHAT, {"messages": [{"role": "user", "content": "hello"}], "n": 3, "max_tokens": 8, "seed": 1,
                                           "ignore_eos": True, "stream_options": {"include_usage": True}})
        ends = [event["choices"][0]["index"] for event in events if event["choices"] and event["choices"][0]["finish_reason"]]
        self.assertEqual(sorted(ends), [0, 1, 2])
        self.assertEqual(events[-1]["usage"]["completion_tokens"], 24)


class Refusals(ServerTest):
    def test_fields(self):
        cases = {"prompt": [None, 3, [], [[]], [1.5], ["a", [1]], [99999], [-1], {}], "max_tokens": [-1, "x", 1.5, True, 5000],
                 "temperature": [-1, "hot"], "top_p": [0, 1.1], "top_k": [-2, 0.5], "min_p": [2], "n": [0, 129, "2"],
                 "repetition_penalty": [0], "presence_penalty": [3], "frequency_penalty": [-3], "logprobs": [21, -1, True],
                 "logit_bias": [[], {"x": 1}, {"5": "a"}, {"400": 1}], "stop": [[""], [5], 5, ["x"] * 17], "seed": ["a", 1.5],
                 "stream": ["yes"], "stream_options": [{}, 5], "window": [0, -1, "all"], "sink_tokens": [-1, 4],
                 "positions": ["nowhere"], "stop_token_ids": [5, ["a"]], "ignore_eos": [1], "best_of": [3], "suffix": ["x"],
                 "response_format": [{"type": "json_object"}], "guided_json": [{}], "min_tokens": [4], "timeout_seconds": [0],
                 "prompt_logprobs": [0, 1], "add_special_tokens": [False]}
        for name, values in cases.items():
            for value in values:
                param = {"max_tokens": "messages"}.get(name, name) if value == 5000 else name
                if name == "logit_bias" and value == {"400": 1}:
                    param = "logit_bias"
                self.refused(400, param, COMPLETIONS, {"prompt": "hello", name: value})
        self.refused(400, "window", COMPLETIONS, {"prompt": "hello", "window": 4000, "sink_tokens": 100})
        self.refused(400, "stream_options.include_usage", COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}})
        self.refused(404, "model", COMPLETIONS, {"prompt": "hello", "model": "gpt-9"})
        self.refused(400, "messages", COMPLETIONS, {"prompt": list(range(250)) * 20})
        for messages in (None, [], {}, [5], [{"role": "robot", "content": "x"}], [{"role": "user"}], [{"role": "user", "content": 5}],
                         [{"role": "user", "content": [{"type": "image_url"}]}]):
            self.refused(400, "messages", CHAT, {"messages": messages})
        for name, value in (("tools", [{}]), ("tools", 5), ("tool_choice", "required"), ("reasoning_effort", "high"), ("chat_template_kwargs", 3),
                            ("parallel_tool_calls", False), ("response_format", {"type": "json_schema"}), ("top_logprobs", 3), ("audio", {}), ("echo", True), ("prompt_logprobs", 1)):
            self.refused(400, name, CHAT, {"messages": [{"role": "user", "content": "x"}], name: value})
        self.refused(400, "logit_bias", COMPLETIONS, {"prompt": "hello", "logit_bias": {f"{i:09}": 1 for i in range(1025)}})
        self.refused(400, "messages", COMPLETIONS, {"prompt": [5] * (2**20 + 1), "max_tokens": 1, "window": 8})
        for n, logprobs, most in ((1, 0, 2**22), (128, 0, 2**15), (2, 3, 2**19)):
            fields = {"prompt": "hello", "window": 8, "n": n, "logprobs": logprobs}
            self.refused(400, "max_tokens", COMPLETIONS, {**fields, "max_tokens": most + 1})
            self.refused(408, None, COMPLETIONS, {**fields, "max_tokens": most, "ignore_eos": True, "timeout_seconds": 0.01})
        self.refused(400, "max_tokens", COMPLETIONS, {"prompt": ["hello"] * 2, "window": 8, "n": 128, "max_tokens": 2**15})
        # What is unknown is ignored, and what asks for nothing is no reason to refuse.
        self.server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 1, "user": "me", "unheard_of": 1, "suffix": None, "best_of": 1})

    def test_prompts_that_wait_are_counted_in_tokens(self):
        fields = {"prompt": [5] * 2**17, "window": 8, "max_tokens": 1}
        self.refused(400, "n", COMPLETIONS, {**fields, "prompt": [[5] * 2**17, [5]], "n": 128})
        body = json.dumps({**fields, "n": 128}).encode()
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=30) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                               b"Content-Length: %d\r\n\r\n" % len(body) + body)
            self.server.wait_for(lambda m: m["basin_running_sequences"] + m["basin_waiting_sequences"] == 128)
            self.refused(429, None, COMPLETIONS, {"prompt": "hello"})
        self.server.wait_for(lambda m: m["basin_running_sequences"] + m["basin_waiting_sequences"] == 0)
        self.server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 1})

    def test_bodies_and_paths(self):
        post = lambda body, kind="application/json": self.server.request("POST", COMPLETIONS, body, {"Content-Type": kind})
        self.assertEqual(post("{}", "text/plain")[0], 415)
        for body in ("", "{", "[]", "5", b'{"prompt": "\xff"}', "[" * 100000):
            status, _, data = post(body)
            self.assertEqual((status, json.loads(data)["error"]["code"]), (400, "invalid_json"))
        for body in ('{"temperature": %s}', '{"messages": [{"role": "user", "content": %s}]}', '{"tools": %s}', '{"x": %s}'):
            for nested in ("[" * 100000 + "]" * 100000, '{"a":' * 100000 + "1" + "}" * 100000):
                for path in (COMPLETIONS, CHAT, "/generate", "/tokenize"):
                    status, _, data = self.server.request("POST", path, body % nested, {"Content-Type": "application/json"})
                    self.assertEqual((status, json.loads(data)["error"]["code"]), (400, "invalid_json"))
        self.assertEqual(self.server.request("GET", "/nothing")[0], 404)
        self.assertEqual(self.server.request("POST", "/v1/responses", {})[0], 501)
        status, headers, _ = self.server.request("GET", COMPLETIONS)
        self.assertEqual((status, headers["Allow"]), (405, "POST"))
        self.assertEqual(self.server.request("DELETE", "/v1/models")[0], 405)
        self.assertEqual(self.server.request("GET", "/v1/models/other")[0], 404)

    def test_a_long_text_keeps_nobody_waiting(self):
        took = []

        def ask():
            begin = time.monotonic()
            self.refused(400, "messages", COMPLETIONS, {"prompt": "hello the world " * (1 << 20)})
            took.append(time.monotonic() - begin)

        thread = threading.Thread(target=ask)
        thread.start()
        longest = 0
        while thread.is_alive():
            begin = time.monotonic()
            self.server.get("/health")
            longest = max(longest, time.monotonic() - begin)
        thread.join()
        self.assertLess(longest, took[0] / 2)

    def test_another_site_is_no_host_of_ours(self):
        for host, status in (("localhost:1", 200), ("LocalHost", 200), ("127.0.0.1", 200), ("127.8.255.3:65535", 200), ("[::1]:80", 200),
                             ("[::1]", 200), ("evil.example", 403), ("localhost.evil.example", 403), ("127.0.0.1.evil.example", 403),
                             ("127.0.0.1:80.evil.example", 403), ("127.0.0", 403), ("127.0.0.256", 403), ("127.0.0.1.", 403), ("1.127.0.0", 403),
                             ("[::2]", 403), ("[::1].evil.example", 403), ("localhost:65536", 403), ("", 403)):
            self.assertEqual(self.server.request("GET", "/v1/models", headers={"Host": host})[0], status, host)

    def test_pages_of_another_site_are_refused(self):
        for origin, status in (("http://localhost:3000", 200), ("https://127.0.0.2", 200), ("http://[::1]:80", 200), ("vscode-webview://a", 200),
                               ("http://evil.example", 403), ("https://localhost.evil.example", 403), ("null", 403)):
            got, headers, data = self.server.request("POST", "/flush_cache", b"", {"Origin": origin})
            self.assertEqual(got, status, origin)
            self.assertNotIn("Access-Control-Allow-Origin", headers)
            if status == 403:
                self.assertEqual(json.loads(data)["error"]["code"], "wrong_origin")

    def raw(self, data, more=b""):
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=30) as connection:
            connection.sendall(data)
            if more:
                connection.sendall(more)
            received = b""
            while chunk := connection.recv(65536):
                received += chunk
            return received

    def test_what_is_no_http(self):
        self.assertTrue(self.raw(b"hello\r\n\r\n").startswith(b"HTTP/1.1 400"))
        self.assertTrue(self.raw(b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400"))  # no Host
        self.assertTrue(self.raw(b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200"))
        big = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20000 + b"\r\n\r\n"
        self.assertTrue(self.raw(big).startswith(b"HTTP/1.1 431"))
        large = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n"
        self.assertTrue(self.raw(large).startswith(b"HTTP/1.1 413"))
        chunked = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.assertTrue(self.raw(chunked, b"2000001\r\n" + b"x" * 1_000_000).startswith(b"HTTP/1.1 413"))

    def test_a_body_whose_end_is_unknown_is_no_second_request(self):
        hidden = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        for encoding in (b"gzip", b"chunked, gzip", b"identity", b"", b"chunkedx", b"x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: y"):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: " + encoding + b"\r\n\r\n"
            answer = self.raw(head + hidden)
            self.assertEqual((answer[:13], answer.count(b"HTTP/1.1 ")), (b"HTTP/1.1 400 ", 1), encoding)
        body = {"prompt": "hello", "max_tokens": 1}
        self.assertEqual(self.server.request("POST", COMPLETIONS, body, {"Content-Encoding": "identity"})[0], 200)
        for encoding in ("gzip", "br", "deflate, gzip"):
            self.assertIn("compressed", self.refused(415, None, COMPLETIONS, body, **{"Content-Encoding": encoding})["message"])

    def test_a_target_may_name_its_host(self):
        """As proxies are sent it; what the target says counts, and not the Host header (RFC 9112, 3.2.2)."""
        get = lambda target, host, version="1.1": self.raw(f"GET {target} HTTP/{version}\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        for target, host, status in (("http://localhost/health", "localhost", 200), ("HTTP://LocalHost:99/health?a=/b", "localhost", 200),
                                     ("https://127.0.0.1/health", "localhost", 200), ("http://[::1]:80/health", "localhost", 200),
                                     ("http://localhost/health", "evil.example", 200), ("http://evil.example/health", "localhost", 403),
                                     ("http://localhost@evil.example/health", "localhost", 403), ("http://evil.example?localhost/health", "localhost", 403),
                                     ("http:///health", "localhost", 400), ("http://", "localhost", 400), ("http://localhost/nothing", "localhost", 404),
                                     ("ftp://localhost/health", "localhost", 404), ("//localhost/health", "localhost", 404)):
            for version in ("1.1", "1.0"):
                answer = get(target, host, version)
                self.assertTrue(answer.startswith(b"HTTP/1.1 %d " % status), (target, host, version, answer[:300]))
        self.assertTrue(self.raw(b"GET http://evil.example/health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 403"))  # and no Host header
        for target in ("http://localhost", "http://localhost/", "http://localhost?a"):
            self.assertIn(b"<!doctype html", get(target, "localhost").lower())
        body = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
        answer = self.raw(b"POST http://127.0.0.1:1/v1/completions HTTP/1.1\r\nHost: a.proxy\r\nContent-Type: application/json\r\n"
                          b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        self.assertTrue(answer.startswith(b"HTTP/1.1 200"), answer)

    def test_what_is_quoted_is_quoted_to_its_end_and_no_further(self):
        message = lambda answer: json.loads(answer[2])["error"]["message"]
        self.assertEqual(message(self.server.request("GET", "/a%00b")), "there is nothing at /a\0b")
        self.assertEqual(message(self.server.request("GET", "/v1/models/a%00b")), "the model 'a\0b' is not served here")
        asked = {"prompt": "hello", "model": "a\0b"}
        self.assertEqual(message(self.server.request("POST", COMPLETIONS, asked)), "the model 'a\0b' is not served here; 'tiny' is")
        for name in ("model", "positions", "stop", "seed", "temperature", "stream", "response_format", "prompt", "n"):
            status, _, data = self.server.request("POST", COMPLETIONS, {"prompt": "hello", name: [["\0" + "x" * 100000]] if name == "stop" else {"a": "\0"} if name == "prompt" else "\0" + "x" * 100000})
            self.assertIn(status, (400, 404), name)
            self.assertLess(len(data), 1000, name)

    def test_what_the_header_says_is_judged_before_the_body_comes(self):
        fine = {"Host": "localhost", "Content-Type": "application/json"}
        for path, change, status in ((COMPLETIONS, {"Content-Type": "text/plain"}, 415), ("/nothing", {}, 404), ("/v1/models", {}, 405),
                                     (COMPLETIONS, {"Host": "evil.example"}, 403)):
            lines = [f"POST {path} HTTP/1.1", "Content-Length: 30000000", *(f"{name}: {value}" for name, value in {**fine, **change}.items())]
            for expect in ([], ["Expect: 100-continue"]):
                with socket.create_connection(("127.0.0.1", self.server.port), timeout=5) as connection:
                    connection.sendall("\r\n".join([*lines, *expect, "", ""]).encode())  # and no body
                    self.assertTrue(connection.recv(10000).startswith(b"HTTP/1.1 %d" % status), (path, change))

    def test_expected_bodies_and_pipelines(self):
        body = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=30) as connection:
            connection.sendall(head + b"Expect: 100-continue\r\n\r\n")
            self.assertTrue(connection.recv(1000).startswith(b"HTTP/1.1 100 Continue\r\n\r\n"))
            connection.sendall(body)
            self.assertTrue(connection.recv(10000).startswith(b"HTTP/1.1 200"))
        for value in (b"200-ok", b"100-continue, 200-ok", b"", b"100-continue\r\nExpect: x"):  # what nobody here can promise
            answer = self.raw(head + b"Expect: " + value + b"\r\n\r\n")
            self.assertTrue(answer.startswith(b"HTTP/1.1 417"), answer)
            self.assertIn("100-continue", json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"])
        # HTTP/1.0 has no such thing, and its clients would take the interim answer for theirs.
        old = self.raw(head.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Expect: 100-continue\r\n\r\n" + body)
        self.assertTrue(old.startswith(b"HTTP/1.1 200"), old)
        both = self.raw((head + b"\r\n" + body) * 2 + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        self.assertEqual(both.count(b"HTTP/1.1 200"), 3)

    def test_metrics(self):
        self.server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 3, "ignore_eos": True})
        self.server.wait_for(lambda m: m["basin_running_sequences"] == 0)  # the answer leaves before its step has ended
        metrics = self.server.metrics()
        self.assertGreaterEqual(metrics["basin_generated_tokens_total"], 3)
        self.assertEqual(metrics['basin_time_to_first_token_seconds_bucket{le="+Inf"}'], metrics["basin_time_to_first_token_seconds_count"])
        self.assertEqual(metrics["basin_running_sequences"], 0)
        self.assertEqual(metrics['basin_kv_pages{state="held"}'], 0)

    @unittest.skipIf(shutil.which("promtool") is None, "promtool (Debian: prometheus) is not installed")
    def test_promtool_finds_nothing_to_say(self):
        self.server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 3, "ignore_eos": True})
        text = self.server.request("GET", "/metrics")[2]
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
        self.assertEqual((done.returncode, done.stdout + done.stderr), (0, b""))

    def test_no_prompt_in_the_log(self):
        self.server.post(COMPLETIONS, {"prompt": "a secret phrase", "max_tokens": 1})
        log = self.server.stderr()
        self.assertNotIn("secret", log)
        records = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        self.assertTrue(any(record["path"] == COMPLETIONS and record["status"] == 200 for record in records))


class Other(ServerTest):
    def test_information(self):
        self.assertEqual(self.server.get("/health"), {"status": "ok"})
        self.assertEqual(self.server.get("/ready"), {"status": "ready"})
        model = self.server.get("/v1/models")["data"][0]
        self.assertEqual((model["id"], model["max_model_len"]), ("tiny", 4096))
        self.assertEqual(self.server.get("/v1/models/tiny"), model)
        self.assertEqual(self.server.get("/get_model_info")["model_path"], self.model)
        self.assertIn(self.server.get("/tokenizer_info")["eos_token"], ("<|im_end|>", "<|endoftext|>"))
        self.assertIn("version", self.server.get("/version"))
        self.assertEqual(self.server.get("/get_server_info")["served_model_name"], "tiny")
        self.assertIsNone(self.server.get("/tokenizer_info")["chat_template"])

    def test_tokenize_and_back(self):
        tokens = self.server.post("/tokenize", {"prompt": "hello the <|im_end|>"})["tokens"]
        self.assertEqual(tokens, self.basin_json("tokenize", self.model, "--text", "hello the <|im_end|>")["token_ids"])
        self.assertEqual(self.server.post("/detokenize", {"tokens": tokens})["prompt"], "hello the <|im_end|>")
        self.refused(400, "tokens", "/detokenize", {"tokens": [319]})

    def test_generate_in_the_form_of_sglang(self):
        parameters = {"max_new_tokens": 10, "temperature": 0, "ignore_eos": True}
        one = self.server.post("/generate", {"text": "hello", "sampling_params": parameters})
        self.assertEqual(one["meta_info"]["finish_reason"], {"type": "length", "length": 10})
        self.assertEqual(one["meta_info"]["completion_tokens"], 10)
        several = self.server.post("/generate", {"text": ["hello", "the"], "sampling_params": parameters})
        self.assertEqual(several[0]["text"], one["text"])
        events = self.server.events("/generate", {"text": "hello", "sampling_params": parameters})
        self.assertEqual(len(events), 10)
        self.assertEqual(events[-1]["text"], one["text"])
        self.assertEqual(events[-1]["output_ids"], one["output_ids"])
        for before, after in zip(events, events[1:]):
            self.assertTrue(after["text"].startswith(before["text"]))
        self.assertEqual(self.server.post("/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 0}})["text"], "")

    def test_calls_of_benchmark_clients(self):
        """What SGLang's bench_serving and vLLM's `bench serve` send, eight at once, read line by line as they read it."""
        forms = {
            "/generate": lambda text, tokens: {
                "text": text, "sampling_params": {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}, "stream": True,
                "lora_path": None, "return_logprob": False, "logprob_start_len": -1, "image_data": None},
            "/v1/completions": lambda text, tokens: {
                "model": "tiny", "prompt": text, "repetition_penalty": 1.0, "temperature": 0.0, "best_of": 1, "max_tokens": tokens,
                "logprobs": None, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True},
            "/v1/chat/completions": lambda text, tokens: {
                "model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}], "max_completion_tokens": tokens,
                "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0, "ignore_eos": True},
        }

        def ask(path, text, tokens):
            """Text, generated tokens, events."""
            _, _, data = self.server.request("POST", path, forms[path](text, tokens))
            lines = [line.strip().decode().removeprefix("data: ") for line in data.split(b"\n") if line.strip()]
            self.assertEqual(lines[-1], "[DONE]")
            events = [json.loads(line) for line in lines[:-1]]
            if path == "/generate":
                return events[-1]["text"], events[-1]["meta_info"]["completion_tokens"], len(events)
            if path == CHAT:
                self.assertEqual(events[0]["choices"][0]["delta"]["role"], "assistant")  # which is no token to them
                said = "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"])
            else:
                said = text_of(events)
            return said, events[-1]["usage"]["completion_tokens"], len(events)

        self.server.post("/flush_cache", {})
        work = [(path, f"hello the {i}", 8 + i) for path in forms for i in range(8)]
        with concurrent.futures.ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(lambda one: ask(*one), work))
        for (path, _, tokens), (_, count, events) in zip(work, answers):
            self.assertEqual(count, tokens)
            if path == "/generate":  # the other sends none for a token that says nothing
                self.assertEqual(events, tokens)
        self.assertEqual([said for said, _, _ in answers[:8]], [said for said, _, _ in answers[8:16]])
        for (_, text, tokens), (said, _, _) in zip(work[16:], answers[16:]):
            whole = self.server.post(CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0, "ignore_eos": True})
            self.assertEqual(said, whole["choices"][0]["message"]["content"])
        self.assertIn("version", self.server.get("/get_server_info"))

    def test_generate_reads_its_fields_wherever_they_stand(self):
        def ask(parameters, **fields):
            return self.server.post("/generate", {"input_ids": [5] * 30, "sampling_params": {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True, **parameters},
                                                  **fields})["meta_info"]["kept_tokens"]
        self.assertEqual(ask({}), 49)
        self.assertEqual(ask({}, window=8, sink_tokens=2), 10)
        self.assertEqual(ask({"window": 8, "sink_tokens": 2}), 10)
        self.assertEqual(ask({"window": 8, "sink_tokens": 2}, window=20), 10)
        self.assertEqual(ask({"window": None}, window=20), 49)
        self.refused(400, "sampling_params.sink_tokens", "/generate", {"text": "a", "window": 8, "sampling_params": {"sink_tokens": 2}})
        self.refused(408, None, "/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}, "timeout_seconds": 0.02})
        self.refused(400, "priority", "/generate", {"text": "hello", "priority": 5000})
        for name in ("regex", "prompt_logprobs"):
            self.refused(400, name, "/generate", {"text": "hello", name: "x"})
            self.refused(400, f"sampling_params.{name}", "/generate", {"text": "hello", "sampling_params": {name: "x"}})
        self.refused(400, "add_special_tokens", "/generate", {"text": "hello", "add_special_tokens": False})


class Key(ServerTest):
    ARGS = ("--api-key", "sesame")

    def test_only_with_the_key(self):
        for value, status in ((None, 401), ("Bearer wrong", 401), ("Bearer sesam", 401), ("sesame", 401), ("Bearer sesame", 200), ("bearer sesame", 200)):
            headers = {} if value is None else {"Authorization": value}
            self.assertEqual(self.server.request("GET", "/v1/models", headers=headers)[0], status, value)
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=5) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 30000000\r\n\r\n")
            self.assertTrue(connection.recv(10000).startswith(b"HTTP/1.1 401"))
        self.assertEqual(self.server.request("GET", "/health")[0], 200)
        self.assertNotIn("sesame", self.server.stderr())


class Flags(unittest.TestCase):
    """Every flag of the command changes what a client sees."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="basin-serve-")
        cls.model = cli_helpers.copy_model(os.path.join(cls.folder.name, "tiny"))
        cli_helpers.write_tokenizer(cls.model)
        cls.plain = Server(cls.model)
        cls.addClassCleanup(cls.folder.cleanup)
        cls.addClassCleanup(cls.plain.close)

    def serve(self, *flags, **options):
        server = Server(self.model, *flags, **options)
        self.addCleanup(server.close)
        return server

    def ask(self, server, **fields):
        return server.post(COMPLETIONS, {"prompt": "hello the world " * 4, "max_tokens": 30, "temperature": 0, "ignore_eos": True, **fields})

    def told(self, server, name):
        return server.get("/get_server_info")[name]

    def test_masks_are_defaults_of_requests(self):
        server, far = self.serve("--sink-tokens", "2", "--window", "6"), self.serve("--window", "6", "--sink-tokens", "2", "--positions", "absolute")
        mask = {"sink_tokens": 2, "window": 6}
        texts = []
        for one, fields in ((self.plain, {}), (server, mask), (far, {**mask, "positions": "absolute"}), (self.serve("--window", "6"), {"window": 6})):
            got = self.ask(one)
            self.assertEqual(got["choices"], self.ask(self.plain, **fields)["choices"])
            texts.append((got["choices"][0]["text"], got["usage"]["kept_tokens"]))
        self.assertEqual(len(set(texts)), 4, texts)
        # A request that says something else gets it; what it does not say stays the server's.
        self.assertEqual(self.ask(server, window=None)["choices"], self.ask(self.plain)["choices"])
        self.assertEqual(self.ask(server, window=9)["usage"]["kept_tokens"], 11)
        self.assertEqual(self.ask(far, positions="in-cache")["choices"], self.ask(server)["choices"])

    def test_lengths(self):
        tokens = self.ask(self.plain)["usage"]["total_tokens"]
        server = self.serve("--max-model-len", str(tokens))
        self.assertEqual(server.get("/v1/models")["data"][0]["max_model_len"], tokens)
        self.assertEqual(self.ask(server)["choices"], self.ask(self.plain)["choices"])
        for fields in ({"max_tokens": 31}, {"max_tokens": 31, "window": 8}):
            self.assertEqual(server.request("POST", COMPLETIONS, {"prompt": "hello the world " * 4, **fields})[0], 400, fields)

    def test_sizes(self):
        self.assertEqual(self.told(self.plain, "page_tokens"), 16)
        pages = self.serve("--page-tokens", "5", "--kv-memory", "100kB")
        self.assertEqual(self.told(pages, "page_tokens"), 5)
        self.assertEqual(self.told(pages, "pages"), 100_000 // self.told(pages, "page_bytes"))
        self.assertEqual(self.told(self.serve("--max-num-seqs", "3"), "max_num_seqs"), 3)
        self.assertEqual(self.ask(pages)["choices"], self.ask(self.plain)["choices"])
        small = self.serve("--max-num-seqs", "1", "--max-num-batched-tokens", "4")
        prompt = self.ask(small)["usage"]["prompt_tokens"]
        small.wait_for(lambda m: m["basin_running_sequences"] == 0)
        self.assertEqual(small.metrics()["basin_steps_total"], -(-prompt // 4) + 29)

    def test_arithmetic_and_threads(self):
        exact = self.serve("--compute", "fp32")
        self.assertEqual(self.told(exact, "page_bytes"), 2 * self.told(self.plain, "page_bytes"))
        logprobs = [self.ask(server, logprobs=0)["choices"][0]["logprobs"]["token_logprobs"] for server in (self.plain, exact)]
        self.assertNotEqual(*logprobs)
        threads = lambda server: len(os.listdir(f"/proc/{server.process.pid}/task"))
        one, four = self.serve("--threads", "1"), self.serve("--threads", "4")
        self.assertEqual(threads(four) - threads(one), 3)
        self.assertEqual(self.ask(one)["choices"], self.ask(four)["choices"])

    def test_no_prefix_cache(self):
        cached = lambda server: [self.ask(server)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
        self.assertGreater(cached(self.plain)[1], 0)
        self.assertEqual(cached(self.serve("--no-prefix-cache")), [0, 0])

    def test_names_and_lines(self):
        named = self.serve("--served-model-name", "other", "--quiet")
        self.assertEqual(self.ask(named, model="other")["model"], "other")
        self.assertEqual(named.request("POST", COMPLETIONS, {"prompt": "a", "model": "tiny"})[0], 404)
        self.assertNotIn('{"', named.stderr())
        self.ask(self.plain)
        self.assertIn('{"', self.plain.stderr())

    def listen(self, *flags, env=None):
        """Where it says that it listens, and the process."""
        process = subprocess.Popen([BINARY, "serve", self.model, *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                   env={**os.environ, **(env or {})})
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.terminate)
        return process.stdout.readline().decode().removeprefix("listening on ").strip()

    def status(self, url, **headers):
        address = urllib.parse.urlsplit(url)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
        connection.request("GET", "/v1/models", headers=headers)
        try:
            return connection.getresponse().status
        finally:
            connection.close()

    def test_addresses(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.assertEqual(self.listen("--port", str(port)), f"http://127.0.0.1:{port}")
        self.assertRegex(self.listen("--port", "0", "--host", "127.0.0.2"), r"^http://127\.0\.0\.2:\d+$")
        if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6"):
            url = self.listen("--port", "0", "--host", "::1")
            self.assertRegex(url, r"^http://\[::1\]:\d+$")
            self.assertEqual(self.status(url), 200)

    def test_keys(self):
        key = {"BASIN_API_KEY": "surroundings"}
        bearer = lambda word: {"Authorization": f"Bearer {word}"}
        url = self.listen("--port", "0", env=key)
        self.assertEqual((self.status(url), self.status(url, **bearer(key["BASIN_API_KEY"]))), (401, 200))
        url = self.listen("--port", "0", "--api-key", "flag", env=key)
        self.assertEqual((self.status(url, **bearer(key["BASIN_API_KEY"])), self.status(url, **bearer("flag"))), (401, 200))
        # Without a key every address but this machine's own takes a word, and then any Host will do.
        url = self.listen("--port", "0", "--host", "0.0.0.0", "--no-auth", env=key)
        self.assertEqual(self.status(url.replace("0.0.0.0", "127.0.0.1"), Host="any.example"), 200)
        done = subprocess.run([BINARY, "serve", self.model, "--port", "0"], capture_output=True, check=False, timeout=60,
                              env={**os.environ, "BASIN_API_KEY": "two words"})
        self.assertEqual((done.returncode, done.stdout), (1, b""))
        self.assertIn(b"BASIN_API_KEY has spaces", done.stderr)

    def test_devices_are_refused_by_name(self):
        done = subprocess.run([BINARY, "serve", self.model, "--device", "cuda"], capture_output=True, check=False, timeout=60)
        self.assertEqual((done.returncode, done.stdout), (2, b""))
        self.assertIn(b"--device cuda", done.stderr)


class Sparse(unittest.TestCase):
    """A model with indexers: what is said about them holds for all answers."""

    def test_the_text_is_that_of_basin_generate(self):
        with tempfile.TemporaryDirectory(prefix="basin-serve-") as folder:
            model = cli_helpers.copy_model(os.path.join(folder, "tiny"), "deepseekv32_tiny")
            cli_helpers.write_tokenizer(model)
            prompt, texts = "hello the world and all that is in it, again and again", set()
            for flags in ((), ("--index-fp8",), ("--index-sink-tokens", "8", "--index-window", "15")):
                done = subprocess.run([BINARY, "generate", model, "--prompt", prompt, "--max-tokens", "40", "--json", *flags],
                                      capture_output=True, check=True)
                server = Server(model, *flags)
                try:
                    got = server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 40, "temperature": 0})
                finally:
                    server.close()
                self.assertEqual(got["choices"][0]["text"], json.loads(done.stdout)["text"], flags)
                texts.add(got["choices"][0]["text"])
            self.assertEqual(len(texts), 3, "every flag changes the answer")


class Windows(ServerTest):
    ARGS = ("--sink-tokens", "4", "--window", "60", "--kv-memory", "200kB", "--page-tokens", "8", "--max-num-seqs", "2", "--max-num-batched-tokens", "32")

    def test_a_text_of_any_length_in_a_bounded_number_of_pages(self):
        got = self.server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 6000, "temperature": 0, "ignore_eos": True})
        self.assertEqual(got["usage"]["completion_tokens"], 6000)  # the context has 4,096
        self.assertEqual(got["usage"]["kept_tokens"], 64)
        # All of it, or a larger window, would need more pages than there are.
        self.refused(400, None, COMPLETIONS, {"prompt": "hello", "max_tokens": 4000, "window": None})
        self.refused(400, None, COMPLETIONS, {"prompt": "hello", "max_tokens": 4000, "window": 3000})


class Life(ServerTest):
    ARGS = ("--max-num-seqs", "1", "--max-queued", "2")

    def open(self, **fields):
        """A streaming request whose answer is not read."""
        body = json.dumps({"prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": True, **fields}).encode()
        connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=30)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                           b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return connection

    def test_a_client_that_goes_is_forgotten(self):
        for stream in (True, False):
            connections = [self.open(stream=stream) for _ in range(3)]  # one runs, two wait
            self.server.wait_for(lambda m: m["basin_running_sequences"] == 1 and m["basin_waiting_sequences"] == 2)
            for connection in connections:
                connection.close()
            self.server.wait_for(lambda m: m["basin_running_sequences"] + m["basin_waiting_sequences"] == 0, 1)
            self.assertEqual(self.server.metrics()['basin_kv_pages{state="held"}'], 0)

    def test_a_full_queue_says_so(self):
        connections = [self.open(max_tokens=4000) for _ in range(3)]
        self.server.wait_for(lambda m: m["basin_waiting_sequences"] == 2)
        status, headers, data = self.server.request("POST", COMPLETIONS, {"prompt": "hello"})
        self.assertEqual((status, headers["Retry-After"]), (429, "1"))
        self.assertEqual(json.loads(data)["error"]["code"], "queue_full")
        for connection in connections:
            connection.close()
        self.server.wait_for(lambda m: m["basin_running_sequences"] + m["basin_waiting_sequences"] == 0)

    def test_a_list_may_be_longer_than_the_queue(self):
        prompts = [[i, i + 1] for i in range(20)]
        fields = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
        want = [self.server.post(COMPLETIONS, {"prompt": prompt, **fields})["choices"][0]["text"] for prompt in prompts]
        got = self.server.post(COMPLETIONS, {"prompt": prompts, **fields})
        self.assertEqual([choice["text"] for choice in got["choices"]], want)
        # While one waits for its turn nothing else is taken, and when its client goes all of it ends.
        connection = self.open(prompt=prompts)
        self.server.wait_for(lambda m: m["basin_running_sequences"] == 1 and m["basin_waiting_sequences"] == 19)
        self.refused(429, None, COMPLETIONS, {"prompt": "hello"})
        connection.close()
        self.server.wait_for(lambda m: m["basin_running_sequences"] + m["basin_waiting_sequences"] == 0, 2)
        self.assertEqual(self.server.metrics()['basin_kv_pages{state="held"}'], 0)
        # Choices of one prompt share it and come together.
        self.assertIn("4 choices", self.refused(400, None, COMPLETIONS, {"prompt": "hello", "n": 4})["message"])

    def test_time_runs_out(self):
        self.refused(408, None, COMPLETIONS, {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "timeout_seconds": 0.02})

    def test_one_large_event_is_no_fault_of_its_reader(self):
        events = self.server.events(COMPLETIONS, {"prompt": [5] * 3000, "echo": True, "logprobs": 20, "max_tokens": 50, "ignore_eos": True})
        self.assertGreater(len(json.dumps(events[0])), 1 << 20)
        self.assertEqual(events[-1]["choices"][0]["finish_reason"], "length")

    def test_a_client_that_does_not_read_holds_nothing(self):
        connection = self.open(max_tokens=4000, logprobs=20, n=1)  # megabytes of events
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.server.wait_for(lambda m: m["basin_running_sequences"] == 1)
        self.server.wait_for(lambda m: m["basin_running_sequences"] == 0, 60)
        connection.close()


class Ends(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        ServerTest.setUpClass.__func__(cls)

    @classmethod
    def tearDownClass(cls):
        ServerTest.tearDownClass.__func__(cls)

    ARGS = ()

    def test_sigterm_lets_answers_end(self):
        server = Server(self.model)
        result = {}

        def ask():
            result["events"] = server.events(COMPLETIONS, {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True})

        thread = threading.Thread(target=ask)
        thread.start()
        server.wait_for(lambda m: m["basin_generated_tokens_total"] > 0)
        server.process.send_signal(signal.SIGTERM)
        refused = False
        while thread.is_alive() and not refused:  # nobody new is let in meanwhile
            try:
                server.get("/ready")
            except OSError:
                refused = thread.is_alive()
        self.assertTrue(refused)
        self.assertEqual(server.process.wait(timeout=60), 0)
        server.process.stdout.close()
        thread.join()
        self.assertEqual(result["events"][-1]["choices"][0]["finish_reason"], "length")
        server.log.close()

    def test_a_second_signal_ends_at_once(self):
        server = Server(self.model)
        connection = socket.create_connection(("127.0.0.1", server.port))
        body = json.dumps({"prompt": "hello", "max_tokens": 4000, "ignore_eos": True}).encode()
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                           b"Content-Length: %d\r\n\r\n" % len(body) + body)
        server.wait_for(lambda m: m["basin_running_sequences"] == 1)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        self.assertIsNone(server.process.poll())
        self.assertEqual(server.stop(), 0)
        connection.close()
        server.log.close()

    def test_ctrl_c_ends_with_130(self):
        server = Server(self.model)
        self.assertEqual(server.stop(signal.SIGINT), 130)
        server.log.close()

    def test_a_terminal_that_goes_ends_it(self):
        server = Server(self.model)
        self.assertEqual(server.stop(signal.SIGHUP), 0)
        server.log.close()

    def test_nohup_goes_on(self):
        server = Server(self.model, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        self.assertEqual(server.get("/health"), {"status": "ok"})
        self.assertEqual(server.stop(), 0)
        server.log.close()

    def test_no_socket_gets_the_number_of_a_closed_stream(self):
        done = subprocess.run(["sh", "-c", 'exec "$0" serve "$1" --port 0 >&- <&-', BINARY, self.model], stderr=subprocess.PIPE,
                              check=False, timeout=60)
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"cannot write to standard output: Bad file descriptor", done.stderr)
        server = Server(self.model, preexec_fn=lambda: (os.close(0), os.close(2)))
        for descriptor in (0, 2):
            self.assertEqual(os.readlink(f"/proc/{server.process.pid}/fd/{descriptor}"), "/dev/null")
        self.assertEqual(server.stop(), 0)
        server.log.close()

    def test_a_signal_right_after_the_first_line(self):
        for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, 130)) * 5:
            server = Server(self.model)
            self.assertEqual(server.stop(number), code)
            server.log.close()

    def refused(self, code, message, *args, env=None):
        done = subprocess.run([BINARY, "serve", *args], capture_output=True, check=False, timeout=60,
                              env={**os.environ, **(env or {})})
        self.assertEqual((done.returncode, done.stdout), (code, b""))
        self.assertIn(message, done.stderr.decode())

    def test_refusals_at_the_start(self):
        self.refused(1, "lets other machines in", self.model, "--host", "0.0.0.0", "--port", "0")
        self.refused(1, "no address of this machine", self.model, "--host", "not a host")
        self.refused(1, "Address already in use", self.model, "--port", str(self.server.port))
        self.refused(2, "is less than --max-num-seqs", self.model, "--max-num-seqs", "9", "--max-num-batched-tokens", "8")
        self.refused(1, "less than one page", self.model, "--kv-memory", "1kB", "--port", "0")
        self.refused(2, "--kv-memory", self.model, "--kv-memory", "much")
        self.refused(2, "--port", self.model, "--port", "65536")
        self.refused(2, "exclude each other", self.model, "--api-key", "x", "--no-auth")
        self.refused(1, "has no tokenizer", cli_helpers.golden_model("llama_tiny"), "--port", "0")

    def test_the_chat_template_of_the_model_is_given(self):
        model = cli_helpers.copy_model(os.path.join(self.folder.name, "other"))
        cli_helpers.write_tokenizer(model)
        template = "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' + message['content'] }}<|im_end|>\n{% endfor %}"
        with open(os.path.join(model, "chat_template.jinja"), "w", encoding="utf-8") as file:
            file.write(template)
        server = Server(model)
        self.assertEqual(server.get("/tokenizer_info")["chat_template"], template)
        server.stop()
        server.close()

    def test_other_hosts_with_a_key(self):
        server = Server.__new__(Server)
        process = subprocess.Popen([BINARY, "serve", self.model, "--host", "0.0.0.0", "--port", "0"], stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, env={**os.environ, "BASIN_API_KEY": "sesame"})
        server.port = int(process.stdout.readline().decode().rsplit(":", 1)[1])
        self.assertEqual(server.request("GET", "/v1/models", headers={"Host": "any.example"})[0], 401)
        headers = {"Host": "any.example", "Authorization": "Bearer sesame"}
        self.assertEqual(server.request("GET", "/v1/models", headers=headers)[0], 200)
        process.terminate()
        self.assertEqual(process.wait(timeout=30), 0)
        process.stdout.close()


if __name__ == "__main__":
    unittest.main()
