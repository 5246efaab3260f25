"""Generators and maps of the core, one at a time and in batches, against their formulas."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from eigenstep.core import step
from eigenstep_lab.orthogonality import inverse_cayley, orthogonality_defect

from . import formulas

BF16 = formulas.Format(half=True)


def averages(count: int = 4, n: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Return positive eigenvalues, some of them close, and symmetric matrices near them."""
    random = np.random.default_rng(1)
    d = random.uniform(0.5, 3, (count, n))
    d[0, 1] = 1.05 * d[0, 0]
    noise = random.standard_normal((count, n, n))
    return d, np.stack([np.diag(row) + 0.3 * (m + m.T) for row, m in zip(d, noise, strict=True)])


def skew(size: float) -> np.ndarray:
    m = (
        np.random.default_rng(2).standard_normal((4, 5, 5))
        * np.array([0.1, 0.5, 1, 2])[:, None, None]
    )
    return size * (m - m.transpose(0, 2, 1))


GENERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "bounded": (step.bounded, lambda d, A: formulas.bounded(A), {}),
    "pairwise": (
        step.bounded,
        lambda d, A, pairwise: formulas.bounded(A, pairwise=pairwise),
        {"pairwise": True},
    ),
    "moore_penrose": (step.moore_penrose, formulas.moore_penrose, {"gap": 0.2}),
    "normalized": (step.normalized, formulas.normalized, {"gap": 0.2, "rate": 0.7}),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_generator(name: str) -> None:
    function, formula, options = GENERATORS[name]
    d, A = averages()
    found = function(torch.from_numpy(d), torch.from_numpy(A), **options).numpy()
    for at in range(len(d)):
        assert abs(found[at] - formula(d[at], A[at], **options)).max() < 1e-14


def test_generator_defaults() -> None:
    d, A = averages()
    d[1, 1] = d[1, 0] * (1 + 2e-6)
    tensors = torch.from_numpy(d), torch.from_numpy(A)
    free = step.moore_penrose(*tensors).numpy()
    length = step.normalized(*tensors).numpy()
    for at in range(len(d)):
        expected = formulas.moore_penrose(d[at], A[at], 1e-6)
        assert abs(free[at] - expected).max() <= 1e-9 * abs(expected).max()
        assert abs(length[at] - formulas.normalized(d[at], A[at], 0.1, 0.5)).max() < 1e-12


def test_bounded_rotation_of_ties_follows_the_order_of_indices() -> None:
    A = np.array([[1.0, 0.2, 0.0], [0.2, 1.0, -0.1], [0.0, -0.1, 1.0]])
    for pairwise in (False, True):
        found = step.bounded(torch.ones(3), torch.from_numpy(A), pairwise=pairwise)
        assert abs(found.numpy() - formulas.bounded(A, pairwise=pairwise)).max() < 1e-14


@pytest.mark.parametrize("name", GENERATORS)
def test_nothing_to_turn(name: str) -> None:
    function, _, options = GENERATORS[name]
    zero = torch.zeros(3, 3, dtype=torch.float64)
    assert not function(torch.tensor([1.0, 1.0, 2.0]), zero, **options).any()


@pytest.mark.parametrize("form", [formulas.EXACT, BF16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("cap", [None, 0.5, 0.9])
def test_truncated_cayley(cap: float | None, form: formulas.Format) -> None:
    N = form.round(skew(0.1))
    tensor = torch.from_numpy(N).to(torch.bfloat16 if form.half else torch.float64)
    found = step.truncated_cayley(tensor, cap).double().numpy()
    for at in range(len(N)):
        assert abs(found[at] - formulas.truncated_cayley(N[at], cap, form)).max() < 1e-14


def test_maps_are_capped_by_default() -> None:
    N = skew(1.0)
    truncated, quadratic = (
        f(torch.from_numpy(N)).numpy() for f in (step.truncated_cayley, step.quadratic)
    )
    for at in range(len(N)):
        assert abs(truncated[at] - formulas.truncated_cayley(N[at], 0.6)).max() < 1e-14
        assert abs(quadratic[at] - formulas.quadratic_cayley(N[at], 0.5)).max() < 1e-14


def test_cayley_and_its_inverse() -> None:
    N = skew(1.0)
    found = step.cayley(torch.from_numpy(N))
    for at in range(len(N)):
        assert abs(found[at].numpy() - formulas.cayley(N[at])).max() < 1e-13
    assert abs(inverse_cayley(found).numpy() - N).max() < 1e-11


def test_newton_schulz() -> None:
    B = (
        np.linalg.qr(np.random.default_rng(3).standard_normal((2, 4, 4)))[0]
        + 0.01 * skew(1.0)[:2, :4, :4]
    )
    found = step.reorthonormalize(torch.from_numpy(B)).numpy()
    for at in range(2):
        assert abs(found[at] - formulas.newton_schulz(B[at])).max() < 1e-14
    defects = orthogonality_defect(torch.from_numpy(B)).numpy()
    expected = [np.linalg.norm(b.T @ b - np.eye(4)) / 2 for b in B]
    assert abs(defects - expected).max() < 1e-14


def test_positive_maps() -> None:
    d = np.array([0.5, 1.0, 2.0])
    h = np.array([-0.4, 0.3, 5.0])
    tensors = torch.from_numpy(d), torch.from_numpy(d + h)
    assert abs(step.exp(*tensors).numpy() - d * np.exp(h / d)).max() < 1e-13
    assert abs(step.truncated_exp(*tensors).numpy() - (d + h)).max() < 1e-15


def test_batches_with_two_axes() -> None:
    N = torch.from_numpy(skew(1.0)).view(2, 2, 5, 5)
    Q = step.cayley(N)
    assert abs(inverse_cayley(Q) - N).max() < 1e-11
    expected = torch.linalg.matrix_norm(1.21 * torch.eye(5) - torch.eye(5)) / 5**0.5
    assert abs(orthogonality_defect(1.1 * Q) - expected).max() < 1e-6


def test_defect_of_half_precision_is_measured_in_float32() -> None:
    defect = orthogonality_defect(torch.full((1, 1), 1.0078125, dtype=torch.bfloat16))
    assert defect.dtype == torch.float32
    assert abs(defect - (1.0078125**2 - 1)) < 1e-7


@pytest.mark.parametrize("name", GENERATORS)
def test_sizes_side_by_side_do_not_matter(name: str) -> None:
    """Matrices of a batch may be of any size: scaling ``d`` and ``A`` leaves ``N`` as it is."""
    function, formula, options = GENERATORS[name]
    d, A = averages()
    units = np.array([2.0**800, 1.0, 2.0**-800, 1.0])
    found = function(
        torch.from_numpy(d * units[:, None]), torch.from_numpy(A * units[:, None, None]), **options
    )
    for at in range(len(d)):
        assert abs(found[at].numpy() - formula(d[at], A[at], **options)).max() < 1e-14
