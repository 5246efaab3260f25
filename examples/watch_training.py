"""Watch what the optimizer learns: prices of layers, turning bases and their spectra.

`Spectral.summary()` tells structure, memory and work of every parameter. `Spectral.metrics()` has
numbers for loggers, and `Spectral.spectra()` the eigenvalues that were learned.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from eigenstep import Spectral


def main(steps: int = 200) -> None:
    """Train on the digits, print the summary, and draw what was logged."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pictures, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    pictures = pictures.float() / 16
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 10))
    optimizer, log = Spectral(model.named_parameters(), lr=1e-2), []
    for step in range(steps):
        chosen = torch.randint(len(labels), (64,))
        optimizer.zero_grad()
        loss = cross_entropy(model(pictures[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            log.append(optimizer.metrics())
    print(optimizer.summary())
    print(f"loss of the last batch: {loss.item():.3f}")
    draw(log, optimizer.spectra(), "spectra.png")


def draw(
    log: list[dict[str, float]], spectra: dict[str, dict[str, torch.Tensor]], path: str
) -> None:
    figure, (eigenvalues, conditions, speeds) = plt.subplots(
        1, 3, figsize=(15, 4), layout="constrained"
    )
    for name, found in spectra.items():
        for side in (0, 1):
            eigenvalues.semilogy(
                found[f"eigenvalues_{side}"].flatten(), label=f"{name}, side {side}"
            )
    steps = [numbers["steps"] for numbers in log]
    for key in log[-1]:
        kind, _, name = key.partition("/")
        if kind in ("condition", "rotation_speed"):
            axes = conditions if kind == "condition" else speeds
            axes.semilogy(steps, [numbers[key] for numbers in log], label=name)
    eigenvalues.set(title="Eigenvalues in the end", xlabel="rank")
    conditions.set(title="Condition number", xlabel="step")
    speeds.set(title="Speed of rotation", xlabel="step")
    for axes in (eigenvalues, conditions, speeds):
        axes.legend(fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    main()
