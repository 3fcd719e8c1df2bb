#!/usr/bin/env python3
"""What PyTorch reaches on this GPU, for the rows of basin_attention_gpu_bench that it has: a bf16 GEMM of 4096, SDPA through
cuDNN and through its flash kernel (keys repeated to all heads in prefill, no sink: SDPA has none), and, with --flex,
FlexAttention with the sink through its log-sum-exp (compiling takes most of a minute). Caches are cold, times are medians."""
import argparse
import json
import statistics
import sys

FLUSH_BYTES = 256 << 20
DECODE = [(1, 8192), (1, 131072), (8, 32768), (64, 8192), (256, 8192)]
HEADS = [(32, 128), (64, 64)]  # (h_q, d); 8 key heads


def size_text(tokens):
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


class Clock:
    def __init__(self, torch, budget_ms):
        self.torch, self.budget_ms = torch, budget_ms
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def measure(self, run, count):
        begins = [self.torch.cuda.Event(enable_timing=True) for _ in range(count)]
        ends = [self.torch.cuda.Event(enable_timing=True) for _ in range(count)]
        for begin, end in zip(begins, ends):
            self.flush.zero_()
            begin.record()
            run()
            end.record()
        self.torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in zip(begins, ends))

    def median_ms(self, run):
        first = self.measure(run, 3)
        return self.measure(run, max(11, min(201, int(self.budget_ms / (first + 0.1)))))


# Each generator yields (work, peer, what to run, operations, bytes or 0); what it made lives until it is asked for more.

def gemm_rows(torch):
    for n in (4096, 8192):
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        yield f"GEMM {n}", "cuBLAS", lambda: a @ b, 2 * n**3, 0


def sdpa_rows(torch):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    sdpa = torch.nn.functional.scaled_dot_product_attention
    peers = [("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)]

    def through(backend, *tensors, **options):
        with sdpa_kernel(backend):
            sdpa(*tensors, **options)

    for h_q, d in HEADS:
        for batch, tokens, causal in [(1, 16384, True), (4, 4096, True), (1, 16384, False)]:
            q, k, v = (torch.randn(batch, h_q, tokens, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            pairs = tokens * (tokens + 1) // 2 if causal else tokens**2
            work = f"prefill {'causal' if causal else 'full'} {batch}x{size_text(tokens)} d{d}"
            for peer, backend in peers:
                yield work, peer, lambda: through(backend, q, k, v, is_causal=causal), 4 * batch * h_q * d * pairs, 0
        for batch, tokens in DECODE:
            q = torch.randn(batch, h_q, 1, d, device="cuda", dtype=torch.bfloat16)
            k, v = (torch.randn(batch, 8, tokens, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            yield (f"decode {batch}x{size_text(tokens)} d{d}", "cuDNN, contiguous",
                   lambda: through(SDPBackend.CUDNN_ATTENTION, q, k, v, enable_gqa=True),
                   4 * batch * h_q * d * tokens, 4 * batch * (tokens * 8 + h_q) * d)


def backward_rows(torch):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for peer, backend in [("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)]:
        for h_q, d in HEADS:
            for batch, tokens in [(1, 16384), (4, 4096)]:
                q, k, v = (torch.randn(batch, h_q, tokens, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                           for _ in range(3))
                with sdpa_kernel(backend):
                    out = sdpa(q, k, v, is_causal=True)
                dout = torch.randn_like(out)
                yield (f"backward causal {batch}x{size_text(tokens)} d{d}", peer,
                       lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
                       10 * batch * h_q * d * (tokens * (tokens + 1) // 2), 0)


def flex_rows(torch):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    flex = torch.compile(flex_attention)
    for h_q, d in HEADS:
        sink = torch.ones(h_q, device="cuda", dtype=torch.float32).view(1, h_q, 1)
        q = torch.randn(1, h_q, 16384, d, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(1, 8, 16384, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))

        def with_sink(mask):
            out, lse = flex(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
            return out * torch.sigmoid(lse - sink).unsqueeze(-1).to(out.dtype)

        for window in (0, 128):
            def visible(b, h, i, j, window=window):
                return (j <= i) & (i - j < window) if window else j <= i
            mask = create_block_mask(visible, None, None, 16384, 16384, device="cuda")
            name = f"prefill window {window}, 1x16k d{d}" if window else f"prefill causal 1x16k d{d}"
            pairs = sum(min(i + 1, window or 16384) for i in range(16384))
            yield name, "FlexAttention + sink", lambda: with_sink(mask), 4 * h_q * d * pairs, 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flex", action="store_true", help="FlexAttention, too")
    parser.add_argument("--backward", action="store_true", help="the backward passes of SDPA, too")
    parser.add_argument("--budget-ms", type=float, default=250, help="device time for each row")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout; the table goes to stderr")
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("error: this needs PyTorch", file=sys.stderr)
        print("hint: it is not a dependency of Basin; run this with a Python that has it", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("error: PyTorch finds no GPU here", file=sys.stderr)
        return 1
    clock = Clock(torch, args.budget_ms)
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
              "rows": []}
    text = sys.stderr if args.json else sys.stdout
    print(f"{report['device']}, torch {report['torch']}, cuDNN {report['cudnn']}", file=text)
    print(f"{'work (bf16)':<32} {'peer':<22} {'ms':>9} {'TFLOP/s':>9} {'TB/s':>8}", file=text)
    wanted = [gemm_rows, sdpa_rows] + ([backward_rows] if args.backward else []) + ([flex_rows] if args.flex else [])
    for rows in wanted:
        for work, peer, run, flops, size in rows(torch):
            row = {"work": work, "peer": peer}
            try:
                row["ms"] = clock.median_ms(run)
                row["tflops"] = flops / row["ms"] * 1e-9
                if size:
                    row["tb_s"] = size / row["ms"] * 1e-9
                tb_s = f"{row['tb_s']:.3f}" if size else "-"
                print(f"{work:<32} {peer:<22} {row['ms']:>9.4f} {row['tflops']:>9.1f} {tb_s:>8}", file=text, flush=True)
            except RuntimeError as error:  # this version of the peer lacks it; the others count all the same
                row["failed"] = str(error)
                print(f"{work:<32} {peer:<22} failed: {str(error).splitlines()[0]}", file=text, flush=True)
            report["rows"].append(row)
    if args.json:
        print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
