"""flash_attn_with_kvcache: appending, rotating, paging and padding against plain attention over the cache it should leave."""
import basin
import pytest
import torch
from plain import draw, plain_attention

B, CAPACITY, H, HKV, D = 3, 40, 4, 2, 32
LENGTHS = torch.tensor([7, 0, 21], dtype=torch.int32)


def turned(x, cos, sin, position, interleaved):
    """x [tokens, heads, D] with pair (a, b) turned by the angle of each position."""
    half = cos.shape[1]
    x = x.clone()
    for t, p in enumerate(position):
        for i in range(half):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
            a, b = x[t, :, first].clone(), x[t, :, second].clone()
            x[t, :, first] = a * cos[p, i] - b * sin[p, i]
            x[t, :, second] = a * sin[p, i] + b * cos[p, i]
    return x


def new_cache(**given):
    return draw(B, CAPACITY, HKV, D, grad=False, **given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rotary", [None, True, False], ids=["plain", "interleaved", "halves"])
@pytest.mark.parametrize("causal", [False, True])
def test_append_and_attend(causal, rotary, dtype):
    q, k, v = (draw(B, 5, h, D, seed=s, grad=False) for s, h in ((1, H), (2, HKV), (3, HKV)))
    k_cache, v_cache = new_cache(seed=4), new_cache(seed=5)
    sink = draw(H, seed=6, grad=False)
    angles = draw(CAPACITY, D // 4, seed=7, grad=False)
    cos, sin = (None, None) if rotary is None else (angles.cos(), angles.sin())
    want = []
    for i, n in enumerate(LENGTHS.tolist()):
        key, query = k[i], q[i]
        if rotary is not None:
            key = turned(key, cos, sin, range(n, n + 5), rotary)
            query = turned(query, cos, sin, range(n, n + 5) if causal else [n] * 5, rotary)
        keys, values = torch.cat([k_cache[i, :n], key]), torch.cat([v_cache[i, :n], v[i]])
        want.append(plain_attention(query[None], keys[None], values[None], causal=causal, learnable_sink=sink)[0][0])
    low = [x.to(dtype) if x is not None else None for x in (q, k_cache, v_cache, k, v, cos, sin)]
    untouched = low[1].clone()
    out, lse = basin.flash_attn_with_kvcache(*low, cache_seqlens=LENGTHS, causal=causal, rotary_interleaved=bool(rotary),
                                             learnable_sink=sink if dtype == torch.float64 else sink.float(),
                                             return_softmax_lse=True)
    assert (out - torch.stack(want)).abs().max() < (1e-12 if dtype == torch.float64 else 1e-5)
    assert lse.shape == (B, H, 5)
    for i, n in enumerate(LENGTHS.tolist()):
        assert torch.equal(low[2][i, n : n + 5], low[4][i])
        assert torch.equal(low[1][i, :n], untouched[i, :n]) and torch.equal(low[1][i, n + 5 :], untouched[i, n + 5 :])


def test_pages_padding_indices_and_splits_give_the_same_bits():
    q = draw(B, 2, H, D, dtype=torch.bfloat16, grad=False)
    k_cache, v_cache = new_cache(seed=4, dtype=torch.bfloat16), new_cache(seed=5, dtype=torch.bfloat16)
    options = {"causal": True, "window_size": (9, 0), "sink_tokens": 2, "learnable_sink": draw(H, dtype=torch.float32, grad=False)}
    want = basin.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=LENGTHS, **options)
    for splits in (0, 1, 7):
        assert torch.equal(want, basin.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=LENGTHS, num_splits=splits,
                                                               **options))
    # Pages of 8 in another order.
    order = torch.randperm(B * 5, generator=torch.Generator().manual_seed(1))
    table = torch.empty(B * 5, dtype=torch.int32)
    table[:] = order.argsort().int()
    pages = [x.view(B * 5, 8, HKV, D)[order] for x in (k_cache, v_cache)]
    assert torch.equal(want, basin.flash_attn_with_kvcache(q, *pages, cache_seqlens=LENGTHS, block_table=table.view(B, 5),
                                                           **options))
    # Rows of a larger cache.
    index = torch.tensor([4, 0, 2], dtype=torch.int32)
    larger = [torch.full((6, CAPACITY, HKV, D), torch.nan, dtype=torch.bfloat16) for _ in range(2)]
    for x, y in zip(larger, (k_cache, v_cache)):
        x[index.long()] = y
    assert torch.equal(want, basin.flash_attn_with_kvcache(q, *larger, cache_seqlens=LENGTHS, cache_batch_idx=index, **options))
    # Left padding: the first keys do not exist.
    pad = torch.tensor([3, 1, 12], dtype=torch.int32)
    shifted = [torch.full((B, CAPACITY + 12, HKV, D), torch.nan, dtype=torch.bfloat16) for _ in range(2)]
    for x, y in zip(shifted, (k_cache, v_cache)):
        for i, n in enumerate(pad.tolist()):
            x[i, n : n + CAPACITY] = y[i]
    assert torch.equal(want, basin.flash_attn_with_kvcache(q, *shifted, cache_seqlens=LENGTHS + pad, cache_leftpad=pad, **options))


