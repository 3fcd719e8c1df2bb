"""The two operators as PyTorch sees them: shapes for tracing, and the backward of the forward."""
import torch

from basin import _library  # noqa: F401  (defines the operators)


@torch.library.register_fake("basin::attention_forward")
def _forward_shapes(q, k, v, sink_logit, q_begin, kv_begin, kv_tokens, page_table, max_q_tokens, max_kv_tokens, scale,
                    softcap, causal, window, window_right, sink_tokens):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    return out, q.new_empty(lse_shape, dtype=lse_dtype(q))


@torch.library.register_fake("basin::attention_backward")
def _backward_shapes(dout, dlse, q, k, v, out, lse, sink_logit, q_begin, kv_begin, kv_tokens, max_q_tokens,
                     max_kv_tokens, scale, softcap, causal, window, window_right, sink_tokens):
    sinks = 0 if sink_logit is None else q.shape[-2]
    return (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), q.new_empty((sinks,), dtype=lse_dtype(q)))


def lse_dtype(q):
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _save(ctx, inputs, output):
    q, k, v, sink_logit, q_begin, kv_begin, kv_tokens, page_table, *ctx.rest = inputs
    out, lse = output
    ctx.paged = page_table is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, sink_logit, q_begin, kv_begin, kv_tokens)


def _backward(ctx, dout, dlse):
    q, k, v, out, lse, sink_logit, q_begin, kv_begin, kv_tokens = ctx.saved_tensors
    if ctx.paged:
        raise NotImplementedError("block_table has no backward: a paged cache is for inference")
    if dout is None and dlse is None:
        return (None,) * 16
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dsink = torch.ops.basin.attention_backward(dout, dlse, q, k, v, out, lse, sink_logit, q_begin, kv_begin,
                                                           kv_tokens, *ctx.rest)
    return (dq, dk, dv, None if sink_logit is None else dsink) + (None,) * 12


torch.library.register_autograd("basin::attention_forward", _backward, setup_context=_save)


def _no_second_order(ctx, *gradients):
    raise NotImplementedError("attention_backward cannot be differentiated again: second-order gradients do not exist")


torch.library.register_autograd("basin::attention_backward", _no_second_order)


def _padded(x, multiple):
    """Zeros behind the head size change no score and no output, and the kernels have head sizes in steps."""
    missing = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def attention(q, k, v, *, sink_logit=None, q_begin=None, kv_begin=None, kv_tokens=None, page_table=None,
              max_q_tokens, max_kv_tokens, scale, softcap=0.0, causal, window=0, window_right=-1, sink_tokens=0):
    """(out, lse) of checked arguments. sink_logit of any dtype; window counts keys including self, 0 = unlimited."""
    d_v = v.shape[-1]
    if q.dtype != torch.float64:  # the reference has every head size
        multiple = 8 if q.is_cuda else 16
        q, k, v = _padded(q, multiple), _padded(k, multiple), _padded(v, multiple)
    if sink_logit is not None:
        sink_logit = sink_logit.to(lse_dtype(q)).contiguous()
    out, lse = torch.ops.basin.attention_forward(q, k, v, sink_logit, q_begin, kv_begin, kv_tokens, page_table,
                                                 max_q_tokens, max_kv_tokens, scale, softcap, causal, window,
                                                 window_right, sink_tokens)
    return (out if out.shape[-1] == d_v else out[..., :d_v].contiguous()), lse
