"""Is attention in training attention in serving? Bit for bit per layer, and as log-probabilities of the whole model."""
import basin
import torch
from basin.hugging_face import basin_attention, basin_mask
from model import load_model
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

PAGE_TOKENS = 64
LIMITS = (0.0, 1e-4, 1e-3, 1e-2, 1e-1, float("inf"))


def record_layers(model, ids):
    """What goes into the attention of each layer in a training step's forward, and what comes out."""
    layers = []

    def recorded(module, query, key, value, attention_mask, **options):
        out, _ = basin_attention(module, query, key, value, attention_mask, **options)
        q, k, v = (x.detach().transpose(1, 2) for x in (query, key, value))
        layers.append({"q": q, "k": k, "v": v, "out": out.detach(), "sinks": options["s_aux"].detach(),
                       "scale": options["scaling"], "window": options["sliding_window"]})
        return out, None

    AttentionInterface.register("basin_recorded", recorded)
    AttentionMaskInterface.register("basin_recorded", basin_mask)
    model.train().set_attn_implementation("basin_recorded")
    model(input_ids=ids, use_cache=False)
    model.set_attn_implementation("basin")
    return layers


def replay_layer(layer):
    """The layer's outputs from a paged cache in shuffled pages that is filled token by token."""
    q, k, v = layer["q"], layer["k"], layer["v"]
    batch, tokens, kv_heads, size = k.shape
    pages = -(-tokens // PAGE_TOKENS)
    table = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0)).int().view(batch, pages).to(q.device)
    k_cache, v_cache = (x.new_full((batch * pages, PAGE_TOKENS, kv_heads, size), 1e4) for x in (k, v))  # not to be seen
    left = layer["window"] - 1 if layer["window"] else -1
    rows = []
    for t in range(tokens):
        now = slice(t, t + 1)
        lengths = torch.full((batch,), t, dtype=torch.int32, device=q.device)
        rows.append(basin.flash_attn_with_kvcache(
            q[:, now], k_cache, v_cache, k[:, now], v[:, now], cache_seqlens=lengths, block_table=table, causal=True,
            window_size=(left, 0), softmax_scale=layer["scale"], learnable_sink=layer["sinks"]))
    return torch.cat(rows, dim=1)


def check_replay(model, ids):
    """Raises AssertionError where one bit differs."""
    for number, layer in enumerate(record_layers(model, ids)):
        with torch.no_grad():
            got = replay_layer(layer)
        different = int((got != layer["out"]).sum())
        kind = f"window {layer['window']}" if layer["window"] else "full"
        print(f"replay: layer {number} ({kind}): {got.numel() - different:,} of {got.numel():,} values bitwise equal", flush=True)
        assert different == 0 and got.isfinite().all(), f"layer {number}: decode differs from training in {different} values"


def _of_next(logits, ids):
    return logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)


def trainer_log_probabilities(model, ids):
    return _of_next(model.train()(input_ids=ids, use_cache=False).logits.detach(), ids)


@torch.no_grad()
def decode_log_probabilities(model, ids):
    cache, model = DynamicCache(config=model.config), model.eval()
    steps = [model(input_ids=ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(ids.shape[1])]
    return _of_next(torch.cat(steps, dim=1), ids)


def compare_log_probabilities(folder, dtype, ids):
    """Trainer minus decode for the tokens of `ids`, by who trains and who decodes."""
    trainer, decode = {}, {}
    for name in ("basin", "eager"):
        model = load_model(folder, dtype, name).to(ids.device)
        trainer[name], decode[name] = trainer_log_probabilities(model, ids), decode_log_probabilities(model, ids)
    pairs = [("basin", "basin"), ("eager", "eager"), ("eager", "basin")]
    return {f"{a} trains, {b} decodes": (trainer[a] - decode[b]).flatten().tolist() for a, b in pairs}


def print_histogram(differences):
    print("log-probability, |trainer - decode|:" + "".join(f"{'= 0' if x == 0 else f'< {x:g}':>10}" for x in LIMITS) +
          f"{'mean':>12}{'largest':>12}")
    for name, values in differences.items():
        x = torch.tensor(values).abs()
        below = [int((x <= 0).sum())] + [int((x < limit).sum()) for limit in LIMITS[1:]]
        counts = [below[0], *(after - before for before, after in zip(below, below[1:]))]
        print(f"{name:>36}" + "".join(f"{count:>10,}" for count in counts) + f"{x.mean().item():>12.2e}{x.max().item():>12.2e}")
