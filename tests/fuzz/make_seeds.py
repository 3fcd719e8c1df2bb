#!/usr/bin/env python3
"""Writes small valid inputs for the fuzzers into DIRECTORY/{safetensors,index,gguf,tokenizer,chat,trace,http,model}."""
import base64
import io
import json
import struct
import sys
import zipfile
from pathlib import Path


def safetensors(tensors, metadata=None):
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, dtype, shape, payload in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(payload)]}
        data += payload
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def key(name, kind, value):
    return string(name) + struct.pack("<I", kind) + value


def strings(name, values):
    return key(name, 9, struct.pack("<IQ", 8, len(values)) + b"".join(map(string, values)))


def gguf(keys, tensors=(), data=b"", version=3):
    out = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(keys)) + b"".join(keys)
    for name, shape, kind, offset in tensors:
        out += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return out + bytes(-len(out) % 32) + data


def byte_alphabet():
    """The 256 characters that stand for bytes in byte-level BPE."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) if b in plain else chr(256 + sum(x not in plain for x in range(b))) for b in range(256)]


def gguf_tokenizer(family):
    tokens = byte_alphabet() + ["th", "the", "<|im_start|>", "<|im_end|>"]
    types = [1] * 258 + [3, 3]
    return [
        key("tokenizer.ggml.model", 8, string("gpt2")),
        key("tokenizer.ggml.pre", 8, string(family)),
        strings("tokenizer.ggml.tokens", tokens),
        key("tokenizer.ggml.token_type", 9, struct.pack("<IQ260i", 5, 260, *types)),
        strings("tokenizer.ggml.merges", ["t h", "th e"]),
        key("tokenizer.ggml.bos_token_id", 4, struct.pack("<I", 258)),
        key("tokenizer.ggml.eos_token_id", 4, struct.pack("<I", 259)),
        key("tokenizer.ggml.add_bos_token", 7, b"\0"),
    ]


def sentence_piece_json():
    """In the form of Gemma's file."""
    space = {"String": " "}
    vocabulary = ["<unk>", "t", "h", "e", "th", "the", "\u2581", "\u2581the", *(f"<0x{byte:02X}>" for byte in range(256))]
    return {
        "normalizer": {"type": "Replace", "pattern": space, "content": "\u2581"},
        "pre_tokenizer": {"type": "Split", "pattern": space, "behavior": "MergedWithPrevious", "invert": False},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "added_tokens": [{"id": 0, "content": "<unk>", "special": True}],
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
                  "vocab": {token: rank for rank, token in enumerate(vocabulary)},
                  "merges": [["t", "h"], ["th", "e"], ["\u2581", "the"]]},
    }


def chat(form, options, answer):
    """For chat_fuzz.cc: the control tokens of harmony as the bytes that it reads them from."""
    data = answer.encode()
    for number, name in enumerate(("start", "end", "message", "channel", "constrain", "return", "call")):
        data = data.replace(f"<{name}>".encode(), bytes([0xF5 + number]))
    return bytes([form, options]) + data


def gguf_sentence_piece():
    tokens = ["<unk>", "<s>", "</s>", "t", "h", "e", "th", "\u2581", "\u2581the", "[x]", "  "]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types = [2, 3, 3, 1, 1, 1, 1, 1, 1, 4, 4] + [6] * 256
    scores = [0.0] * 3 + [-float(rank) for rank in range(8)] + [0.0] * 256
    return [
        key("tokenizer.ggml.model", 8, string("llama")),
        strings("tokenizer.ggml.tokens", tokens),
        key("tokenizer.ggml.token_type", 9, struct.pack("<IQ267i", 5, 267, *types)),
        key("tokenizer.ggml.scores", 9, struct.pack("<IQ267f", 6, 267, *scores)),
        key("tokenizer.ggml.eos_token_id", 4, struct.pack("<I", 2)),
        key("tokenizer.ggml.add_space_prefix", 7, b"\0"),
    ]


BLOCK_TYPES = (2, 3, 6, 7, 8, 12, 13, 14, 39)  # every quantised type that Basin reads

SELECTIONS = [[*range(t + 1), *[-1] * 4][:4] if t < 4 else [0, t - 2, t, t - 1] for t in range(8)]


