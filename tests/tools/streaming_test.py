"""The streaming demo judges honestly, and its picture holds what it should."""
import json
import math
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from helpers import ROOT, load

demo = load("streaming_demo")
plot = load("plot_streaming")


def curve(seen_tokens, nll):
    """As `basin perplexity` writes it: the first token that is seen is not scored, be it BOS or the text's."""
    return [[seen, nll] for seen in range(513, seen_tokens + 1, 512)]


def runs(window, sinks, dense, last=12_288, bos=False):
    def run(name, perplexity, tokens):
        return {"name": name, "tokens": tokens, "scored_tokens": tokens if bos else tokens - 1,
                "curve": curve(tokens + bos, math.log(perplexity))}
    return [run("window", window, last), run("sinks", sinks, last), run("dense", dense, min(last, 8192))]


class Verdict(unittest.TestCase):
    def test_holds_and_fails_on_either_side(self):
        for window, sinks, dense, holds in [(30, 20, 19, True), (25, 20, 19, False), (30, 20, 17, False)]:
            result = demo.verdict(runs(window, sinks, dense), 8192)
            self.assertEqual(result["holds"], holds)
            self.assertAlmostEqual(result["gain"], window / sinks)
            self.assertAlmostEqual(result["loss"], sinks / dense)
            self.assertIn("holds" if holds else "NOT hold", demo.describe(result))

    def test_looks_only_at_whole_points_in_the_range_of_the_gate(self):
        for bos in (True, False):
            items = runs(30, 20, 19, bos=bos)
            for run in items:
                for point in run["curve"]:
                    if point[0] <= demo.GATE_FROM + 1:
                        point[1] = 100.0
                run["curve"].append([run["tokens"] - 7, 100.0])  # the end overlaps the last whole point
            result = demo.verdict(items, 8192)
            self.assertAlmostEqual(result["window"], 30.0)
            self.assertAlmostEqual(result["loss"], 20 / 19)

    def test_sinks_and_dense_are_compared_on_the_same_positions(self):
        items = runs(30, 20, 19)
        for point in items[1]["curve"]:
            if point[0] > 7681:  # dense ends at 8192 tokens, before its next whole point
                point[1] = math.log(25)
        self.assertAlmostEqual(demo.verdict(items, 8192)["loss"], 20 / 19)

    def test_a_short_text_has_no_verdict(self):
        result = demo.verdict(runs(30, 20, 19, last=4096), 8192)
        self.assertIsNone(result["holds"])
        self.assertIn("too short", demo.describe(result))


class Picture(unittest.TestCase):
    series = [("last only", curve(40_000, 5.0)), ("sinks <4>", curve(40_000, 3.0))]

    def test_has_axes_units_legend_and_marks(self):
        root = ElementTree.fromstring(plot.draw(self.series, "T", [(1024, "1,024 kept"), (8192, "trained")]))
        words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        for wanted in ("T", "last only", "sinks <4>", "1,024 kept", "trained", "position in the text (tokens)",
                       "mean NLL of the last 512 tokens (nats per token)", "0", "10,000"):
            self.assertIn(wanted, words)

    def test_points_stand_at_their_values(self):
        svg = plot.draw([("a", [[0, 1.0], [1000, 2.0]])], "", [])
        self.assertIn(f"M{plot.LEFT:.1f} ", svg)
        self.assertIn(f"L{plot.WIDTH - plot.RIGHT:.1f} ", svg)

    def test_refuses_what_it_cannot_draw(self):
        for series in ([("a", [])], [("a", [[512, math.nan]])]):
            with self.assertRaises(ValueError):
                plot.draw(series, "", [])

    def test_ticks_are_round_and_inside(self):
        for low, high in [(0, 40_000), (2.9, 3.1), (0, 1)]:
            marks = plot.ticks(low, high, 6)
            self.assertTrue(2 <= len(marks) <= 7 and low <= marks[0] and marks[-1] <= high * (1 + 1e-9), marks)


FAKE = """#!{python}
import json, sys
if sys.argv[1] == "info":
    print(json.dumps(dict(context=8192)))
else:
    n = int(sys.argv[sys.argv.index("--max-tokens") + 1])
    alone = sys.argv[sys.argv.index("--sink-tokens") + 1] == "0" if "--sink-tokens" in sys.argv else False
    nll = {window} if alone else 3.0
    print(json.dumps(dict(tokens=n, scored_tokens=n, mean_nll=nll, perplexity=1.0, kept_tokens_max=1024, kv_bytes_max=1, seconds=0.1,
                          curve=[[t, nll] for t in range(513, n + 2, 512)])))
"""


class WholeRun(unittest.TestCase):
    def run_demo(self, window, *flags):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        basin = Path(folder.name) / "basin"
        basin.write_text(FAKE.format(python=sys.executable, window=window))
        basin.chmod(0o755)
        out = Path(folder.name) / "out"
        done = subprocess.run([sys.executable, ROOT / "tools" / "streaming_demo.py", "--basin", basin, "--model", "m",
                               "--text", "t", "--max-tokens", "12000", "--out", out, *flags],
                              capture_output=True, text=True)
        return done, out

    def test_writes_table_and_pictures(self):
        done, out = self.run_demo(4.0, "--gate")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("verdict: holds", done.stdout)
        self.assertEqual((out / "streaming.png").read_bytes()[:4], b"\x89PNG")
        self.assertEqual(json.loads((out / "streaming.json").read_text())["runs"][2]["tokens"], 8192)

    def test_a_failed_gate_decides_the_exit_code_only_when_asked(self):
        self.assertEqual(self.run_demo(3.1)[0].returncode, 0)
        self.assertEqual(self.run_demo(3.1, "--gate")[0].returncode, 1)

    def test_a_failed_run_fails(self):
        self.assertEqual(self.run_demo("undefined_name")[0].returncode, 1)


if __name__ == "__main__":
    unittest.main()
