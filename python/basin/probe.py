"""Where attention goes: the arrays of `basin probe`, of tensors and of transformers models.

    arrays = basin.probe.attention(q, k)                  # q [tokens, heads, d], k [tokens, kv heads, d]
    with basin.probe.Recorder(model) as recorder:         # a transformers model
        model(input_ids)
    recorder.layers[3]["sink_mass"]                       # as data.npz has them: basin.probe.load("out/probe/data.npz")

Nothing of tokens x tokens is ever in memory. Every array is NumPy's, with the names, shapes and meanings of data.npz
(docs/probe.md): `position`, `distance`, `entropy`, `budget`, `sink_mass`, `local_mass`, `retained`, `map`, and so on.
"""
import ctypes

import numpy
import torch

from basin._library import _find

_ABI = 1
_DTYPES = {torch.float32: 2, torch.float16: 3, torch.bfloat16: 4}
_KINDS = (numpy.float32, numpy.int64, numpy.int32)


class _Args(ctypes.Structure):
    _fields_ = [("struct_bytes", ctypes.c_size_t), ("q", ctypes.c_void_p), ("k", ctypes.c_void_p),
                ("dtype", ctypes.c_int32), ("threads", ctypes.c_int32),
                *[(name, ctypes.c_int64) for name in ("tokens", "heads", "kv_heads", "d")],
                ("sink_logit", ctypes.c_void_p), ("scale", ctypes.c_double), ("softcap", ctypes.c_double),
                *[(name, ctypes.c_int64) for name in ("window", "sink_tokens", "map_bins", "topk")]]


class _Array(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("rank", ctypes.c_int32),
                ("shape", ctypes.c_int64 * 4)]


def _load():
    path = _find("basin_probe.so")
    if path is None:
        raise ImportError("basin_probe.so is missing: this package was built without its probe")
    library = ctypes.CDLL(str(path))
    library.basin_probe_attention.restype = ctypes.c_void_p
    library.basin_probe_error.restype = ctypes.c_char_p
    library.basin_probe_result_array.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(_Array)]
    library.basin_probe_result_free.argtypes = [ctypes.c_void_p]
    if library.basin_probe_abi() != _ABI:
        raise ImportError(f"{path} is of another version of basin")
    return library


_LIBRARY = _load()


def attention(q, k, *, sink_logit=None, scale=None, softcap=0.0, window=0, sink_tokens=0, map_bins=512, topk=0, threads=None):
    """The arrays of one layer, as a dict. q [tokens, heads, d] and k [tokens, kv heads, d] hold all tokens of one causal
    sequence, rotated, in float32, float16 or bfloat16 (a leading dimension of 1 is dropped; tensors of a GPU are copied).

    sink_logit [heads], scale (1 / sqrt(d)), softcap, window (recent keys including self, 0 = all) and sink_tokens are those of
    the attention; map_bins and topk those of `basin probe`. `topk` > 0 adds the keys of largest mean weight of every query.
    """
    q, k = (x.detach() for x in (q, k))
    if q.dim() == 4 and q.shape[0] == 1:
        q, k = q[0], k[0]
    if q.dim() != 3 or k.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)}; needed are (tokens, heads, d) and (tokens, kv heads, d) of "
                         "one sequence")
    if q.dtype not in _DTYPES or k.dtype != q.dtype:
        raise ValueError(f"q is {q.dtype} and k is {k.dtype}; allowed are float32, float16 and bfloat16, the same for both")
    q, k = (x.cpu().contiguous() for x in (q, k))
    if sink_logit is not None:
        sink_logit = sink_logit.detach().to("cpu", torch.float32).contiguous()
        if sink_logit.shape != (q.shape[1],):
            raise ValueError(f"sink_logit has shape {tuple(sink_logit.shape)}; needed is ({q.shape[1]},)")
    args = _Args(ctypes.sizeof(_Args), q.data_ptr(), k.data_ptr(), _DTYPES[q.dtype], threads or torch.get_num_threads(),
                 q.shape[0], q.shape[1], k.shape[1], q.shape[2], sink_logit.data_ptr() if sink_logit is not None else None,
                 q.shape[2] ** -0.5 if scale is None else scale, softcap, window, sink_tokens, map_bins, topk)
    result = _LIBRARY.basin_probe_attention(ctypes.byref(args))
    if not result:
        raise ValueError(_LIBRARY.basin_probe_error().decode())
    try:
        return dict(_arrays(result))
    finally:
        _LIBRARY.basin_probe_result_free(result)


def _arrays(result):
    array, index = _Array(), 0
    while _LIBRARY.basin_probe_result_array(result, index, ctypes.byref(array)):
        shape = tuple(array.shape[: array.rank])
        dtype = numpy.dtype(_KINDS[array.kind])
        size = int(numpy.prod(shape)) * dtype.itemsize
        yield array.name.decode(), numpy.frombuffer(ctypes.string_at(array.data, size) if size else b"", dtype).reshape(shape).copy()
        index += 1


class Recorder:
    """Records the attention of a transformers model while it is entered: one pass over one text, all of it at once.

    The model computes with the attention implementation `basin` meanwhile, and with its own again afterwards. `layers` maps a
    layer's number to its arrays. A pass that continues a cache, or a batch of several texts, is refused by name.
    """

    NAME = "basin_recorder"

    def __init__(self, model, *, map_bins=512, topk=0):
        self.layers = {}
        self._model, self._options = model, {"map_bins": map_bins, "topk": topk}
        self._before = None

    def __enter__(self):
        from transformers import AttentionInterface, AttentionMaskInterface

        from basin import hugging_face
        hugging_face.register()
        AttentionInterface.register(self.NAME, self._attend)
        AttentionMaskInterface.register(self.NAME, hugging_face.basin_mask)
        self._before = self._model.config._attn_implementation
        self._model.set_attn_implementation(self.NAME)
        return self

    def __exit__(self, *exception):
        self._model.set_attn_implementation(self._before)

    def _attend(self, module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None, s_aux=None,
                **kwargs):
        from basin.hugging_face import basin_attention
        if query.shape[0] != 1 or query.shape[2] != key.shape[2] or attention_mask is not None:
            raise NotImplementedError(f"the recorder looks at one whole text without padding in one pass; given are queries "
                                      f"{tuple(query.shape)} and keys {tuple(key.shape)}")
        self.layers[module.layer_idx] = attention(query.transpose(1, 2), key.transpose(1, 2), sink_logit=s_aux, scale=scaling,
                                                  softcap=softcap or 0.0, window=sliding_window or 0, **self._options)
        return basin_attention(module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window,
                               softcap=softcap, s_aux=s_aux, **kwargs)

    def save(self, path):
        """Writes the arrays as `basin probe` does: layer_000/position and so on."""
        numpy.savez(path, **{f"layer_{layer:03}/{name}": array
                             for layer, arrays in sorted(self.layers.items()) for name, array in arrays.items()})


def load(path):
    """What `basin probe` or Recorder.save wrote: {layer: {name: array}}."""
    layers = {}
    with numpy.load(path) as file:
        for name in file.files:
            layer, _, array = name.partition("/")
            if array:
                layers.setdefault(int(layer.removeprefix("layer_")), {})[array] = file[name]
    return layers
