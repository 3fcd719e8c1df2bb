"""A Llama in NumPy whose attention is one explicit mask over all keys: no cache, no pages, no chunks. It is what a text read
through `sink_tokens` and `window` must come to, at any length and in any company."""
import json
import os
import struct

import numpy as np


def read_tensors(directory):
    """{name: float32 array} of model.safetensors."""
    with open(os.path.join(directory, "model.safetensors"), "rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
        data = file.read()
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if entry["dtype"] == "F32":
            values = np.frombuffer(data[begin:end], np.float32)
        elif entry["dtype"] == "BF16":
            values = (np.frombuffer(data[begin:end], np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data[begin:end], {"F16": np.float16}[entry["dtype"]]).astype(np.float32)
        tensors[name] = values.reshape(entry["shape"])
    return tensors


class Llama:
    def __init__(self, directory):
        with open(os.path.join(directory, "config.json"), encoding="utf-8") as file:
            self.config = json.load(file)
        self.tensors = read_tensors(directory)

    def weight(self, name):
        return self.tensors.get(f"model.{name}.weight", self.tensors.get(f"{name}.weight"))

    def norm(self, x, name):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config["rms_norm_eps"]) * self.weight(name)

    def rotate(self, x, positions):
        """x [tokens, heads, d] at the given positions; the halves of a head belong together."""
        d = x.shape[-1]
        theta = self.config.get("rope_theta") or self.config["rope_parameters"]["rope_theta"]
        angles = np.outer(positions.astype(np.float64), theta ** (-np.arange(0, d, 2) / d))
        cos, sin = (f(angles).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
        a, b = x[..., :d // 2], x[..., d // 2:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attention(self, q, k, v, sink_tokens, window, in_cache):
        """q, k [tokens, heads, d] before rotation. Sinks are seen from where they would stand among the kept tokens."""
        tokens, heads, d = q.shape
        group = heads // k.shape[1]
        position = np.arange(tokens)
        last_kept = np.minimum(position, sink_tokens + window - 1) if in_cache and window else position
        q_recent, q_sink, k = self.rotate(q, position), self.rotate(q, last_kept), self.rotate(k, position)
        out = np.empty_like(q)
        rows = 512  # at a time: a score for each row and key is all there is of memory
        for begin in range(0, tokens, rows):
            end = min(begin + rows, tokens)
            p, j = position[begin:end, None], position[None, :end]
            visible = (j <= p) & ((j < sink_tokens) | (p - j < window)) if window else j <= p
            for head in range(heads):
                keys = k[:end, head // group].T
                scores = q_recent[begin:end, head] @ keys
                scores[:, :sink_tokens] = (q_sink[begin:end, head] @ keys)[:, :sink_tokens]
                scores = np.where(visible, scores / np.sqrt(np.float32(d)), -np.inf)
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                out[begin:end, head] = weights @ v[:end, head // group] / weights.sum(axis=-1, keepdims=True)
        return out

    def logprobs(self, ids, sink_tokens=0, window=0, positions="in-cache"):
        """Of each token but the first, given those before it that the mask shows."""
        config = self.config
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        x = self.weight("embed_tokens")[np.asarray(ids)]
        for i in range(config["num_hidden_layers"]):
            layer = f"layers.{i}"
            h = self.norm(x, f"{layer}.input_layernorm")
            q, k, v = ((h @ self.weight(f"{layer}.self_attn.{name}_proj").T).reshape(len(ids), count, -1)
                       for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)))
            attended = self.attention(q, k, v, sink_tokens, window, positions == "in-cache")
            x = x + attended.reshape(len(ids), -1) @ self.weight(f"{layer}.self_attn.o_proj").T
            h = self.norm(x, f"{layer}.post_attention_layernorm")
            gate = h @ self.weight(f"{layer}.mlp.gate_proj").T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ self.weight(f"{layer}.mlp.up_proj").T)) @ self.weight(
                f"{layer}.mlp.down_proj").T
        x = self.norm(x, "norm")
        head = self.weight("lm_head")
        head = self.weight("embed_tokens") if head is None else head
        chosen = np.empty(len(ids) - 1)
        for begin in range(0, len(ids) - 1, 256):
            end = min(begin + 256, len(ids) - 1)
            logits = (x[begin:end] @ head.T).astype(np.float64)
            peak = logits.max(axis=-1)
            chosen[begin:end] = (logits[np.arange(end - begin), ids[begin + 1:end + 1]] - peak
                                 - np.log(np.exp(logits - peak[:, None]).sum(axis=-1)))
        return chosen
