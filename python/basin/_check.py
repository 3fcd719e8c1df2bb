"""Checks of what a caller gives. Every message names the argument, what it is and what it must be."""
import sys

import torch

from basin._library import kernels_missing

MAX_HEAD = 256
_CPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_CUDA_DTYPES = (torch.float16, torch.bfloat16)
_SINK_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _names(dtypes):
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def is_tensor(name, x):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")


def rank(name, x, what):
    """`what` names the dimensions: "(batch, tokens, heads, head size)"."""
    is_tensor(name, x)
    wanted = what.count(",") + 1
    if x.dim() != wanted:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have {wanted} dimensions {what}")


def first(name, x):
    """The tensor that dtype and device of the call are those of."""
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {x.device}; basin runs on cpu and cuda")
    if x.is_cuda and kernels_missing():
        raise NotImplementedError(f"{name} is on {x.device}, and {kernels_missing()}")
    allowed = _CUDA_DTYPES if x.is_cuda else _CPU_DTYPES
    if x.dtype not in allowed:
        raise TypeError(f"{name} is {_names([x.dtype])}; on {x.device.type} it must be one of {_names(allowed)}")


def like(name, x, reference_name, reference):
    same_device(name, x, reference_name, reference)
    if x.dtype != reference.dtype:
        raise TypeError(f"{name} is {_names([x.dtype])} and {reference_name} is {_names([reference.dtype])}; "
                        "they must have one dtype")


def same_device(name, x, reference_name, reference):
    if x.device != reference.device:
        raise ValueError(f"{name} is on {x.device} and {reference_name} is on {reference.device}; "
                         "they must be on one device")


def heads(q, k, v, k_name="k", v_name="v"):
    """Head counts and head sizes of q [..., h_q, d_qk], k [..., h_kv, d_qk] and v [..., h_kv, d_v]."""
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"{k_name} has shape {tuple(k.shape)} and {v_name} {tuple(v.shape)}; "
                         "they may differ in the head size only")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head size {q.shape[-1]} and {k_name} {k.shape[-1]}; they must be equal")
    if k.shape[-2] < 1 or q.shape[-2] < 1 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q has {q.shape[-2]} heads and {k_name} {k.shape[-2]}; the first must be a positive multiple of "
                         "the second")
    for name, x in (("q", q), (v_name, v)):
        if not 1 <= x.shape[-1] <= MAX_HEAD:
            raise ValueError(f"{name} has head size {x.shape[-1]}; head sizes are 1 to {MAX_HEAD}")


def int32_vector(name, x, q, entries):
    is_tensor(name, x)
    same_device(name, x, "q", q)
    if x.dtype != torch.int32:
        raise TypeError(f"{name} is {_names([x.dtype])}; it must be int32")
    if x.dim() != 1 or x.shape[0] != entries:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have shape ({entries},)")
    return x.contiguous()


def cumulative(name, x, q):
    is_tensor(name, x)
    if x.dim() != 1 or x.shape[0] < 1:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have shape (batch + 1,)")
    return int32_vector(name, x, q, x.shape[0])


def whole(name, value, least=0):
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
    return value


def learnable_sink(sink, q):
    if sink is None:
        return
    is_tensor("learnable_sink", sink)
    same_device("learnable_sink", sink, "q", q)
    allowed = _SINK_DTYPES + ((torch.float64,) if q.dtype == torch.float64 else ())
    if sink.dtype not in allowed:
        raise TypeError(f"learnable_sink is {_names([sink.dtype])}; it must be one of {_names(allowed)}")
    if tuple(sink.shape) != (q.shape[-2],):
        raise ValueError(f"learnable_sink has shape {tuple(sink.shape)}; it must have shape ({q.shape[-2]},), one logit "
                         "per query head")


def scale(softmax_scale, q):
    if softmax_scale is None:
        return q.shape[-1] ** -0.5
    number("softmax_scale", softmax_scale)
    return float(softmax_scale)


def number(name, value):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float, not {type(value).__name__}")
    if not -sys.float_info.max <= value <= sys.float_info.max:  # math.isfinite cannot be compiled
        raise ValueError(f"{name} is {value}; it must be finite")


def flag(name, value):
    if not isinstance(value, (bool, int)):
        raise TypeError(f"{name} must be a bool, not {type(value).__name__}")
    return bool(value)


def mask(causal, window_size, sink_tokens):
    """flash-attn's window counts keys besides self, -1 = unlimited; the operators count self, 0 = unlimited."""
    if isinstance(window_size, torch.Tensor) and not window_size.is_floating_point():
        window_size = tuple(window_size.tolist()) if window_size.dim() == 1 else window_size  # flash-attn takes these, too
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size is {window_size!r}; it must be (left, right), -1 = unlimited")
    for side in window_size:
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)):
            raise TypeError(f"window_size is {window_size!r}; it must hold two ints")
    left, right = window_size
    return {"causal": flag("causal", causal), "window": left + 1 if left >= 0 else 0,
            "window_right": right if right >= 0 else -1, "sink_tokens": whole("sink_tokens", sink_tokens)}


def softcap(value):
    number("softcap", value)
    return max(float(value), 0.0)  # as in flash-attn, nothing above zero means off


def absent(name, value, why):
    if value is not None:
        raise NotImplementedError(f"{name} is not supported: {why}")


def dropout(p, q):
    number("dropout_p", p)
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout_p is {p}; it must be in [0, 1)")
    if p > 0.0 and q.is_cuda:
        raise NotImplementedError("dropout_p > 0 is not supported on CUDA tensors; on the CPU it is")
