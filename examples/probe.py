"""Where a transformers model's attention goes: four figures from basin.probe.

    python examples/probe.py MODEL TEXT_FILE [--tokens 2048] [--out probe.png]

MODEL is what transformers loads: a folder or a name. Needs basin-attention, transformers, NumPy and matplotlib. Written to be read
from top to bottom, like a notebook.
"""
import argparse

import basin
import numpy
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("text_file")
parser.add_argument("--tokens", type=int, default=2048)
parser.add_argument("--out", default="probe.png")
options = parser.parse_args()

# --- 1. Read a text, all of it in one pass, and look at every layer on the way. ---
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
with open(options.text_file, encoding="utf-8") as file:
    ids = tokenizer(file.read(), return_tensors="pt").input_ids[:, : options.tokens]
with torch.no_grad(), basin.probe.Recorder(model, map_bins=256) as recorder:
    model(ids, use_cache=False)
layers = recorder.layers  # {layer: {name: array}}, the same as basin.probe.load("data.npz")
tokens = ids.shape[1]
print(f"{tokens} tokens, {len(layers)} layers; weights of a row sum to 1 within {max(a['row_error'][0] for a in layers.values()):.1e}")

# --- 2. How much of the attention falls on the first tokens? ---
counts = layers[0]["sink_counts"]
for n, count in enumerate(counts):
    mass = numpy.array([a["sink_mass"][n].mean() for a in layers.values()])
    print(f"first {count:4} tokens hold {100 * mass.mean():5.1f} % on average, {100 * mass.max():5.1f} % in layer {mass.argmax()}")

# --- 3. Which window keeps 95 %, with and without sink tokens? ---
windows = layers[0]["windows"]
retained = numpy.mean([a["retained"].mean(axis=-1) for a in layers.values()], axis=0)  # [sink counts + 1, windows]
for n, row in enumerate(retained):
    enough = windows[row >= 0.95]
    sinks = 0 if n == 0 else counts[n - 1]
    print(f"{sinks:4} sink tokens: " + (f"a window of {enough[0]} keeps 95 %" if len(enough) else "no window keeps 95 %"))

# --- 4. Pictures. ---
try:
    import matplotlib
except ImportError:
    print("no pictures: matplotlib is not installed")
    raise SystemExit(0) from None
matplotlib.use("Agg")
from matplotlib import pyplot

figure, ((one, two), (three, four)) = pyplot.subplots(2, 2, figsize=(12, 10), constrained_layout=True)
one.set(title="weight on the first token", xlabel="head", ylabel="layer")
first = numpy.array([a["position"][:, 0] / tokens for a in layers.values()])
figure.colorbar(one.imshow(first, vmin=0, vmax=1, aspect="auto"), ax=one)

two.set(title="weight against distance", xlabel="distance + 1, in tokens", ylabel="mean weight", xscale="log", yscale="log")
reach = tokens - numpy.arange(tokens)  # queries that reach so far back
for layer, arrays in layers.items():
    two.plot(numpy.arange(1, tokens + 1), arrays["distance"].mean(axis=0) / reach, lw=0.7, color=pyplot.cm.viridis(layer / len(layers)))

three.set(title="retained share against the window", xlabel="window, in tokens", ylim=(0, 1))
three.set_xscale("log", base=2)
for n, row in enumerate(retained):
    three.plot(windows, row, marker="o", label=f"{0 if n == 0 else counts[n - 1]} sink tokens")
three.legend()

strongest = max(layers, key=lambda layer: layers[layer]["position"][:, 0].mean())
four.set(title=f"map of layer {strongest}, mean over heads, log10", xlabel="key", ylabel="query")
share = numpy.log10(numpy.maximum(layers[strongest]["map"], 1e-6))
share[numpy.triu_indices(len(share), 1)] = numpy.nan
figure.colorbar(four.imshow(share, extent=(0, tokens, tokens, 0)), ax=four)
figure.savefig(options.out, dpi=110)
print(f"wrote {options.out}")
