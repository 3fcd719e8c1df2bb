"""The page at / in a headless browser, driven by WebDriver (Debian: chromium, chromium-driver)."""
import base64
import json
import os
import shutil
import socket
import subprocess
import time
import unittest
import urllib.error
import urllib.request

from helpers import ServerTest

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


class Browser:
    """As much of WebDriver as this test needs."""

    def __init__(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.base = f"http://127.0.0.1:{port}"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1100,800"]
        capabilities = {"alwaysMatch": {"goog:chromeOptions": {"binary": BROWSER, "args": arguments},
                                        "goog:loggingPrefs": {"browser": "ALL"}}}
        for _ in range(100):
            try:
                session = self.call("POST", "/session", {"capabilities": capabilities})
                break
            except urllib.error.URLError:
                time.sleep(0.1)
        self.base += "/session/" + session["sessionId"]

    def call(self, method, path, body=None):
        request = urllib.request.Request(self.base + path, method=method, headers={"Content-Type": "application/json"},
                                         data=None if body is None else json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def run(self, script):
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def wait(self, script, seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.run("return " + script):
                return
            time.sleep(0.05)
        raise AssertionError(f"never so: {script}; the page: {self.run('return document.body.innerText')}")

    def close(self):
        try:
            self.call("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait()


@unittest.skipIf(BROWSER is None or DRIVER is None, "chromium and chromium-driver are not installed")
class Page(ServerTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.browser = Browser()

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        super().tearDownClass()

    def say(self, text):
        self.browser.run(f"document.getElementById('text').value = {json.dumps(text)};"
                         "document.getElementById('form').requestSubmit()")

    def test_a_conversation(self):
        browser = self.browser
        browser.call("POST", "/url", {"url": self.server.url + "/"})
        browser.wait("document.getElementById('model').textContent === 'tiny'")
        browser.run("document.getElementById('window').value = '12'; document.getElementById('max_tokens').value = '60';"
                    "document.getElementById('temperature').value = '0'")  # else the first token may be the last
        self.say("hello the world")
        browser.wait("document.body.dataset.done === '2'")
        turns = browser.run("return [...document.querySelectorAll('.turn')].map(turn => turn.className + ':' + turn.textContent)")
        self.assertEqual(turns[0], "turn user:hello the world")
        self.assertTrue(turns[1].startswith("turn assistant:"), turns)
        self.assertEqual(browser.run("return document.getElementById('kept').textContent"), "16 tokens kept")  # 4 + 12
        self.assertRegex(browser.run("return document.getElementById('speed').textContent"), r"^\d+ tokens, [\d.]+/s$")
        # What the server refuses is shown in its own words.
        browser.run("document.getElementById('window').value = '5000'")
        self.say("again")
        browser.wait("document.querySelector('.error') !== null")
        self.assertIn("window", browser.run("return document.querySelector('.error').textContent"))
        severe = [entry for entry in browser.call("POST", "/se/log", {"type": "browser"})
                  if entry["level"] == "SEVERE" and "400" not in entry["message"]]
        self.assertEqual(severe, [])  # no script error, nothing that the page's policy stopped
        if folder := os.environ.get("BASIN_SCREENSHOTS"):
            with open(os.path.join(folder, "page.png"), "wb") as file:
                file.write(base64.b64decode(browser.call("GET", "/screenshot")))


if __name__ == "__main__":
    unittest.main()
