"""What a step costs on many GPUs: a model for transformers from 124 M to 70 B weights, and
measurements that check it.

The model counts operations, memory of state and bytes on the wire; its formulas are in
`eigenstep_lab.cost`. They are compared with what is measured on a GPT of 12 layers: operations and
state of each optimizer in one process, and what each of 2 and 4 ranks computes, keeps and sends
when Spectral trains with DDP, FSDP2 and HSDP (by gloo, on this machine; how long that takes says
nothing about GPUs and is not measured).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from .. import plotting as plots
from ..behavior import behavior
from ..console import UserError
from ..cost.model import (
    GPUS,
    MODELS,
    OPTIMIZERS,
    Cost,
    Optimizer,
    Shapes,
    cost,
    spectral,
    training_traffic,
)
from ..cost.runs import MEASURED, WAYS, Ranks, gpt, measure_ranks, measure_single, trained
from ..lines import look
from ..results import Table, Verdict
from ..study import Cell, Plans, figures

DRAWN = ("124 M", "7 B", "70 B")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how large the measured network is, and where the picture goes."""
    parser.add_argument(
        "--width", type=int, default=32, help="width of the measured network (default: %(default)s)"
    )
    parser.add_argument("--no-ranks", action="store_true", help="do not start processes")
    parser.add_argument(
        "--plot",
        default="runs/bench/scaling.png",
        help="where the picture goes (default: %(default)s)",
    )


def cells(args: argparse.Namespace, found: Mapping[Any, Any]) -> Plans:
    """List what is measured: one process, by optimizer, and ranks."""
    if args.width < 4 or args.width % 4:
        raise UserError(f"--width must be a multiple of 4, got {args.width}")
    code = behavior("spectral", "fast")
    plans: dict[Any, Cell] = {}
    for name in MEASURED:
        key = {"width": args.width, "optimizer": name}
        ours = code if name.startswith("Spectral") else ""
        plans["single", name] = Cell(key, partial(compare_single, name, args.width), ours)
    plans["serial",] = Cell({"serial": args.width}, partial(serial_of, args.width), code)
    if not args.no_ranks:
        plans["ranks",] = Cell({"ranks": args.width}, partial(measure_ranks, args.width), code)
    return plans


def report(args: argparse.Namespace, found: Mapping[Any, Any]) -> dict[str, Any]:
    """Compute the model, compare it with what was measured, and draw."""
    modeled = {name: model_costs(name) for name in MODELS}
    draw(modeled, args.plot)
    shapes = shapes_of(args.width)
    single = {name[1]: value for name, value in found.items() if name[0] == "single"}
    serial = found["serial",]
    ranks = found.get(("ranks",), {})
    verdicts = [
        *single_verdicts(single),
        *ranks_verdicts(ranks, shapes, serial),
        *rival_verdicts(modeled),
    ]
    tables = [*(model_table(*costs) for costs in modeled.items()), single_table(single)]
    if ranks:
        tables.append(ranks_table(ranks, shapes, serial))
    models = {
        name: {key: [asdict(c) for c in row] for key, row in costs.items()}
        for name, costs in modeled.items()
    }
    plain = {"models": models, "single": single, "serial": serial, "ranks": ranks}
    return figures(plain, verdicts, tables, "What holds")


def shapes_of(width: int) -> Shapes:
    """List the parameters of the measured network."""
    return [(name, tuple(p.shape)) for name, p in gpt(width).named_parameters()]


def serial_of(width: int) -> dict[str, float]:
    """Measure one process that trains."""
    return dict(trained(gpt(width)))


Costs = Mapping[str, list[Cost]]
"""Costs of each optimizer, for every number of GPUs."""


def model_costs(name: str, optimizers: Mapping[str, Optimizer] = OPTIMIZERS) -> Costs:
    """Compute the model's figures for one network."""
    shapes = MODELS[name].shapes()
    found = {}
    for key, optimizer in optimizers.items():
        units = optimizer.units(shapes)
        found[key] = [cost(units, ranks, splits=optimizer.splits) for ranks in GPUS]
    return found


