"""Attention in a dozen lines of PyTorch, with autograd, written from docs/sinks.md; and problems to hold Basin to it."""
import torch


def sees(rows, keys, causal=False, window_size=(-1, -1), sink_tokens=0):
    """Bool [rows, keys] with flash-attn's window, aligned to the bottom right corner."""
    p = torch.arange(rows)[:, None] + keys - rows
    j = torch.arange(keys)[None]
    near = torch.ones(rows, keys, dtype=torch.bool)
    if window_size[0] >= 0:
        near &= p - j <= window_size[0]
    if window_size[1] >= 0:
        near &= j - p <= window_size[1]
    near |= j < sink_tokens
    return near & (j <= p) if causal else near


def plain_attention(q, k, v, *, softmax_scale=None, softcap=0.0, learnable_sink=None, bias=None, **mask):
    """(out, lse) of dense tensors, in their own precision."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    x = torch.einsum("bshd,bthd->bhst", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    visible = sees(q.shape[1], k.shape[1], **mask)
    x = x.masked_fill(~visible, -torch.inf)
    if learnable_sink is not None:
        x = torch.cat([x, learnable_sink.view(1, -1, 1, 1).expand(*x.shape[:3], 1)], dim=-1)
    lse = torch.logsumexp(x, dim=-1)
    weights = torch.where(torch.isneginf(lse)[..., None], 0.0, torch.softmax(x, dim=-1))[..., : k.shape[1]]
    return torch.einsum("bhst,bthd->bshd", weights, v), lse


def draw(*shape, dtype=torch.float64, seed=0, grad=True):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).requires_grad_(grad)


def tensors(b=2, s_q=7, s_kv=9, h_q=4, h_kv=2, d_qk=8, d_v=8, dtype=torch.float64):
    """q, k, v and one sink logit per query head."""
    return (draw(b, s_q, h_q, d_qk, dtype=dtype, seed=1), draw(b, s_kv, h_kv, d_qk, dtype=dtype, seed=2),
            draw(b, s_kv, h_kv, d_v, dtype=dtype, seed=3),
            draw(h_q, dtype=torch.float64 if dtype == torch.float64 else torch.float32, seed=4))


# Every feature that can be combined freely, by name.
FEATURES = {
    "causal": {"causal": True},
    "window": {"window_size": (3, -1)},
    "two_sided": {"window_size": (2, 1)},
    "sink_tokens": {"window_size": (2, 0), "sink_tokens": 2},
    "softcap": {"softcap": 1.5},
    "scale": {"softmax_scale": 0.3},
    "sink": {"sink": True},
    "gqa": {"h_kv": 1},
    "head_sizes": {"d_qk": 12, "d_v": 4},
    "more_queries": {"s_q": 9, "s_kv": 6},
}


def feature_pairs():
    names = sorted(FEATURES)
    # (A two-sided window is a window with another right side: there is no pair of these.)
    return [(a, b) for i, a in enumerate(names) for b in names[i:] if {a, b} != {"window", "two_sided"}]


def problem(names, **shape):
    """(q, k, v, sink or None, keyword arguments) with the features of these names."""
    options = {}
    for name in sorted(names, key="sink_tokens".__ne__):  # its window gives way to another one
        options.update(FEATURES[name])
    with_sink = options.pop("sink", False)
    shape = {**shape, **{key: options.pop(key) for key in ("h_kv", "d_qk", "d_v", "s_q", "s_kv") if key in options}}
    q, k, v, sink = tensors(**shape)
    return q, k, v, sink if with_sink else None, options
