"""A positive-definite matrix as a parameter of a model, for any optimizer of ``torch.optim``."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.checks import choose
from ..core.matrices import SPD, Diagonal, Full
from .point import Block, Matrix, Point, Positive, Retraction
from .retractions import RETRACTIONS
from .tangent_view import TangentView


class SPDParameter(nn.Module):
    """A learnable positive-definite matrix ``S = B Diag(d) B^T``.

    Call the module to get the matrix, with differentiable ``matmul``, ``solve``, ``logdet``,
    ``dense``, ``trace``, ``sample`` and ``log_prob`` (``TangentView``). Its parameters are
    coordinates around the current matrix, zero until an optimizer changes them. The next call
    follows that step on the manifold and sets them to zero again. Whatever the optimizer does,
    ``S`` stays positive definite, and momentum is carried along with it.

    The step follows the affine-invariant metric: with ``torch.optim.SGD`` this is Riemannian
    gradient descent, with momentum if wanted, at twice the paper's beta-2: ``SGD(lr=0.1)`` takes
    the steps of ``minimize_spd(lr=0.05)``. Weight decay has no effect. ``torch.optim.LBFGS`` cannot
    be used, which expects parameters to stay where they are.

    Examples:
        >>> covariance = SPDParameter(torch.eye(3))
        >>> optimizer = torch.optim.SGD(covariance.parameters(), lr=0.5)
        >>> data = torch.randn(100, 3)
        >>> for _ in range(20):
        ...     optimizer.zero_grad()
        ...     loss = -covariance().log_prob(data, power=1).mean()
        ...     loss.backward()
        ...     optimizer.step()
    """

    def __init__(self, S: SPD | Tensor, *, retraction: str | Retraction = "geodesic") -> None:
        """Start from a tensor or a spectral matrix, which keeps its structure."""
        super().__init__()
        self._template = Point.start(S, choose(retraction, RETRACTIONS, "retraction"))
        self.tangents = nn.ParameterList(nn.Parameter(leaf) for leaf in self._template.leaves())
        for index, block in enumerate(self._template.blocks):
            for name, tensor in _tensors(block).items():
                self.register_buffer(f"{name}{index}", tensor.clone())

    def forward(self) -> TangentView:
        """Return the matrix, differentiable with respect to the parameters of this module."""
        return self._settled().view(list(self.tangents))

    @property
    def matrix(self) -> SPD:
        """The matrix by itself, without gradients."""
        return self._settled().S

    @torch.no_grad()
    def _settled(self) -> Point:
        """Return the current point, after following the step of an optimizer if there was one."""
        blocks = [self._filled(block, index) for index, block in enumerate(self._template.blocks)]
        point = self._template.with_blocks(blocks)
        step = torch.cat([tangent.flatten() for tangent in self.tangents])
        if not torch.isfinite(step).all():
            raise ValueError(
                "the optimizer has put NaN or infinity into the parameters of SPDParameter"
            )
        if step.any():
            point = point.move(step)
            for index, block in enumerate(point.blocks):
                for name, tensor in _tensors(block).items():
                    self.get_buffer(f"{name}{index}").copy_(tensor)
            for tangent in self.tangents:
                tangent.zero_()
        return point

    def _filled(self, block: Block, index: int) -> Block:
        """Return a block with the values of this module's buffers."""
        eigs = self.get_buffer(f"eigs{index}")
        if isinstance(block, Matrix):
            factor = Full(self.get_buffer(f"basis{index}"), eigs)
            orientation = self.get_buffer(f"orientation{index}")
            return Matrix.of(factor, orientation, block.weight, block.unit, block.retraction)
        assert isinstance(block, Positive)
        return replace(block, factor=Diagonal(eigs))


def _tensors(block: Block) -> dict[str, Tensor]:
    """Return what describes a block."""
    if isinstance(block, Matrix):
        factor, orientation = block.spectral
        return {"basis": factor.basis, "eigs": factor.eigs, "orientation": orientation}
    assert isinstance(block, Positive)
    return {"eigs": block.factor.eigs}
