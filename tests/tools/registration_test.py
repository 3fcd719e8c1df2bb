"""What CTest was told about the tests: a label or a variable that gets lost turns three targets into one, silently."""
import json
import os
import subprocess
import unittest

TARGETS = os.environ["BASIN_CPU_TARGETS"].split(",")


def registered():
    done = subprocess.run(["ctest", "--test-dir", os.environ["BASIN_BUILD_DIR"], "--show-only=json-v1"],
                          capture_output=True, text=True, check=True)
    for test in json.loads(done.stdout)["tests"]:
        yield test["name"], {p["name"]: p["value"] for p in test["properties"]}


class Registration(unittest.TestCase):
    def test_tests_of_a_target_are_forced_onto_it(self):
        count = dict.fromkeys(TARGETS, 0)
        for name, properties in registered():
            target = name.split(".")[0]
            if target in count:
                count[target] += 1
                self.assertIn(f"BASIN_CPU={target}", properties.get("ENVIRONMENT", []), name)
                self.assertIn("per_target", properties["LABELS"], name)
            else:
                self.assertNotIn("per_target", properties.get("LABELS", []), name)
        self.assertGreater(min(count.values()), 0, count)
        self.assertEqual(len(set(count.values())), 1, count)

    def test_every_test_has_a_label(self):
        for name, properties in registered():
            self.assertIn("cpu", properties.get("LABELS", []), name)


if __name__ == "__main__":
    unittest.main()
