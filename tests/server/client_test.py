"""The `openai` package from PyPI against a running server."""
import unittest

try:
    import openai
except ImportError:
    openai = None

from helpers import ServerTest

NAME = "my/gr\u00f6\u00dfte 100%"  # a client escapes it in a path

@unittest.skipIf(openai is None, "the Python package openai is not installed")
class Client(ServerTest):
    ARGS = ("--api-key", "sesame", "--quiet", "--served-model-name", NAME)

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.client = openai.OpenAI(base_url=cls.server.url + "/v1", api_key="sesame", max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        super().tearDownClass()

    def chat(self, **fields):
        return self.client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "hello"}], **fields)

    def test_models(self):
        self.assertEqual([model.id for model in self.client.models.list()], [NAME])
        self.assertEqual(self.client.models.retrieve(NAME).id, NAME)

    def test_chat_whole_and_streamed(self):
        fields = {"max_tokens": 20, "temperature": 0.8, "seed": 5, "extra_body": {"ignore_eos": True}}
        whole = self.chat(**fields)
        self.assertEqual(whole.usage.completion_tokens, 20)
        self.assertEqual(whole.choices[0].finish_reason, "length")
        chunks = list(self.chat(stream=True, stream_options={"include_usage": True}, **fields))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual(chunks[-1].usage.total_tokens, whole.usage.total_tokens)

    def test_choices_logprobs_and_stop(self):
        answer = self.chat(n=3, max_tokens=6, logprobs=True, top_logprobs=4, seed=1)
        self.assertEqual([choice.index for choice in answer.choices], [0, 1, 2])
        entry = answer.choices[0].logprobs.content[0]
        self.assertEqual(len(entry.top_logprobs), 4)
        self.assertLessEqual(entry.logprob, 0)
        text = self.chat(max_tokens=100, temperature=1, seed=3).choices[0].message.content
        stopped = self.chat(max_tokens=100, temperature=1, seed=3, stop=[text[4:6]]).choices[0]
        self.assertEqual((stopped.message.content, stopped.finish_reason), (text[:text.index(text[4:6])], "stop"))

    def test_completions(self):
        fields = {"model": NAME, "prompt": "hello the", "max_tokens": 10, "temperature": 0}
        whole = self.client.completions.create(**fields, logprobs=2, echo=True)
        self.assertTrue(whole.choices[0].text.startswith("hello the"))
        self.assertIsNone(whole.choices[0].logprobs.token_logprobs[0])
        plain = self.client.completions.create(**fields)
        streamed = "".join(chunk.choices[0].text for chunk in self.client.completions.create(**fields, stream=True))
        self.assertEqual(streamed, plain.choices[0].text)
        self.assertEqual(whole.choices[0].text, "hello the" + plain.choices[0].text)

    def test_window_fields(self):
        fields = {"max_tokens": 30, "temperature": 0}
        narrow = self.chat(**fields, extra_body={"sink_tokens": 1, "window": 3, "ignore_eos": True})
        self.assertEqual(narrow.usage.model_extra["kept_tokens"], 4)

    def test_errors_have_their_classes(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(max_tokens=5, temperature=-1)
        self.assertEqual(caught.exception.param, "temperature")
        with self.assertRaises(openai.NotFoundError) as caught:
            self.client.completions.create(model="other", prompt="x")
        self.assertEqual(caught.exception.code, "model_not_found")
        with self.assertRaises(openai.AuthenticationError):
            openai.OpenAI(base_url=self.server.url + "/v1", api_key="wrong", max_retries=0).models.list()
        with self.assertRaises(openai.InternalServerError):  # 501
            self.client.responses.create(model=NAME, input="x")
        with self.assertRaises(openai.BadRequestError):
            self.chat(max_tokens=5000)

    def test_breaking_off_cancels(self):
        stream = self.chat(stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        self.server.key = "sesame"
        self.server.wait_for(lambda metrics: metrics["basin_running_sequences"] == 0, 2)
        self.assertGreaterEqual(self.server.metrics()['basin_choices_total{reason="cancelled"}'], 1)


if __name__ == "__main__":
    unittest.main()
