"""The command line, on which rank 1 is killed twice: in a step, then while it saves."""

from __future__ import annotations

import os
import signal
import sys

from torch.distributed.checkpoint import FileSystemWriter

from eigenstep.optim.distributed.collectives import ShardedRound
from eigenstep_lab import cli, cpu

DEATHS = [
    # Gradients are there, and the other rank is about to wait for what the killed one owns. Each
    # step sends three times: steps of tables, of matrices and of vectors.
    (ShardedRound, "send_steps", 14),
    # The other rank writes its file; the checkpoint's table of contents comes last.
    (FileSystemWriter, "write_data", 1),
]
"""For each attempt, which call of which method kills rank 1."""


def deadly(method, last):
    calls = 0

    def call(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*arguments, **options)

    return call


cpu._try_bf16 = lambda _: ""  # the run needs no bf16, and the trial takes seconds
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if os.environ["RANK"] == "1" and attempt < len(DEATHS):
    kind, name, last = DEATHS[attempt]
    setattr(kind, name, deadly(getattr(kind, name), last))
sys.exit(cli.main())
