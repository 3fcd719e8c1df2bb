"""basin.probe: against sums over the matrix, against transformers' own weights, and against what the program writes."""
import os
import subprocess
import sys
from pathlib import Path

import basin
import numpy
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
COMMON = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 2}


def weights_of(q, k, sink=None, window=0, sink_tokens=0, softcap=0.0):
    """A [heads, queries, keys] and the sink's weight [heads, queries], in double."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    x = torch.einsum("ihd,jhd->hij", q, k) * q.shape[2] ** -0.5
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    i, j = torch.arange(len(q)).view(-1, 1), torch.arange(len(q)).view(1, -1)
    seen = (j <= i) & ((window == 0) | (i - j < (window or 1)) | (j < sink_tokens))
    x = x.masked_fill(~seen, -torch.inf)
    column = torch.full_like(x[..., :1], -torch.inf) if sink is None else sink.double().view(-1, 1, 1).expand_as(x[..., :1])
    a = torch.softmax(torch.cat([x, column], -1), -1).nan_to_num()
    return a[..., :-1], a[..., -1]


def check(arrays, a, sink, tolerance=2e-5):
    heads, tokens, _ = a.shape

    def close(name, want):
        numpy.testing.assert_allclose(arrays[name], want.numpy(), atol=tolerance * tokens ** 0.5, err_msg=name)

    close("position", a.sum(1))
    close("distance", torch.stack([torch.stack([a[h].diagonal(-n).sum() for n in range(tokens)]) for h in range(heads)]))
    counts, windows = arrays["sink_counts"], arrays["windows"]
    close("sink_mass", torch.stack([a[:, n:, :n].sum(-1).mean(-1) for n in counts]))
    i, j = torch.arange(tokens).view(-1, 1), torch.arange(tokens).view(1, -1)
    close("local_mass", torch.stack([(a * (i - j < int(w))).sum(-1).mean(-1) for w in windows]))
    entropy = -(torch.special.xlogy(a, a).sum(-1) + torch.special.xlogy(sink, sink))
    if arrays["entropy"].shape[1] == tokens:  # one query in each bin
        close("entropy", entropy)
        close("learned_sink", sink)
        kv_heads = arrays["group_entropy"].shape[0]
        mean, mean_sink = a.unflatten(0, (kv_heads, -1)).mean(1), sink.unflatten(0, (kv_heads, -1)).mean(1)
        close("group_entropy", -(torch.special.xlogy(mean, mean).sum(-1) + torch.special.xlogy(mean_sink, mean_sink)))
        close("map", a.mean(0))
    assert arrays["row_error"][0] < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"window": 20, "sink_tokens": 3}, {"softcap": 2.0}])
@pytest.mark.parametrize("with_sink", [False, True])
def test_equals_sums_over_the_matrix(dtype, options, with_sink):
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(90, heads, 32, generator=generator).to(dtype) * 1.5 for heads in (6, 2))
    sink = torch.randn(6, generator=generator) if with_sink else None
    arrays = basin.probe.attention(q, k, sink_logit=sink, **options)
    check(arrays, *weights_of(q, k, sink, **options))
    assert arrays["position"].dtype == numpy.float32 and arrays["position"].flags.writeable


def test_the_largest_keys_of_every_query():
    q, k = torch.randn(60, 4, 16), torch.randn(60, 4, 16)
    rows = basin.probe.attention(q, k, topk=8)["topk"]
    mean = weights_of(q, k)[0].mean(0)
    for t in range(60):
        row = rows[t][rows[t] >= 0]
        assert len(set(row)) == min(8, t + 1) and row.max() <= t
        best = mean[t].topk(min(8, t + 1)).values.sum()
        assert abs(mean[t][torch.as_tensor(row).long()].sum() - best) < 1e-5


def test_leading_one_layout_and_threads_do_not_matter():
    q, k = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16)
    want = basin.probe.attention(q, k)
    for other in (basin.probe.attention(q[0], k[0], threads=1),
                  basin.probe.attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, threads=2)):
        for name, array in want.items():
            numpy.testing.assert_array_equal(other[name], array, err_msg=name)


@pytest.mark.parametrize("q, k, options, message", [
    ((2, 9, 4, 16), (2, 9, 4, 16), {}, "one sequence"), ((9, 4, 16), (8, 4, 16), {}, "one sequence"),
    ((9, 4, 16), (9, 3, 16), {}, "heads"), ((9, 4, 12), (9, 4, 12), {}, "16"), ((9, 4, 16), (9, 4, 16), {"topk": 10}, "topk"),
    ((9, 4, 16), (9, 4, 16), {"sink_logit": torch.zeros(3)}, "sink_logit"), ((9, 4, 16), (9, 4, 16), {"map_bins": 0}, "map_bins"),
    ((9, 4, 16), (9, 4, 16), {"window": -1}, "window")])
def test_refusals(q, k, options, message):
    with pytest.raises(ValueError, match=message):
        basin.probe.attention(torch.zeros(q), torch.zeros(k), **options)
    with pytest.raises(ValueError, match="float64"):
        basin.probe.attention(torch.zeros(9, 4, 16).double(), torch.zeros(9, 4, 16).double())


CONFIGS = {
    "gpt_oss": lambda: transformers.GptOssConfig(**COMMON, sliding_window=6, num_local_experts=4, num_experts_per_tok=2),
    "gemma3": lambda: transformers.Gemma3TextConfig(**COMMON, sliding_window=6, query_pre_attn_scalar=16,
                                                    layer_types=["sliding_attention", "full_attention", "full_attention"]),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_recorder_sees_the_weights_of_transformers(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="eager", dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(ids, output_attentions=True, use_cache=False)
        with basin.probe.Recorder(model, topk=4) as recorder:
            got = model(ids, use_cache=False)
    torch.testing.assert_close(got.logits, want.logits, atol=2e-4, rtol=1e-3)
    assert model.config._attn_implementation == "eager"
    assert sorted(recorder.layers) == [0, 1, 2]
    for layer, a in enumerate(want.attentions):
        check(recorder.layers[layer], a[0].double(), 1 - a[0].double().sum(-1) if family == "gpt_oss" else torch.zeros(4, 40).double())
        assert recorder.layers[layer]["topk"].shape == (40, 4)


def test_a_recorder_refuses_batches_and_caches(tmp_path):
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"](), attn_implementation="eager").eval()
    with torch.no_grad(), basin.probe.Recorder(model) as recorder:
        with pytest.raises(NotImplementedError, match="one whole text"):
            model(torch.ones(2, 5, dtype=torch.long))
        cache = model(torch.ones(1, 5, dtype=torch.long), use_cache=True).past_key_values
        with pytest.raises(NotImplementedError, match="one whole text"):
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
    recorder.save(tmp_path / "data.npz")
    loaded = basin.probe.load(tmp_path / "data.npz")
    assert loaded.keys() == recorder.layers.keys()
    for name, array in recorder.layers[1].items():
        numpy.testing.assert_array_equal(loaded[1][name], array)


@pytest.mark.skipif("BASIN_BINARY" not in os.environ, reason="the program was not built")
def test_equals_what_the_program_writes(tmp_path):
    from safetensors.torch import save_file
    folder = ROOT / "tests" / "golden" / "models" / "llama_tiny"
    ids = torch.arange(150) * 37 % 300
    save_file({"input_ids": ids}, tmp_path / "tokens.safetensors")
    subprocess.run([os.environ["BASIN_BINARY"], "probe", folder, "--tokens", tmp_path / "tokens.safetensors", "--out", tmp_path / "out",
                    "--compute", "fp32", "--no-advice"], check=True, capture_output=True)
    want = basin.probe.load(tmp_path / "out" / "data.npz")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad(), basin.probe.Recorder(model) as recorder:
        model(ids.view(1, -1), use_cache=False)
    assert recorder.layers.keys() == want.keys()
    for layer, arrays in recorder.layers.items():
        extra = want[layer].keys() - arrays.keys()
        assert extra == {"pairs", "pair_error", "pair_error_all"}  # errors of the output need the values
        for name, array in arrays.items():
            assert array.dtype == want[layer][name].dtype
            if "budget" in name:  # counts: weights near the boundary may fall on either side
                numpy.testing.assert_allclose(array, want[layer][name], atol=0.1, err_msg=name)
            else:
                numpy.testing.assert_allclose(array, want[layer][name], atol=2e-3, rtol=1e-3, err_msg=name)


def test_the_example(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    AutoModelForCausalLM.from_config(CONFIGS["qwen3"]()).save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", "a", "b", "c"])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("a b c " * 60)
    done = subprocess.run([sys.executable, ROOT / "examples" / "probe.py", tmp_path / "model", tmp_path / "text", "--tokens", "150",
                           "--out", tmp_path / "probe.png"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "150 tokens, 3 layers" in done.stdout and "first    1 tokens hold" in done.stdout
    assert "no pictures" in done.stdout or (tmp_path / "probe.png").stat().st_size > 10000
