"""flash_attn_with_kvcache: append to a cache, rotate, attend. In place, without a backward, without reading anything back."""
import torch

from basin import _check
from basin._ops import attention
from basin.flash import _ALIBI, page_table


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
                            return_softmax_lse=False, *, learnable_sink=None, sink_tokens=0, return_lse=False):
    """Attention of q (batch, seqlen_q, nheads, headdim) over a cache: k_cache and v_cache (batch_cache, seqlen_cache,
    nheads_k, headdim), or (num_blocks, page_block_size, nheads_k, headdim) with block_table (batch, blocks).

    New k and v (batch, seqlen_new, nheads_k, headdim) are written behind cache_seqlens first, rotated with rotary_cos and
    rotary_sin (seqlen_ro, rotary_dim / 2) when given; then q is rotated, too. num_splits has no influence on the result:
    Basin's order of sums does not depend on how the keys are split.

    Returns out, or (out, softmax_lse) with return_softmax_lse or return_lse.
    """
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        _check.rank(name, x, "(batch, tokens, heads, head size)")
    _check.first("q", q)
    _check.like("k_cache", k_cache, "q", q)
    _check.like("v_cache", v_cache, "q", q)
    _check.heads(q, k_cache, v_cache, "k_cache", "v_cache")
    _check.learnable_sink(learnable_sink, q)
    _check.absent("alibi_slopes", alibi_slopes, _ALIBI)
    _check.whole("num_splits", num_splits)
    mask = _check.mask(causal, window_size, sink_tokens)
    cache = _Cache(q, k_cache, v_cache, cache_batch_idx, cache_leftpad, block_table)
    lengths = _lengths(cache_seqlens, q, k_cache, block_table)
    start = lengths  # flash-attn's angles count from the first row of the cache, padding included
    _check_new(k, v, q, k_cache, v_cache)
    if rotary_cos is not None or rotary_sin is not None:
        _check_rotary(rotary_cos, rotary_sin, q, k)
        k = _rotated(k, rotary_cos, rotary_sin, start.view(-1, 1) + torch.arange(k.shape[1], device=q.device),
                     rotary_interleaved)
        steps = torch.arange(q.shape[1], device=q.device)
        local = mask["causal"] or mask["window"] > 0 or mask["window_right"] >= 0
        q = _rotated(q, rotary_cos, rotary_sin, start.view(-1, 1) + (steps if local else torch.zeros_like(steps)),
                     rotary_interleaved)
    if k is not None:
        cache.append(k, v, lengths)
        lengths = lengths + k.shape[1]
    out, lse = attention(q, **cache.keys(lengths), max_q_tokens=q.shape[1], sink_logit=learnable_sink,
                         scale=_check.scale(softmax_scale, q), softcap=_check.softcap(softcap), **mask)
    return (out, lse) if return_softmax_lse or return_lse else out


