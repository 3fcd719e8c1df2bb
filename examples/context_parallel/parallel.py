"""Attention over a sequence that is spread over the ranks of a process group: by a ring of keys, or by heads.

Every rank holds as many tokens, in the order of the ranks: q [b, s, h_q, d], k and v [b, s, h_kv, d]. Both functions are
differentiable, and learnable_sink [h_q] is the whole one on every rank: its gradient there is that of the rank's own rows (ring) or
heads (by heads), so that their sum over the ranks is the gradient.
"""
import basin
import torch
import torch.distributed as dist


class _Shift(torch.autograd.Function):
    """Each rank's keys and values go to the next rank, and their gradients come back: together, so that no rank takes one for
    the other."""

    @staticmethod
    def forward(ctx, k, v, group):
        ctx.group = group
        return _exchange((k, v), 1, group)

    @staticmethod
    def backward(ctx, dk, dv):
        return (*_exchange((dk, dv), -1, ctx.group), None)


def _exchange(tensors, step, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    peer = lambda place: dist.get_global_rank(group or dist.group.WORLD, place % size)
    sent = [x.contiguous() for x in tensors]
    received = [torch.empty_like(x) for x in sent]
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer(rank + step), group) for x in sent] +
                                   [dist.P2POp(dist.irecv, x, peer(rank - step), group) for x in received])
    for work in works:
        work.wait()
    return tuple(received)


def ring_attention(q, k, v, learnable_sink=None, group=None):
    """Causal attention. Keys and values travel once round the ring; the parts have no sink, which joins after the last merge."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    outs, lses = [], []
    for step in range(size):
        # The keys here are those of rank (rank - step): all of them earlier, the own, or all of them later.
        if step <= rank:
            out, lse = basin.flash_attn_func(q, k, v, causal=step == 0, return_lse=True)
            outs.append(out)
            lses.append(lse)
        if step + 1 < size:
            k, v = _Shift.apply(k, v, group)
    out, lse = basin.merge_states(outs, lses)
    if step > rank:  # every rank takes part in the backward exchange, also of keys that it has not used
        out = out + (k.sum() + v.sum()) * 0
    return basin.finish(out, lse, learnable_sink)[0]


class _HeadsToTokens(torch.autograd.Function):
    """All tokens of a part of the heads become a part of the tokens of all heads (or, with `inverse`, the other way round)."""

    @staticmethod
    def forward(ctx, x, inverse, group):
        ctx.inverse, ctx.group = inverse, group
        return _transpose(x, inverse, group)

    @staticmethod
    def backward(ctx, gradient):
        return _transpose(gradient, not ctx.inverse, ctx.group), None, None


def _transpose(x, inverse, group):
    size = dist.get_world_size(group)
    split, joined = (2, 1) if inverse else (1, 2)  # dimensions: tokens 1, heads 2
    parts = torch.stack(x.chunk(size, dim=split))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), dim=joined)


def head_parallel_attention(q, k, v, learnable_sink=None, group=None, **options):
    """Any mask (`options` go to flash_attn_func): each rank computes all tokens of its share of the heads, with its sinks."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if q.shape[2] % size or k.shape[2] % size:
        raise ValueError(f"{q.shape[2]} query heads and {k.shape[2]} key heads do not divide over {size} ranks")
    q, k, v = (_HeadsToTokens.apply(x, True, group) for x in (q, k, v))
    sink = None if learnable_sink is None else learnable_sink.chunk(size)[rank]
    return _HeadsToTokens.apply(basin.flash_attn_func(q, k, v, learnable_sink=sink, **options), False, group)
