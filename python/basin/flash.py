"""flash-attn's functions: its arguments in its order, its meanings, its return values.

Added, keyword-only: `learnable_sink` [h_q] joins every row's softmax as one more logit without a value; `sink_tokens` keeps
the first tokens of each sequence visible beside the window; `return_lse` returns (out, softmax_lse). softmax_lse holds the
sink and is differentiable. A row that sees no key has out = 0 and softmax_lse = the sink's logit (-inf without one).
"""
from basin import _check
from basin._ops import attention
from basin.dropout import attention_with_dropout, varlen_attention_with_dropout

_ALIBI = "Basin has no position biases"


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False, *, learnable_sink=None,
                    sink_tokens=0, return_lse=False):
    """Attention of q (batch, seqlen_q, nheads, headdim) over k and v (batch, seqlen_k, nheads_k, headdim).

    Masks are aligned to the bottom right corner. Gradients are deterministic whatever `deterministic` says.
    Returns out, or (out, softmax_lse) with return_lse, or (out, softmax_lse, S_dmask) with return_attn_probs.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check.rank(name, x, "(batch, tokens, heads, head size)")
    _check.first("q", q)
    _check.like("k", k, "q", q)
    _check.like("v", v, "q", q)
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch size {q.shape[0]} and k {k.shape[0]}; they must be equal")
    options = _options(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                       learnable_sink, sink_tokens)
    probabilities = q.new_empty(0)
    if dropout_p > 0.0:
        out, lse, probabilities = attention_with_dropout(q, k, v, dropout_p, **options)
    else:
        out, lse = attention(q, k, v, max_q_tokens=q.shape[1], max_kv_tokens=k.shape[1], **options)
    return _result(out, lse, probabilities, return_attn_probs, return_lse)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False, *, learnable_sink=None,
                             sink_tokens=0, return_lse=False):
    """flash_attn_func with kv (batch, seqlen_k, 2, nheads_k, headdim)."""
    k, v = _unpack("kv", kv, 2, "(batch, tokens, 2, heads, head size)")
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                           return_attn_probs, learnable_sink=learnable_sink, sink_tokens=sink_tokens,
                           return_lse=return_lse)


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False, *, learnable_sink=None,
                              sink_tokens=0, return_lse=False):
    """flash_attn_func with qkv (batch, seqlen, 3, nheads, headdim)."""
    q, k, v = _unpack("qkv", qkv, 3, "(batch, tokens, 3, heads, head size)")
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                           return_attn_probs, learnable_sink=learnable_sink, sink_tokens=sink_tokens,
                           return_lse=return_lse)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           deterministic=False, return_attn_probs=False, block_table=None, *, learnable_sink=None,
                           sink_tokens=0, return_lse=False):
    """Attention of sequences that lie one behind the other: q (total_q, nheads, headdim), k and v (total_k, nheads_k,
    headdim), sequence i in rows cu_seqlens[i] to cu_seqlens[i + 1]. With block_table (batch, blocks), k and v are
    (num_blocks, page_block_size, nheads_k, headdim), and there is no backward.

    softmax_lse is (nheads, total_q).
    """
    _check.rank("q", q, "(tokens, heads, head size)")
    keys = "(tokens, heads, head size)" if block_table is None else "(blocks, tokens, heads, head size)"
    _check.rank("k", k, keys)
    _check.rank("v", v, keys)
    _check.first("q", q)
    _check.like("k", k, "q", q)
    _check.like("v", v, "q", q)
    cu_seqlens_q = _check.cumulative("cu_seqlens_q", cu_seqlens_q, q)
    batch = cu_seqlens_q.shape[0] - 1
    cu_seqlens_k = _check.int32_vector("cu_seqlens_k", cu_seqlens_k, q, batch + 1)
    lengths = {"q_begin": cu_seqlens_q, "max_q_tokens": _check.whole("max_seqlen_q", max_seqlen_q),
               "max_kv_tokens": _check.whole("max_seqlen_k", max_seqlen_k)}
    options = _options(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                       learnable_sink, sink_tokens)
    if block_table is None:
        lengths["kv_begin"] = cu_seqlens_k
    else:
        lengths["page_table"] = page_table("block_table", block_table, q, batch)
        lengths["kv_tokens"] = cu_seqlens_k.diff()
    probabilities = q.new_empty(0)
    if dropout_p > 0.0:
        _check.absent("block_table with dropout_p > 0", block_table, "a paged cache is for inference")
        out, lse, probabilities = varlen_attention_with_dropout(q, k, v, dropout_p, **lengths, **options)
    else:
        out, lse = attention(q, k, v, **lengths, **options)
    return _result(out, lse, probabilities, return_attn_probs, return_lse)


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                                    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                                    alibi_slopes=None, deterministic=False, return_attn_probs=False, *,
                                    learnable_sink=None, sink_tokens=0, return_lse=False):
    """flash_attn_varlen_func with kv (total_k, 2, nheads_k, headdim)."""
    k, v = _unpack("kv", kv, 2, "(tokens, 2, heads, head size)")
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs, learnable_sink=learnable_sink, sink_tokens=sink_tokens,
                                  return_lse=return_lse)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                     window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False, *, learnable_sink=None, sink_tokens=0, return_lse=False):
    """flash_attn_varlen_func with qkv (total, 3, nheads, headdim)."""
    q, k, v = _unpack("qkv", qkv, 3, "(tokens, 3, heads, head size)")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
                                  causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
                                  learnable_sink=learnable_sink, sink_tokens=sink_tokens, return_lse=return_lse)


def page_table(name, table, q, batch):
    _check.is_tensor(name, table)
    _check.same_device(name, table, "q", q)
    if table.dim() != 2 or table.shape[0] != batch:
        raise ValueError(f"{name} has shape {tuple(table.shape)}; it must have shape ({batch}, blocks)")
    _check.int32_vector(name, table.flatten(), q, table.numel())
    return table.contiguous()


def _options(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
             learnable_sink, sink_tokens):
    _check.heads(q, k, v)
    _check.absent("alibi_slopes", alibi_slopes, _ALIBI)
    _check.dropout(dropout_p, q)
    _check.flag("deterministic", deterministic)
    _check.learnable_sink(learnable_sink, q)
    return {"sink_logit": learnable_sink, "scale": _check.scale(softmax_scale, q), "softcap": _check.softcap(softcap),
            **_check.mask(causal, window_size, sink_tokens)}


def _unpack(name, packed, count, what):
    _check.rank(name, packed, what)
    if packed.shape[-3] != count:
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; it must be {what}")
    return packed.unbind(-3)


def _result(out, lse, probabilities, return_attn_probs, return_lse):
    if return_attn_probs:
        return out, lse, probabilities
    return (out, lse) if return_lse else out
