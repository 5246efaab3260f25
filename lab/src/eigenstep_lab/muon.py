"""Muon with Newton-Schulz steps in float32: few CPUs are fast in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Muon's: singular values come close to 1 in five steps, but not to it."""


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """Return about the nearest orthogonal matrix by Muon's Newton-Schulz steps."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(_muon.Muon):
    """torch.optim.Muon in the precision of its gradients."""

    def step(self, closure: Any = None) -> Any:
        """Take a step; torch's function for Newton-Schulz is replaced meanwhile."""
        theirs = _muon._zeropower_via_newtonschulz
        _muon._zeropower_via_newtonschulz = lambda gradient, *_: orthogonalize(gradient)
        try:
            return super().step(closure)  # type: ignore[no-untyped-call]
        finally:
            _muon._zeropower_via_newtonschulz = theirs
