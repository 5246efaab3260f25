"""Matrices and functions that these tests share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eigenstep import Diagonal, Full, Kronecker
from eigenstep.core.matrices import SPD
from eigenstep_lab.baselines.van_loan import nearest_kronecker


def random_spd(n: int, condition: float = 10.0, batch: tuple[int, ...] = ()) -> Tensor:
    """Return random matrices with eigenvalues spread evenly, on a logarithmic scale, from 1 to
    `condition`.
    """
    basis = torch.linalg.qr(torch.randn(*batch, n, n))[0]
    eigs = torch.logspace(0, torch.log10(torch.tensor(condition)), n)
    return basis * eigs @ basis.mT


def symmetric(n: int, batch: tuple[int, ...] = ()) -> Tensor:
    matrix = torch.randn(*batch, n, n)
    return (matrix + matrix.mT) / 2


def structures() -> dict[str, SPD]:
    """Return one matrix of each structure, with and without repeated eigenvalues and batches."""
    torch.manual_seed(1)
    mixed = Kronecker.identity((2, 3, 2), kinds=("full", "diagonal", "identity"))
    return {
        "full": Full.from_dense(random_spd(4)),
        "full tied": Full.from_dense(torch.diag(torch.tensor([2.0, 2.0, 3.0, 2.0]))),
        "full batch": Full.from_dense(random_spd(3, batch=(2,))),
        "diagonal": Diagonal(torch.tensor([0.5, 1.0, 3.0])),
        "kronecker": nearest_kronecker(torch.kron(random_spd(2), random_spd(3)), (2, 3)),
        "kronecker batch": Kronecker.identity((2, 3), batch=(2,)),
        "kronecker mixed": mixed,
    }


def log_det(Q: Tensor) -> tuple[Callable[[Tensor], Tensor], float]:
    """Return `tr(S Q) - log det S` and its least value, which it has at the inverse of `Q`."""
    return lambda S: (S * Q).sum() - torch.logdet(S).sum(), (len(Q) + torch.logdet(Q)).item()


def nearness(Q: Tensor, samples: int = 200) -> tuple[Callable[[Tensor], Tensor], float]:
    """Return `1/(2N) sum ||S Q x - x||^2` and its least value, zero at the inverse of `Q`."""
    x = torch.randn(Q.shape[-1], samples)
    return lambda S: (S @ Q @ x - x).square().sum() / (2 * samples), 0.0
