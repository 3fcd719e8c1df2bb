"""A small gpt-oss: windowed and full layers in turn, learned sinks, grouped heads of size 64, experts behind a router."""
import types

import torch
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

# 5.7 million parameters, 11.4 MB in bfloat16.
SHAPE = {"hidden_size": 192, "intermediate_size": 192, "num_hidden_layers": 6, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 128, "num_local_experts": 4,
         "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}


def make_model(tokenizer, seed, **shape):
    """In float32, with the same weights for the same seed."""
    end = tokenizer.eos_token_id
    config = GptOssConfig(vocab_size=len(tokenizer), bos_token_id=end, eos_token_id=end, pad_token_id=None, **{**SHAPE, **shape})
    torch.manual_seed(seed)
    return with_dense_experts(GptOssForCausalLM._from_config(config, dtype=torch.float32))


def load_model(folder, dtype, attention):
    return with_dense_experts(GptOssForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention))


def with_dense_experts(model):
    """Every expert takes every token, and the router's weights, zero for those it did not choose, add them up: for a few small
    experts quicker than sorting tokens, and deterministic, since nothing is summed by atomics."""
    for module in model.modules():
        if isinstance(module, GptOssExperts):
            module.forward = types.MethodType(_dense_experts, module)
    return model


def _dense_experts(self, hidden_states, router_indices=None, routing_weights=None):
    weights = hidden_states.new_zeros(len(hidden_states), self.num_experts).scatter(1, router_indices, routing_weights)
    every = hidden_states.expand(self.num_experts, -1, -1)
    inner = self._apply_gate(torch.baddbmm(self.gate_up_proj_bias.unsqueeze(1), every, self.gate_up_proj))
    out = torch.baddbmm(self.down_proj_bias.unsqueeze(1), inner, self.down_proj)
    return (out * weights.t().unsqueeze(-1)).sum(0)


def sinks_of(model):
    """[layers, heads]"""
    return torch.stack([layer.self_attn.sinks.detach().float() for layer in model.model.layers])


class Trainer:
    """AdamW over float32 copies of weights that the model itself has in `dtype`: what is saved is what was trained with."""

    def __init__(self, model, dtype, steps, rate):
        self.masters = [p.detach().clone() for p in model.parameters()]
        self.model = model.to(dtype)
        self.weights = list(model.parameters())
        matrices = [p for p in self.masters if p.dim() > 1]
        others = [p for p in self.masters if p.dim() <= 1]  # sinks, norms, biases: nothing draws them to zero
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
        warmup = max(1, min(100, steps // 10))
        self.schedule = torch.optim.lr_scheduler.SequentialLR(self.optimizer, milestones=[warmup], schedulers=[
            torch.optim.lr_scheduler.LinearLR(self.optimizer, 1 / warmup, 1.0, warmup),
            torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, max(1, steps - warmup), rate / 10)])

    def step(self, rows):
        """One step over tokens [rows, length + 1]. Returns the loss, still on the device."""
        out = self.model(input_ids=rows[:, :-1], use_cache=False, output_router_logits=True)
        loss = torch.nn.functional.cross_entropy(out.logits.float().flatten(0, 1), rows[:, 1:].flatten())
        (loss + self.model.config.router_aux_loss_coef * out.aux_loss).backward()
        for master, weight in zip(self.masters, self.weights):
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.schedule.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)
        return loss.detach()


@torch.no_grad()
def mean_loss(model, rows, at_once=16):
    total = 0.0
    for part in rows.split(at_once):
        logits = model(input_ids=part[:, :-1], use_cache=False).logits.float()
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    return total / rows[:, 1:].numel()
