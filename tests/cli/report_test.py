"""report.html in a headless browser, from file://: of a model, and of the selections of a sparse one (Debian: chromium,
chromium-driver)."""
import os
import subprocess
import sys
import unittest

from helpers import BINARY, SOURCE_DIR, CliTest, golden_model, write_tokens

sys.path.insert(0, os.path.join(SOURCE_DIR, "tests", "support"))
from browser import BROWSER, DRIVER, Browser

ARROW_LEFT, ARROW_UP, ARROW_RIGHT, ARROW_DOWN = "\ue012", "\ue013", "\ue014", "\ue015"


@unittest.skipIf(BROWSER is None or DRIVER is None, "chromium and chromium-driver are not installed")
class Report(CliTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.browser = Browser()

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        super().tearDownClass()

    def text(self, element):
        return self.browser.run(f"return document.getElementById('{element}').textContent")

    def pixels(self, element):
        """All pixels of a canvas as one string, to tell pictures apart."""
        return self.browser.run(f"return document.getElementById('{element}').toDataURL()")

    def open(self, model):
        tokens = write_tokens(self.path(f"{model}.safetensors"), [(i * 37 + 11) % 300 for i in range(120)])
        out = self.path(f"{model}_report")
        done = subprocess.run([BINARY, "probe", golden_model(model), "--tokens", tokens, "--out", out],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        page = os.path.join(out, "report.html")
        self.assertLess(os.path.getsize(page), 5 << 20)
        self.browser.call("POST", "/url", {"url": "file://" + page})
        self.browser.wait("pixels !== null")
        self.browser.run("document.activeElement.blur()")

    def check_common(self, model, grey):
        browser = self.browser
        self.assertRegex(self.text("mapTitle"), r"^Layer \d+")  # the one that says most
        browser.run("choose(0, 0)")
        browser.wait("document.getElementById('mapTitle').textContent.startsWith('Layer 0')")
        first = self.pixels("map")
        self.assertGreater(len(first), 2000, "the map is empty")
        browser.keys(ARROW_RIGHT)
        browser.wait("state.layer === 1")
        browser.wait("document.getElementById('map').toDataURL() !== " + repr(first))
        browser.keys(ARROW_LEFT)
        browser.wait("state.layer === 0")
        browser.wait("document.getElementById('map').toDataURL() === " + repr(first))
        # Zoom by keys, back by the button; the other tone; values under the mouse.
        browser.keys("++")
        self.assertLess(browser.run("return state.x1 - state.x0"), 0.7)
        self.assertNotEqual(self.pixels("map"), first)
        browser.run("document.getElementById('reset').click()")
        self.assertEqual(self.pixels("map"), first)
        tone = browser.run("return document.getElementById('tone').value")
        browser.keys("l")
        self.assertNotEqual(browser.run("return document.getElementById('tone').value"), tone)
        if grey:  # a cell that is selected or not looks the same in both
            browser.wait("document.getElementById('map').toDataURL() !== " + repr(first))
        browser.keys("l")
        browser.run("document.getElementById('map').scrollIntoView()")
        browser.move("#map", -200, 100)
        browser.wait("document.getElementById('tip').style.display === 'block'")
        self.assertRegex(self.text("tip"), r"\d")
        # Both themes; what is drawn on changes with the theme.
        theme = browser.run("return document.documentElement.dataset.theme")
        before = browser.run("return getComputedStyle(document.body).backgroundColor")
        browser.keys("t")
        self.assertNotEqual(browser.run("return document.documentElement.dataset.theme"), theme)
        self.assertNotEqual(browser.run("return getComputedStyle(document.body).backgroundColor"), before)
        # Every chart has its lines, and no number is NaN.
        self.assertGreater(browser.run("return document.querySelectorAll('.charts svg').length"), 1)
        self.assertEqual(browser.run("return [...document.querySelectorAll('.charts svg')].filter("
                                     "s => s.querySelector('path, polyline, circle') === null).length"), 0)
        self.assertEqual(browser.run("return document.querySelectorAll('[d*=NaN], [points*=NaN]').length"), 0)
        self.assertNotIn("NaN", browser.run("return document.body.innerText"))
        self.assertEqual(browser.run("return document.documentElement.scrollWidth <= innerWidth"), True)
        self.assertEqual(browser.errors(), [])
        if folder := os.environ.get("BASIN_SCREENSHOTS"):
            browser.run("scrollTo(0, 0)")
            browser.screenshot(os.path.join(folder, f"report_{model}.png"))

    def test_of_a_model(self):
        self.open("llama_tiny")
        self.check_common("llama_tiny", grey=True)
        browser = self.browser
        browser.keys(ARROW_DOWN + ARROW_DOWN)
        browser.wait("state.head === 2")
        self.assertIn("head 1", self.text("mapTitle"))
        # A cell of the grid chooses its layer and head.
        browser.run("const c = document.getElementById('grid'), cell = +c.dataset.cell, r = c.getBoundingClientRect();"
                    "c.dispatchEvent(new MouseEvent('click', {clientX: r.x + 34 + 3.5 * cell, clientY: r.y + 1.5 * cell}))")
        browser.wait("state.layer === 1 && state.head === 4")

    def test_of_selections(self):
        self.open("deepseekv32_tiny")
        self.check_common("deepseekv32_tiny", grey=False)
        self.assertIn("selections", self.text("mapTitle"))


if __name__ == "__main__":
    unittest.main()
