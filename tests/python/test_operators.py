"""The operators as PyTorch's own checker and compiler see them."""
import basin
import pytest
import torch
from plain import draw, tensors

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def dense(dtype):
    q, k, v, sink = tensors(dtype=dtype, d_qk=16, d_v=16)
    return (q, k, v, sink, None, None, None, None, 7, 9, 0.25, 0.0, True, 4, -1, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("check", CHECKS)
def test_opcheck_forward(check, dtype):
    torch.library.opcheck(torch.ops.basin.attention_forward.default, dense(dtype), test_utils=check)


@pytest.mark.parametrize("check", CHECKS)
def test_opcheck_ragged(check):
    begin = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    q, k, v = draw(10, 4, 16), draw(10, 2, 16, seed=2), draw(10, 2, 16, seed=3)
    torch.library.opcheck(torch.ops.basin.attention_forward.default,
                          (q, k, v, None, begin, begin, None, None, 7, 7, 0.25, 0.0, True, 0, -1, 0), test_utils=check)


@pytest.mark.parametrize("check", ("test_schema", "test_faketensor"))
def test_opcheck_backward(check):
    q, k, v, sink, *rest = dense(torch.float32)
    out, lse = torch.ops.basin.attention_forward(q, k, v, sink, *rest)
    given = [x.detach() for x in (torch.ones_like(out), torch.ones_like(lse), q, k, v, out, lse, sink)]
    torch.library.opcheck(torch.ops.basin.attention_backward.default, (*given, *rest[:3], *rest[4:]), test_utils=check)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_without_a_graph_break(backend):
    q, k, v, sink = tensors(dtype=torch.float32, d_qk=20, d_v=20)  # head size 20: padded inside

    def loss(q, k, v, sink):
        out, lse = basin.flash_attn_func(q * 2, k, v, causal=True, window_size=(3, 0), learnable_sink=sink, sink_tokens=1,
                                         return_lse=True)
        return (out * out).sum() + lse.sum()

    want = torch.autograd.grad(loss(q, k, v, sink), (q, k, v, sink))
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend=backend)(q, k, v, sink), (q, k, v, sink))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want))


def test_compile_with_changing_lengths_and_ragged_batches():
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph

    attend = torch.compile(basin.flash_attn_varlen_func, fullgraph=True, backend=backend, dynamic=True)
    for n in (5, 11, 17):
        begin = torch.tensor([0, 2, n], dtype=torch.int32)
        q, k, v = (draw(n, 2, 16, dtype=torch.float32, seed=s, grad=False) for s in range(3))
        assert torch.equal(attend(q, k, v, begin, begin, n, n, causal=True),
                           basin.flash_attn_varlen_func(q, k, v, begin, begin, n, n, causal=True))
    assert len(traced) == 1


def test_compile_the_cache():
    attend = torch.compile(basin.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    caches = [torch.zeros(2, 8, 2, 16) for _ in range(4)]
    q, k, v = (draw(2, 1, 2, 16, dtype=torch.float32, seed=s, grad=False) for s in range(3))
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    got = attend(q, caches[0], caches[1], k, v, cache_seqlens=lengths, causal=True)
    want = basin.flash_attn_with_kvcache(q, caches[2], caches[3], k, v, cache_seqlens=lengths, causal=True)
    assert torch.equal(got, want) and torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])


def test_meta_shapes_need_no_memory():
    q = torch.empty(1, 1 << 20, 64, 128, device="meta", dtype=torch.bfloat16)
    out, lse = torch.ops.basin.attention_forward(q, q, q, None, None, None, None, None, 1 << 20, 1 << 20, 1.0, 0.0, True, 0, -1,
                                                 0)
    assert out.shape == q.shape and lse.shape == (1, 64, 1 << 20) and lse.dtype == torch.float32


def test_a_forked_process_has_threads_of_its_own():
    import multiprocessing
    q, k, v, _ = (x.detach() for x in tensors(s_q=300, s_kv=300, dtype=torch.float32, d_qk=32, d_v=32))
    want = basin.flash_attn_func(q, k, v)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(basin.flash_attn_func(q, k, v).numpy().tobytes()))
    child.start()
    assert queue.get(timeout=60) == want.numpy().tobytes()  # PyTorch's own threads would hang in the child
    child.join(timeout=60)
    assert child.exitcode == 0