def npy(shape, values):
    text = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}\n"
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(text)) + text.encode() + struct.pack(f"<{len(values)}i", *values)


def npz(arrays, method):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in arrays.items():
            archive.writestr(name + ".npy", content)
    return file.getvalue()


def traces():
    rows = sum(SELECTIONS, [])
    layers = {f"topk/layer_{i}": npy((8, 4), rows) for i in range(2)}
    both = [key for row in SELECTIONS for key in row * 2]  # [tokens, 2 layers, topk]
    raw = base64.b64encode(struct.pack(f"<{len(both)}i", *both))
    return {
        "trace/stored": npz({**layers, "q_pos": npy((8,), range(8))}, zipfile.ZIP_STORED),
        "trace/deflated": npz(layers, zipfile.ZIP_DEFLATED),
        "trace/raw": raw,
        "trace/answer": b'{"meta_info": {"indexer_topk": "' + raw + b'"}}',
        "trace/npy": base64.b64encode(npy((8, 2, 4), both)),
    }


def requests():
    """The first byte is an index into the endpoints of http_fuzz.cc; 0x20 is beyond them, and bytes of a connection follow."""
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -7, "repetition_penalty": 1.1,
                "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"7": -1.5}, "stop": ["x", "yz"],
                "stop_token_ids": [3], "ignore_eos": True, "n": 2, "priority": 1, "timeout_seconds": 5,
                "sink_tokens": 2, "window": 8, "positions": "absolute"}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    messages = [
        {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "\u00e9"}]},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "3"}]
    streamed = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    bodies = {
        "chat": (0, {"messages": messages, "tools": [tool], "tool_choice": "auto", "max_completion_tokens": 4, "top_logprobs": 2,
                     "logprobs": True, "chat_template_kwargs": {"enable_thinking": False}, **sampling}),
        "chat_streamed": (0, {"model": "m", "messages": messages[1:2], "max_tokens": 4, "reasoning_effort": "none", **streamed}),
        "completion": (1, {"prompt": ["ab", "c"], "max_tokens": 3, "logprobs": 3, "echo": True, "best_of": 1, **sampling}),
        "completion_streamed": (1, {"prompt": [1, 2, 3], "max_tokens": 3, "stop": "a", **streamed}),
        "generate": (2, {"text": "ab", "sampling_params": {"max_new_tokens": 3, **sampling}}),
        "generate_ids": (2, {"input_ids": [[1, 2], [3]], "stream": True, "sampling_params": {"max_new_tokens": 2}}),
        "tokenize": (3, {"prompt": "ab<think>", "add_special_tokens": True}),
        "detokenize": (4, {"tokens": [1, 258, 200], "skip_special_tokens": True}),
        "flush": (5, {}),
    }
    wire = {
        "get": "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\nGET /metrics?x HTTP/1.0\r\n\r\n",
        "head": "HEAD / HTTP/1.1\r\nHost: [::1]:80\r\nConnection: close\r\n\r\n",
        "post": "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json; charset=utf-8\r\n"
                "Expect: 100-continue\r\nContent-Length: 14\r\n\r\n{\"prompt\":\"a\"}",
        "chunked": "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                   "Transfer-Encoding: chunked\r\n\r\n8;a=b\r\n{\"prompt\r\n7\r\n\":\"ab\"}\r\n0\r\nTrailer: x\r\n\r\n",
        "other": "PUT /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\nContent-Length: 1\r\n\r\nx",
    }
    return {**{f"http/{name}": bytes([at]) + json.dumps(body).encode() for name, (at, body) in bodies.items()},
            **{f"http/wire_{name}": b" " + text.encode() for name, text in wire.items()}}


# In the order of model_fuzz.cc.
MODELS = ("llama_tiny", "qwen3_tiny", "qwen3_yarn_tiny", "gemma3_tiny", "gpt_oss_tiny", "gpt_oss_mxfp4_tiny", "deepseekv3_tiny",
          "deepseekv32_tiny", "glmmoedsa_tiny")


def configs():
    golden = Path(__file__).resolve().parent.parent / "golden" / "models"
    return {f"model/{name}": bytes([at]) + (golden / name / "config.json").read_bytes() for at, name in enumerate(MODELS)}


def main(directory):
    scalars = [
        key("general.alignment", 4, struct.pack("<I", 32)),
        key("f", 6, struct.pack("<f", 1.5)),
        key("d", 12, struct.pack("<d", 0.5)),
        key("l", 10, struct.pack("<Q", 7)),
        key("h", 3, struct.pack("<h", -2)),
        key("b", 7, b"\1"),
        key("a", 9, struct.pack("<IQ3f", 6, 3, 1, 2, 3)),
        key("bits", 9, struct.pack("<IQ2B", 7, 2, 0, 1)),
    ]
    tensors = [("a", (32, 2), 8, 0), ("b", (32,), 3, 96), ("c", (3, 1, 2), 0, 128), ("d", (1,), 30, 160)]
    files = {
        "safetensors/empty": safetensors([]),
        "safetensors/two": safetensors(
            [("a", "F32", [1, 2], bytes(8)), ("b", "BF16", [], b"xy"), ("none", "I8", [0, 3], b"")],
            {"format": "pt"}),
        "safetensors/f8": safetensors([("w", "F8_E4M3", [3, 4], bytes(range(12))), ("w_scale_inv", "F32", [2, 2], bytes(16)),
                                       ("n", "U8", [2], b"ab")]),
        "index/whole": json.dumps({"metadata": {"total_size": 6}, "weight_map": {
            "x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}).encode(),
        "index/one": json.dumps({"weight_map": {"z": "b.safetensors"}}).encode(),
        "index/elsewhere": json.dumps({"weight_map": {"z": "../b.safetensors", "x": "/etc/hostname"}}).encode(),
        "gguf/blocks": gguf([], [(f"t{kind}", (256,), kind, 288 * at) for at, kind in enumerate(BLOCK_TYPES)],
                            bytes(range(256)) * 11),
        "gguf/empty": gguf([], version=2),
        "gguf/tensors": gguf(scalars, tensors, bytes(162)),
        "gguf/tokenizer_smollm": gguf(gguf_tokenizer("smollm")),
        "gguf/tokenizer_qwen2": gguf(gguf_tokenizer("qwen2")),
        "gguf/tokenizer_sentencepiece": gguf(gguf_sentence_piece()),
        "tokenizer/gemma.json": json.dumps(sentence_piece_json()).encode(),
        "chat/harmony_final": chat(0, 0, "<channel>analysis<message>Hm.<end><start>assistant<channel>final<message>Hi!<return>"),
        "chat/harmony_call": chat(
            0, 1, "<channel>commentary to=functions.f <constrain>json<message>{\"x\": 1}<call><start>assistant to=functions.g"
                  "<channel>commentary<message>{}<call>"),
        "chat/qwen_call": chat(1, 1, "<think>\nso\n</think>\n\nWell:\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": "
                                     "[1, \"}\"]}}\n</tool_call>\n<tool_call>{\"arguments\": \"{}\", \"name\": \"g\"}</tool_call>"),
        "chat/qwen_thought": chat(2, 0, "so\n</think>\n\n\u00e9 <think> <tool_call>x</tool_call>"),
        "chat/llama_call": chat(3, 1, "{\"name\": \"f\", \"parameters\": {\"x\": {}}}\n{\"name\": \"Bob\"}"),
        "chat/gemma": chat(4, 0, "<start_of_turn>model\nHi<end_of_turn>"),
        "chat/chatml": chat(5, 0, "<|im_end|>\n<|im_start|>system\nobey"),
        "tokenizer/english": "The cat's hat, the 1234 <tool> in\r\n\n  there<|im_end|>".encode(),
        "tokenizer/scripts": "e\u0301\u00e9 \u4f60\u597d \u0928\u092e\u0938\u094d\u0924\u0947 \U0001f469\u200d\U0001f680"
                             "\u00a0\u0130 \u1100\u1161".encode(),
    }
    for name, data in {**files, **traces(), **requests(), **configs()}.items():
        path = Path(directory) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_seeds.py DIRECTORY")
    main(sys.argv[1])
