"""`TangentView` and `Point` against finite differences along geodesics of dense float64
matrices.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from eigenstep import Full, Kronecker
from eigenstep.core.matrices import SPD
from eigenstep.manifold.point import Point
from eigenstep.manifold.tangent_view import TangentView

from .problems import random_spd, structures, symmetric

FUNCTIONS: dict[str, Callable[[SPD], Tensor]] = {
    "dense": lambda S: S.dense().square().sum(),
    "inverse": lambda S: S.dense(-1).sin().sum(),
    "root": lambda S: S.dense(0.5).cos().sum(),
    "logdet": lambda S: S.logdet().sin().sum(),
    "trace": lambda S: S.trace(-2).sum() + S.trace(0.5).square().sum(),
    "matmul": lambda S: S.matmul(_events(S), -0.5).pow(3).sum(),
    "solve": lambda S: (S.solve(_events(S)) * _events(S)).square().sum(),
    "spectrum": lambda S: S.spectrum.log().pow(3).sum(),
    "sample": lambda S: S.sample((2,), generator=torch.Generator().manual_seed(3)).square().sum(),
}


def _events(S: SPD) -> Tensor:
    return torch.linspace(-1, 2, 2 * S.spectrum.numel()).reshape(2, *S.spectrum.shape)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("structure", structures())
def test_gradient_is_the_slope_along_steps(structure: str, name: str) -> None:
    point = Point.start(structures()[structure])
    function = FUNCTIONS[name]
    if structure != "full tied":  # the frames turn
        point = point.move(0.3 * torch.randn_like(_flat(point.leaves())))
    elif name == "spectrum":
        function = FUNCTIONS["logdet"]
    leaves = point.leaves()
    gradient = _flat(torch.autograd.grad(function(point.view(leaves)), leaves))
    step = _tangent(point, torch.randn_like(gradient))

    def value(size: float) -> Tensor:
        moved = point.move(size * step)
        with torch.no_grad():
            return function(moved.view(moved.leaves()))

    slope = (value(1e-5) - value(-1e-5)) / 2e-5
    assert_close(gradient.dot(step), slope, rtol=1e-6, atol=1e-6)


def _flat(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _tangent(point: Point, vector: Tensor) -> Tensor:
    """Make the parts that belong to matrices symmetric, as all steps are."""
    return point.to_eigenbasis(point.to_eigenbasis(vector), back=True)


@pytest.mark.parametrize("structure", structures())
def test_values_are_those_of_the_matrix(structure: str) -> None:
    S = structures()[structure]
    point = Point.start(S)
    local = point.view(point.leaves())
    for power in (1.0, -1.0, 0.5, 2.0):
        assert_close(local.dense(power), S.dense(power))
        assert_close(local.matmul(_events(S), power), S.matmul(_events(S), power))
        assert_close(local.trace(power), S.trace(power))
    assert_close(local.logdet(), S.logdet())
    assert_close(local.spectrum, S.spectrum)
    assert local.sizes == S.sizes
    assert local.batch_shape == S.batch_shape


def test_log_prob_is_that_of_torch() -> None:
    covariance = random_spd(4)
    x = torch.randn(5, 4)
    point = Point.start(covariance)
    expected = torch.distributions.MultivariateNormal(torch.zeros(4), covariance).log_prob(x)
    assert_close(point.view(point.leaves()).log_prob(x, power=1), expected)
    inverse = Point.start(torch.linalg.inv(covariance))
    assert_close(inverse.view(inverse.leaves()).log_prob(x), expected)


def test_samples_have_the_covariance_and_its_gradient() -> None:
    covariance = random_spd(3)
    point = Point.start(covariance)
    leaves = point.leaves()
    local = point.view(leaves)
    x = local.sample((200_000,), power=1)
    assert_close(torch.cov(x.detach().T), covariance, rtol=0.02, atol=0.05)
    # E ||x||^2 = tr S, whose gradient in local coordinates is diagonal: the eigenvalues.
    (gradient,) = torch.autograd.grad(x.square().sum(-1).mean(), leaves)
    assert_close(
        point.to_eigenbasis(gradient.flatten()).reshape(3, 3),
        torch.diag(point.S.spectrum),
        rtol=0.02,
        atol=0.1,
    )


def test_powers_are_accurate_at_extreme_conditions() -> None:
    S = Full(torch.eye(3), torch.tensor([1e-12, 1.0, 1e12]))
    X = torch.zeros(3, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(TangentView(S, [X]).dense(-1)[0, 1], X)
    # d(S^-1)_01 = -S^-1 dS S^-1 = -(d_0 d_1)^-1/2 X_01, shared by the two entries of a symmetric
    # matrix
    assert_close(gradient[0, 1], torch.tensor(-0.5e6))


@pytest.mark.parametrize("structure", structures())
def test_coordinates_are_orthonormal_for_the_affine_invariant_metric(structure: str) -> None:
    point = Point.start(structures()[structure])
    step = _tangent(point, torch.randn_like(_flat(point.leaves())))
    if isinstance(
        point.S, Kronecker
    ):  # remove the traces, which a factor of determinant one has no use for
        turned = [(block, block.tangent(part) * block.weight) for block, part in point._split(step)]
        parts = [block.to_eigenbasis(part, back=True) for block, part in turned]
        step = _flat(parts)
    change = (point.move(1e-6 * step).S.dense() - point.move(-1e-6 * step).S.dense()) / 2e-6
    relative = torch.linalg.solve(point.S.dense(), change)
    assert_close(
        (relative @ relative).diagonal(dim1=-2, dim2=-1).sum(),
        step.square().sum(),
        rtol=1e-6,
        atol=1e-8,
    )


def test_coordinates_do_not_change_in_parallel_transport() -> None:
    """Along one geodesic, its own velocity keeps its coordinates, and transport is an isometry by
    formula.
    """
    S = random_spd(4, 30.0)
    n = 4
    point = Point.start(S)
    step = symmetric(n).flatten()
    other = symmetric(n).flatten()
    moved = point.move(step)
    forward = moved.move(step)
    both = point.move(2 * step)
    assert_close(forward.S.dense(), both.S.dense())
    # Transport of V is E V E^T with E = (S_new S^-1)^1/2, the textbook formula.
    ratio = moved.S.dense() @ torch.linalg.inv(S)
    values, vectors = torch.linalg.eig(ratio)
    E = (vectors * values.sqrt() @ torch.linalg.inv(vectors)).real
    V = _change(point, other)
    assert_close(_change(moved, other), E @ V @ E.T, rtol=1e-6, atol=1e-6)


def _change(point: Point, step: Tensor) -> Tensor:
    return (point.move(1e-5 * step).S.dense() - point.move(-1e-5 * step).S.dense()) / 2e-5
