#!/usr/bin/env python3
"""Trains a small gpt-oss on text, once with Basin's attention and once with eager's, from the same seed and data.

Writes OUT/training.json, OUT/training.png and, from the run with Basin, OUT/model in Hugging Face's layout. See
docs/training.md.
"""
import argparse
import json
import time
from pathlib import Path

import basin
import torch
import transformers
from model import Trainer, load_model, make_model, mean_loss, sinks_of
from picture import draw
from replay import check_replay, compare_log_probabilities, print_histogram
from text import Tokens, make_tokenizer, read_books

CARD = """# A small language model with learned sinks

gpt-oss's architecture: {parameters:,} parameters, {layers} layers with windows of {window} tokens and full attention in turn,
{heads} query heads on {kv_heads} key heads of size {head_size}, {experts} experts of which {chosen} speak. One learned sink for
each head and layer.

| | |
| --- | --- |
| made by | `examples/training/train_sinks.py` of Basin, {steps} steps of {rows} x {length} tokens, seed {seed}, {dtype}, on {device} |
| text | {text}, {tokens:,} tokens; the last {held_out:.0%} held out |
| tokenizer | byte-level BPE of that text, {vocabulary} tokens |
| loss | {loss:.3f} nats per token in training (mean of the last 50 steps), {held_out_loss:.3f} held out |
| sinks | from {first_low:.2f} ... {first_high:.2f} at the start to {last_low:.2f} ... {last_high:.2f} |
| use | a test of sinks in kernels, converters and servers. It says nothing true, and nothing that its text would not |
"""


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="text file (.txt, .txt.xz), or a folder of such files")
    parser.add_argument("--out", type=Path, default=Path("trained"), help="folder to write (default: trained)")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=16, help="sequences in a batch")
    parser.add_argument("--length", type=int, default=1024, help="tokens in a sequence")
    parser.add_argument("--rate", type=float, default=2e-3, help="largest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repeat-steps", type=int, default=100, help="steps to train again: every loss must be the same, bit for bit")
    parser.add_argument("--check", action="store_true", help="replay training through paged decode, and compare log-probabilities")
    parser.add_argument("--check-rows", type=int, default=4)
    parser.add_argument("--text-name", help="what the data card says about the text")
    return parser.parse_args()


def train(args, tokenizer, tokens, attention, stop):
    """The first `stop` steps. Returns the model, the losses, and the sinks with their steps."""
    model = make_model(tokenizer, args.seed, num_hidden_layers=args.layers).to(args.device)
    model.set_attn_implementation(attention)
    trainer = Trainer(model.train(), getattr(torch, args.dtype), args.steps, args.rate)
    losses, sinks, sink_steps = [], [sinks_of(model)], [0]
    begin = time.perf_counter()
    for step, rows in enumerate(tokens.batches(stop, args.rows, args.length, args.seed), start=1):
        losses.append(trainer.step(rows))
        if step % 10 == 0 or step == stop:
            sinks.append(sinks_of(model))
            sink_steps.append(step)
        if step % 100 == 0 or step == stop:
            mean = torch.stack(losses[-50:]).mean().item()  # waits for the device, so that the time is true
            print(f"{attention}: step {step}, loss {mean:.4f}, {(time.perf_counter() - begin) / step * 1e3:.1f} ms a step", flush=True)
    seconds = time.perf_counter() - begin
    return model, {"loss": torch.stack(losses).tolist(), "sinks": torch.stack(sinks).tolist(), "sink_steps": sink_steps,
                   "seconds_per_step": seconds / stop}


def data_card(args, model, tokens, run):
    config, sinks = model.config, torch.tensor(run["sinks"])
    return CARD.format(
        parameters=sum(p.numel() for p in model.parameters()), layers=config.num_hidden_layers, window=config.sliding_window,
        heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, head_size=config.head_dim,
        experts=config.num_local_experts, chosen=config.num_experts_per_tok, steps=args.steps, rows=args.rows, length=args.length,
        seed=args.seed, dtype=args.dtype, device=torch.cuda.get_device_name() if args.device == "cuda" else "the CPU",
        text=args.text_name or args.text.name, tokens=len(tokens.training) + len(tokens.held_out),
        held_out=len(tokens.held_out) / (len(tokens.training) + len(tokens.held_out)), vocabulary=config.vocab_size,
        loss=sum(run["loss"][-50:]) / len(run["loss"][-50:]), held_out_loss=run["held_out_loss"], first_low=sinks[0].min(),
        first_high=sinks[0].max(), last_low=sinks[-1].min(), last_high=sinks[-1].max())


def main():
    args = arguments()
    basin.register()
    books = read_books(args.text)
    tokenizer = make_tokenizer(books, args.vocabulary)
    tokens = Tokens(books, tokenizer, args.device)
    held_out = tokens.held_out_rows(args.length)
    print(f"text: {len(books)} books, {len(tokens.training):,} tokens to train on, {len(tokens.held_out):,} held out", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    folder, runs = args.out / "model", {}
    for attention in ("basin", "eager"):
        model, runs[attention] = train(args, tokenizer, tokens, attention, args.steps)
        runs[attention]["held_out_loss"] = mean_loss(model.eval(), held_out)
        print(f"{attention}: held out loss {runs[attention]['held_out_loss']:.4f}", flush=True)
        if attention == "basin":
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            (folder / "README.md").write_text(data_card(args, model, tokens, runs[attention]))
    report = {"steps": args.steps, "rows": args.rows, "length": args.length, "seed": args.seed, "dtype": args.dtype,
              "torch": torch.__version__, "transformers": transformers.__version__,
              "windows": [layer.self_attn.sliding_window for layer in model.model.layers], "runs": runs}
    ours, eager = (torch.tensor(runs[name]["loss"]) for name in ("basin", "eager"))
    moved = torch.tensor(runs["basin"]["sinks"])
    moved = (moved[-1] - moved[0]).abs()
    print(f"losses differ by {(ours - eager).abs().mean():.2e} on average, by {(ours - eager)[-50:].mean():+.2e} over the "
          f"last 50 steps; sinks moved by {moved.mean():.3f} on average, by {moved.max():.3f} at most", flush=True)
    try:
        again = min(args.repeat_steps, args.steps)
        if again > 0:
            _, repeated = train(args, tokenizer, tokens, "basin", again)
            same = sum(a == b for a, b in zip(repeated["loss"], runs["basin"]["loss"]))
            report["repeated_steps_equal"] = same == again
            print(f"repeat: {same} of {again} steps trained again have bitwise the same loss", flush=True)
        if args.check:
            ids = held_out[: args.check_rows, : args.length]
            report["log_probability_differences"] = compare_log_probabilities(folder, getattr(torch, args.dtype), ids)
            print_histogram(report["log_probability_differences"])
            check_replay(load_model(folder, getattr(torch, args.dtype), "basin").to(args.device), ids)
            report["replay_bitwise_equal"] = True
        assert report.get("repeated_steps_equal", True), "training again gave other losses"
    finally:  # what was trained is kept when a check fails
        (args.out / "training.json").write_text(json.dumps(report))
        try:
            draw(report, args.out / "training.png")
        except ImportError:
            print("training.png was not drawn: matplotlib is not installed")


if __name__ == "__main__":
    main()
