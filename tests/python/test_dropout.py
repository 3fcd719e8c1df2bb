"""Dropout on the CPU: which entries go depends on their place, and everything else is attention as ever."""
import basin
import pytest
import torch
from basin.dropout import kept
from plain import draw, plain_attention, tensors


def test_the_mask_depends_on_the_place_only():
    whole = kept(torch.tensor(5), torch.tensor(0), torch.arange(3), 4, 40, 50, 0.3)
    part = kept(torch.tensor(5), torch.tensor(0), torch.tensor([1]), 2, 10, 20, 0.3)
    assert torch.equal(whole[1:2, :2, :10, :20], part)
    others = [kept(torch.tensor(seed), torch.tensor(offset), torch.arange(3), 4, 40, 50, 0.3) for seed, offset in ((6, 0), (5, 1))]
    for other in others:
        assert abs((other == whole).double().mean() - (0.49 + 0.09)) < 0.02  # independent
    assert abs(whole.double().mean() - 0.7) < 0.01
    for axis in range(4):  # no two slices are alike
        slices = whole.movedim(axis, 0).flatten(1)
        assert len({tuple(s.tolist()) for s in slices}) == len(slices)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, 1)}, {"softcap": 1.0},
                                     {"window_size": (1, 0), "sink_tokens": 2}])
def test_probabilities_tell_what_was_dropped(options):
    q, k, v, sink = tensors()
    torch.manual_seed(3)
    out, lse, signed = basin.flash_attn_func(q, k, v, 0.4, return_attn_probs=True, learnable_sink=sink, **options)
    _, want_lse = plain_attention(q, k, v, learnable_sink=sink, **options)
    assert torch.allclose(lse, want_lse)
    keep = ~torch.signbit(signed)
    values = v.repeat_interleave(2, dim=2)
    want = torch.einsum("bhst,bthd->bshd", signed.abs() * keep / 0.6, values)
    assert torch.allclose(out, want)
    assert 0.3 < 1 - keep.double().mean() < 0.5


def test_the_generator_decides():
    q, k, v, _ = tensors()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(basin.flash_attn_func(q, k, v, dropout_p=0.5))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_gradients():
    q, k, v, sink = tensors(b=1, s_q=3, s_kv=4, d_qk=4, d_v=4)

    def run(*given):
        torch.manual_seed(1)
        return basin.flash_attn_func(*given[:3], dropout_p=0.3, causal=True, learnable_sink=given[3], return_lse=True)

    assert torch.autograd.gradcheck(run, (q, k, v, sink))


def test_a_ragged_batch_drops_what_its_sequences_drop():
    begin = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    q, k, v = (draw(9, 2, 8, seed=s) for s in range(3))
    torch.manual_seed(1)
    out, lse, signed = basin.flash_attn_varlen_func(q, k, v, begin, begin, 5, 5, dropout_p=0.3, return_attn_probs=True)
    assert signed.shape == (3, 2, 5, 5) and lse.shape == (2, 9)
    padded = [torch.zeros(3, 5, 2, 8, dtype=torch.float64) for _ in range(3)]
    torch.manual_seed(1)
    _, _, dense = basin.flash_attn_func(*padded, dropout_p=0.3, return_attn_probs=True)
    assert torch.equal(torch.signbit(signed[2]), torch.signbit(dense[2]))
    values = torch.einsum("hst,thd->shd", signed[2].clamp(min=0) / 0.7, v[4:9])
    assert torch.allclose(out[4:], values)
