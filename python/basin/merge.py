"""Partial attention over parts of the keys, put together: for context parallelism and cascades.

Parts never hold the sink; it is added once, by `finish`, after the last merge:

    parts = [basin.flash_attn_func(q, k_i, v_i, return_lse=True) for k_i, v_i in shards]
    out, lse = basin.merge_states([out for out, _ in parts], [lse for _, lse in parts])
    out, lse_with_sink = basin.finish(out, lse, learnable_sink)
"""
import torch

from basin import _check


def merge_states(outs, lses):
    """The (out, lse) of all keys from those of parts of them: outs (batch, tokens, heads, head size) each with lse
    (batch, heads, tokens), or (tokens, heads, head size) with (heads, tokens). Differentiable.

    The order of the parts does not matter to the last bit for two of them; for more the order given is that of the sums.
    """
    if len(outs) != len(lses) or not outs:
        raise ValueError(f"outs has {len(outs)} parts and lses {len(lses)}; both must have the same, and at least one")
    for i, (out, lse) in enumerate(zip(outs, lses)):
        _state(f"outs[{i}]", out, f"lses[{i}]", lse)
        if out.shape != outs[0].shape:
            raise ValueError(f"outs[{i}] has shape {tuple(out.shape)} and outs[0] {tuple(outs[0].shape)}; they must be equal")
        _check.like(f"outs[{i}]", out, "outs[0]", outs[0])
    total = torch.stack(list(lses)).amax(dim=0).detach()
    top = total.masked_fill(torch.isneginf(total), 0.0)  # rows that see no key in any part
    weights = [torch.exp(lse - top) for lse in lses]
    weight = sum(weights[1:], weights[0])
    empty = weight == 0
    lse = (top + torch.log(weight.masked_fill(empty, 1.0))).masked_fill(empty, -torch.inf)
    scaled = [out.to(w.dtype) * _per_row(w) for out, w in zip(outs, weights)]
    out = sum(scaled[1:], scaled[0]) / _per_row(weight.masked_fill(empty, 1.0))
    return out.to(outs[0].dtype), lse


def finish(out, lse, learnable_sink=None):
    """Adds the sink, once: (out, lse_with_sink) from the sink-free (out, lse). Differentiable in all three."""
    _state("out", out, "lse", lse)
    _check.learnable_sink(learnable_sink, out)
    if learnable_sink is None:
        return out, lse
    sink = learnable_sink.to(lse.dtype)
    if lse.dim() == 2:
        sink = sink.view(-1, 1)
    else:
        sink = sink.view(1, -1, 1)
    sink = sink.expand_as(lse)
    # A row without a key, and a sink of -inf, must not reach logaddexp: both have no finite derivative there.
    empty, absent = torch.isneginf(lse), torch.isneginf(sink)
    safe_lse, safe_sink = lse.masked_fill(empty, 0.0), sink.masked_fill(absent, 0.0)
    keys = torch.sigmoid(safe_lse - safe_sink)
    keys = keys.masked_fill(absent, 1.0).masked_fill(empty, 0.0)
    both = torch.logaddexp(safe_lse, safe_sink)
    lse_with_sink = torch.where(empty, sink, torch.where(absent, lse, both))
    return (out.to(lse.dtype) * _per_row(keys)).to(out.dtype), lse_with_sink


def _per_row(x):
    """[batch, heads, tokens] or [heads, tokens] as a factor of out."""
    return x.transpose(-1, -2).unsqueeze(-1)


def _state(out_name, out, lse_name, lse):
    _check.is_tensor(out_name, out)
    _check.is_tensor(lse_name, lse)
    _check.same_device(lse_name, lse, out_name, out)
    if out.dim() not in (3, 4):
        raise ValueError(f"{out_name} has shape {tuple(out.shape)}; it must have 3 or 4 dimensions")
    if lse.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{lse_name} is {lse.dtype}; it must be float32 or float64")
    expected = (*out.shape[:-3], out.shape[-2], out.shape[-3])
    if tuple(lse.shape) != expected:
        raise ValueError(f"{lse_name} has shape {tuple(lse.shape)}; for {out_name} of shape {tuple(out.shape)} it must be {expected}")
