"""basin chat, in this process and with a server, and basin bench serve."""
import json
import subprocess
import unittest

from helpers import BINARY, ServerTest


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


class BenchServe(ServerTest):
    def test_every_request_is_counted(self):
        for flags in (("--concurrency", "3"), ("--rate", "200"), ("--shared-tokens", "40", "--window", "9", "--sink-tokens", "1")):
            done = subprocess.run([BINARY, "bench", "serve", "--url", self.server.url, "--requests", "7", "--input-tokens", "5",
                                   "--output-tokens", "6", "--vocabulary", "250", "--json", *flags], capture_output=True, check=True, timeout=120)
            lines = [json.loads(line) for line in done.stdout.splitlines()]
            self.assertEqual(sorted(line["request"] for line in lines[:-1]), list(range(7)))
            self.assertEqual((lines[-1]["failed"], lines[-1]["output_tokens"]), (0, 42))
            self.assertLessEqual(lines[-1]["ttft_ms"]["p50"], lines[-1]["e2e_ms"]["p50"])

    def test_failures_are_failures(self):
        done = subprocess.run([BINARY, "bench", "serve", "--url", self.server.url, "--requests", "2", "--input-tokens", "5000",
                               "--vocabulary", "250", "--json"], capture_output=True, check=False, timeout=120)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(json.loads(done.stdout.splitlines()[-1])["failed"], 2)


if __name__ == "__main__":
    unittest.main()
