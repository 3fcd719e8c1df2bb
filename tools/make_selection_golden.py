#!/usr/bin/env python3
"""Writes selections.safetensors beside a golden model with indexers: what transformers selects, and its logits, when equal scores
are taken in the order of their positions.

torch.topk leaves open which of equal scores it takes, and rows have plateaus of exact zeros: golden.safetensors of such a model
holds logits of one such choice, which depends on the length of the row. Here torch.topk is replaced by a stable sort.

  topk_L int32 [T, k]   the selection of layer L: ascending; a row without k visible keys holds those there are, then -1
  clear_L uint8 [T]     0 where the k-th score and the next differ by less than 1e-5 of the row's spread, but are not equal:
                        float arithmetic does not tell them apart
  logits float32 [T, V]

Needs torch and transformers.  Usage: make_selection_golden.py MODEL_FOLDER...
"""
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


class StableTopk:
    """torch.Tensor.topk for rows of index scores [1, T, T], and what it was given."""

    def __init__(self, tokens):
        self.tokens, self.scores, self.before = tokens, [], torch.Tensor.topk

    def __enter__(self):
        def topk(scores, k, *arguments, **options):
            if scores.dim() != 3 or scores.shape[1:] != (self.tokens, self.tokens):
                return self.before(scores, k, *arguments, **options)
            self.scores.append(scores[0].double())
            values, indices = torch.sort(scores, dim=-1, descending=True, stable=True)
            return torch.return_types.topk((values[..., :k], indices[..., :k]))

        torch.Tensor.topk = topk
        return self

    def __exit__(self, *exception):
        torch.Tensor.topk = self.before


def record(folder):
    golden = load_file(folder / "golden.safetensors")
    ids = golden["input_ids"].unsqueeze(0)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        difference = float((model(ids, use_cache=False).logits[0].float() - golden["logits"]).abs().max())
        if difference > 1e-4:
            raise SystemExit(f"{folder}: logits differ from the golden ones by {difference}; another transformers?")
        with StableTopk(ids.shape[1]) as stable:
            tensors = {"logits": model(ids, use_cache=False).logits[0].float().contiguous()}
    k = model.config.index_topk
    for layer, scores in enumerate(stable.scores):
        tokens = scores.shape[0]
        rows = torch.full((tokens, k), -1, dtype=torch.int32)
        clear = torch.ones(tokens, dtype=torch.uint8)
        for t in range(tokens):
            row = scores[t, :t + 1]
            order = torch.argsort(row, descending=True, stable=True)
            taken = order[:k].sort().values
            rows[t, :len(taken)] = taken.int()
            if t + 1 > k:
                margin = row[order[k - 1]] - row[order[k]]
                clear[t] = 0 if 0 < margin <= 1e-5 * (row.max() - row.min()) else 1
        tensors[f"topk_{layer}"], tensors[f"clear_{layer}"] = rows, clear
    save_file(tensors, folder / "selections.safetensors")
    moved = int(((tensors["logits"] - golden["logits"]).abs().amax(-1) > 2e-3).sum())
    print(folder.name, len(stable.scores), "layers; unclear rows", [int((1 - tensors[n]).sum()) for n in tensors if n.startswith("clear")],
          "; rows whose logits depend on the choice among equal scores", moved)


for argument in sys.argv[1:]:
    record(Path(argument))
