"""The operators on a GPU against those on the CPU: run this file with pytest where there is a Hopper GPU."""
import basin
import pytest
import torch
from plain import draw, tensors

pytestmark = pytest.mark.skipif(basin.cuda_missing() is not None, reason=str(basin.cuda_missing()))
H, HKV = 8, 2
OPTIONS = {"full": {}, "causal": {"causal": True}, "two_sided": {"window_size": (30, 20)},
           "softcap": {"causal": True, "softcap": 5.0},
           "sink_tokens": {"causal": True, "window_size": (100, 0), "sink_tokens": 4}}


def there(x):
    return x.cuda() if isinstance(x, torch.Tensor) else x


def compare(function, *given, **options):
    """Both devices round differently: outputs agree to their dtype, lse to float32."""
    want = function(*given, **options)
    got = function(*map(there, given), **{name: there(x) for name, x in options.items()})
    want, got = (x if isinstance(x, tuple) else (x,) for x in (want, got))
    for a, b in zip(got, want):
        assert a.is_cuda and a.shape == b.shape and a.dtype == b.dtype
        assert torch.allclose(a.float().cpu(), b.float(), atol=2e-2 if a.dtype != torch.float32 else 2e-3, rtol=0)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("d, d_v", [(20, 20), (40, 40), (64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_forward(dtype, d, d_v, name):
    q, k, v, sink = (x.detach() for x in tensors(s_q=300, s_kv=410, h_q=H, h_kv=HKV, d_qk=d, d_v=d_v, dtype=dtype))
    compare(basin.flash_attn_func, q, k, v, learnable_sink=sink, return_lse=True, **OPTIONS[name])


def test_ragged():
    begin = torch.tensor([0, 5, 5, 300, 301], dtype=torch.int32)
    q, k, v = (draw(301, h, 128, dtype=torch.bfloat16, seed=h, grad=False) for h in (H, HKV, HKV))
    compare(basin.flash_attn_varlen_func, q, k, v, begin, begin, 295, 295, causal=True, return_lse=True)


@pytest.mark.parametrize("page", [0, 16, 64])
def test_cache(page):
    k_cache, v_cache = (draw(3, 256, HKV, 128, dtype=torch.bfloat16, seed=s, grad=False) for s in (1, 2))
    q, k, v = (draw(3, 2, h, 128, dtype=torch.bfloat16, seed=s, grad=False) for s, h in ((3, H), (4, HKV), (5, HKV)))
    angles = draw(256, 32, dtype=torch.float32, seed=6, grad=False)
    options = {"cache_seqlens": torch.tensor([7, 100, 33], dtype=torch.int32), "causal": True, "rotary_cos": angles.cos(),
               "rotary_sin": angles.sin(), "rotary_interleaved": False, "window_size": (50, 0), "sink_tokens": 2}
    if page:
        k_cache, v_cache = k_cache.view(-1, page, HKV, 128), v_cache.view(-1, page, HKV, 128)
        options["block_table"] = torch.arange(3 * 256 // page, dtype=torch.int32).view(3, -1)
    compare(lambda q, a, b, *rest, **o: basin.flash_attn_with_kvcache(q, a.clone(), b.clone(), *rest, **o), q, k_cache, v_cache, k,
            v, **options)


def test_left_padding_and_rows_of_a_cache():
    k_cache, v_cache = (draw(3, 256, HKV, 64, dtype=torch.bfloat16, seed=s, grad=False) for s in (1, 2))
    q = draw(3, 1, H, 64, dtype=torch.bfloat16, grad=False)
    lengths = torch.tensor([19, 112, 45], dtype=torch.int32)
    compare(basin.flash_attn_with_kvcache, q, k_cache, v_cache, cache_seqlens=lengths, causal=True,
            cache_leftpad=torch.tensor([3, 0, 12], dtype=torch.int32))
    compare(basin.flash_attn_with_kvcache, q, k_cache, v_cache, cache_seqlens=lengths, causal=True,
            cache_batch_idx=torch.tensor([2, 0, 1], dtype=torch.int32))


def long_problem():
    return [draw(1, 200, h, 128, dtype=torch.bfloat16, seed=h, grad=False).cuda() for h in (H, HKV, HKV)]


def test_decode_gives_the_bits_of_the_training_forward():
    q, k, v = long_problem()
    whole = basin.flash_attn_func(q, k, v, causal=True)
    for i in range(0, 200, 7):
        one = basin.flash_attn_with_kvcache(q[:, i : i + 1], k[:, : i + 1].contiguous(), v[:, : i + 1].contiguous(), causal=True)
        assert torch.equal(one[:, 0], whole[:, i]), i


def test_graph_capture_and_compile():
    q, k, v = long_problem()
    basin.flash_attn_func(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = basin.flash_attn_func(q, k, v, causal=True)
    q.mul_(0.5)
    want = basin.flash_attn_func(q, k, v, causal=True)
    graph.replay()
    assert torch.equal(out, want)
    compiled = torch.compile(basin.flash_attn_func, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, causal=True), want)


def test_nothing_waits_for_the_device():
    q, k, v = long_problem()
    lengths = torch.tensor([100], dtype=torch.int32, device="cuda")
    sink = torch.zeros(H, device="cuda")
    new_k, new_v = k[:, :1].clone(), v[:, :1].clone()
    basin.flash_attn_with_kvcache(q[:, :1], k, v, new_k, new_v, cache_seqlens=lengths, causal=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        basin.flash_attn_func(q, k, v, causal=True, learnable_sink=sink)
        basin.flash_attn_with_kvcache(q[:, :1], k, v, new_k, new_v, cache_seqlens=lengths, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gradients(function, tensors, dout, dlse=None, **options):
    tensors = [x.detach().requires_grad_() for x in tensors]
    *inputs, sink = tensors
    out, lse = function(*inputs, learnable_sink=sink, return_lse=True, **options)
    total = (out.float() * dout).sum() if dlse is None else (out.float() * dout).sum() + (lse * dlse).sum()
    return torch.autograd.grad(total, tensors)


def compare_gradients(function, tensors, dout, dlse, **options):
    """Against the CPU in float32: the error of bfloat16 products, by size of the gradient."""
    want = gradients(function, [x.float() for x in tensors], dout, dlse, **options)
    got = gradients(function, [x.cuda() for x in tensors], dout.cuda(), dlse.cuda(),
                    **{name: there(x) for name, x in options.items()})
    for name, a, b in zip(("q", "k", "v", "sink"), got, want):
        assert a.is_cuda and a.shape == b.shape
        error = (a.float().cpu() - b).norm() / (b.norm() + 1e-6)
        assert error < 2e-2, (name, float(error))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("d, d_v", [(20, 20), (64, 64), (128, 128), (192, 128), (256, 256)])
def test_gradients(d, d_v, name):
    given = [x.detach() for x in tensors(s_q=300, s_kv=410, h_q=H, h_kv=HKV, d_qk=d, d_v=d_v, dtype=torch.bfloat16)]
    b = given[0].shape[0]
    dout = draw(b, 300, H, d_v, dtype=torch.float32, seed=8, grad=False)
    dlse = draw(b, H, 300, dtype=torch.float32, seed=9, grad=False)
    compare_gradients(basin.flash_attn_func, given, dout, dlse, **OPTIONS[name])


def test_gradients_of_ragged_sequences():
    begin = torch.tensor([0, 5, 5, 300, 301], dtype=torch.int32)
    given = [draw(301, h, 128, dtype=torch.bfloat16, seed=h, grad=False) for h in (H, HKV, HKV)]
    given.append(torch.linspace(-1, 2, H))
    dout = draw(301, H, 128, dtype=torch.float32, seed=8, grad=False)
    dlse = draw(H, 301, dtype=torch.float32, seed=9, grad=False)
    for window in ((-1, -1), (40, 0)):
        compare_gradients(basin.flash_attn_varlen_func, given, dout, dlse, cu_seqlens_q=begin, cu_seqlens_k=begin,
                          max_seqlen_q=295, max_seqlen_k=295, causal=True, window_size=window)


def test_gradients_in_any_layout_accumulate_and_repeat():
    q, k, v = (x.requires_grad_() for x in long_problem())
    basin.flash_attn_func(q, k, v, causal=True).sum().backward()  # its gradient has strides of 0
    first = [x.grad.clone() for x in (q, k, v)]
    basin.flash_attn_func(q, k, v, causal=True).sum().backward()
    for x, once in zip((q, k, v), first):
        assert torch.equal(x.grad, once + once)
    transposed = k.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    again = torch.autograd.grad(basin.flash_attn_func(q, transposed, v, causal=True).sum(), (q, transposed, v))
    for a, b in zip(again, first):
        assert torch.equal(a, b)


def test_a_training_step_compiles_and_can_be_captured():
    q, k, v = (x.requires_grad_() for x in long_problem())
    sink = torch.zeros(H, device="cuda", requires_grad=True)

    def step(q, k, v, sink):
        return basin.flash_attn_func(q, k, v, causal=True, learnable_sink=sink).square().sum()

    want = torch.autograd.grad(step(q, k, v, sink), (q, k, v, sink))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(q, k, v, sink), (q, k, v, sink)), want):
        assert torch.equal(a, b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(step(q, k, v, sink), (q, k, v, sink))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(step(q, k, v, sink), (q, k, v, sink))
    graph.replay()
    for a, b in zip(captured, want):
        assert torch.equal(a, b)


def test_what_is_refused_by_name():
    q = draw(1, 8, 2, 64, dtype=torch.bfloat16).detach().cuda().requires_grad_()
    with pytest.raises(NotImplementedError, match="dropout_p > 0 is not supported on CUDA"):
        basin.flash_attn_func(q, q, q, 0.1)
    with pytest.raises(TypeError, match="q is float32; on cuda"):
        basin.flash_attn_func(q.float(), q.float(), q.float())
    with pytest.raises(ValueError, match="k is on cpu and q is on cuda"):
        basin.flash_attn_func(q, q.cpu(), q)
