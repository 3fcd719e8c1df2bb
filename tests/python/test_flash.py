"""flash-attn's functions against plain attention: every feature, layout and dtype, and what is returned."""
import basin
import pytest
import torch
from plain import FEATURES, draw, plain_attention, problem, tensors

LOW = (torch.float32, torch.float16, torch.bfloat16)


def error(got, want):
    return (got.double() - want.double()).abs().max().item() if want.numel() else 0.0


@pytest.mark.parametrize("name", FEATURES)
def test_float64_equals_plain_attention(name):
    q, k, v, sink, options = problem([name])
    out, lse = basin.flash_attn_func(q, k, v, learnable_sink=sink, return_lse=True, **options)
    want, want_lse = plain_attention(q, k, v, learnable_sink=sink, **options)
    assert error(out, want) < 1e-12
    seen = torch.isfinite(want_lse)
    assert error(lse[seen], want_lse[seen]) < 1e-12
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", FEATURES)
def test_low_precision_is_within_twice_the_error_of_plain_attention_in_it(name, dtype):
    q, k, v, sink, options = problem([name], s_q=40, s_kv=70, d_qk=40, d_v=40)
    low = [x.detach().to(dtype) for x in (q, k, v)]
    exact = [x.double() for x in low]
    want, want_lse = plain_attention(*exact, learnable_sink=sink, **options)
    yardstick, _ = plain_attention(*low, learnable_sink=None if sink is None else sink.to(dtype), **options)
    out, lse = basin.flash_attn_func(*low, learnable_sink=None if sink is None else sink.float(), return_lse=True, **options)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert error(out, want) <= 2 * error(yardstick, want) + 1e-6
    seen = torch.isfinite(want_lse)
    assert error(lse[seen], want_lse[seen]) < 1e-5


@pytest.mark.parametrize("sink_dtype", LOW)
def test_a_sink_of_any_dtype_is_used_in_float32(sink_dtype):
    q, k, v, sink = (x.detach() for x in tensors(dtype=torch.bfloat16, d_qk=16, d_v=16))
    sink = sink.to(sink_dtype)
    assert torch.equal(basin.flash_attn_func(q, k, v, learnable_sink=sink),
                       basin.flash_attn_func(q, k, v, learnable_sink=sink.float()))


@pytest.mark.parametrize("option", [{"causal": True}, {"window_size": (2, 2)}, {"softcap": 1.0}, {"softmax_scale": 0.1},
                                    {"learnable_sink": torch.zeros(4)}, {"window_size": (1, 1), "sink_tokens": 3}])
def test_every_option_changes_the_output(option):
    q, k, v, _ = (x.detach() for x in tensors(dtype=torch.float32, d_qk=16, d_v=16))
    without = {name: value for name, value in option.items() if name != "sink_tokens" and len(option) > 1}
    assert not torch.equal(basin.flash_attn_func(q, k, v, **option), basin.flash_attn_func(q, k, v, **without))


@pytest.mark.parametrize("d", [1, 7, 20, 64, 96, 200, 256])
def test_any_head_size_up_to_256(d):
    q, k, v, _ = (x.detach() for x in tensors(dtype=torch.float32, d_qk=d, d_v=d))
    out = basin.flash_attn_func(q, k, v, causal=True)
    assert out.shape == q.shape
    assert error(out, plain_attention(q.double(), k.double(), v.double(), causal=True)[0]) < 1e-5


def test_packed_forms_equal_the_plain_one():
    qkv = draw(2, 6, 3, 4, 16, dtype=torch.float32)
    kv = draw(2, 9, 2, 2, 16, dtype=torch.float32, seed=8)
    q, k, v = qkv.unbind(2)
    sink = draw(4, dtype=torch.float32)
    options = {"causal": True, "window_size": (3, 0), "learnable_sink": sink, "sink_tokens": 1}
    assert torch.equal(basin.flash_attn_qkvpacked_func(qkv, **options), basin.flash_attn_func(q, k, v, **options))
    assert torch.equal(basin.flash_attn_kvpacked_func(q, kv, **options),
                       basin.flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], **options))


