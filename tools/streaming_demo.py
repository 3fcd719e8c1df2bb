#!/usr/bin/env python3
"""The streaming run of ./quickstart: one novel read in three settings, a table, a picture and a verdict."""
import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = 1024          # tokens that both streaming settings may see
SINKS = 4
CHUNK = 512
CURVE_STEP = 512     # a curve point is the mean over this many tokens
GATE_FROM = 4096     # the gate looks at positions from here on
LEAST_GAIN = 1.3     # window-only perplexity over the sinks' one
MOST_LOSS = 1.15     # the sinks' perplexity over dense, where both exist


def settings(context):
    return [
        {"name": "window", "label": f"last {KEPT:,} only",
         "flags": ["--sink-tokens", "0", "--window", str(KEPT)]},
        {"name": "sinks", "label": f"first {SINKS} + last {KEPT - SINKS:,}",
         "flags": ["--sink-tokens", str(SINKS), "--window", str(KEPT - SINKS), "--positions", "in-cache"]},
        {"name": "dense", "label": f"all (up to {context:,})", "flags": [], "most": context},
    ]


def run_json(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}")
    return json.loads(done.stdout)


def full_points(run):
    """{position: mean NLL} of the curve points that stand for 512 tokens of their own. The last one may overlap."""
    # One token that is seen is never scored: the BOS, which counts as seen, or else the first.
    return {seen: nll for seen, nll in run["curve"] if (seen - 1) % CURVE_STEP == 0}


def perplexities(runs, last):
    """Perplexity of each run over the same positions, from GATE_FROM to `last`; None when there are none."""
    points = [full_points(run) for run in runs]
    common = [seen for seen in points[0]
              if GATE_FROM < seen - CURVE_STEP + 1 and seen <= last and all(seen in other for other in points)]
    if not common:
        return None
    return [math.exp(sum(other[seen] for seen in common) / len(common)) for other in points]


def verdict(runs, context):
    """The gate: perplexities and their ratios, and whether it holds (None when there is nothing to judge)."""
    by_name = {run["name"]: run for run in runs}
    window, sinks, dense = by_name["window"], by_name["sinks"], by_name["dense"]
    end = sinks["tokens"]
    shared = min(end, context)
    alone = perplexities([window, sinks], end)
    near = perplexities([sinks, dense], shared)
    result = {"from": GATE_FROM, "to": end, "shared_to": shared, "holds": None}
    if alone is None or near is None:
        return result
    result["window"], result["sinks"] = alone
    result["sinks_shared"], result["dense_shared"] = near
    result["gain"] = alone[0] / alone[1]
    result["loss"] = near[0] / near[1]
    result["holds"] = result["gain"] >= LEAST_GAIN and result["loss"] <= MOST_LOSS
    return result


def describe(result):
    if result["holds"] is None:
        return f"verdict: the text is too short to judge positions from {GATE_FROM:,} on"
    lines = [
        f"positions {result['from']:,} to {result['to']:,}: perplexity {result['window']:.2f} with the window alone, "
        f"{result['sinks']:.2f} with sinks: {result['gain']:.2f}x (gate: at least {LEAST_GAIN}x)",
        f"positions {result['from']:,} to {result['shared_to']:,}: perplexity {result['sinks_shared']:.2f} with sinks, "
        f"{result['dense_shared']:.2f} dense: {result['loss']:.3f}x (gate: at most {MOST_LOSS}x)",
    ]
    if result["holds"]:
        lines.append(f"verdict: holds. {SINKS} sink tokens keep the model working far past its window.")
    elif result["gain"] < LEAST_GAIN:
        lines.append("verdict: does NOT hold: this model loses less than expected without its sinks.")
    else:
        lines.append("verdict: does NOT hold: with sinks the model is further from dense than expected.")
    return "\n".join(lines)


def table(runs):
    head = ["setting", "tokens", "mean NLL", "perplexity", "kept tokens", "KV bytes", "seconds"]
    rows = [[run["label"], f"{run['tokens']:,}", f"{run['mean_nll']:.4f}", f"{run['perplexity']:.2f}",
             f"{run['kept_tokens_max']:,}", f"{run['kv_bytes_max']:,}", f"{run['seconds']:.1f}"] for run in runs]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append("  ".join(cells))
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--basin", required=True, help="the program")
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--title", default="", help="heading of the picture (default: the model)")
    parser.add_argument("--max-tokens", type=int, default=40_000)
    parser.add_argument("--out", type=Path, default=ROOT / "out")
    parser.add_argument("--gate", action="store_true", help="exit 1 when the gate does not hold")
    args = parser.parse_args()

    context = run_json([args.basin, "info", args.model, "--json"])["context"]
    runs = []
    for setting in settings(context):
        tokens = min(args.max_tokens, setting.get("most", args.max_tokens))
        print(f"reading {tokens:,} tokens: {setting['label']}", file=sys.stderr, flush=True)
        result = run_json([args.basin, "perplexity", args.model, "--text-file", args.text,
                           "--max-tokens", str(tokens), "--chunk-tokens", str(CHUNK), *setting["flags"], "--json"])
        runs.append({"name": setting["name"], "label": setting["label"], "flags": setting["flags"], **result})

    result = verdict(runs, context)
    report = {
        "schema": 1,
        "title": args.title or Path(args.model).name,
        "context": context,
        "marks": [[KEPT, f"{KEPT:,} kept"], [context, f"trained context {context:,}"]],
        "runs": runs,
        "gate": result,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "streaming.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(runs))
    print(describe(result))
    sys.stdout.flush()
    plotted = subprocess.run([sys.executable, str(ROOT / "tools" / "plot_streaming.py"), str(path)]).returncode
    if plotted != 0:
        return 1
    return 0 if result["holds"] or not args.gate else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        sys.exit(f"error: {error}")
