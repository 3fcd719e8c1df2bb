"""The page at / in a headless browser (Debian: chromium, chromium-driver)."""
import json
import os
import sys
import unittest

from helpers import ServerTest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support"))
from browser import BROWSER, DRIVER, Browser

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
        severe = [entry for entry in browser.errors() if "400" not in entry["message"]]
        self.assertEqual(severe, [])  # no script error, nothing that the page's policy stopped
        if folder := os.environ.get("BASIN_SCREENSHOTS"):
            browser.screenshot(os.path.join(folder, "page.png"))


if __name__ == "__main__":
    unittest.main()
