"""Gradients of every feature pair in float64 by finite differences, and against plain attention in low precision."""
import basin
import pytest
import torch
from plain import FEATURES, draw, feature_pairs, plain_attention, problem, tensors

LOW = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("pair", feature_pairs(), ids="-".join)
def test_gradcheck(pair):
    q, k, v, sink, options = problem(pair, b=1, s_q=4, s_kv=6, d_qk=4, d_v=3)

    def run(*given):
        out, lse = basin.flash_attn_func(*given[:3], learnable_sink=given[3] if sink is not None else None,
                                         return_lse=True, **options)
        return out, torch.where(torch.isneginf(lse), 0.0, lse)

    assert torch.autograd.gradcheck(run, (q, k, v) if sink is None else (q, k, v, sink))


def gradients(function, given, weights):
    out, lse = function(*given)
    loss = (out * weights[0].to(out.dtype)).sum() + (torch.where(torch.isfinite(lse), lse, 0) * weights[1].to(lse.dtype)).sum()
    return torch.autograd.grad(loss, [x for x in given if x is not None])


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", [name for name in FEATURES if name != "more_queries"])
def test_low_precision_is_within_twice_the_error_of_plain_attention_in_it(name, dtype):
    q, k, v, sink, options = problem([name], s_q=70, s_kv=90, d_qk=32, d_v=32)
    low = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in low]
    sinks = [None, None, None] if sink is None else [sink, sink.detach().to(dtype).requires_grad_(),
                                                     sink.detach().float().requires_grad_()]
    weights = draw(2, 70, 4, v.shape[-1], seed=11, grad=False), draw(2, 4, 70, seed=12, grad=False)
    weights = weights[0].to(dtype).double(), weights[1]
    want = gradients(lambda *x: plain_attention(*x[:3], learnable_sink=x[3], **options), (*exact, sinks[0]), weights)
    yardstick = gradients(lambda *x: plain_attention(*x[:3], learnable_sink=x[3], **options), (*low, sinks[1]), weights)
    got = gradients(lambda *x: basin.flash_attn_func(*x[:3], learnable_sink=x[3], return_lse=True, **options),
                    (*low, sinks[2]), weights)
    for what, a, y, w in zip("q k v sink".split(), got, yardstick, want):
        assert (a - w).abs().max() <= 2 * (y - w).abs().max() + 1e-5 * w.abs().max(), what


def test_sinks_of_low_precision_get_gradients_in_it():
    q, k, v, sink = tensors(dtype=torch.bfloat16, d_qk=16, d_v=16)
    sink = sink.detach().to(torch.bfloat16).requires_grad_()
    basin.flash_attn_func(q, k, v, learnable_sink=sink).float().sum().backward()
    assert sink.grad.dtype == torch.bfloat16 and (sink.grad != 0).all()


@pytest.mark.parametrize("dtype", LOW)
def test_a_ragged_batch_has_the_gradients_of_its_sequences(dtype):
    lengths = [(5, 9), (0, 4), (1, 140), (7, 7), (4, 0), (130, 150)]
    cu_q = torch.tensor([0] + [q for q, _ in lengths]).cumsum(0).int()
    cu_k = torch.tensor([0] + [k for _, k in lengths]).cumsum(0).int()
    q, k, v = draw(147, 4, 16, dtype=dtype), draw(310, 2, 16, dtype=dtype, seed=5), draw(310, 2, 16, dtype=dtype, seed=6)
    sink = draw(4, dtype=torch.float32, seed=7)
    weight = draw(147, 4, 16, dtype=dtype, seed=8, grad=False)
    options = {"causal": True, "window_size": (30, 0), "sink_tokens": 2, "learnable_sink": sink}
    out = basin.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 130, 150, **options)
    dq, dk, dv, dsink = torch.autograd.grad(out, (q, k, v, sink), weight)
    total = torch.zeros_like(sink)
    for i in range(len(lengths)):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        alone = basin.flash_attn_func(q[None, rows], k[None, keys], v[None, keys], **options)
        parts = torch.autograd.grad(alone, (q, k, v, sink), weight[None, rows])
        assert torch.equal(dq[rows], parts[0][rows]) and torch.equal(dk[keys], parts[1][keys])
        assert torch.equal(dv[keys], parts[2][keys])
        total += parts[3]
    assert torch.allclose(total, dsink, rtol=1e-5)


