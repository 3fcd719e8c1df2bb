"""Attention with dropout, on the CPU: plain PyTorch that holds the probabilities in memory, for tests and small models.

Whether an entry is dropped depends on (seed, offset, batch, head, row, column) alone, never on how work is cut into tiles.
"""
import torch

_MASK64 = (1 << 64) - 1


def _signed(x):
    return x - (1 << 64) if x >> 63 else x


def _shifted(x, bits):
    """Logical shift right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(x):
    """The finaliser of splitmix64: every bit of the result depends on every bit of x."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def kept(seed, offset, batch, heads, rows, columns, p):
    """Bool [len(batch), heads, rows, columns]: what dropout with probability p keeps. `batch` holds sequence numbers."""
    state = _mixed(seed + _signed(0x9E3779B97F4A7C15) * (offset + 1))
    for place, index in ((0, batch), (1, torch.arange(heads)), (2, torch.arange(rows)), (3, torch.arange(columns))):
        shape = [1] * 4
        shape[place] = -1
        state = _mixed(state + _signed(0x9E3779B97F4A7C15) * (index.to(torch.int64).view(shape) + 1))
    return _shifted(state, 11).to(torch.float64) * 2.0**-53 >= p


def visible(rows, keys, causal, window, window_right, sink_tokens):
    """Bool [rows, keys] by the rule of docs/sinks.md."""
    position = torch.arange(rows).view(-1, 1) + keys - rows
    key = torch.arange(keys).view(1, -1)
    near = torch.ones(rows, keys, dtype=torch.bool)
    if window > 0:
        near &= position - key < window
    if window_right >= 0:
        near &= key - position <= window_right
    near |= key < sink_tokens
    return near & (key <= position) if causal else near


def draw_seed():
    """(seed, offset) from PyTorch's generator, so that torch.manual_seed and checkpointing reproduce them."""
    return torch.randint(0, 2**62, (2,))


def attention_with_dropout(q, k, v, p, *, sink_logit, scale, softcap, causal, window, window_right, sink_tokens,
                           drawn=None, batch=None):
    """(out, lse, probabilities), the last negative where they were dropped. Dense tensors on the CPU."""
    real = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[2] // k.shape[2]
    queries = q.to(real).transpose(1, 2)
    keys = k.to(real).transpose(1, 2).repeat_interleave(group, dim=1)
    values = v.to(real).transpose(1, 2).repeat_interleave(group, dim=1)
    scores = queries @ keys.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(q.shape[1], k.shape[1], causal, window, window_right, sink_tokens)
    scores = scores.masked_fill(~seen, -torch.inf)
    columns = scores
    if sink_logit is not None:
        sink = sink_logit.to(real).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        columns = torch.cat([scores, sink], dim=-1)
    # A row without a column would be NaN in both directions.
    none = torch.isneginf(columns).all(dim=-1) if columns.shape[-1] else torch.ones(columns.shape[:-1], dtype=torch.bool)
    if not columns.shape[-1]:
        columns = scores.new_zeros(*scores.shape[:3], 1)
    lse = torch.logsumexp(columns.masked_fill(none.unsqueeze(-1), 0.0), dim=-1)
    probabilities = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(none.unsqueeze(-1), 0.0)
    seed, offset = draw_seed() if drawn is None else drawn
    batch = torch.arange(q.shape[0]) if batch is None else batch
    keep = kept(seed, offset, batch, q.shape[2], q.shape[1], k.shape[1], p)
    out = (probabilities * keep / (1 - p)) @ values
    lse = lse.masked_fill(none, -torch.inf)
    signed = torch.where(keep, probabilities, -probabilities).detach()
    return out.transpose(1, 2).to(q.dtype).contiguous(), lse, signed.to(q.dtype)


def varlen_attention_with_dropout(q, k, v, p, *, q_begin, kv_begin, max_q_tokens, max_kv_tokens, **options):
    """The same, sequence by sequence; probabilities [batch, heads, max_q_tokens, max_kv_tokens]."""
    drawn = draw_seed()
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    batch = q_begin.shape[0] - 1
    probabilities = q.new_zeros(batch, q.shape[1], max_q_tokens, max_kv_tokens)
    outs, lses, places = [], [], []
    for i in range(batch):
        rows = slice(int(q_begin[i]), int(q_begin[i + 1]))
        keys = slice(int(kv_begin[i]), int(kv_begin[i + 1]))
        one = attention_with_dropout(q[None, rows], k[None, keys], v[None, keys], p, drawn=drawn, batch=torch.tensor([i]),
                                     **options)
        outs.append(one[0][0])
        lses.append(one[1][0])
        places.append(torch.arange(rows.start, rows.stop))
        probabilities[i, :, : rows.stop - rows.start, : keys.stop - keys.start] = one[2][0]
    if places:
        place = torch.cat(places)
        out = out.index_copy(0, place, torch.cat(outs))
        lse = lse.index_copy(1, place, torch.cat(lses, dim=1))
    return out, lse, probabilities
