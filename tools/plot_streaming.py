#!/usr/bin/env python3
"""Draws mean NLL against position for several settings: out/streaming.json -> .svg (and .png with rsvg-convert)."""
import argparse
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 960, 540
LEFT, RIGHT, TOP, BOTTOM = 84, 30, 100, 64
COLOURS = ["#c0392b", "#1f6fb2", "#2e8b57", "#8e6c1f"]
DASHES = ["", "", "7 4", "2 3"]
FONT = "DejaVu Sans, sans-serif"


def ticks(low, high, most):
    """Round numbers between low and high, at most `most` + 1 of them."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def text(x, y, content, size=14, anchor="middle", extra=""):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" {extra}>'
            f"{escape(content)}</text>")


def draw(series, title, marks):
    """SVG text. series: [(label, [(tokens_seen, mean_nll)])]; marks: [(tokens, label)], vertical lines."""
    points = [point for _, curve in series for point in curve]
    if not points:
        raise ValueError("nothing to draw: no curve has a point")
    if not all(math.isfinite(x) and math.isfinite(y) for x, y in points):
        raise ValueError("a curve holds a number that is not finite")
    x_high = max(x for x, _ in points)
    y_low, y_high = min(y for _, y in points), max(y for _, y in points)
    pad = max(0.08 * (y_high - y_low), 0.05)
    y_low, y_high = max(0.0, y_low - pad), y_high + pad
    to_x = lambda x: LEFT + (WIDTH - LEFT - RIGHT) * x / x_high
    to_y = lambda y: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - y_low) / (y_high - y_low)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
           f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="{FONT}" fill="#222">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
           text(LEFT, 28, title, 17, "start", 'font-weight="bold"')]
    for y in ticks(y_low, y_high, 6):
        out.append(f'<line x1="{LEFT}" y1="{to_y(y):.1f}" x2="{WIDTH - RIGHT}" y2="{to_y(y):.1f}" stroke="#ddd"/>')
        out.append(text(LEFT - 8, to_y(y) + 5, f"{y:g}", 14, "end"))
    for x in ticks(0, x_high, 8):
        out.append(f'<line x1="{to_x(x):.1f}" y1="{HEIGHT - BOTTOM}" x2="{to_x(x):.1f}" y2="{HEIGHT - BOTTOM + 6}" '
                   'stroke="#222"/>')
        out.append(text(to_x(x), HEIGHT - BOTTOM + 22, f"{int(x):,}"))
    for position, label in marks:
        if position <= x_high:
            x = to_x(position)
            out.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#777" '
                       'stroke-dasharray="3 4"/>')
            out.append(text(x, TOP - 14, label, 13, "middle", 'fill="#555"'))
    out.append(f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#222"/>')
    for i, (_, curve) in enumerate(series):
        path = "M" + "L".join(f"{to_x(x):.1f} {to_y(y):.1f}" for x, y in curve)
        dash = DASHES[i % len(DASHES)]
        out.append(f'<path d="{path}" fill="none" stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="2.5" '
                   f'stroke-linejoin="round"{f" stroke-dasharray={chr(34)}{dash}{chr(34)}" if dash else ""}/>')
    # The legend stands in one row between heading and axes, where no curve can be.
    x, y = LEFT, 58
    for i, (label, _) in enumerate(series):
        dash = DASHES[i % len(DASHES)]
        out.append(f'<line x1="{x:.1f}" y1="{y - 5}" x2="{x + 34:.1f}" y2="{y - 5}" '
                   f'stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="3"'
                   f'{f" stroke-dasharray={chr(34)}{dash}{chr(34)}" if dash else ""}/>')
        out.append(text(x + 42, y, label, 14, "start"))
        x += 78 + 8.6 * len(label)
    middle = (TOP + HEIGHT - BOTTOM) / 2
    out.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, "position in the text (tokens)", 15))
    out.append(text(24, middle, "mean NLL of the last 512 tokens (nats per token)", 15, "middle",
                    f'transform="rotate(-90 24 {middle:.1f})"'))
    out.append("</svg>\n")
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, help="streaming.json as ./quickstart writes it")
    parser.add_argument("--out", type=Path, help="SVG file to write (default: beside the JSON)")
    args = parser.parse_args()
    report = json.loads(args.json.read_text(encoding="utf-8"))
    svg = args.out or args.json.with_suffix(".svg")
    series = [(run["label"], run["curve"]) for run in report["runs"]]
    svg.write_text(draw(series, report["title"], [tuple(mark) for mark in report["marks"]]), encoding="utf-8")
    print(f"wrote {svg}")
    if shutil.which("rsvg-convert") is None:
        print("no rsvg-convert (Debian: librsvg2-bin): the PNG is not written", file=sys.stderr)
        return 1
    png = svg.with_suffix(".png")
    subprocess.run(["rsvg-convert", "--zoom=1.5", f"--output={png}", str(svg)], check=True)
    print(f"wrote {png}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError, KeyError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
