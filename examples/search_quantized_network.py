"""Train a quantized network, for which gradients do not exist.

All weights of the network are one of the integers -1, 0 and 1, and its hidden units are switched on
or off: every derivative is zero. The search needs values alone. It treats the weights as integer
coordinates with bounds, evaluates its whole population in one batched call, and looks at the error
on held-out digits only at the end.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from eigenstep.search import minimize

PIXELS, HIDDEN, CLASSES = 16, 12, 4
WEIGHTS = (PIXELS + 1) * HIDDEN + HIDDEN * CLASSES


def digits() -> tuple[Tensor, Tensor]:
    """Return digits 0 to 3, 4 x 4 pixels and a constant input, and their labels."""
    pictures, labels = (
        torch.tensor(array) for array in load_digits(n_class=CLASSES, return_X_y=True)
    )
    small = torch.nn.functional.avg_pool2d(
        pictures.float().reshape(-1, 1, 8, 8) / 8 - 1, 2
    ).flatten(1)
    return torch.cat([small, torch.ones(len(small), 1)], 1), labels


def logits(weights: Tensor, inputs: Tensor) -> Tensor:
    """Return logits, shape (networks, examples, classes), for a row of weights each."""
    first = weights[:, : (PIXELS + 1) * HIDDEN].reshape(-1, PIXELS + 1, HIDDEN)
    second = weights[:, (PIXELS + 1) * HIDDEN :].reshape(-1, HIDDEN, CLASSES)
    switched = (inputs @ first > 0).float()  # on or off
    return switched @ second


def main(max_evals: int = 24_000) -> None:
    """Search, then compare with how well guessing does."""
    inputs, labels = digits()
    known, held_out = slice(0, None, 2), slice(1, None, 2)

    def loss(weights: Tensor) -> Tensor:
        scores = logits(weights, inputs[known]).log_softmax(-1)
        return -scores[:, torch.arange(len(labels[known])), labels[known]].mean(1)

    def error(weights: Tensor) -> float:
        guesses = logits(weights[None], inputs[held_out])[0].argmax(-1)
        return (guesses != labels[held_out]).float().mean().item()

    start = torch.zeros(WEIGHTS)
    result = minimize(
        loss,
        start,
        0.7,
        method="separable",
        bounds=(-1, 1),
        integers=range(WEIGHTS),
        batched=True,
        population=30,
        max_evals=max_evals,
        seed=0,
    )
    assert set(result.x.tolist()) <= {-1.0, 0.0, 1.0}
    print(f"{WEIGHTS} weights of -1, 0 or 1, {result.nfev} evaluations")
    print(f"held-out error at the start: {error(start):.3f}")
    print(f"held-out error after the search: {error(result.x):.3f}")


if __name__ == "__main__":
    main()