def test_append_to_pages():
    q, k, v = (draw(2, 3, h, D, seed=s, dtype=torch.float32, grad=False) for s, h in ((1, H), (2, HKV), (3, HKV)))
    lengths = torch.tensor([6, 15], dtype=torch.int32)
    dense = [draw(2, 24, HKV, D, seed=s, dtype=torch.float32, grad=False) for s in (4, 5)]
    pages = [x.reshape(6, 8, HKV, D).clone() for x in dense]
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    want = basin.flash_attn_with_kvcache(q, *dense, k, v, cache_seqlens=lengths, causal=True)
    got = basin.flash_attn_with_kvcache(q, *pages, k, v, cache_seqlens=lengths, block_table=table, causal=True)
    assert torch.equal(got, want)
    for page, whole in zip(pages, dense):
        assert torch.equal(page.reshape(2, 24, HKV, D), whole)


def test_decode_gives_the_bits_of_the_training_forward():
    q, k, v = (draw(1, 70, h, D, seed=s, dtype=torch.bfloat16, grad=False) for s, h in ((1, H), (2, HKV), (3, HKV)))
    sink = draw(H, dtype=torch.float32, grad=False)
    options = {"causal": True, "window_size": (20, 0), "sink_tokens": 4, "learnable_sink": sink}
    want = basin.flash_attn_func(q, k, v, **options)
    caches = [torch.zeros(1, 80, HKV, D, dtype=torch.bfloat16) for _ in range(2)]
    for i in range(70):
        got = basin.flash_attn_with_kvcache(q[:, i : i + 1], *caches, k[:, i : i + 1], v[:, i : i + 1], cache_seqlens=i, **options)
        assert torch.equal(got[:, 0], want[:, i]), i


def test_without_lengths_the_whole_cache_counts():
    q, k, v = (draw(2, n, h, D, seed=s, dtype=torch.float32, grad=False) for s, n, h in ((1, 1, H), (2, 9, HKV), (3, 9, HKV)))
    assert torch.equal(basin.flash_attn_with_kvcache(q, k, v), basin.flash_attn_func(q, k, v))
    assert torch.equal(basin.flash_attn_with_kvcache(q, k, v, cache_seqlens=4), basin.flash_attn_func(q, k[:, :4], v[:, :4]))


def test_left_padding_does_not_shift_the_angles_of_new_keys():
    """As in flash-attn, whose tests rotate by cache_seqlens, padding included."""
    caches = [[torch.zeros(B, CAPACITY, HKV, D) for _ in range(2)] for _ in range(2)]
    q, k, v = (draw(B, 1, h, D, dtype=torch.float32, seed=h, grad=False) for h in (2 * HKV, HKV, HKV))
    angles = draw(CAPACITY, D // 2, dtype=torch.float32, seed=6, grad=False)
    options = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "cache_seqlens": LENGTHS, "causal": True}
    basin.flash_attn_with_kvcache(q, *caches[0], k, v, **options)
    basin.flash_attn_with_kvcache(q, *caches[1], k, v, cache_leftpad=torch.ones(B, dtype=torch.int32), **options)
    assert torch.equal(caches[0][0], caches[1][0]) and caches[0][0].abs().sum() > 0