def shares(name: str, costs: Iterable[Cost]) -> dict[str, list[float]]:
    """Relate an optimizer's costs to what training itself computes and sends, in percent, for each
    number of GPUs.
    """
    network = MODELS[name]
    found: dict[str, list[float]] = {"work": [], "DDP": [], "FSDP2": []}
    for ranks, c in zip(GPUS, costs, strict=True):
        ddp, fsdp = training_traffic(network.parameters, ranks)
        own = 6.0 * network.parameters * network.tokens / ranks  # forward and backward pass
        for key, part, whole in (
            ("work", c.flops, own),
            ("DDP", c.ddp_sent, ddp),
            ("FSDP2", c.fsdp_sent, fsdp),
        ):
            found[key].append(100 * part / whole)
    return found


def model_table(name: str, costs: Costs) -> Table:
    """Show the model's figures for one network."""
    network, rows = MODELS[name], []
    for key, row in costs.items():
        percent = shares(name, row)
        cells = [
            [c.ddp_state / 2**30 for c in row],
            [c.fsdp_state / 2**30 for c in row],
            [c.flops / 1e12 for c in row],
        ]
        rows.append(
            (key, *map(_cells, [*cells, percent["work"], percent["DDP"], percent["FSDP2"]]))
        )
    title = (
        f"{name} on {' / '.join(map(str, GPUS))} GPUs ({network.parameters / 1e9:.2f} billion "
        "weights, "
        f"{network.tokens // 2**10} Ki tokens per batch)"
    )
    columns = (
        "optimizer",
        "state with DDP, GiB per GPU",
        "state with FSDP2, GiB per GPU",
        "TFLOP per GPU and step",
        "… in % of the network's",
        "sent with DDP, in % of DDP's own",
        "sent with FSDP2, in % of FSDP2's own",
    )
    return Table(title, columns, rows)


def _cells(values: Iterable[float]) -> str:
    return " / ".join(
        "–" if math.isnan(v) else f"{v:.2g}" if v < 99.5 else f"{v:,.0f}" for v in values
    )


