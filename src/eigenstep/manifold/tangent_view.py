"""A spectral matrix as a differentiable function of coordinates around itself.

Around ``S = B Diag(d) B^T`` every positive-definite matrix is ``B D^1/2 e^X D^1/2 B^T`` with one
symmetric ``X``: the tangent coordinates, in which the affine-invariant metric at ``X = 0`` is the
Frobenius norm. First derivatives with respect to ``X`` exist even where eigenvalues are equal and
those of ``B`` and ``d`` do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import diagonal

from ..core.matrices import SPD, Full, Kronecker, contract, factors_of, scale_of
from ..core.step import symmetrize


class TangentView(SPD):
    """``S`` as a function of its tangent coordinates, to be differentiated at zero.

    Differentiable: ``matmul``, ``solve``, ``dense``, ``logdet``, ``trace``, ``sample``,
    ``log_prob``, and functions of ``spectrum`` that do not depend on the order of the eigenvalues.
    Not differentiable: ``rotate`` and ``unrotate``, because eigenvectors of equal eigenvalues are
    not unique. Gradients are exact, second derivatives are not: powers of ``S`` are expanded to
    first order in the coordinates.
    """

    def __init__(
        self, base: SPD, tangents: Sequence[Tensor], log_scale: Tensor | None = None
    ) -> None:
        """Tie a matrix to its tangent coordinates, all of which are zero.

        Args:
            base: the matrix itself.
            tangents: for each factor ``X``, shape ``(*batch, n, n)``, or logarithms, ``(*batch,
                n)``, if diagonal.
            log_scale: for a Kronecker product, the logarithm of a factor to its scale, shape
                ``(*batch,)``.
        """
        self.base = base
        self.tangents = tuple(tangents)
        self.log_scale = log_scale

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of an event."""
        return self.base.sizes

    @property
    def batch_shape(self) -> torch.Size:
        """Leading dimensions."""
        return self.base.batch_shape

    @property
    def spectrum(self) -> Tensor:
        """All eigenvalues, shape ``(*batch, *sizes)``."""
        return self._grow(torch.ones_like(self.base.spectrum), 1.0, eigenvalues_only=True)

    def rotate(self, x: Tensor) -> Tensor:
        """Return ``B^T x`` with a constant ``B``."""
        return self.base.rotate(x)

    def unrotate(self, x: Tensor) -> Tensor:
        """Return ``B x`` with a constant ``B``."""
        return self.base.unrotate(x)

    def to(self, target: torch.dtype | torch.device | str) -> TangentView:
        """Return a copy in another number format or on another device."""
        log_scale = None if self.log_scale is None else self.log_scale.to(target)
        return TangentView(
            self.base.to(target), [tangent.to(target) for tangent in self.tangents], log_scale
        )

    def logdet(self) -> Tensor:
        """Return the logarithm of the determinant, shape ``(*batch,)``."""
        size = math.prod(self.sizes)
        total = self.base.logdet()
        for factor, tangent in zip(factors_of(self.base), self.tangents, strict=True):
            logs = diagonal(tangent) if isinstance(factor, Full) else tangent
            total = total + size * logs.mean(-1)
        return total if self.log_scale is None else total + size * self.log_scale

    def matmul(self, x: Tensor, power: float = 1.0) -> Tensor:
        """Return ``S^power x`` for any real power."""
        self.check_event(x)
        return self.unrotate(self._grow(self.rotate(x), power)).to(x.dtype)

    def dense(self, power: float = 1.0) -> Tensor:
        """Return ``S^power`` as an ordinary matrix, shape ``(*batch, N, N)``."""
        if isinstance(self.base, Full):  # two products instead of the three that events would take
            return (
                self.base.basis
                @ _power(self.base.eigs, self.tangents[0], power)
                @ self.base.basis.mT
            )
        return super().dense(power)

    def color(self, noise: Tensor, power: float) -> Tensor:
        """Return ``S^power`` times standard normal events: the symmetric root has a derivative."""
        return self.matmul(noise, power)

    def log_prob(self, x: Tensor, *, power: float = -1.0) -> Tensor:
        """Return the log density of events under the Gaussian that ``sample`` draws from."""
        axes = tuple(range(-len(self.sizes), 0))
        distance = (x * self.matmul(x, -power)).sum(axes)
        return -0.5 * (
            distance + power * self.logdet() + math.prod(self.sizes) * math.log(2 * math.pi)
        )

    def _grow(self, x: Tensor, power: float, eigenvalues_only: bool = False) -> Tensor:
        """Multiply events in the eigenbasis by ``Diag(d)^power`` and its first-order change."""
        factors = factors_of(self.base)
        batch = self.batch_shape
        for axis, (factor, tangent) in enumerate(
            zip(factors, self.tangents, strict=True), start=-len(factors)
        ):
            if isinstance(factor, Full) and not eigenvalues_only:
                x = contract(x, _power(factor.eigs, tangent, power), axis, len(factors))
            else:
                logs = diagonal(tangent) if isinstance(factor, Full) else tangent
                values = factor.eigs.pow(power) * (1 + power * logs)
                shape = (n if k - len(factors) == axis else 1 for k, n in enumerate(self.sizes))
                x = x * values.reshape(*batch, *shape)
        if isinstance(self.base, Kronecker):
            scale = scale_of(self.base).pow(power)
            scale = scale if self.log_scale is None else scale * (1 + power * self.log_scale)
            x = x * scale.reshape(*batch, *[1] * len(factors))
        return x


def _power(eigs: Tensor, tangent: Tensor, power: float) -> Tensor:
    """Return ``(D^1/2 e^X D^1/2)^power`` to first order in ``X``.

    The theorem of Daleckii and Krein gives the change: ``X_ij (d_i d_j)^(p/2) sinh(p r) / sinh(r)``
    with ``r = log(d_i / d_j) / 2``, and ``X_ij p d^p`` where ``d_i = d_j``.
    """
    change = symmetrize(tangent)
    if power != 1:
        half = 0.5 * eigs.log()
        gap = half[..., :, None] - half[..., None, :]
        distinct = gap.abs() > torch.finfo(gap.dtype).eps
        change = change * torch.where(
            distinct, (power * gap).sinh() / gap.sinh().where(distinct, 1.0), power
        )
    roots = eigs.pow(power / 2)
    return torch.diag_embed(eigs.pow(power)) + roots[..., :, None] * change * roots[..., None, :]
