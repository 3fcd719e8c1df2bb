"""generate, tokenize and perplexity on text, with a small byte-level tokenizer beside the golden weights."""
import json
import math
import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from helpers import SPECIAL, CliTest, byte_alphabet, copy_model, write_tokens, write_tokenizer  # noqa: E402

GENERATE_KEYS = ["text", "token_ids", "prompt_tokens", "completion_tokens", "finish_reason", "kept_tokens_max",
                 "kv_bytes_max", "seconds", "compute"]
PERPLEXITY_KEYS = ["tokens", "scored_tokens", "bos", "perplexity", "mean_nll", "curve", "kept_tokens_max",
                   "kv_bytes_max", "seconds", "compute"]


class Text(CliTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model = copy_model(os.path.join(cls.dir, "model"))
        write_tokenizer(cls.model)
        cls.bos_model = copy_model(os.path.join(cls.dir, "bos_model"))
        write_tokenizer(cls.bos_model, bos=True)

    def generated(self, *args, prompt="hello the world"):
        return self.json("generate", self.model, "--prompt", prompt, "--max-tokens", "24", *args)

    def test_tokenize(self):
        found = self.json("tokenize", self.model, "--text", "hello the\u00e9")
        self.assertEqual(list(found), ["token_ids", "tokens", "bos_added"])
        self.assertEqual(found["token_ids"], [259, 261, 0xC3, 0xA9])
        self.assertEqual(found["tokens"], ["hello", " the", "\ufffd", "\ufffd"])
        self.assertFalse(found["bos_added"])
        self.assertEqual(len(byte_alphabet()), 256)

    def test_tokenize_file_is_the_same(self):
        text = "one\ntwo  three\t\u4e2d\u6587 \U0001f600\n"
        path = self.write("text.txt", text)
        found = self.json("tokenize", self.model, "--text-file", path)
        self.assertEqual(found, self.json("tokenize", self.model, "--text", text))
        lines = self.ok("tokenize", self.model, "--text-file", path).stdout.decode().splitlines()
        self.assertEqual(len(lines), len(found["token_ids"]) + 1)
        self.assertEqual([int(line.split()[0]) for line in lines[:-1]], found["token_ids"])

    def test_tokenize_special(self):
        text = "<|im_end|>"
        self.assertEqual(self.json("tokenize", self.model, "--text", text)["token_ids"], [SPECIAL[text]])
        plain = self.json("tokenize", self.model, "--text", text, "--no-special")
        self.assertEqual("".join(plain["tokens"]), text)
        self.assertNotIn(SPECIAL[text], plain["token_ids"])
        with_bos = self.json("tokenize", self.bos_model, "--text", "he")
        self.assertEqual((with_bos["token_ids"], with_bos["bos_added"]), ([300, 256], True))
        without = self.json("tokenize", self.bos_model, "--text", "he", "--no-special")
        self.assertEqual((without["token_ids"], without["bos_added"]), ([256], False))

    def test_tokenize_needs_no_weights(self):
        os.makedirs(self.path("only_tokenizer"))
        write_tokenizer(self.path("only_tokenizer"))
        self.assertEqual(self.json("tokenize", self.path("only_tokenizer"), "--text", "he")["token_ids"], [256])

    def test_awkward_texts_arrive_unchanged(self):
        for text in ("{}", "[a,b]", "@file", "%%", "a,b", "'q\"", "\\n", "--help", "--max_tokens", "-x", "a=b", " "):
            found = self.json("tokenize", self.model, "--text", text)
            self.assertEqual("".join(found["tokens"]), text)
        self.assertEqual("".join(self.json("tokenize", self.model, "--text=--a_b=c_d")["tokens"]), "--a_b=c_d")

    def test_generate_json(self):
        found = self.generated()
        self.assertEqual(list(found), GENERATE_KEYS)
        self.assertEqual(found["prompt_tokens"], 8)
        self.assertEqual(found["completion_tokens"], len(found["token_ids"]))
        self.assertIn(found["finish_reason"], ("length", "stop"))
        self.assertEqual(found["compute"], "fast")
        self.assertGreater(found["kv_bytes_max"], 0)

    def test_generate_text_is_the_json_text(self):
        for seed in "123":
            args = ("--temperature", "2", "--seed", seed)
            done = self.ok("generate", self.model, "--prompt", "hello the world", "--max-tokens", "24", *args)
            self.assertEqual(done.stdout.decode(), self.generated(*args)["text"] + "\n")

    def test_prompt_sources_agree(self):
        prompt = "hello the world"
        path = self.write("prompt.txt", prompt)
        ids = self.json("tokenize", self.model, "--text", prompt)["token_ids"]
        tokens = write_tokens(self.path("prompt.st"), ids, dtype="I32")
        expected = self.generated()["token_ids"]
        for source in (("--prompt-file", path), ("--tokens", tokens)):
            self.assertEqual(self.json("generate", self.model, *source, "--max-tokens", "24")["token_ids"], expected)

    def test_model_without_tokenizer_prints_ids(self):
        bare = copy_model(self.path("bare"))
        tokens = write_tokens(self.path("bare.st"), [1, 2, 3])
        found = self.json("generate", bare, "--tokens", tokens, "--max-tokens", "5")
        self.assertEqual((found["text"], len(found["token_ids"])), ("", 5))
        printed = self.ok("generate", bare, "--tokens", tokens, "--max-tokens", "5").stdout.decode()
        self.assertEqual(printed, " ".join(map(str, found["token_ids"])) + "\n")

    def test_chat_wraps_the_prompt(self):
        plain = self.generated(prompt="hello")
        chat = self.generated("--chat", prompt="hello")
        # <|im_start|> "user\n" "hello" <|im_end|> "\n" <|im_start|> "assistant\n"
        self.assertEqual((plain["prompt_tokens"], chat["prompt_tokens"]), (1, 1 + 5 + 1 + 1 + 1 + 1 + 10))
        system = self.generated("--chat", "--system", "the", prompt="hello")
        self.assertGreater(system["prompt_tokens"], chat["prompt_tokens"])
        self.assertEqual(self.generated("--chat", "--system", "", prompt="hello")["token_ids"], chat["token_ids"])
        # What a user writes is never a special token.
        injected = self.generated("--chat", prompt="<|im_end|>")
        self.assertEqual(injected["prompt_tokens"], chat["prompt_tokens"] - 1 + len("<|im_end|>"))

    def test_chat_puts_the_models_own_system_message_first(self):
        folder = copy_model(self.path("with_template"))
        write_tokenizer(folder)

        def generated(*args):
            return self.json("generate", folder, "--chat", "--prompt", "hello", "--max-tokens", "8", *args)

        bare = generated()
        template = "{{ '<|im_start|>system\\nhello the hello<|im_end|>\\n' }}{{ messages[0]['content'] }}"
        with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as file:
            file.write(template)
        own = generated()
        self.assertGreater(own["prompt_tokens"], bare["prompt_tokens"])
        self.assertEqual(own["token_ids"], generated("--system", "hello the hello")["token_ids"])
        self.assertEqual(own["prompt_tokens"], generated("--system", "hello the hello")["prompt_tokens"])
        self.assertEqual(generated("--system", "")["prompt_tokens"], bare["prompt_tokens"])
        # The older place of the template.
        os.remove(os.path.join(folder, "chat_template.jinja"))
        with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as file:
            json.dump({"eos_token": "<|im_end|>", "chat_template": template}, file)
        self.assertEqual(generated()["token_ids"], own["token_ids"])

    def test_an_unknown_chat_template_is_refused(self):
        folder = copy_model(self.path("unknown_template"))
        write_tokenizer(folder)
        with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as file:
            file.write("[INST] {{ messages[0]['content'] }} [/INST]")
        self.refused(1, "[INST]", "generate", folder, "--chat", "--prompt", "hello", hint="plain prompt")
        self.json("generate", folder, "--prompt", "hello", "--max-tokens", "1")

    def test_a_model_that_thinks(self):
        folder = copy_model(self.path("thinking"))
        write_tokenizer(folder)
        template = "'<|im_start|>' '<|im_end|>' '</think>' enable_thinking"
        with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as file:
            file.write(template)
        chat = ("generate", folder, "--chat", "--prompt", "hello", "--max-tokens", "16")
        slow, fast = self.json(*chat), self.json(*chat, "--no-thinking")
        # The tokenizer has no tokens for the marks of the empty thought, so each byte is one.
        self.assertEqual(fast["prompt_tokens"] - slow["prompt_tokens"], len("<think>\n\n</think>\n\n"))
        with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as file:
            file.write(template.replace("enable_thinking", ""))
        self.refused(1, "no switch for thinking", *chat, "--no-thinking")
        self.refused(2, "--no-thinking without --chat", "generate", folder, "--prompt", "x", "--no-thinking")

    def test_seeds(self):
        draw = lambda *args: self.generated("--temperature", "1.5", *args)["token_ids"]  # noqa: E731
        first = draw("--seed", "1")
        self.assertEqual(draw("--seed", "1"), first)
        self.assertEqual(draw("--seed", "1", "--threads", "1", "--chunk-tokens", "3"), first)
        self.assertNotEqual(draw("--seed", "2"), first)
        self.assertEqual(draw(), draw("--seed", "0"))

    def test_every_sampling_option_changes_the_text(self):
        base = ("--temperature", "3", "--seed", "5")
        free = self.generated(*base)["token_ids"]
        for option in (("--top-k", "2"), ("--top-p", "0.2"), ("--min-p", "0.8"), ("--repetition-penalty", "50")):
            self.assertNotEqual(self.generated(*base, *option)["token_ids"], free, option)
        greedy = self.generated()["token_ids"]
        self.assertNotEqual(greedy, free)
        self.assertEqual(self.generated("--temperature", "3", "--top-k", "1")["token_ids"], greedy)
        self.assertNotEqual(self.generated("--repetition-penalty", "50")["token_ids"], greedy)

    def test_ignore_eos(self):
        greedy = self.generated()["token_ids"]
        folder = copy_model(self.path("ends"))
        write_tokenizer(folder)
        end = next(i for i in range(1, len(greedy)) if greedy[i] not in greedy[:i])
        self.write("ends/generation_config.json", json.dumps({"eos_token_id": greedy[end]}))
        ask = ("generate", folder, "--prompt", "hello the world", "--max-tokens", str(len(greedy)))
        short, whole = self.json(*ask), self.json(*ask, "--ignore-eos")
        self.assertEqual((short["token_ids"], short["finish_reason"]), (greedy[:end], "stop"))
        self.assertEqual((whole["token_ids"], whole["finish_reason"]), (greedy, "length"))

    def test_number_suffixes_and_underscores(self):
        short = self.json("generate", self.model, "--prompt", "hello the world", "--max_tokens", "24")
        self.assertEqual(short["token_ids"], self.generated()["token_ids"])
        text = self.write("suffix.txt", "0123456789" * 120)
        self.assertEqual(self.json("perplexity", self.model, "--text-file", text, "--max-tokens", "1k")["tokens"], 1000)
        self.assertEqual(self.json("perplexity", self.model, "--text-file", text, "--max-tokens=1K")["tokens"], 1024)

    def test_perplexity_counts(self):
        text = self.write("novel.txt", "0123456789" * 120)
        found = self.json("perplexity", self.model, "--text-file", text)
        self.assertEqual(list(found), PERPLEXITY_KEYS)
        self.assertEqual((found["tokens"], found["scored_tokens"], found["bos"]), (1200, 1199, False))
        self.assertAlmostEqual(math.log(found["perplexity"]), found["mean_nll"], places=9)
        self.assertEqual(found["curve"][-1][0], 1200)
        self.assertEqual(len(found["curve"]), 3)
        bos = self.json("perplexity", self.bos_model, "--text-file", text)
        self.assertEqual((bos["tokens"], bos["scored_tokens"], bos["bos"]), (1200, 1200, True))
        few = self.json("perplexity", self.bos_model, "--text-file", text, "--max-tokens", "100")
        self.assertEqual((few["tokens"], few["scored_tokens"]), (100, 100))
        lines = self.ok("perplexity", self.model, "--text-file", text).stdout.decode()
        self.assertIn(f"{found['perplexity']:.4f}", lines)

    def test_non_utf8_file_names(self):
        name = os.path.join(os.fsencode(self.dir), b"caf\xe9.txt")
        with open(name, "wb") as file:
            file.write(b"hello")
        self.assertEqual(self.json("tokenize", self.model, "--text-file", name)["token_ids"], [259])
        self.refused(1, "\\xe9", "tokenize", self.model, "--text-file", name + b".none")


if __name__ == "__main__":
    unittest.main()
