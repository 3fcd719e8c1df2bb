#!/usr/bin/env python3
"""Holds both kinds of context parallelism to attention on one device, gradients too.

    torchrun --nproc-per-node 2 examples/context_parallel/check.py            # two GPUs, NCCL
    torchrun --nproc-per-node 2 examples/context_parallel/check.py --cpu      # two processes, gloo
"""
import argparse
import os
import sys

import basin
import torch
import torch.distributed as dist
from parallel import head_parallel_attention, ring_attention


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="float32 on the CPU, with gloo")
    parser.add_argument("--tokens", type=int, default=4096, help="of the whole sequence")
    args = parser.parse_args()
    dist.init_process_group("gloo" if args.cpu else "nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    if args.tokens % size:
        raise SystemExit(f"error: --tokens is {args.tokens}; it must be a multiple of the {size} processes")
    device = torch.device("cpu" if args.cpu else f"cuda:{os.environ['LOCAL_RANK']}")
    if not args.cpu:
        torch.cuda.set_device(device)
    dtype = torch.float32 if args.cpu else torch.bfloat16
    random = torch.Generator().manual_seed(1)
    draw = lambda heads: torch.randn(1, args.tokens, heads, 64, generator=random).to(device, dtype)
    q, k, v, dout = draw(8), draw(2), draw(2), draw(8)
    sink = torch.linspace(-1, 2, 8, device=device)
    mine = slice(rank * args.tokens // size, (rank + 1) * args.tokens // size)

    def gradients(function, slices):
        inputs = [x[:, slices].detach().clone().requires_grad_() for x in (q, k, v)] + [sink.clone().requires_grad_()]
        out = function(*inputs)
        return out, torch.autograd.grad(out, inputs, dout[:, slices])

    want, want_gradients = gradients(lambda q, k, v, s: basin.flash_attn_func(q, k, v, causal=True, learnable_sink=s),
                                     slice(None))
    want = want.detach()
    tolerance = 1e-5 if args.cpu else 1e-2
    failed = False
    for name, function in (("ring", ring_attention),
                           ("heads", lambda *x: head_parallel_attention(*x[:3], x[3], causal=True))):
        out, (dq, dk, dv, dsink) = gradients(function, mine)
        out = out.detach()
        dist.all_reduce(dsink)
        pairs = {"out": (out, want[:, mine]), "dq": (dq, want_gradients[0][:, mine]), "dk": (dk, want_gradients[1][:, mine]),
                 "dv": (dv, want_gradients[2][:, mine]), "dsink": (dsink, want_gradients[3])}
        errors = {what: float((a.float() - b.float()).norm() / b.float().norm()) for what, (a, b) in pairs.items()}
        equal = [what for what, (a, b) in pairs.items() if torch.equal(a, b)]
        failed |= max(errors.values()) > tolerance
        print(f"rank {rank} of {size}, {name}: " + ", ".join(f"{what} {error:.1e}" for what, error in errors.items()) +
              (f"; equal to the bit: {', '.join(equal)}" if equal else ""), flush=True)
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
