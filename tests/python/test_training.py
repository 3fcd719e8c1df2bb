"""examples/training: a few steps of a small gpt-oss on the pages of docs/, with Basin and eager, in float32."""
import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "examples" / "training"))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    import train_sinks
    folder = tmp_path_factory.mktemp("training")
    text = folder / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))))
    options = ["--out", folder, "--steps", 12, "--rows", 2, "--length", 144, "--layers", 2, "--vocabulary", 320, "--device", "cpu",
               "--dtype", "float32", "--repeat-steps", 3, "--check", "--check-rows", 1, text]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small that threads only wait for one another: 20 times slower where others work, too
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train_sinks.py", *map(str, options)])
        train_sinks.main()  # replays every layer through pages, and raises where one bit differs
    torch.set_num_threads(threads)
    return folder


def test_losses_fall_alike_and_sinks_move(out):
    report = json.loads((out / "training.json").read_text())
    basin, eager = report["runs"]["basin"], report["runs"]["eager"]
    assert sum(basin["loss"][-3:]) / 3 < basin["loss"][0] - 0.5
    assert torch.allclose(torch.tensor(basin["loss"]), torch.tensor(eager["loss"]), atol=1e-3)
    assert report["repeated_steps_equal"] and report["replay_bitwise_equal"]
    sinks = torch.tensor(basin["sinks"])
    assert sinks.shape == (3, 2, 8) and basin["sink_steps"] == [0, 10, 12]
    assert (sinks[-1] != sinks[0]).all()
    for values in report["log_probability_differences"].values():
        assert len(values) == 143 and max(map(abs, values)) < 1e-3


def test_the_checkpoint_has_the_layout_of_gpt_oss(out):
    from safetensors import safe_open
    from transformers import AutoTokenizer
    with safe_open(out / "model" / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.get_slice("model.layers.1.mlp.experts.gate_up_proj").get_shape() == [4, 192, 384]
        assert file.get_slice("model.layers.1.self_attn.sinks").get_shape() == [8]
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.router.bias"} <= names
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["model_type"] == "gpt_oss" and config["layer_types"] == ["sliding_attention", "full_attention"]
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert tokenizer.decode(tokenizer("sinks: ä, 1 + 1").input_ids) == "sinks: ä, 1 + 1"


def test_dense_experts_are_those_of_transformers():
    from model import SHAPE, with_dense_experts
    from transformers import GptOssConfig, GptOssForCausalLM
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(vocab_size=32, pad_token_id=None, **{**SHAPE, "num_hidden_layers": 1}))
    model.set_experts_implementation("eager")
    experts = model.model.layers[0].mlp.experts
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens, chosen = torch.randn(40, 192), torch.rand(40, 4).topk(2).indices
    weights = torch.rand(40, 2)
    want = experts(tokens, chosen, weights)
    got = with_dense_experts(model).model.layers[0].mlp.experts(tokens, chosen, weights)
    assert torch.allclose(got, want, atol=1e-4)
