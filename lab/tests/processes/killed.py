"""The command line, on which rank 1 is killed once: in the middle of a step, or while it writes a
checkpoint.

The environment says where: KILL_IN is "step" or "save", KILL_AT the number of the call at which it
happens, and KILL_MARKER a file that remembers that it has happened.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

from eigenstep.optim.distributed.collectives import ReplicatedRound, ShardedRound
from eigenstep_lab import cli, cpu

PLACES = {
    # Gradients are there, and the other rank is about to wait for what the killed one owns.
    "step": [(ReplicatedRound, "send_steps"), (ShardedRound, "send_steps")],
    # The other rank writes its file; the checkpoint's table of contents comes last.
    "save": [(FileSystemWriter, "write_data")],
}
marker, at = Path(os.environ["KILL_MARKER"]), int(os.environ["KILL_AT"])
calls = 0


def deadly(method: Any) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        global calls
        calls += 1
        if calls == at and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*arguments, **options)

    return call


cpu._try_bf16 = lambda _: ""  # the run needs no bf16, and the trial takes seconds
if os.environ["RANK"] == "1":
    for kind, name in PLACES[os.environ["KILL_IN"]]:
        setattr(kind, name, deadly(getattr(kind, name)))
sys.exit(cli.main())
