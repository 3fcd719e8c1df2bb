"""Attention with sinks for PyTorch: flash-attn's functions, forward and backward, with learnable sinks and sink tokens.

    import basin
    out = basin.flash_attn_func(q, k, v, causal=True, window_size=(127, 0), learnable_sink=sinks, sink_tokens=4)

    arrays = basin.probe.attention(q, k)    # where attention goes (needs NumPy)

The functions take flash-attn 2.8's arguments in its order and return what it returns; what Basin adds is keyword-only.
"""
from basin._library import __version__, cuda_missing
from basin.flash import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from basin.kv_cache import flash_attn_with_kvcache
from basin.merge import finish, merge_states

__all__ = [
    "__version__",
    "cuda_missing",
    "finish",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "merge_states",
    "register",
]


def __getattr__(name):
    """basin.probe needs NumPy, so it is imported when it is first used."""
    if name == "probe":
        import importlib
        return importlib.import_module("basin.probe")
    raise AttributeError(f"module 'basin' has no attribute '{name}'")


def register():
    """Adds the attention implementation `basin` to transformers; see basin.hugging_face."""
    from basin import hugging_face
    hugging_face.register()