LENGTHS = [(5, 9), (0, 4), (1, 300), (7, 7), (4, 0), (66, 80)]


def ragged(dtype=torch.float32, h_q=4, h_kv=2, d=16):
    cu_q = torch.tensor([0] + [q for q, _ in LENGTHS]).cumsum(0).int()
    cu_k = torch.tensor([0] + [k for _, k in LENGTHS]).cumsum(0).int()
    return (draw(int(cu_q[-1]), h_q, d, dtype=dtype), draw(int(cu_k[-1]), h_kv, d, dtype=dtype, seed=5),
            draw(int(cu_k[-1]), h_kv, d, dtype=dtype, seed=6), cu_q, cu_k)


@pytest.mark.parametrize("dtype", (torch.float64,) + LOW)
def test_a_ragged_batch_is_bitwise_its_sequences(dtype):
    q, k, v, cu_q, cu_k = ragged(dtype)
    sink = draw(4, dtype=torch.float64 if dtype == torch.float64 else torch.float32, seed=9)
    options = {"causal": True, "window_size": (20, 0), "sink_tokens": 3, "learnable_sink": sink, "return_lse": True}
    out, lse = basin.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 66, 300, **options)
    assert lse.shape == (4, q.shape[0])
    for i, (n_q, _) in enumerate(LENGTHS):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        alone, alone_lse = basin.flash_attn_func(q[None, rows], k[None, keys], v[None, keys], **options)
        assert torch.equal(out[rows], alone[0]), n_q
        assert torch.equal(lse[:, rows], alone_lse[0]), n_q
    packed = torch.stack([k, v], dim=1)
    assert torch.equal(out, basin.flash_attn_varlen_kvpacked_func(q, packed, cu_q, cu_k, 66, 300, **options)[0])
    qkv = torch.stack([q, q, q], dim=1)
    assert torch.equal(basin.flash_attn_varlen_qkvpacked_func(qkv, cu_q, 66, causal=True),
                       basin.flash_attn_varlen_func(q, q, q, cu_q, cu_q, 66, 66, causal=True))


def test_pages_give_the_bits_of_contiguous_keys():
    q, k, v, cu_q, cu_k = ragged()
    page = 16
    table = torch.full((len(LENGTHS), 20), -1, dtype=torch.int32)
    pages_k, pages_v = torch.full((2, 60, page, 2, 16), torch.nan)
    free = iter(torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist())
    for i, (_, n) in enumerate(LENGTHS):
        for j in range(0, n, page):
            table[i, j // page] = at = next(free)
            rows = slice(int(cu_k[i]) + j, min(int(cu_k[i]) + j + page, int(cu_k[i + 1])))
            pages_k[at, : rows.stop - rows.start] = k[rows].detach()
            pages_v[at, : rows.stop - rows.start] = v[rows].detach()
    with torch.no_grad():
        assert torch.equal(basin.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 66, 300, causal=True),
                           basin.flash_attn_varlen_func(q, pages_k, pages_v, cu_q, cu_k, 66, 300, causal=True,
                                                        block_table=table))


def test_strides_do_not_matter():
    q, k, v, _ = (x.detach() for x in tensors(dtype=torch.float32, d_qk=16, d_v=16))
    want = basin.flash_attn_func(q, k, v)
    loose = [torch.full((3 * x.shape[0], 2 * x.shape[1], x.shape[2], 2 * x.shape[3]), torch.nan) for x in (q, k, v)]
    views = [y[: x.shape[0], 1 : x.shape[1] + 1, :, ::2] for x, y in zip((q, k, v), loose)]
    gaps = [y[: x.shape[0], 1 : x.shape[1] + 1, :, : x.shape[3]] for x, y in zip((q, k, v), loose)]
    for x, view, gap in zip((q, k, v), views, gaps):
        view.copy_(x)
        assert not view.is_contiguous()
    assert torch.equal(basin.flash_attn_func(*views), want)
    for x, gap in zip((q, k, v), gaps):
        gap.copy_(x)
    assert torch.equal(basin.flash_attn_func(*gaps), want)
    one = k[:, :1]
    assert torch.equal(basin.flash_attn_func(q, one.expand_as(k), v), basin.flash_attn_func(q, one.repeat(1, 9, 1, 1), v))


