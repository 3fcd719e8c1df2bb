"""lm-eval, the harness that most published scores come from, against a running server: log-likelihoods by echoed prompts of
token ids, generation by completions and by chat. Needs the package `lm-eval[api]`, which ./test does not install (0.8 GB)."""
import json
import logging
import math
import os
import random
import subprocess
import unittest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
try:
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
except ImportError:
    lm_eval = None

from helpers import BINARY, ServerTest, cli_helpers


def lines(seed, count, low, high):
    rng = random.Random(seed)
    words = ["hello", "the", "world", "of", "a", "number", "tell", "then", "shell", "he"]
    return [" ".join(rng.choice(words) for _ in range(rng.randint(low, high))) for _ in range(count)]


@unittest.skipIf(lm_eval is None, "the Python package lm-eval is not installed")
class LmEval(ServerTest):
    ARGS = ("--quiet", "--max-num-seqs", "16")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        os.environ["HF_DATASETS_CACHE"] = os.path.join(cls.folder.name, "cache")

    def evaluate(self, kind, path, task, documents, **arguments):
        """Results and samples of one task over documents made here."""
        name = task["task"]
        data = os.path.join(self.folder.name, f"{name}.jsonl")
        with open(data, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(document) + "\n" for document in documents)
        config = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": data}}, "test_split": "test", **task}
        chat = arguments.pop("apply_chat_template", False)
        options = {"model": "tiny", "base_url": self.server.url + path, "max_retries": 1, **arguments}
        done = lm_eval.simple_evaluate(model=kind, model_args=options, tasks=[ConfigurableTask(config=config)], log_samples=True,
                                       bootstrap_iters=0, apply_chat_template=chat)
        return done["results"][name], done["samples"][name]

    def logits(self, ids):
        tokens = cli_helpers.write_tokens(os.path.join(self.folder.name, "t.safetensors"), ids)
        out = os.path.join(self.folder.name, "l.safetensors")
        subprocess.run([BINARY, "logits", self.model, "--tokens", tokens, "--out", out, "--compute", "fast"], check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        (_, width), values = cli_helpers.read_safetensors(out)["logits"]
        return [values[i * width:(i + 1) * width] for i in range(len(ids))]

    def encode(self, text):
        return self.server.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]

    def loglikelihood(self, context, continuation):
        """By `basin logits`: the sum over the continuation, and whether each of its tokens is the likeliest."""
        ids, start = self.encode(context + continuation), len(self.encode(context))
        rows, total, greedy = self.logits(ids), 0.0, True
        for i in range(start, len(ids)):
            row = rows[i - 1]
            peak = max(row)
            total += row[ids[i]] - peak - math.log(sum(math.exp(x - peak) for x in row))
            greedy = greedy and row[ids[i]] == peak
        return total, greedy

    def test_loglikelihoods_are_those_of_basin_logits(self):
        documents = [{"context": line, "choices": lines(i, 3, 1, 4), "answer": 0} for i, line in enumerate(lines(1, 12, 3, 40))]
        task = {"task": "choices", "output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_choice": "choices",
                "doc_to_target": "answer", "metric_list": [{"metric": "acc"}]}
        for arguments in ({"num_concurrent": 4}, {"batch_size": 7}, {"tokenized_requests": False, "tokenizer_backend": "remote"}):
            _, samples = self.evaluate("local-completions", "/v1/completions", task, documents, **arguments)
            self.assertEqual(len(samples), len(documents))
            for sample in samples:
                document = sample["doc"]
                for choice, ((got, greedy),) in zip(document["choices"], sample["resps"]):
                    want, likeliest = self.loglikelihood(document["context"], " " + choice)
                    self.assertAlmostEqual(float(got), want, delta=1e-3, msg=str(arguments))
                    self.assertEqual(str(greedy), str(likeliest))

    def test_perplexity_of_whole_texts(self):
        documents = [{"text": line} for line in lines(3, 4, 30, 60)]
        task = {"task": "rolling", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
                "metric_list": [{"metric": "word_perplexity"}]}
        results, samples = self.evaluate("local-completions", "/v1/completions", task, documents, num_concurrent=4)
        end = self.server.get("/tokenizer_info")["eos_token"]
        total = 0.0
        for sample in samples:
            want, _ = self.loglikelihood(end, sample["doc"]["text"])
            self.assertAlmostEqual(float(sample["resps"][0][0]), want, delta=1e-3)
            total += want
        words = sum(len(document["text"].split()) for document in documents)
        self.assertAlmostEqual(results["word_perplexity,none"] / math.exp(-total / words), 1.0, delta=1e-3)

    def test_generation(self):
        task = {"output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "", "metric_list": [{"metric": "exact_match"}],
                "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "temperature": 0}}
        documents = [{"text": line} for line in lines(4, 6, 2, 9)]
        _, samples = self.evaluate("local-completions", "/v1/completions", {"task": "texts", **task}, documents, num_concurrent=6)
        for sample in samples:
            want = self.server.post("/v1/completions", {"prompt": sample["doc"]["text"], "max_tokens": 12, "temperature": 0, "stop": ["\n\n"]})
            self.assertEqual(sample["resps"][0][0], want["choices"][0]["text"])
        _, samples = self.evaluate("local-chat-completions", "/v1/chat/completions", {"task": "chats", **task}, documents, num_concurrent=6,
                                   apply_chat_template=True)
        for sample in samples:
            message = {"role": "user", "content": sample["doc"]["text"]}
            want = self.server.post("/v1/chat/completions", {"messages": [message], "max_tokens": 12, "temperature": 0, "stop": ["\n\n"]})
            self.assertEqual(sample["resps"][0][0], want["choices"][0]["message"]["content"])


if __name__ == "__main__":
    unittest.main()
