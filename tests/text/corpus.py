"""Texts that tokenizers get wrong: scripts, emoji, code, white space, numbers, and letters newer than Unicode 14."""

import random

SENTENCES = [
    "It is a truth universally acknowledged, that a single man in possession of a good fortune wasn't lost.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. ІЇЄҐ ѣ",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. ΐ ΰ",
    "敏捷的棕色狐狸跳过了懒狗。 私はガラスを食べられます。 다람쥐 헌 쳇바퀴에 타고파 ㅎㅎ",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ١٢٣٤٥ עטלף אבק נס דרך מזגן",
    "ऋषियों को सताने वाले दुष्ट राक्षसों १२३ ก็ไม่มีใคร ๔๕๖ ქართული հայերեն አማርኛ ᠮᠣᠩᠭᠣᠯ",
    "Zażółć gęślą jaźń; Árvíztűrő tükörfúrógép; déjà vu; cafe\u0301 a\u030a\u0323 \u1e9b\u0323 \u212b \u2126",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ☃️ 🤷🏿‍♀️ e\u20dd",
    "int main() {\r\n\tfor (int i = 0; i < 10; ++i) { x[i] += 3.14159e-10; }\r\n}\r\n\r\n\r\n    return;\n \n  \n",
    "We'll WE'LL we'Ve I'M they'd it'\u017f 'S 's''s don’t 'tis 'llama 're-re",
    "a\u00a0b\u0085c\u3000d\u180ee\u200bf\u2028g\u2029h\u202fi\u205fj\u1680k\u2003l\ufeffm\u00adn \u180e x \u200b y",
    "\x00\x01\x02\x04\x06\x13\x14\x16\x1b[31mred\x1b[0m\x1c\x1d\x1e\x1f\x7f\x80\x9f bell\x07 vt\x0bff\x0c",
    "1234567 0x1F 3,141,592 ½ ² ₃ Ⅷ ⅻ 〇一二三 ①⑳ ٣٫١٤ 𝟘𝟙𝟚 ꩐ 𞥐 ৳৫ ໑໒ \U00010d40\U0001e4f0\U00011f50 \U00016ff4",
    "Newer letters: \ua7cb \U00011f12 \U0001e4d0\U0001e5d0 \U00031350\U0002ebf0 \U000105c0x \U0001df25",
    "\U0010ffff\U000e0001\ufffe\ufffd \ue000 \u0378 \ud7ff\U00010000",
    "<|im_start|>user\nHello<|im_end|>\n<|endoftext|><|im_start|><|im_start|> <|im_end <|im|> |im_end|>",
    "before  <pad-both>\t\u3000after <tool>x</tool><tool></tool>  <left>  <left><right>   end caf\u00e9 cafe\u0301!",
    "", " ", "  ", "\n", "\r\n", "\t", " \n ", "a", "é", "\u0301", " \u0301a", "'", "''", "   a   ", "\n\n\na\n\n",
]


def random_texts(count, seed):
    rng = random.Random(seed)
    spaces = " \t\n\r\u00a0\u0085\u3000\u180e\u200b\u2028\u1680\x0b\x0c\x1c"
    pools = [
        lambda: chr(rng.randrange(0x20, 0x7F)),
        lambda: chr(rng.randrange(0x80, 0x800)),
        lambda: chr(rng.choice([rng.randrange(0x800, 0xD800), rng.randrange(0xE000, 0x10000)])),
        lambda: chr(rng.randrange(0x10000, 0x20000)),
        lambda: chr(rng.randrange(0x20000, 0x110000)),
        lambda: rng.choice(spaces),
        lambda: rng.choice("aeou") + chr(rng.randrange(0x300, 0x370)) * rng.randrange(1, 4),
        lambda: rng.choice("0123456789٠١٢३४५½²Ⅷ") * rng.randrange(1, 6),
        lambda: rng.choice(["'s", "'LL", "'Re", "\r\n", "\n \n", "    ", "<|im_end|>", "<tool>", " <left>", "<pad-both> "]),
        lambda: rng.choice(["the", " and", "hello", " World", "THE", "ing"]),
    ]
    for _ in range(count):
        weights = [rng.random() ** 3 for _ in pools]
        yield "".join(f() for f in rng.choices(pools, weights, k=rng.randrange(1, 120)))
