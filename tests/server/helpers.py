"""A running `basin serve` on a small golden model, and plain HTTP to it."""
import http.client
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

# The helpers of the command line's tests, which have the same name as this file.
_path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli", "helpers.py")
_spec = importlib.util.spec_from_file_location("cli_helpers", _path)
cli_helpers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cli_helpers)
BINARY = cli_helpers.BINARY


class Server:
    """The process; its first line on stdout says where it listens."""

    def __init__(self, *args, env=None, **options):
        self.log = tempfile.TemporaryFile()
        self.key = None  # for metrics()
        self.process = subprocess.Popen([BINARY, "serve", *args, "--port", "0"], stdout=subprocess.PIPE,
                                        stderr=self.log, env={**os.environ, **(env or {})}, **options)
        line = self.process.stdout.readline().decode()
        match = re.fullmatch(r"listening on http://127\.0\.0\.1:(\d+)\n", line)
        if not match:
            self.process.kill()
            raise AssertionError(f"no server: {line!r} {self.stderr()}")
        self.port = int(match[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def stderr(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def request(self, method, path, body=None, headers=None):
        """Status, headers, body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
            headers = {"Content-Type": "application/json", **(headers or {})}
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, response.headers, data

    def get(self, path, **headers):
        status, _, data = self.request("GET", path, headers=headers)
        if status != 200:
            raise AssertionError(f"{path}: {status} {data}")
        return json.loads(data)

    def post(self, path, body):
        status, _, data = self.request("POST", path, body)
        if status != 200:
            raise AssertionError(f"{path}: {status} {data}")
        return json.loads(data)

    def events(self, path, body):
        """The events of a stream, parsed; the last must be [DONE]."""
        status, headers, data = self.request("POST", path, {**body, "stream": True})
        if status != 200 or not headers["Content-Type"].startswith("text/event-stream"):
            raise AssertionError(f"{path}: {status} {data}")
        parts = data.decode().split("\n\n")
        if parts[-1] != "" or parts[-2] != "data: [DONE]" or not all(part.startswith("data: ") for part in parts[:-1]):
            raise AssertionError(f"{path}: {data[-300:]}")
        return [json.loads(part[len("data: "):]) for part in parts[:-2]]

    def metrics(self):
        """{name with labels: value}"""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        lines = self.request("GET", "/metrics", headers=headers)[2].decode().splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    def wait_for(self, condition, seconds=10):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition(self.metrics()):
                return
            time.sleep(0.02)
        now = {name: value for name, value in self.metrics().items() if "_bucket" not in name}
        raise AssertionError(f"still not so after {seconds} s: {now}")

    def stop(self, number=signal.SIGTERM):
        """The exit code after a signal."""
        self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        self.process.stdout.close()
        return code

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()


class ServerTest(unittest.TestCase):
    """One server for all tests of a class."""
    ARGS = ()

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="basin-serve-")
        cls.model = cli_helpers.copy_model(os.path.join(cls.folder.name, "tiny"))
        cli_helpers.write_tokenizer(cls.model)
        cls.server = Server(cls.model, *cls.ARGS)

    @classmethod
    def tearDownClass(cls):
        cls.server.close()
        cls.folder.cleanup()

    def basin_json(self, *args):
        done = subprocess.run([BINARY, *args, "--json"], capture_output=True, check=True, stdin=subprocess.DEVNULL)
        return json.loads(done.stdout)

    def refused(self, status, param, path, body, **headers):
        got, _, data = self.server.request("POST", path, body, headers)
        self.assertEqual(got, status, data)
        error = json.loads(data)["error"]
        self.assertEqual(sorted(error), ["code", "message", "param", "type"])
        self.assertEqual(error["param"], param, error)
        return error
