"""Say what this machine can do, and what to set or install to make it do more.

Shows torch and its threads, whether bf16 matmuls work here, the packages we compare with, and the
datasets.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path

from eigenstep import __version__

from . import cpu
from .console import print_table, write_json
from .data.command import status

PEERS = (
    "heavyball",
    "pytorch_optimizer",
    "cma",
    "cmaes",
    "coco-experiment",
    "cocopp",
    "crfmnes",
    "pymanopt",
    "geoopt",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where the findings go."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to FILE too")


def run(args: argparse.Namespace) -> None:
    """Print the findings."""
    machine = dict(_machine())
    peers = dict(_peers())
    datasets = status()
    print_table("Machine", ("what", "found"), machine.items())
    print_table("What eigenstep is compared with", ("package", "version"), peers.items())
    print_table("Datasets", ("name", "what it is", "where"), datasets)
    if args.json:
        write_json(args.json, {"machine": machine, "peers": peers, "datasets": datasets})


def _machine() -> Iterable[tuple[str, str]]:
    import torch

    yield "eigenstep", __version__
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    yield "torch", torch.__version__
    yield (
        "CPU",
        f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}",
    )
    yield "OMP_WAIT_POLICY", os.environ.get("OMP_WAIT_POLICY", "not set")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield "GPU", ", ".join(gpus) or ("Apple" if torch.backends.mps.is_available() else "none")
    yield "bf16 on the CPU", cpu.prepare().explain()


def _peers() -> Iterable[tuple[str, str]]:
    for name in PEERS:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "missing: pip install './lab[peers]'"
