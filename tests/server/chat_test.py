"""basin chat, in this process and with a server, and basin bench serve."""
import json
import os
import pty
import re
import signal
import socket
import subprocess
import threading
import time
import unittest

from helpers import BINARY, Server, ServerTest, cli_helpers

MODELS = b'{"data": [{"id": "m"}]}'


class Liar:
    """A server that gives one answer to whatever is asked; `models` to GET."""

    def __init__(self, answer, models=MODELS, kind="text/event-stream", hang=False):
        self.answer, self.models, self.kind, self.hang = answer, models, kind, hang
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.asked = threading.Event()
        self.open = []  # those that hang
        self.bodies, self.times = [], []  # of what was posted
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                client, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.reply, args=(client,), daemon=True).start()

    def reply(self, client):
        data = b""
        while b"\r\n\r\n" not in data:
            data += client.recv(65536)
        if data.startswith(b"POST"):
            header, _, posted = data.partition(b"\r\n\r\n")
            size = int(re.search(rb"(?i)content-length: (\d+)", header)[1])
            while len(posted) < size:
                posted += client.recv(65536)
            self.times.append(time.monotonic())
            self.bodies.append(json.loads(posted))
        body, kind = (self.models, "application/json") if data.startswith(b"GET") else (self.answer, self.kind)
        try:
            client.sendall(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\n".encode() + body)
        except OSError:
            pass
        if self.hang and data.startswith(b"POST"):
            self.open.append(client)
            self.asked.set()
        else:
            client.close()

    def close(self):
        self.socket.close()
        for client in self.open:
            client.close()


def events(*objects):
    return b"".join(b"data: " + (o if isinstance(o, bytes) else json.dumps(o).encode()) + b"\n\n" for o in objects)


LIES = (
    events(b"[DONE]"), events(b"1"), events(b"[]"), events(b"nonsense"), events({}), events({"error": "words"}), events({"error": {}}),
    events({"error": {"message": 7}}), events({"choices": 1}), events({"choices": {"a": 1}}), events({"choices": [1]}),
    events({"choices": [{}]}), events({"choices": [{"delta": 1}]}), events({"choices": [{"delta": {"content": 1}}]}),
    events({"choices": [{"text": 1, "delta": {"content": None}}]}), events({"usage": {"completion_tokens": "x"}}),
    events({"usage": 1, "choices": [{"text": None}]}), events({"choices": [{"delta": {"reasoning_content": {}}}]}), b"\xff\0" * 1000,
    events(b'{"choices": ' + b"[" * 100000), b"",
)


class Lies(unittest.TestCase):
    """What a server says is not to be trusted, either."""

    def run_basin(self, *args, text=b"hello\n"):
        done = subprocess.run([BINARY, *args], input=text, capture_output=True, check=False, timeout=60)
        self.assertIn(done.returncode, (0, 1), (args, done.stderr[-2000:]))
        if done.returncode == 1:
            self.assertRegex(done.stderr, b"error: |first failure: ")
        self.assertNotIn(b"json.exception", done.stderr)
        return done

    def test_chat_and_bench_stand_them(self):
        for lie in LIES:
            with self.subTest(lie=lie[:80]):
                liar = Liar(lie)
                self.addCleanup(liar.close)
                self.run_basin("chat", "--url", liar.url)
                self.run_basin("bench", "serve", "--url", liar.url, "--requests", "2", "--json")

    def test_lists_of_models(self):
        for models in (b"", b"1", b"[]", b"{}", b'{"data": 1}', b'{"data": [1]}', b'{"data": [{}]}', b'{"data": [{"id": 7}]}', b'{"data": {"a": {}}}'):
            with self.subTest(models=models):
                liar = Liar(events(b"[DONE]"), models)
                self.addCleanup(liar.close)
                done = self.run_basin("bench", "serve", "--url", liar.url, "--requests", "1")
                self.assertEqual(done.returncode, 1)

    def test_lines_may_end_as_the_standard_allows(self):
        said = events({"choices": [{"delta": {"content": "he"}}]}, {"choices": [{"delta": {"content": "llo"}}]}, b"[DONE]")
        for answer in (said, said.replace(b"\n", b"\r\n"), said.replace(b"data: ", b"data:"), b": comment\n\nevent: x\n" + said):
            liar = Liar(answer)
            self.addCleanup(liar.close)
            self.assertEqual(self.run_basin("chat", "--url", liar.url).stdout, b"hello\n")

    def test_an_event_without_an_end_is_not_kept(self):
        liar = Liar(b"data: " + b"x" * (80 << 20))
        self.addCleanup(liar.close)
        for command in (("chat",), ("bench", "serve", "--requests", "1")):
            done = self.run_basin(*command, "--url", liar.url)
            self.assertEqual(done.returncode, 1)
            self.assertIn(b"larger than", done.stderr)

    def test_a_silent_server_can_be_left(self):
        for command in (("chat",), ("bench", "serve", "--requests", "1"), ("bench", "serve", "--requests", "1", "--rate", "0.001")):
            for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
                with self.subTest(command=command, number=number):
                    liar = Liar(events({"choices": [{"delta": {"content": "he"}}]}), hang=True)
                    self.addCleanup(liar.close)
                    process = subprocess.Popen([BINARY, *command, "--url", liar.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                               stderr=subprocess.PIPE)
                    process.stdin.write(b"hello\n")
                    process.stdin.flush()
                    liar.asked.wait(2 if "--rate" in command else 60)
                    time.sleep(0.2)
                    process.send_signal(number)
                    _, stderr = process.communicate(timeout=20)
                    self.assertEqual(process.returncode, code, stderr)


def on_terminal(arguments, script, timeout=60):
    """What a terminal shows of it; `script` is a list of (text to wait for, what is typed then)."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(BINARY, [BINARY, *arguments])
    shown, end = b"", time.monotonic() + timeout
    os.set_blocking(terminal, False)
    steps = list(script)
    since = 0
    while time.monotonic() < end:
        try:
            got = os.read(terminal, 65536)
            if not got:
                break
            shown += got
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:  # the other end is closed
            break
        if steps and steps[0][0] in shown[since:]:
            since = len(shown)
            os.write(terminal, steps.pop(0)[1])
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), shown


class Chat(ServerTest):
    def chat(self, lines, *args, code=0):
        done = subprocess.run([BINARY, "chat", *args], input="".join(line + "\n" for line in lines).encode(), capture_output=True,
                              check=False, timeout=120)
        self.assertEqual(done.returncode, code, done.stderr)
        return done

    def test_a_conversation_is_the_same_near_and_far(self):
        flags = ("--temperature", "0", "--max-tokens", "12")
        for lines in (["hello"], ["hello", "the", "hello the"], ["hello", "/new", "the", "/quit", "never"]):
            messages, want = [], b""
            for line in lines:
                if line == "/quit":
                    break
                if line == "/new":
                    messages = []
                    continue
                messages.append({"role": "user", "content": line})
                answer = self.server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 12})
                text = answer["choices"][0]["message"]["content"]
                messages.append({"role": "assistant", "content": text})
                want += text.encode() + b"\n"
            self.assertEqual(self.chat(lines, self.model, *flags).stdout, want)
            self.assertEqual(self.chat(lines, "--url", self.server.url, *flags).stdout, want)

    def test_windows_and_systems_change_it(self):
        flags = ("--temperature", "0", "--max-tokens", "12")
        plain = self.chat(["hello"], self.model, *flags).stdout
        for more in (("--window", "3"), ("--system", "the"), ("--window", "4", "--sink-tokens", "2")):
            near = self.chat(["hello"], self.model, *flags, *more).stdout
            self.assertNotEqual(near, plain, more)
            self.assertEqual(self.chat(["hello"], "--url", self.server.url, *flags, *more).stdout, near, more)

    def test_what_goes_wrong_is_said(self):
        self.assertIn(b"error: the server says: ", self.chat(["hello"], "--url", self.server.url, "--window", "5000", code=1).stderr)
        self.assertIn(b"cannot connect to", self.chat(["hello"], "--url", "http://127.0.0.1:1", code=1).stderr)
        self.chat([], "--url", self.server.url, self.model, code=2)
        self.chat([], code=2)

    def test_flags_that_a_server_does_not_heed_are_refused(self):
        for flags in (("--threads", "2"), ("--chunk-tokens", "8"), ("--page-tokens", "8"), ("--device", "cpu"), ("--compute", "fp32"),
                      ("--positions", "absolute")):
            self.assertIn(flags[0].encode(), self.chat(["hello"], "--url", self.server.url, *flags, code=2).stderr)
        self.assertIn(b"--url", self.chat([], "--url", "http://127.0.0.1:99999", code=2).stderr)
        for url in ("http://", "http://:80", "http://a b", "http://a:b", "http://a:0", "http://a/b c", "http://a:80\r\nX: y"):
            for command in ("chat", "bench-serve"):
                done = subprocess.run([BINARY, command, "--url", url], capture_output=True, check=False, stdin=subprocess.DEVNULL)
                self.assertEqual(done.returncode, 2, (url, done.stderr))

    def test_at_a_terminal_an_error_does_not_end_the_conversation(self):
        small = cli_helpers.copy_model(os.path.join(self.folder.name, "small"), max_position_embeddings=100)
        cli_helpers.write_tokenizer(small)
        server = Server(small)
        self.addCleanup(server.close)
        for partner in ((small,), ("--url", server.url)):
            with self.subTest(partner=partner[0]):
                code, shown = on_terminal(["chat", *partner, "--temperature", "0", "--max-tokens", "4"],
                                          [(b"> ", b"\xff\n"), (b"> ", b"hello " * 500 + b"\n"), (b"> ", b"hello\n"), (b"> ", b"\x04")])
                self.assertEqual(code, 0, shown)
                self.assertIn(b"not UTF-8", shown)
                self.assertEqual(shown.count(b"error: "), 2, shown)

    def test_at_a_terminal_ctrl_c_ends_it(self):
        code, shown = on_terminal(["chat", self.model], [(b"> ", b"\x03")])
        self.assertEqual(code, 130, shown)

    def test_a_terminal_is_not_steered_by_what_a_server_says(self):
        liar = Liar(events({"choices": [{"delta": {"content": "a\x1b]0;title\x07b\x9b2J\tc\nd", "reasoning_content": "\x1b[2Jz"}}]}, b"[DONE]"))
        self.addCleanup(liar.close)
        _, shown = on_terminal(["chat", "--url", liar.url], [(b"> ", b"hello\n"), (b"> ", b"\x04")])
        for bad in (b"\x1b]", b"\x1b[2J", b"\x07", b"\xc2\x9b"):
            self.assertNotIn(bad, shown)
        self.assertIn(b"\tc\r\nd", shown)
        # A file gets what was said.
        self.assertIn(b"a\x1b]0;title\x07b", self.chat(["hello"], "--url", liar.url).stdout)


class BenchServe(ServerTest):
    def test_neighbouring_seeds_share_no_prompt(self):
        """A second run must not find the first one's prompts in the prefix cache; the same run must find its own."""
        liar = Liar(events(b"[DONE]"))
        self.addCleanup(liar.close)

        def prompts(seed):
            liar.bodies.clear()
            subprocess.run([BINARY, "bench", "serve", "--url", liar.url, "--requests", "6", "--shared-tokens", "8",
                            "--input-tokens", "8", "--vocabulary", "30000", "--seed", str(seed)], capture_output=True, check=True, timeout=60)
            return {tuple(body["prompt"]) for body in liar.bodies}

        runs = [prompts(seed) for seed in (0, 1, 2, 1 << 32)]
        own = [prompt[8:] for run in runs for prompt in run]
        self.assertEqual(len(set(own)), 24)
        beginnings = [{prompt[:8] for prompt in run} for run in runs]
        self.assertEqual([len(beginning) for beginning in beginnings], [1] * 4)
        self.assertEqual(len(set.union(*beginnings)), 4)
        self.assertEqual(prompts(1), runs[1])

    def test_prompts_are_of_ids_that_the_model_has(self):
        def ids(models, *flags):
            """Of what a server with this list of models is asked, and what is noted."""
            liar = Liar(events(b"[DONE]"), json.dumps(models).encode())
            self.addCleanup(liar.close)
            done = subprocess.run([BINARY, "bench", "serve", "--url", liar.url, "--requests", "4", "--input-tokens", "400", *flags],
                                  capture_output=True, check=True, timeout=60)
            return {token for body in liar.bodies for token in body["prompt"]}, done.stderr

        for models, flags, size in (({"data": [{"id": "m", "meta": {"n_vocab": 300}}]}, (), 300),  # as llama.cpp says it
                                    ({"data": [{"id": "m"}], "vocab_size": 50}, (), 50),
                                    ({"data": [{"id": "m"}], "vocab_size": 50}, ("--vocabulary", "400"), 400)):
            asked, notes = ids(models, *flags)
            self.assertGreaterEqual(min(asked), size // 10)
            self.assertGreater(max(asked), size * 9 // 10)
            self.assertLess(max(asked), size)
            self.assertNotIn(b"note:", notes)
        for models in ({"data": [{"id": "m"}]}, {"data": [{"id": "m", "meta": {"n_vocab": 1}}]}, {"data": [{"id": "m", "meta": 5}], "vocab_size": "9"}):
            asked, notes = ids(models)
            self.assertGreater(max(asked), 18000)
            self.assertLess(max(asked), 20000)
            self.assertIn(b"note: the server does not say", notes)

    def test_every_request_is_counted(self):
        for flags in (("--concurrency", "3"), ("--rate", "200"), ("--shared-tokens", "40", "--window", "9", "--sink-tokens", "1")):
            done = subprocess.run([BINARY, "bench", "serve", "--url", self.server.url, "--requests", "7", "--input-tokens", "5",
                                   "--output-tokens", "6", "--json", *flags], capture_output=True, check=True, timeout=120)
            lines = [json.loads(line) for line in done.stdout.splitlines()]
            self.assertEqual(sorted(line["request"] for line in lines[:-1]), list(range(7)))
            self.assertEqual((lines[-1]["failed"], lines[-1]["output_tokens"]), (0, 42))
            self.assertLessEqual(lines[-1]["ttft_ms"]["p50"], lines[-1]["e2e_ms"]["p50"])

    def test_a_rate_is_kept_at_random_times(self):
        liar = Liar(events(b"[DONE]"))
        self.addCleanup(liar.close)

        def gaps(seed):
            liar.times.clear()
            subprocess.run([BINARY, "bench", "serve", "--url", liar.url, "--requests", "60", "--rate", "60", "--input-tokens", "2",
                            "--vocabulary", "300", "--seed", str(seed)], capture_output=True, check=True, timeout=60)
            times = sorted(liar.times)
            self.assertEqual(len(times), 60)
            return [after - before for before, after in zip(times, times[1:])]

        one, same, other = gaps(1), gaps(1), gaps(2)
        for each in (one, same, other):  # a second for all, whatever its spread: 1 +- 0.13
            self.assertTrue(0.5 < sum(each) < 2.0, sum(each))
            # Of such times two of three gaps are shorter than the mean; of equal ones half, and the longest is no longer.
            self.assertGreater(max(each), 2.5 * sum(each) / len(each))
        apart = lambda a, b: sum(abs(x - y) for x, y in zip(a, b))
        self.assertLess(apart(one, same), apart(one, other) / 2)

    def test_failures_are_failures(self):
        done = subprocess.run([BINARY, "bench", "serve", "--url", self.server.url, "--requests", "2", "--input-tokens", "5000",
                               "--vocabulary", "250", "--json"], capture_output=True, check=False, timeout=120)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(json.loads(done.stdout.splitlines()[-1])["failed"], 2)

    def test_a_full_disk_is_an_error(self):
        with open("/dev/full", "w") as full:
            for flags in ((), ("--json",)):
                done = subprocess.run([BINARY, "bench", "serve", "--url", self.server.url, "--requests", "4", "--input-tokens", "5",
                                       "--output-tokens", "2", "--vocabulary", "250", *flags], stdout=full, stderr=subprocess.PIPE,
                                      check=False, timeout=120)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn(b"error: cannot write to standard output", done.stderr)

    def test_flags_that_mean_nothing_are_refused(self):
        for flags in (("--rate", "5", "--concurrency", "2"), ("--rate", "-1"), ("--rate", "1e-300"), ("--rate", "1e300"), ("--rate", "0"),
                      ("--sink-tokens", "2")):
            done = subprocess.run([BINARY, "bench", "serve", "--url", self.server.url, *flags], capture_output=True, check=False)
            self.assertEqual(done.returncode, 2, (flags, done.stderr))


class Keys(ServerTest):
    ARGS = ("--api-key", "sesame", "--quiet")

    def test_clients_send_theirs(self):
        commands = (("chat", "--max-tokens", "2"), ("bench", "serve", "--requests", "1", "--input-tokens", "3", "--output-tokens", "2"))
        environment = {name: value for name, value in os.environ.items() if name != "BASIN_API_KEY"}
        for command in commands:
            for flags, key, code in (((), None, 1), ((), "wrong", 1), (("--api-key", "wrong"), None, 1), (("--api-key", "sesame"), None, 0),
                                     ((), "sesame", 0), (("--api-key", "sesame"), "wrong", 0), (("--api-key", "wrong"), "sesame", 1)):
                done = subprocess.run([BINARY, *command, "--url", self.server.url, *flags], input=b"hello\n", capture_output=True, check=False,
                                      timeout=60, env={**environment, **({"BASIN_API_KEY": key} if key else {})})
                self.assertEqual(done.returncode, code, (command, flags, key, done.stderr))
                if code == 1:
                    self.assertRegex(done.stderr, b"401|wants a key")
                self.assertNotIn(b"sesame", done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
