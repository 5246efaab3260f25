"""Find out whether bf16 matrix products work on this processor, and repair them.

Some processors (virtual ones, mostly) advertise AMX instructions and then kill the process with an
illegal instruction at the first bf16 matmul. Telling oneDNN, the library behind torch's matmuls, to
leave AMX alone helps; it reads that setting once, at the first matmul of the process, whatever its
dtype. So call

    from eigenstep_lab import cpu
    print(cpu.prepare().explain())

at the start of a program, best before torch is imported: OMP_WAIT_POLICY, which stops idle threads
from spinning, is read while torch is being imported. Nothing here runs by itself, and nothing here
can crash the calling process: the matmul is tried in a child process.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

# Everything up to bf16 vector instructions, but no AMX.
_WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}

_PROBE = """
try:  # dying is expected here: leave no core dump behind
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except ImportError:
    pass
import torch
x = torch.ones(2, 256, 256, dtype=torch.bfloat16)
assert (x[0] @ x[1]).eq(256).all() and (x @ x).eq(256).all(), "a bf16 matmul gives wrong numbers"
"""


@dataclass(frozen=True)
class Bf16:
    """What `prepare` found out about bf16 matmuls on this processor.

    Attributes:
        works: Whether they work now.
        failure: How the first attempt ended, e.g. "SIGILL"; empty if it succeeded.
        settings: The environment variables that `prepare` set to make them work.
    """

    works: bool
    failure: str
    settings: Mapping[str, str]

    @property
    def verdict(self) -> str:
        """The answer in a few words: "works", "works with NAME=VALUE" or "does not work"."""
        if not self.works:
            return "does not work"
        return "works" + "".join(f" with {name}={value}" for name, value in self.settings.items())

    def explain(self) -> str:
        """Say in a sentence or two what was found and what to do."""
        if not self.works:
            return (
                f"bf16 matmul does not work here (a trial ended with {self.failure}, without AMX "
                "too): "
                "use float32 on this machine."
            )
        if self.settings:
            setting = " ".join(f"{name}={value}" for name, value in self.settings.items())
            return (
                f"bf16 matmul works here only with {setting} (without it a trial ended with "
                f"{self.failure}). It is "
                "set for this process; if a matmul ran before, that came too late: `export "
                f"{setting}` in your shell."
            )
        return "bf16 matmul works here."


@functools.cache
def prepare() -> Bf16:
    """Try a bf16 matmul in a child process and set in `os.environ` what makes it work.

    The first call takes a few seconds, most of them the child's import of torch; later calls repeat
    its answer.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    failure = _try_bf16({})
    if not failure:
        return Bf16(works=True, failure="", settings={})
    if _try_bf16(_WITHOUT_AMX):
        return Bf16(works=False, failure=failure, settings={})
    os.environ.update(_WITHOUT_AMX)
    return Bf16(works=True, failure=failure, settings=_WITHOUT_AMX)


def _try_bf16(settings: Mapping[str, str]) -> str:
    """Run the probe in a child with more settings; return how it failed, or ""."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if child.returncode < 0:
        return signal.Signals(-child.returncode).name
    return "" if child.returncode == 0 else (child.stderr.strip().splitlines() or ["an error"])[-1]
