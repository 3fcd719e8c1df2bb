"""Wrong arguments: the error's type, and that it names the argument. What is not supported is refused by name."""
import basin
import pytest
import torch
from plain import draw


def x(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


GOOD = {"q": x(2, 5, 4, 16), "k": x(2, 6, 2, 16), "v": x(2, 6, 2, 16)}
WRONG = [
    ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, not list"),
    ({"q": x(2, 5, 64)}, ValueError, "q has shape (2, 5, 64)"),
    ({"k": x(2, 6, 32)}, ValueError, "k has shape"),
    ({"v": None}, TypeError, "v must be a torch.Tensor"),
    ({"q": x(2, 5, 4, 16, dtype=torch.int64)}, TypeError, "q is int64"),
    ({"k": x(2, 6, 2, 16, dtype=torch.float16)}, TypeError, "k is float16 and q is float32"),
    ({"k": x(2, 6, 2, 16).to("meta")}, ValueError, "k is on meta and q is on cpu"),
    ({"q": x(2, 5, 4, 16).to("meta")}, ValueError, "q is on meta"),
    ({"q": x(3, 5, 4, 16)}, ValueError, "q has batch size 3 and k 2"),
    ({"v": x(2, 7, 2, 16)}, ValueError, "k has shape (2, 6, 2, 16) and v (2, 7, 2, 16)"),
    ({"q": x(2, 5, 4, 8)}, ValueError, "q has head size 8 and k 16"),
    ({"q": x(2, 5, 3, 16)}, ValueError, "q has 3 heads and k 2"),
    ({"q": x(2, 5, 4, 272), "k": x(2, 6, 2, 272)}, ValueError, "q has head size 272"),
    ({"v": x(2, 6, 2, 300)}, ValueError, "v has head size 300"),
    ({"learnable_sink": [0.0] * 4}, TypeError, "learnable_sink must be a torch.Tensor"),
    ({"learnable_sink": x(3)}, ValueError, "learnable_sink has shape (3,); it must have shape (4,)"),
    ({"learnable_sink": x(4, dtype=torch.int32)}, TypeError, "learnable_sink is int32"),
    ({"learnable_sink": x(4).to("meta")}, ValueError, "learnable_sink is on meta"),
    ({"sink_tokens": -1}, ValueError, "sink_tokens is -1"),
    ({"sink_tokens": 1.5}, TypeError, "sink_tokens must be an int"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale is nan"),
    ({"softmax_scale": "1"}, TypeError, "softmax_scale must be a float"),
    ({"softcap": float("inf")}, ValueError, "softcap is inf"),
    ({"window_size": 3}, ValueError, "window_size is 3"),
    ({"window_size": (1.0, 0)}, TypeError, "window_size is (1.0, 0)"),
    ({"window_size": torch.tensor([1.0, 0.0])}, ValueError, "window_size is tensor([1., 0.])"),
    ({"window_size": torch.tensor([1, 2, 3])}, ValueError, "window_size is (1, 2, 3)"),
    ({"causal": "yes"}, TypeError, "causal must be a bool"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p is 1.0"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p is -0.1"),
    ({"alibi_slopes": x(4)}, NotImplementedError, "alibi_slopes is not supported"),
]


@pytest.mark.parametrize("change, error, text", WRONG, ids=[text for _, _, text in WRONG])
def test_flash_attn_func(change, error, text):
    with pytest.raises(error) as raised:
        basin.flash_attn_func(**{**GOOD, **change})
    assert text in str(raised.value)


BEGIN = torch.tensor([0, 5, 10], dtype=torch.int32)
RAGGED = {"q": x(10, 4, 16), "k": x(10, 2, 16), "v": x(10, 2, 16), "cu_seqlens_q": BEGIN, "cu_seqlens_k": BEGIN,
          "max_seqlen_q": 5, "max_seqlen_k": 5}
WRONG_RAGGED = [
    ({"q": x(2, 5, 4, 16)}, ValueError, "q has shape"),
    ({"cu_seqlens_q": BEGIN.long()}, TypeError, "cu_seqlens_q is int64; it must be int32"),
    ({"cu_seqlens_q": [0, 5, 10]}, TypeError, "cu_seqlens_q must be a torch.Tensor"),
    ({"cu_seqlens_k": BEGIN[:2]}, ValueError, "cu_seqlens_k has shape (2,); it must have shape (3,)"),
    ({"cu_seqlens_k": BEGIN.to("meta")}, ValueError, "cu_seqlens_k is on meta"),
    ({"max_seqlen_q": 5.0}, TypeError, "max_seqlen_q must be an int"),
    ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k is -1"),
    ({"block_table": x(2, 1, dtype=torch.int32)}, ValueError, "k has shape (10, 2, 16)"),
    ({"cu_seqlens_q": BEGIN + 1}, RuntimeError, "sequence 1 has queries"),
]


@pytest.mark.parametrize("change, error, text", WRONG_RAGGED, ids=[text for _, _, text in WRONG_RAGGED])
def test_flash_attn_varlen_func(change, error, text):
    with pytest.raises(error) as raised:
        basin.flash_attn_varlen_func(**{**RAGGED, **change})
    assert text in str(raised.value)


@pytest.mark.parametrize("function, packed", [(basin.flash_attn_qkvpacked_func, x(2, 5, 2, 4, 16)),
                                              (basin.flash_attn_qkvpacked_func, x(2, 5, 4, 16))])
def test_packed(function, packed):
    with pytest.raises(ValueError, match="qkv has shape"):
        function(packed)


CACHE = {"q": x(2, 1, 4, 16), "k_cache": x(2, 8, 2, 16), "v_cache": x(2, 8, 2, 16), "k": x(2, 1, 2, 16), "v": x(2, 1, 2, 16),
         "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32)}
WRONG_CACHE = [
    ({"v": None}, ValueError, "k and v must be given together"),
    ({"k": x(2, 1, 4, 16)}, ValueError, "k has shape (2, 1, 4, 16); it must be (2, 1, 2, 16)"),
    ({"k_cache": x(3, 8, 2, 16), "v_cache": x(3, 8, 2, 16)}, ValueError, "k_cache has batch size 3 and q 2"),
    ({"cache_seqlens": x(2)}, TypeError, "cache_seqlens is float32"),
    ({"cache_seqlens": 2.0}, TypeError, "cache_seqlens must be an int"),
    ({"rotary_cos": x(9, 8)}, ValueError, "rotary_cos and rotary_sin must be given together"),
    ({"rotary_cos": x(9, 9), "rotary_sin": x(9, 9)}, ValueError, "rotary_cos has shape (9, 9)"),
    ({"k": None, "v": None, "rotary_cos": x(9, 8), "rotary_sin": x(9, 8)}, ValueError, "rotary_cos needs new k and v"),
    ({"block_table": x(2, 2, dtype=torch.int32), "cache_leftpad": x(2, dtype=torch.int32)}, NotImplementedError,
     "cache_leftpad with block_table"),
    ({"block_table": x(2, 2, dtype=torch.int32), "cache_seqlens": None}, ValueError, "cache_seqlens must be given"),
    ({"block_table": x(3, 2, dtype=torch.int32)}, ValueError, "block_table has shape (3, 2)"),
    ({"alibi_slopes": x(4)}, NotImplementedError, "alibi_slopes is not supported"),
    ({"num_splits": -1}, ValueError, "num_splits is -1"),
]


@pytest.mark.parametrize("change, error, text", WRONG_CACHE, ids=[text for _, _, text in WRONG_CACHE])
def test_flash_attn_with_kvcache(change, error, text):
    with pytest.raises(error) as raised:
        basin.flash_attn_with_kvcache(**{**CACHE, **change})
    assert text in str(raised.value)


def test_a_paged_batch_has_no_backward():
    q = draw(2, 4, 16, dtype=torch.float32)
    pages = x(3, 16, 2, 16)
    begin = torch.tensor([0, 1, 2], dtype=torch.int32)
    out = basin.flash_attn_varlen_func(q, pages, pages, begin, begin, 1, 1,
                                       block_table=torch.tensor([[0], [2]], dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="block_table has no backward"):
        out.sum().backward()


def test_merging():
    out, lse = x(2, 5, 4, 16), x(2, 4, 5)
    for outs, lses, error, text in [
        ([], [], ValueError, "at least one"),
        ([out], [lse, lse], ValueError, "outs has 1 parts and lses 2"),
        ([out], [x(2, 5, 4)], ValueError, "lses[0] has shape (2, 5, 4)"),
        ([out, x(2, 6, 4, 16)], [lse, x(2, 4, 6)], ValueError, "outs[1] has shape"),
        ([out], [lse.half()], TypeError, "lses[0] is torch.float16"),
    ]:
        with pytest.raises(error) as raised:
            basin.merge_states(outs, lses)
        assert text in str(raised.value)
    with pytest.raises(ValueError, match="learnable_sink has shape"):
        basin.finish(out, lse, x(3))


@pytest.mark.parametrize("kernels, device, capability, said", [
    ("no kernels", True, (9, 0), "no kernels"), (None, False, None, "torch finds no CUDA device"),
    (None, True, (8, 0), "the kernels are for Hopper GPUs, and A100 is none"), (None, True, (9, 0), None)])
def test_what_is_missing_for_cuda_is_said(monkeypatch, kernels, device, capability, said):
    monkeypatch.setattr("basin._library._KERNELS_MISSING", kernels)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    assert basin.cuda_missing() == said


def test_a_window_may_be_a_tensor_of_two_integers():
    q, k, v = (draw(1, 9, h, 16, dtype=torch.float32, seed=h, grad=False) for h in (4, 2, 2))
    want = basin.flash_attn_func(q, k, v, window_size=(2, 1))
    assert torch.equal(basin.flash_attn_func(q, k, v, window_size=torch.tensor([2, 1])), want)
    assert not torch.equal(basin.flash_attn_func(q, k, v), want)
