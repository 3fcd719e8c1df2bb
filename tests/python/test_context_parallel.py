"""The example of context parallelism on two processes of the CPU: outputs and gradients equal those of one."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "context_parallel" / "check.py"


@pytest.mark.parametrize("processes", [2, 4])
def test_both_kinds_equal_one_process(processes):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", "0",
                          "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(EXAMPLE), "--cpu", "--tokens", "128"],
                         env=environment, capture_output=True, text=True, timeout=300)
    if processes == 4:  # 2 key heads
        assert run.returncode != 0 and "do not divide over 4 ranks" in run.stderr
        return
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("ring:") == run.stdout.count("heads:") == processes