class _Cache:
    """Where the keys of each sequence lie, in the words of the operator."""

    def __init__(self, q, k_cache, v_cache, batch_idx, leftpad, table):
        batch = q.shape[0]
        self.k, self.v = k_cache, v_cache
        self.table = None if table is None else page_table("block_table", table, q, batch)
        self.index = None if batch_idx is None else _check.int32_vector("cache_batch_idx", batch_idx, q, batch)
        self.leftpad = None if leftpad is None else _check.int32_vector("cache_leftpad", leftpad, q, batch)
        if table is not None:
            _check.absent("cache_batch_idx with block_table", batch_idx, "a block table says where every key lies")
            _check.absent("cache_leftpad with block_table", leftpad, "pages begin with the first key")
        elif batch_idx is None and k_cache.shape[0] != batch:
            raise ValueError(f"k_cache has batch size {k_cache.shape[0]} and q {batch}; they must be equal without "
                             "cache_batch_idx or block_table")
        if leftpad is not None and not (k_cache.is_contiguous() and v_cache.is_contiguous()):
            raise ValueError("cache_leftpad needs a contiguous k_cache and v_cache")
        if batch_idx is not None and leftpad is None and q.is_cuda and k_cache.shape[1] & (k_cache.shape[1] - 1):
            raise NotImplementedError(f"cache_batch_idx on CUDA needs a k_cache of 2^n tokens, not {k_cache.shape[1]}")

    def append(self, k, v, lengths):
        """Writes new rows behind the first `lengths`. Rows beyond the cache are the caller's error, as in flash-attn."""
        position = lengths.view(-1, 1).long() + torch.arange(k.shape[1], device=k.device)
        if self.table is not None:
            page_tokens = self.k.shape[1]
            first = self.table.gather(1, position // page_tokens).long()
            second = position % page_tokens
        else:
            rows = torch.arange(k.shape[0], device=k.device) if self.index is None else self.index.long()
            first, second = rows.view(-1, 1).expand_as(position), position
        with torch.no_grad():
            self.k.index_put_((first, second), k.to(self.k.dtype))
            self.v.index_put_((first, second), v.to(self.v.dtype))

    def keys(self, lengths):
        capacity = self.k.shape[1]
        if self.table is not None:
            return {"k": self.k, "v": self.v, "page_table": self.table, "kv_tokens": lengths,
                    "max_kv_tokens": self.table.shape[1] * capacity}
        if self.leftpad is not None:
            rows = torch.arange(lengths.shape[0], device=lengths.device) if self.index is None else self.index
            begin = (rows * capacity + self.leftpad).to(torch.int32)
            begin = torch.cat([begin, begin.new_zeros(1)])  # the end of the last is not looked at
            return {"k": self.k.flatten(0, 1), "v": self.v.flatten(0, 1), "kv_begin": begin,
                    "kv_tokens": lengths - self.leftpad, "max_kv_tokens": capacity}
        if self.index is not None:  # a page per sequence
            return {"k": self.k, "v": self.v, "page_table": self.index.view(-1, 1), "kv_tokens": lengths,
                    "max_kv_tokens": capacity}
        return {"k": self.k, "v": self.v, "kv_tokens": lengths, "max_kv_tokens": capacity}


def _lengths(cache_seqlens, q, k_cache, block_table):
    batch = q.shape[0]
    if cache_seqlens is None:
        if block_table is not None:
            raise ValueError("cache_seqlens must be given with block_table")
        cache_seqlens = k_cache.shape[1]
    if not isinstance(cache_seqlens, torch.Tensor):
        value = _check.whole("cache_seqlens", cache_seqlens)
        return torch.full((batch,), value, dtype=torch.int32, device=q.device)
    return _check.int32_vector("cache_seqlens", cache_seqlens, q, batch)


def _check_new(k, v, q, k_cache, v_cache):
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together")
    if k is None:
        return
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        _check.rank(name, x, "(batch, new tokens, heads, head size)")
        _check.like(name, x, "q", q)
        if x.shape[0] != q.shape[0] or x.shape[2:] != cache.shape[2:] or x.shape[1] != k.shape[1]:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be ({q.shape[0]}, {k.shape[1]}, "
                             f"{cache.shape[2]}, {cache.shape[3]})")


def _check_rotary(cos, sin, q, k):
    if cos is None or sin is None:
        raise ValueError("rotary_cos and rotary_sin must be given together")
    if k is None:
        raise ValueError("rotary_cos needs new k and v: a cache holds keys that are rotated already")
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        _check.rank(name, x, "(positions, rotary size / 2)")
        _check.same_device(name, x, "q", q)
        if x.shape != cos.shape or 2 * x.shape[1] > q.shape[-1]:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (positions, at most {q.shape[-1] // 2})")


def _rotated(x, cos, sin, position, interleaved):
    """x (batch, tokens, heads, d) rotated by the angles of `position` (batch, tokens), in float32 as flash-attn does."""
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    half = cos.shape[1]
    c, s = cos[position.long()].to(real).unsqueeze(2), sin[position.long()].to(real).unsqueeze(2)
    turned = x[..., : 2 * half].to(real)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * c - b * s, a * s + b * c], dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat([a * c - b * s, a * s + b * c], dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], dim=-1)
