"""How orthogonal a matrix is, and which generator it has."""

import torch
from torch import Tensor

from eigenstep.core.step import accumulation_dtype


def inverse_cayley(orthogonal: Tensor) -> Tensor:
    """Return the skew-symmetric ``N = (Q + I)^-1 (Q - I)`` with ``Cayley(N) = Q``."""
    q = orthogonal.to(accumulation_dtype(orthogonal.dtype))
    identity = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return torch.linalg.solve(q + identity, q - identity).to(orthogonal.dtype)


def orthogonality_defect(basis: Tensor) -> Tensor:
    """Return ``||B^T B - I||_F / sqrt(n)`` for each basis of a batch, in float32 or better."""
    b = basis.to(accumulation_dtype(basis.dtype))
    identity = torch.eye(b.shape[-1], dtype=b.dtype, device=b.device)
    return torch.linalg.matrix_norm(b.mT @ b - identity) / max(b.shape[-1], 1) ** 0.5
