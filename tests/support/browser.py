"""A headless browser, driven by WebDriver (Debian: chromium, chromium-driver)."""
import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


class Browser:
    """As much of WebDriver as the tests need."""

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

    def keys(self, text):
        """Presses keys, one after another."""
        presses = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": presses}]})

    def move(self, selector, x, y):
        """The mouse to a place of an element, counted from its centre."""
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})
        step = {"type": "pointerMove", "duration": 0, "x": x, "y": y, "origin": found}
        self.call("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [step]}]})

    def errors(self):
        """What scripts and the page's policy complained about."""
        return [entry for entry in self.call("POST", "/se/log", {"type": "browser"}) if entry["level"] == "SEVERE"]

    def screenshot(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("GET", "/screenshot")))

    def close(self):
        try:
            self.call("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait()