@pytest.mark.parametrize("dtype", LOW)
def test_twenty_runs_are_bitwise_equal_on_any_number_of_threads(dtype):
    q, k, v, sink = tensors(s_q=200, s_kv=200, d_qk=32, d_v=32, dtype=dtype)
    out = basin.flash_attn_func(q, k, v, causal=True, learnable_sink=sink)
    weight = draw(*out.shape, dtype=dtype, seed=9, grad=False)
    first = torch.autograd.grad(out, (q, k, v, sink), weight, retain_graph=True)
    before = torch.get_num_threads()
    try:
        for run in range(20):
            torch.set_num_threads(1 + run % 4)
            again = torch.autograd.grad(out, (q, k, v, sink), weight, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again))
    finally:
        torch.set_num_threads(before)


def test_two_backward_calls_accumulate():
    q, k, v, sink = tensors()
    for _ in range(2):
        basin.flash_attn_func(q, k, v, learnable_sink=sink).sum().backward()
    twice = [x.grad.clone() for x in (q, k, v, sink)]
    once = torch.autograd.grad(basin.flash_attn_func(q, k, v, learnable_sink=sink).sum(), (q, k, v, sink))
    assert all(torch.allclose(a, 2 * b) for a, b in zip(twice, once))


def test_expanded_and_strided_inputs_and_gradients():
    q, k, v, sink = tensors(dtype=torch.float32, d_qk=16, d_v=16)
    one = draw(2, 1, 2, 16, dtype=torch.float32, seed=21)
    other = draw(2, 2, 9, 16, dtype=torch.float32, seed=22)
    weight = draw(1, 1, 1, 16, dtype=torch.float32, seed=23, grad=False).expand(2, 7, 4, 16)

    def loss(attend):
        return torch.autograd.grad(attend(q, one.expand(2, 9, 2, 16), other.transpose(1, 2)), (q, one, other, sink), weight)

    got = loss(lambda *x: basin.flash_attn_func(*x, learnable_sink=sink))
    want = loss(lambda *x: plain_attention(*x, learnable_sink=sink)[0])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want))


def test_rows_without_keys_give_their_gradient_to_the_sink():
    q, k, v, sink = tensors(s_q=9, s_kv=4)
    out, lse = basin.flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)
    dq, dk, dv, dsink = torch.autograd.grad(lse[:, :, :5].sum() + out[:, :5].sum(), (q, k, v, sink))
    assert (dq == 0).all() and (dk == 0).all() and (dv == 0).all()
    assert torch.equal(dsink, torch.full_like(sink, 10.0))


@pytest.mark.parametrize("dtype", LOW)
def test_no_sink_and_a_sink_of_minus_infinity_are_equal(dtype):
    q, k, v, _ = tensors(dtype=dtype, d_qk=16, d_v=16)
    none = torch.full((4,), -torch.inf)
    a = torch.autograd.grad(basin.flash_attn_func(q, k, v).float().sum(), (q, k, v))
    b = torch.autograd.grad(basin.flash_attn_func(q, k, v, learnable_sink=none).float().sum(), (q, k, v))
    assert all(torch.equal(x, y) for x, y in zip(a, b))


# q = 0, v = 1, loss = sum(out): every weight is known, so the size of d_sink is, too.
@pytest.mark.parametrize("dtype", LOW)
def test_closed_form_of_d_sink(dtype):
    n, rows = 50, 300
    sink = torch.tensor([2.0, 0.0, -3.0, 1.0], requires_grad=True)
    q = torch.zeros(1, rows, 4, 16, dtype=dtype)
    k = draw(1, n, 2, 16, dtype=dtype, grad=False)
    out = basin.flash_attn_func(q, k, torch.ones(1, n, 2, 16, dtype=dtype), learnable_sink=sink)
    out.float().sum().backward()
    e = sink.detach().double().exp()
    want = -rows * 16 * n * e / (n + e) ** 2
    assert torch.allclose(sink.grad.double(), want, rtol=1e-2 if dtype == torch.bfloat16 else 2e-3)


def test_second_order_is_refused_by_name():
    q, k, v, _ = tensors()
    (dq,) = torch.autograd.grad(basin.flash_attn_func(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second-order"):
        dq.sum().backward()
