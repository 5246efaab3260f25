"""Spectra of an optimizer's bases over time, and their picture."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from eigenstep import Spectral

from .. import plotting as plots


class Snapshot(NamedTuple):
    """One side of one parameter at one time.

    Attributes:
        eigenvalues: some of the eigenvalues of the side's factor, which has determinant one, evenly
            from the largest to the smallest.
        condition: largest eigenvalue divided by the smallest.
        speed: Frobenius norm of the last rotation's generator, averaged over blocks; 0 is rest.
    """

    eigenvalues: list[float]
    condition: float
    speed: float


class SpectraLog:
    """Spectra, condition numbers and rotation speeds of an optimizer's bases over training.

    Examples:
        >>> import torch
        >>> from eigenstep import Spectral
        >>> from eigenstep_lab.extras import SpectraLog
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer, log = Spectral(model.named_parameters()), SpectraLog()
        >>> for _ in range(3):
        ...     model(torch.randn(2, 8)).square().mean().backward()
        ...     _ = optimizer.step()
        ...     log.record(optimizer)
        >>> sorted(log.snapshots)
        ['weight, side 0', 'weight, side 1']
    """

    def __init__(self, points: int = 32) -> None:
        """Start a log.

        Args:
            points: number of eigenvalues of each side to keep at each time.
        """
        if points < 2:
            raise ValueError(f"points must be at least 2, got {points}")
        self.points = points
        self.steps: list[int] = []
        self.snapshots: dict[str, list[tuple[int, Snapshot]]] = {}

    def record(self, optimizer: Spectral) -> None:
        """Note the present state; numbers are read from the device once."""
        step = optimizer.param_groups[0]["count"]
        self.steps.append(step)
        rows = {
            f"{name}, side {axis}": self._row(found, axis)
            for name, found in optimizer.spectra().items()
            for axis in range(sum(key.startswith("eigenvalues") for key in found))
            if f"speed_{axis}" in found
        }
        numbers = torch.stack(list(rows.values())).tolist() if rows else []
        for name, (condition, speed, *eigenvalues) in zip(rows, numbers, strict=True):
            self.snapshots.setdefault(name, []).append(
                (step, Snapshot(eigenvalues, condition, speed))
            )

    def _row(self, found: dict[str, Tensor], axis: int) -> Tensor:
        eigs = found[f"eigenvalues_{axis}"].flatten().sort(descending=True).values
        places = torch.linspace(0, len(eigs) - 1, self.points, device=eigs.device).round().long()
        numbers = torch.stack([found[f"condition_{axis}"].amax(), found[f"speed_{axis}"].mean()])
        return torch.cat([numbers, eigs[places]]).double()

    def plot(self, path: str | Path, side: str | None = None) -> Path:
        """Draw eigenvalues of one side, and condition numbers and speeds of all.

        Args:
            path: where to write the picture; its ending decides the format.
            side: whose eigenvalues to draw, a key of ``snapshots``; by default those with the
                largest condition number at the end.
        """
        if not self.snapshots:
            raise ValueError("there is nothing to draw: no basis was recorded")
        side = (
            max(self.snapshots, key=lambda key: self.snapshots[key][-1][1].condition)
            if side is None
            else side
        )
        if side not in self.snapshots:
            raise ValueError(
                f"side must be one of {', '.join(map(repr, self.snapshots))}, got {side!r}"
            )
        drawn, ((spectra, conditions, speeds),) = plots.figure(columns=3)
        history = self.snapshots[side]
        for index, (step, snapshot) in enumerate(history):
            label = f"step {step}" if index in (0, len(history) - 1) else None
            color = plots.shade(index / max(1, len(history) - 1))
            ranks = torch.linspace(0, 1, len(snapshot.eigenvalues)).tolist()
            spectra.plot(ranks, snapshot.eigenvalues, color=color, label=label)
        spectra.set(
            title=side,
            xlabel="rank, from the largest to the smallest",
            ylabel="eigenvalue",
            yscale="log",
        )
        spectra.legend(fontsize=8)
        for name, records in self.snapshots.items():
            steps = [step for step, _ in records]
            conditions.plot(steps, [snapshot.condition for _, snapshot in records], label=name)
            speeds.plot(steps, [snapshot.speed for _, snapshot in records], label=name)
        conditions.set(title="Condition number", xlabel="step", yscale="log")
        speeds.set(title="Speed of rotation", xlabel="step", ylabel="norm of the generator")
        if len(self.snapshots) <= 12:
            conditions.legend(fontsize=6)
        return plots.save(drawn, path)