# PyTorch calls [b, 1, h, d] contiguous whatever the stride of its dimension of one element.
@pytest.mark.parametrize("s_q, s_kv, h_q, h_kv", [(1, 1, 4, 2), (1, 9, 4, 2), (7, 1, 4, 2), (7, 9, 1, 1)])
def test_strides_of_single_elements_do_not_matter(s_q, s_kv, h_q, h_kv):
    q, k, v = draw(3, s_q, h_q, 16, dtype=torch.float32), *(draw(3, s_kv, h_kv, 16, dtype=torch.float32, seed=s) for s in (1, 2))
    turned = [torch.stack(list(x.transpose(1, 2))).transpose(1, 2) for x in (q, k, v)]
    sink = draw(h_q, dtype=torch.float32)
    want, got = (basin.flash_attn_func(*x, causal=True, learnable_sink=sink) for x in ((q, k, v), turned))
    assert torch.equal(got, want)
    weight = draw(3, h_q, s_q, 16, dtype=torch.float32, seed=3).transpose(1, 2)
    grads = [torch.autograd.grad(x, (q, k, v, sink), weight) for x in (want, got)]
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_what_is_returned():
    q, k, v, _ = (x.detach() for x in tensors(dtype=torch.float32))
    out = basin.flash_attn_func(q, k, v)
    assert isinstance(out, torch.Tensor) and out.is_contiguous()
    pair = basin.flash_attn_func(q, k, v, return_lse=True)
    assert len(pair) == 2 and pair[1].shape == (2, 4, 7)
    triple = basin.flash_attn_func(q, k, v, return_attn_probs=True)
    assert len(triple) == 3 and triple[2].numel() == 0  # as in flash-attn, filled with dropout only


def test_a_row_without_keys_is_zero_and_its_lse_is_the_sink():
    q, k, v, sink = (x.detach() for x in tensors(s_q=9, s_kv=4, dtype=torch.float32))
    out, lse = basin.flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)
    assert (out[:, :5] == 0).all() and torch.equal(lse[:, :, 0], sink.expand(2, 4))
    out, lse = basin.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert (out[:, :5] == 0).all() and (lse[:, :, :5] == -torch.inf).all()
    none = basin.flash_attn_func(q, k[:, :0], v[:, :0], learnable_sink=sink)
    assert (none == 0).all()
    assert basin.flash_attn_func(q[:, :0], k, v).shape == (2, 0, 4, 8)
    assert basin.flash_attn_func(q[:0], k[:0], v[:0]).shape == (0, 9, 4, 8)


# With q = 0 and v = 1 the output is n / (n + e^sink): no scale, no softcap, counted once.
@pytest.mark.parametrize("options", [{}, {"softmax_scale": 7.0}, {"softcap": 0.5}])
def test_closed_form_of_the_sink(options):
    sink = torch.tensor([2.0, -300.0, 300.0, -torch.inf, torch.inf, 0.0])
    q = torch.zeros(1, 3, 6, 16)
    k = draw(1, 50, 2, 16, dtype=torch.float32, grad=False)
    out, lse = basin.flash_attn_func(q, k, torch.ones(1, 50, 2, 16), learnable_sink=sink, return_lse=True, **options)
    weight = 50 / (50 + sink.double().exp())
    assert error(out, weight.view(1, 1, 6, 1).expand_as(out)) < 1e-6
    want = torch.logaddexp(torch.tensor(50.0).log(), sink).view(1, 6, 1).expand_as(lse)
    assert torch.allclose(lse, want, atol=1e-5)
