#!/usr/bin/env python3
"""Writes tests/golden/rope/frequencies.json: what transformers computes for the RoPE of some config.json files.

Run by hand where torch and transformers are installed (pip install torch transformers), never by the tests:

    python3 tests/tools/make_rope_golden.py

transformers computes frequencies in float32, so the tests compare to its rounding.
"""
import json
from pathlib import Path

import transformers
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

OUT = Path(__file__).resolve().parents[1] / "golden" / "rope" / "frequencies.json"

YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096}

# name: (head_dim, max_position_embeddings, rope_parameters)
CASES = {
    "default_smollm2": (64, 8192, {"rope_type": "default", "rope_theta": 100000.0}),
    "default_odd_size": (80, 2048, {"rope_type": "default", "rope_theta": 10000.0}),
    "linear": (128, 16384, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "llama3_8b": (128, 131072, {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    "llama3_1b": (64, 131072, {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
                               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    "yarn": (64, 131072, {**YARN, "beta_fast": 32.0, "beta_slow": 1.0}),
    "yarn_gpt_oss": (64, 131072, {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}),
    "yarn_qwen3": (128, 131072, {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0,
                                 "original_max_position_embeddings": 32768}),
    "yarn_attention_factor": (64, 131072, {**YARN, "attention_factor": 1.5}),
    "yarn_betas": (64, 131072, {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}),
    "yarn_mscale": (64, 163840, {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0,
                                 "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.8,
                                 "original_max_position_embeddings": 4096}),
    "yarn_factor_1": (64, 4096, {**YARN, "factor": 1.0}),
    "yarn_short_original": (32, 256, {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0,
                                      "original_max_position_embeddings": 64}),
}


def main():
    cases = {}
    for name, (head_dim, context, parameters) in CASES.items():
        config = LlamaConfig(head_dim=head_dim, hidden_size=4 * head_dim, num_attention_heads=4,
                             max_position_embeddings=context, rope_parameters=dict(parameters))
        rope = LlamaRotaryEmbedding(config)
        cases[name] = {
            "head_dim": head_dim,
            "max_position_embeddings": context,
            "rope_parameters": parameters,
            "inv_freq": [float(value) for value in rope.inv_freq],
            "attention_scaling": float(rope.attention_scaling),
        }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    with open(OUT, "w", encoding="utf-8") as file:
        json.dump({"transformers": transformers.__version__, "cases": cases}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
