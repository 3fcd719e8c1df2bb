"""Parts of the keys, merged and finished, equal attention over all of them, gradients too."""
import basin
import pytest
import torch
from plain import draw, plain_attention, tensors


@pytest.mark.parametrize("cuts", [(0, 9), (0, 4, 9), (0, 1, 1, 5, 9)])
def test_merged_parts_are_the_whole(cuts):
    q, k, v, sink = tensors()
    weight, lse_weight = draw(2, 7, 4, 8, seed=5, grad=False), draw(2, 4, 7, seed=6, grad=False)

    def attend(q, k, v, sink):
        parts = [basin.flash_attn_func(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in zip(cuts, cuts[1:])]
        return basin.finish(*basin.merge_states([p[0] for p in parts], [p[1] for p in parts]), sink)

    out, lse = attend(q, k, v, sink)
    want, want_lse = plain_attention(q, k, v, learnable_sink=sink)
    assert torch.allclose(out, want) and torch.allclose(lse, want_lse)
    loss = lambda o, l: (o * weight).sum() + (l * lse_weight).sum()
    got = torch.autograd.grad(loss(out, lse), (q, k, v, sink))
    wanted = torch.autograd.grad(loss(want, want_lse), (q, k, v, sink))
    assert all(torch.allclose(a, b) for a, b in zip(got, wanted))


def test_gradcheck():
    outs = [draw(1, 3, 2, 4, seed=s) for s in (1, 2, 3)]
    lses = [draw(1, 2, 3, seed=s) for s in (4, 5, 6)]
    sink = draw(2, seed=7)
    assert torch.autograd.gradcheck(
        lambda *x: basin.finish(*basin.merge_states(x[:3], x[3:6]), x[6]), (*outs, *lses, sink))


@pytest.mark.parametrize("ragged", [False, True])
def test_two_parts_in_either_order_give_the_same_bits(ragged):
    shapes = ((5, 3, 8), (3, 5)) if ragged else ((2, 5, 3, 8), (2, 3, 5))
    a, b = draw(*shapes[0], dtype=torch.float32), draw(*shapes[0], dtype=torch.float32, seed=1)
    x, y = draw(*shapes[1], dtype=torch.float32, seed=2), draw(*shapes[1], dtype=torch.float32, seed=3)
    one, other = basin.merge_states([a, b], [x, y]), basin.merge_states([b, a], [y, x])
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    assert torch.allclose(one[1], torch.logaddexp(x, y))


def test_rows_without_keys():
    out = torch.zeros(1, 2, 1, 4, requires_grad=True)
    lse = torch.tensor([[[-torch.inf, 0.5]]], requires_grad=True)
    sink = torch.tensor([1.5], requires_grad=True)
    merged, both = basin.merge_states([out, out], [lse, torch.full((1, 1, 2), -torch.inf)])
    assert torch.equal(both, lse) and not merged.isnan().any()
    done, with_sink = basin.finish(merged, both, sink)
    assert with_sink[0, 0, 0] == 1.5 and with_sink[0, 0, 1] == torch.logaddexp(torch.tensor(0.5), torch.tensor(1.5))
    (done.sum() + with_sink.sum()).backward()
    assert not any(x.grad.isnan().any() for x in (out, lse, sink))
    assert torch.allclose(sink.grad, 1 + torch.sigmoid(torch.tensor([1.0])))  # the empty row, and the other's share


def test_sinks_at_infinity_and_none():
    out, lse = draw(1, 2, 3, 4, dtype=torch.float32, grad=False), draw(1, 3, 2, dtype=torch.float32, grad=False, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(basin.finish(out, lse), (out, lse)))
    gone, with_sink = basin.finish(out, lse, torch.tensor([-torch.inf, torch.inf, 300.0]))
    assert torch.equal(gone[:, :, 0], out[:, :, 0]) and torch.equal(with_sink[:, 0], lse[:, 0])
    assert (gone[:, :, 1] == 0).all() and (with_sink[:, 1] == torch.inf).all()
    assert (gone[:, :, 2] == 0).all() and torch.allclose(with_sink[:, 2], torch.tensor(300.0))
