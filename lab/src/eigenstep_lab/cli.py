"""The `eigenstep` command line: a table of commands, each one a module with `add_arguments` and
`run`.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eigenstep import __version__
from eigenstep.core.progress import MissingPackage

from . import cpu
from .console import UserError, check_place, explain


@dataclass(frozen=True)
class Command:
    """One entry of a command table.

    Attributes:
        module: Imported only when the command is chosen. It offers `add_arguments(parser)` and
            `run(args)`, and its docstring is the text above the options in `--help`.
        summary: One line for the list of commands.
        computes: Whether it uses torch, whose environment `cpu.prepare` must set up before torch is
            imported.
    """

    module: str
    summary: str
    computes: bool = True


PICTURES = (".png", ".svg", ".pdf")
"""Endings of pictures that can be drawn."""

# To add a command, write its module and add one line here. Benchmarks have their own table in
# `eigenstep_lab.bench`.
COMMANDS: Mapping[str, Command] = {
    "demo": Command("eigenstep_lab.demo", "see the library's main job at work, in seconds"),
    "train": Command("eigenstep_lab.train.command", "train a transformer, with exact checkpoints"),
    "tune": Command(
        "eigenstep_lab.train.tune", "search hyperparameters at random, as the paper does"
    ),
    "doctor": Command("eigenstep_lab.doctor", "what this machine can do: torch, bf16, peers, data"),
    "reproduce": Command(
        "eigenstep_lab.figures.reproduce", "make the figures of the paper, with verdicts"
    ),
    "data": Command(
        "eigenstep_lab.data.command", "list, fetch and check the datasets", computes=False
    ),
    "soak": Command(
        "eigenstep_lab.soak", "try thousands of random configurations, and look for what breaks"
    ),
    "bench": Command(
        "eigenstep_lab.bench", "measure eigenstep against other methods", computes=False
    ),
}


class _CommandParser(argparse.ArgumentParser):
    """A parser that imports its command's module when it is chosen, so that `eigenstep --help`
    stays instant.
    """

    def __init__(self, *, command: Command, dest: str, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self._command, self._dest = command, dest

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.description is None:
            if self._command.computes:
                cpu.prepare()
            module = importlib.import_module(self._command.module)
            self.description = module.__doc__ or self._command.summary
            self.set_defaults(**{self._dest: module})
            module.add_arguments(self)
        return super().parse_known_args(args, namespace)


def add_commands(
    parser: argparse.ArgumentParser,
    commands: Mapping[str, Command],
    *,
    dest: str = "module",
    add_common: Callable[[argparse.ArgumentParser], None] | None = None,
) -> None:
    """Add one subcommand per entry of a table.

    Args:
        parser: Gets the subcommands.
        commands: Name of each subcommand and what it does.
        dest: The chosen module is stored in the parsed arguments under this name.
        add_common: Adds options that all subcommands which compute have in common.
    """
    choices: Any = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=_CommandParser
    )
    for name, command in commands.items():
        added = choices.add_parser(name, command=command, dest=dest, help=command.summary)
        if add_common is not None and command.computes:
            add_common(added)


def _check_places(args: argparse.Namespace) -> None:
    """Raise unless what a command is going to write can be written, before it has worked for it."""
    for name in ("plot", "json", "directory"):
        if getattr(args, name, None):
            check_place(Path(getattr(args, name)), folder=name == "directory")
    ending = Path(getattr(args, "plot", None) or "").suffix
    if ending and ending not in PICTURES:
        raise UserError(f"--plot must end in {', '.join(PICTURES)}, got {ending}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 done, 2 a mistake to repair, 130
    interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="eigenstep",
        description="Learn positive-definite curvature as eigenvalues and an eigenbasis, without "
        "decompositions.",
        epilog="`eigenstep COMMAND --help` explains a command. New here? Try `eigenstep demo`, "
        "then `doctor`.",
    )
    parser.add_argument("--version", action="version", version=f"eigenstep {__version__}")
    add_commands(parser, COMMANDS)
    try:
        args = parser.parse_args(argv)
        args.command = shlex.join(["eigenstep", *argv])
        _check_places(args)
        args.module.run(args)
    except (UserError, MissingPackage) as error:
        print(f"eigenstep: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"eigenstep: error: {explain(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("eigenstep: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
