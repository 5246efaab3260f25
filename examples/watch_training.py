"""Watch what the optimizer learns: what each layer costs, its spectra, condition numbers and how fast bases turn.

`Spectral.summary()` tells structure, memory and work of every parameter. `SpectraLog` records the learned curvature
during training, cheaply enough for every step, and draws it in the end.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from eigenstep import Spectral
from eigenstep.optim import SpectraLog


def main(steps: int = 200) -> None:
    """Train on the digits, then print the summary and draw the log."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pictures, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    pictures = pictures.float() / 16
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 10))
    optimizer, log = Spectral(model.named_parameters(), lr=1e-2), SpectraLog()
    for step in range(steps):
        chosen = torch.randint(len(labels), (64,))
        optimizer.zero_grad()
        loss = cross_entropy(model(pictures[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            log.record(optimizer)
    print(optimizer.summary())
    print(f"loss of the last batch: {loss.item():.3f}")
    log.plot("spectra.png")


if __name__ == "__main__":
    main()