def draw(modeled: Mapping[str, Costs], path: str) -> None:
    """Draw state, work and bytes against the number of GPUs, for some networks."""
    drawn, axes = plots.figure(3, len(DRAWN), width=4.4, height=3.2)
    for line, name in zip(axes, DRAWN, strict=True):
        for number, (key, row) in enumerate(modeled[name].items()):
            percent, state = shares(name, row), [c.fsdp_state / 2**30 for c in row]
            for ax, values in zip(line, (state, percent["work"], percent["FSDP2"]), strict=True):
                ax.plot(
                    GPUS,
                    [v or math.nan for v in values],
                    marker="o",
                    markersize=4,
                    label=key,
                    **look(key, number),
                )
        labels = ("state, GiB per GPU", "work, % of the network's", "sent with FSDP2, % of its own")
        for ax, label in zip(line, labels, strict=True):
            ax.set(title=name, xlabel="GPUs", ylabel=label, yscale="log")
            ax.set_xscale("log", base=2)
            ax.set_xticks(GPUS, map(str, GPUS))
    drawn.legend(
        *axes[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9
    )
    plots.save(drawn, path)


def compare_single(name: str, width: int) -> dict[str, float]:
    """Measure one process, and say what the model expects."""
    shapes = shapes_of(width)
    units = OPTIMIZERS[name].units(shapes)
    model = {
        f"modeled {key}": sum(u.pieces * getattr(u, key) for u in units)
        for key in ("products", "state")
    }
    return {**measure_single(name, shapes), **model}


def expected(name: str, shapes: Shapes) -> dict[str, float]:
    """Return the model's figures of the busiest rank."""
    way, ranks, replicas = WAYS[name]
    found = cost(spectral(shapes), ranks, replicas)
    ddp = way == "DDP"
    return {
        "flops": found.flops,
        "state": found.ddp_state if ddp else found.fsdp_state,
        "sent": found.ddp_sent if ddp else found.fsdp_sent,
    }


def single_table(single: Mapping[str, Mapping[str, float]]) -> Table:
    """Compare operations and state in one process with the model's."""
    rows = []
    for name, found in single.items():
        products, state = ([found[key], found[f"modeled {key}"]] for key in ("products", "state"))
        rows.append(
            (name, *(f"{x / 1e6:.3f}" for x in products), *(f"{x / 1e3:.1f}" for x in state))
        )
    columns = ("optimizer", "MFLOP in products", "model", "state, kB", "model")
    return Table("One process, GPT of 12 layers: measured and modeled, per step", columns, rows)


def ranks_table(ranks: Ranks, shapes: Shapes, serial: Mapping[str, float]) -> Table:
    """Compare the busiest rank with the model, and with an equal share of what one process does."""
    rows = []
    for name, found in ranks.items():
        most = {key: max(rank[key] for rank in found) for key in serial}
        model = expected(name, shapes)
        both = [
            (f"{most[key] / scale:.{digits}f}", f"{model[key] / scale:.{digits}f}")
            for key, scale, digits in (("flops", 1e6, 3), ("state", 1e3, 1), ("sent", 1e3, 1))
        ]
        equal = [f"{most[key] * len(found) / serial[key]:.3f}" for key in ("flops", "state")]
        rows.append(
            (name, *both[0], equal[0], *both[1], equal[1], *both[2], f"{most['collectives']:.0f}")
        )
    split = ("MFLOP", "model", "× N / serial", "state, kB", "model", "× N / serial")
    columns = ("shared by", *split, "kB sent", "model", "collectives")
    return Table(
        "Spectral, GPT of 12 layers, per step: the busiest rank, measured and modeled",
        columns,
        rows,
    )


def single_verdicts(single: Mapping[str, Mapping[str, float]]) -> Iterator[Verdict]:
    """Say how far the model is from what one process does."""
    for name, found in single.items():
        for what in ("products", "state"):
            measured, model = found[what], found[f"modeled {what}"]
            if model:
                claim = f"one process has the {what} that the model says, to 5 %"
                yield Verdict(
                    claim, name, "relative difference", abs(measured - model) / model, 0.05
                )


def ranks_verdicts(ranks: Ranks, shapes: Shapes, serial: Mapping[str, float]) -> Iterator[Verdict]:
    """Say how ranks compare with the model, with an equal share, and with the fewest bytes
    possible, at worst.
    """
    values: dict[tuple[str, str, float], dict[str, float]] = {}

    def note(name: str, claim: str, quantity: str, limit: float, value: float) -> None:
        values.setdefault((claim, quantity, limit), {})[name] = value

    for name, found in ranks.items():
        most, model = (
            {key: max(rank[key] for rank in found) for key in serial},
            expected(name, shapes),
        )
        for key, what in (("flops", "operations"), ("state", "state")):
            off = abs(most[key] - model[key]) / model[key]
            note(
                name,
                f"the busiest rank has the {what} that the model says, to 5 %",
                "relative difference",
                0.05,
                off,
            )
            share = most[key] * len(found) / serial[key]
            note(name, f"no rank has more than 1.25/N of the {what}", "times N", 1.25, share)
        note(
            name,
            "a rank sends at most 1.1 × what it must",
            "times the bound",
            1.1,
            most["sent"] / model["sent"],
        )
    for (claim, quantity, limit), by_name in values.items():
        worst = max(by_name, key=lambda name: by_name[name])
        yield Verdict(claim, f"Spectral, {worst}", f"most {quantity}", by_name[worst], limit)


RIVALS = (
    ("Spectral", "SOAP, if it were split", "flops"),
    ("Spectral", "Distributed Shampoo", "flops"),
    ("Spectral", "Muon, distributed", "flops"),
    ("Spectral.fast, embeddings diagonal", "Muon, distributed", "flops"),
    ("Spectral", "SOAP, if it were split", "fsdp_state"),
    ("Spectral", "Distributed Shampoo", "fsdp_state"),
)


def rival_verdicts(modeled: Mapping[str, Costs]) -> Iterator[Verdict]:
    """Say whether a step costs at most as much as others', on all networks and numbers of GPUs, as
    the model has it.
    """
    for ours, rival, what in RIVALS:
        ratios = [
            getattr(mine, what) / getattr(theirs, what)
            for costs in modeled.values()
            for mine, theirs in zip(costs[ours], costs[rival], strict=True)
        ]
        unit = {"flops": "work", "fsdp_state": "state"}[what]
        claim = f"at most the {unit} of {rival}, on every network and number of GPUs"
        yield Verdict(claim, ours, f"largest ratio (smallest: {min(ratios):.2g})", max(ratios), 1.0)
