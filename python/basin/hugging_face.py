"""The attention implementation `basin` of transformers: model = AutoModel...(attn_implementation="basin").

A mask is int32 [batch, 1, 1, 2], the first key and the end of the keys of each sequence, or None where every sequence has all
keys: what else a model sees follows from causality and its window. (Four dimensions: generate() makes the mask first, and the
model takes one of four dimensions as it is.) Sequences packed into one row have the mask [n + 1, 1, 1, 1]: where each begins in
the rows laid end to end. So memory does not grow with length times length, and left padding costs nothing but a copy. What
cannot be said that way (custom mask functions, padding between tokens) is refused by name.
"""
import types

import torch

from basin import _check
from basin._ops import attention
from basin.dropout import attention_with_dropout

NAME = "basin"
# Of what models hand on to their attention, these do not change what attention computes.
_WITHOUT_MEANING = {"position_ids", "cache_position", "use_cache", "output_hidden_states", "output_router_logits",
                    "num_items_in_batch", "return_dict", "logits_to_keep", "past_key_values", "labels", "token_type_ids",
                    "position_embeddings", "deterministic"}


def register():
    """Makes `basin` known to transformers (5.0 or later). Safe to call again."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("basin.register() needs transformers 5.0 or later") from error
    AttentionInterface.register(NAME, basin_attention)
    AttentionMaskInterface.register(NAME, basin_mask)


def basin_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None,
               device="cpu", **kwargs):
    """transformers' mask interface. Query i stands at q_offset + i, key j at kv_offset + j."""
    packed = _packed_sequences(mask_function)
    if packed is not None:
        return _begins(packed).view(-1, 1, 1, 1)
    end = q_offset + q_length - kv_offset  # a tensor with a static cache
    aligned = not isinstance(end, torch.Tensor) and end == kv_length
    if attention_mask is None:
        if aligned:
            return None
        mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    else:
        if attention_mask.dim() != 2:
            raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}; basin takes (batch, tokens)")
        missing = kv_length + kv_offset - attention_mask.shape[-1]
        mask = torch.nn.functional.pad(attention_mask.bool(), (0, max(missing, 0)))[:, kv_offset : kv_offset + kv_length]
    mask = mask & (torch.arange(kv_length, device=mask.device) < end)
    exact = mask.device.type == "cpu" and not torch.compiler.is_compiling()  # looking costs nothing there
    if exact and aligned and bool(mask.all()):
        return None
    _require_one_run(mask, exact)
    end = torch.as_tensor(end, device=mask.device).clamp(max=kv_length).expand(batch_size)
    begin = torch.where(mask.any(dim=-1), mask.int().argmax(dim=-1), end)
    return torch.stack([begin, end], dim=-1).to(torch.int32).view(batch_size, 1, 1, 2)


def basin_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None,
                    is_causal=None, s_aux=None, **kwargs):
    """transformers' attention interface: query (batch, heads, tokens, head size), key and value with their own heads."""
    for name, given in kwargs.items():
        if name not in _WITHOUT_MEANING and given is not None and given is not False:
            raise NotImplementedError(f"{name} is not supported by the attention implementation `{NAME}`")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    _check.first("query", q)
    _check.like("key", k, "query", q)
    _check.like("value", v, "query", q)
    _check.heads(q, k, v, "key", "value")
    _check.learnable_sink(s_aux, q)
    _check.dropout(dropout, q)
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    options = {"sink_logit": s_aux, "scale": _check.scale(scaling, q), "softcap": _check.softcap(softcap or 0.0),
               **_check.mask(causal, (sliding_window - 1 if sliding_window else -1, -1), 0)}
    packed = attention_mask is not None and attention_mask.dtype == torch.int32 and attention_mask.shape[1:] == (1, 1, 1)
    if attention_mask is not None and not packed and (attention_mask.dtype != torch.int32 or attention_mask.shape != (q.shape[0], 1, 1, 2)):
        raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)} and dtype {attention_mask.dtype}; `{NAME}` "
                         "makes its own from a (batch, tokens) mask and takes no other")
    if dropout > 0.0:
        if attention_mask is not None:
            raise NotImplementedError("dropout with a padded or packed batch is not supported")
        out, _, _ = attention_with_dropout(q, k, v, dropout, **options)
    elif attention_mask is None:
        out, _ = attention(q, k, v, max_q_tokens=q.shape[1], max_kv_tokens=k.shape[1], **options)
    elif packed:
        begins = attention_mask.flatten()
        out, _ = attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), q_begin=begins, kv_begin=begins,
                           max_q_tokens=q.shape[1], max_kv_tokens=q.shape[1], **options)
        out = out.unflatten(0, (q.shape[0], q.shape[1]))
    else:
        begin, end = attention_mask.view(-1, 2).unbind(-1)
        rows = torch.arange(k.shape[0], device=k.device, dtype=torch.int32) * k.shape[1] + begin
        out, _ = attention(q, k.flatten(0, 1), v.flatten(0, 1), kv_begin=torch.cat([rows, rows.new_zeros(1)]),
                           kv_tokens=(end - begin).contiguous(), max_q_tokens=q.shape[1], max_kv_tokens=k.shape[1], **options)
    return out, None


def _packed_sequences(mask_function):
    """The number of the sequence of each token, or None where a row is one sequence. Refuses what is neither causal nor a
    window: the operators are told of those by other ways, and anything else would be lost."""
    from transformers import masking_utils as masks
    packed, parts = None, [mask_function]
    while parts:
        part = parts.pop()
        if part is None or part in (masks.causal_mask_function, masks.bidirectional_mask_function):
            continue
        known = isinstance(part, types.FunctionType)
        name = part.__qualname__ if known else type(part).__name__
        inner = [cell.cell_contents for cell in part.__closure__ or ()] if known else []
        if name.startswith("sliding_window_overlay."):
            continue
        if name.startswith("and_masks."):
            parts += inner[0]
        elif name.startswith("packed_sequence_mask_function."):
            packed = inner[0]
        elif name.startswith("remap_positions_for_packed_sequence."):
            parts.append(inner[0])  # positions within each sequence are what a ragged batch has anyway
        else:
            raise NotImplementedError(f"the mask function {name} is not supported by `{NAME}`: it takes causal masks, sliding "
                                      "windows, padding and packed sequences")
    return packed


def _begins(packed):
    """Where each sequence begins in the rows laid end to end, and their end. While compiling the count is not known, so there
    is one for every token, and those beyond the last sequence are empty."""
    changes = torch.nn.functional.pad(packed.diff(dim=-1) != 0, (1, 0), value=True).flatten()  # rows begin anew
    place = torch.arange(changes.shape[0], device=packed.device, dtype=torch.int32)
    if not torch.compiler.is_compiling():
        return torch.cat([place[changes], place.new_full((1,), place.shape[0])])
    begins = place.new_full((place.shape[0] + 1,), place.shape[0])
    return begins.scatter_reduce(0, changes.cumsum(0) - 1, place, "amin")


def _require_one_run(mask, exact):
    """Real tokens of a sequence must lie side by side: padding between them would shift positions."""
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0))
    runs = (mask & ~before).sum(dim=-1)
    text = "attention_mask has padding between tokens; it may have some before them and behind them"
    if not exact:
        torch._assert_async((runs <= 1).all(), text)
    elif bool((runs > 1).any()):
        raise ValueError(text)
