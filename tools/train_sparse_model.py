#!/usr/bin/env python3
"""Trains a small model with sparse attention (deepseek_v32, bytes as tokens) on a text, in minutes on a CPU, to have selections to
study that are neither random nor DeepSeek's: first the model with dense attention, then its indexers towards what the heads look at
together (KL, as published). Writes a checkpoint in the Hugging Face layout and, beside it, the text's bytes as tokens.safetensors.

Needs torch and transformers.  Usage: train_sparse_model.py TEXT_FILE OUT_FOLDER [--minutes 4]
"""
import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

TOPK, TOKENS, BATCH = 64, 256, 8
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("text_file")
parser.add_argument("out")
parser.add_argument("--minutes", type=float, default=4)
options = parser.parse_args()

torch.manual_seed(0)
data = torch.tensor(list(Path(options.text_file).read_bytes()))
held_out, data = data[:4096], data[4096:]
config = DeepseekV32Config(
    vocab_size=256, hidden_size=96, intermediate_size=192, moe_intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=2,
    first_k_dense_replace=2, kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
    max_position_embeddings=4096, index_n_heads=4, index_head_dim=32, index_topk=4096, eos_token_id=None, bos_token_id=None,
    pad_token_id=None)
model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)


def batch():
    begin = torch.randint(0, len(data) - TOKENS - 1, (BATCH,))
    return torch.stack([data[b : b + TOKENS + 1] for b in begin])


def train(parameters, loss_of, seconds, rate, what):
    optimiser, start, steps = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01), time.monotonic(), 0
    while (spent := time.monotonic() - start) < seconds:
        for group in optimiser.param_groups:  # up for a tenth of the time, then down
            group["lr"] = rate * min(10 * spent / seconds + 0.02, 1.1 - spent / seconds)
        loss = loss_of(batch())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        steps += 1
        if steps % 50 == 0:
            print(f"{what}: step {steps}, {spent:.0f} s, loss {loss.item():.3f}", flush=True)
    print(f"{what}: {steps} steps, last loss {loss.item():.3f}", flush=True)


# --- 1. The model, with dense attention. ---
indexers = [layer.self_attn.indexer for layer in model.model.layers]
indexer_parameters = [p for indexer in indexers for p in indexer.parameters()]
own = {id(p) for p in indexer_parameters}
rest = [p for p in model.parameters() if id(p) not in own]
for parameter in rest:
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=0.06)


def next_byte(ids):
    logits = model(ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


train(rest, next_byte, options.minutes * 60 * 0.7, 3e-3, "model")

# --- 2. The indexers, towards the attention of all heads together. ---
seen = {}
for number, indexer in enumerate(indexers):
    indexer.register_forward_pre_hook(
        lambda module, args, kwargs, number=number: seen.__setitem__(number, (args, kwargs)), with_kwargs=True)


def scores(indexer, hidden, q_latent, position_embeddings):
    """Index scores [batch, queries, keys] with gradients, as the indexer computes them without."""
    cosine, sine = position_embeddings
    rope = indexer.qk_rope_head_dim
    q = indexer.wq_b(q_latent).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    q_rot, k_rot = apply_rotary_pos_emb(q[..., :rope], k[..., :rope], cosine, sine, unsqueeze_dim=2)
    q, k = torch.cat([q_rot, q[..., rope:]], -1), torch.cat([k_rot, k[..., rope:]], -1).squeeze(2)
    dots = F.relu(torch.einsum("bihd,bjd->bihj", q, k) * indexer.softmax_scale)
    return torch.einsum("bihj,bih->bij", dots, indexer.weights_proj(hidden) * indexer.n_heads**-0.5)


def divergence(ids):
    with torch.no_grad():
        attentions = model(ids[:, :-1], use_cache=False, output_attentions=True).attentions
    total = 0.0
    for number, (indexer, weights) in enumerate(zip(indexers, attentions)):
        arguments, named = seen[number]
        hidden, q_latent, position_embeddings = (x for x in arguments[:3])
        target = weights.sum(1) / weights.sum((1, 3), keepdim=False).unsqueeze(-1)
        causal = torch.ones(target.shape[-2:], dtype=torch.bool).tril()
        guess = scores(indexer, hidden, q_latent, position_embeddings).masked_fill(~causal, -1e9)
        total = total + F.kl_div(guess.log_softmax(-1), target, reduction="batchmean") / target.shape[1]
    return total / len(indexers)


train(indexer_parameters, divergence, options.minutes * 60 * 0.3, 3e-3, "indexers")

# --- 3. Save it as a sparse model. ---
model.config.index_topk = TOPK
model.to(torch.bfloat16).save_pretrained(options.out)
save_file({"input_ids": held_out}, Path(options.out) / "tokens.safetensors")
print(f"wrote {options.out}: basin probe {options.out} --tokens {options.out}/tokens.safetensors --out DIR")
