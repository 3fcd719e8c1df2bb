"""`basin` as an attention implementation of transformers, against `eager` in float32: tiny models of four families."""
import basin
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

basin.register()
# Dynamo reads the closures of the mask functions from torch 2.14 on; before, the graph breaks there.
ONE_GRAPH = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 14)
COMMON = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 2}
CONFIGS = {
    "gpt_oss": lambda: transformers.GptOssConfig(**COMMON, sliding_window=6, num_local_experts=4, num_experts_per_tok=2),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON),
    "gemma3": lambda: transformers.Gemma3TextConfig(**COMMON, sliding_window=6, query_pre_attn_scalar=16,
                                                    layer_types=["sliding_attention", "full_attention"] * 2),
    "llama": lambda: transformers.LlamaConfig(**COMMON),
}


def models(family, **options):
    torch.manual_seed(0)
    eager = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="eager", dtype=torch.float32)
    for name, parameter in eager.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)  # attention that is far from uniform
    ours = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="basin", dtype=torch.float32)
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def batch(padding):
    ids = torch.randint(3, 97, (3, 21), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, missing in enumerate((0, 5, 12)):
        if padding == "left":
            mask[row, :missing] = 0
        elif padding == "right":
            mask[row, ids.shape[1] - missing :] = 0
    return ids * mask, mask


def loss_of(model, ids, mask):
    logits = model(input_ids=ids, attention_mask=mask).logits
    targets = torch.where((mask[:, 1:] * mask[:, :-1]).bool(), ids[:, 1:], -100)  # padding predicts nothing
    return logits, torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_and_gradients(family, checkpointing, padding):
    eager, ours = models(family)
    ids, mask = batch(padding)
    want, want_loss = loss_of(eager, ids, mask)
    want_loss.backward()
    if checkpointing:
        ours.train()
        ours.gradient_checkpointing_enable()
    got, got_loss = loss_of(ours, ids, mask)
    got_loss.backward()
    real = mask.bool()
    assert torch.allclose(got[real], want[real], atol=2e-4, rtol=1e-4)
    theirs = dict(eager.named_parameters())
    for name, parameter in ours.named_parameters():
        expected = theirs[name].grad
        assert torch.allclose(parameter.grad, expected, atol=2e-4 * expected.abs().max().item() + 1e-7, rtol=1e-3), name
    sinks = [p.grad for name, p in ours.named_parameters() if name.endswith("sinks")]
    assert len(sinks) == (4 if family == "gpt_oss" else 0) and all((grad != 0).any() for grad in sinks)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("family", CONFIGS)
def test_generate(family, padding, cache):
    eager, ours = models(family)
    ids, mask = batch(padding)
    options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 14, "do_sample": False, "return_dict_in_generate": True,
               "output_scores": True, "cache_implementation": cache, "disable_compile": True, "eos_token_id": None}
    want = eager.eval().generate(**{**options, "cache_implementation": "dynamic"})
    got = ours.eval().generate(**options)
    assert torch.equal(got.sequences, want.sequences)
    assert torch.allclose(torch.stack(got.scores), torch.stack(want.scores), atol=2e-4)


# Several sequences in one row, told apart by their positions, as training without padding has them.
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_packed_sequences(family, compiled):
    eager, ours = models(family)
    ids, _ = batch("none")
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((9, 12), (21,), (1, 2, 18))])
    want = eager(input_ids=ids, position_ids=positions, use_cache=False).logits
    model = torch.compile(ours, fullgraph=ONE_GRAPH, backend="aot_eager") if compiled else ours
    got = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert torch.allclose(got, want, atol=2e-4, rtol=1e-4)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(2))
    (got * weight).sum().backward()
    (want * weight).sum().backward()
    theirs = dict(eager.named_parameters())
    for name, parameter in ours.named_parameters():
        expected = theirs[name].grad
        assert torch.allclose(parameter.grad, expected, atol=2e-4 * expected.abs().max().item() + 1e-7, rtol=1e-3), name


def test_the_sink_and_the_window_matter():
    _, ours = models("gpt_oss")
    ids, mask = batch("none")
    with torch.no_grad():
        before = ours(input_ids=ids).logits
        ours.model.layers[0].self_attn.sinks.add_(1.0)
        assert not torch.allclose(before, ours(input_ids=ids).logits, atol=1e-4)
        ours.model.layers[0].self_attn.sinks.sub_(1.0)
        ours.model.layers[0].self_attn.sliding_window = 3
        assert not torch.allclose(before, ours(input_ids=ids).logits, atol=1e-4)


def test_what_is_refused():
    _, ours = models("llama")
    ids, mask = batch("none")
    mask[0, 4] = 0
    with pytest.raises(ValueError, match="padding between tokens"):
        ours(input_ids=ids, attention_mask=mask)
    with pytest.raises(ValueError, match="attention_mask has shape"):
        ours(input_ids=ids, attention_mask=torch.ones(3, 1, 21, 21, dtype=torch.bool))
    from transformers.masking_utils import create_causal_mask
    with pytest.raises(NotImplementedError, match="mask function or_masks"):
        create_causal_mask(ours.config, inputs_embeds=torch.zeros(3, 21, 64), attention_mask=None, past_key_values=None,
                           or_mask_function=lambda batch, head, query, key: key == 0)
    q = torch.zeros(1, 4, 5, 16)
    attend = ours.model.layers[0].self_attn
    from basin.hugging_face import basin_attention
    with pytest.raises(NotImplementedError, match="position_bias is not supported"):
        basin_attention(attend, q, q, q, None, position_bias=torch.zeros(1))
    with pytest.raises(NotImplementedError, match="output_attentions is not supported"):
        basin_attention(attend, q, q, q, None, output_attentions=True)


def test_compile():  # without a graph break, where Dynamo can
    eager, ours = models("gpt_oss")
    ids, mask = batch("left")
    with torch.no_grad():
        got = torch.compile(ours.model, fullgraph=ONE_GRAPH, backend="aot_eager")(input_ids=ids, attention_mask=mask, use_cache=False)
        want = eager.model(input_ids=ids, attention_mask=mask)
    assert torch.allclose(got.last_hidden_state[mask.bool()], want.last_hidden_state[mask.bool()], atol=2e-4)
