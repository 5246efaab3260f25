"""The step's parts in NumPy are those in torch: random averages, tied eigenvalues, batches, all
sizes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eigenstep.core import numpy_twin, step
from eigenstep.core.numpy_twin import Array


def averages(shape: tuple[int, ...], kind: str) -> Array:
    rng = np.random.default_rng(len(kind) + shape[-1])
    A = rng.standard_normal((*shape, shape[-1]))
    A = A + A.swapaxes(-2, -1)
    values = numpy_twin.diagonal(A)
    if kind == "tied":
        values[...] = np.round(values)  # several equal ones
    if kind == "all tied":
        values[...] = 2.0
    if kind == "diagonal":
        A = values[..., None] * np.eye(shape[-1])
    return {"small": 1e-8 * A, "large": 1e8 * A}.get(kind, A)


KINDS = ("random", "tied", "all tied", "diagonal", "small", "large")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1,), (30,), (2, 3, 4)])
def test_the_whole_step_is_that_of_torch(shape: tuple[int, ...], kind: str) -> None:
    A = averages(shape, kind)
    N = numpy_twin.bounded(A)
    tensor = torch.from_numpy(A)
    want = step.bounded(torch.zeros(shape), tensor, pairwise=True)
    np.testing.assert_allclose(N, want.numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(N, -N.swapaxes(-2, -1))
    assert np.abs(N).max() <= 0.5
    turn = numpy_twin.cayley(N)
    turn_want = step.cayley(want)
    np.testing.assert_allclose(turn, turn_want.numpy(), rtol=1e-12, atol=1e-12)
    eigs = torch.linalg.diagonal(turn_want.mT @ tensor @ turn_want)
    np.testing.assert_allclose(
        numpy_twin.rayleigh_quotients(A, turn),
        eigs.numpy(),
        rtol=1e-12,
        atol=1e-12 * np.abs(A).max(),
    )


@pytest.mark.parametrize("batch", [(), (4,)])
def test_bases_are_mended_as_in_torch(batch: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    bent = np.linalg.qr(rng.standard_normal((*batch, 6, 6)))[0] + 1e-3 * rng.standard_normal(
        (*batch, 6, 6)
    )
    want = step.reorthonormalize(torch.from_numpy(bent)).numpy()
    np.testing.assert_allclose(numpy_twin.reorthonormalize(bent), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("off", [0.0, 1e-310, 1e-170, 1e-90])
def test_tiny_entries_at_equal_eigenvalues_do_no_harm(off: float) -> None:
    N = numpy_twin.bounded(np.array([[1.0, off], [off, 1.0]]))
    assert np.abs(N).max() <= 0.5


def test_averages_that_rounding_left_asymmetric_still_have_skew_generators() -> None:
    """Where eigenvalues are equal, rounding alone decides on the sign of an entry, on both sides of
    the diagonal.
    """
    A = np.array([[[1.0, 1e-17], [-1e-17, 1.0]], [[1.0, 0.1], [0.1 + 1e-17, 2.0]]])
    N = numpy_twin.bounded(A)
    np.testing.assert_allclose(N, -N.swapaxes(-2, -1), atol=1e-15)
    Q = numpy_twin.cayley(N)
    np.testing.assert_allclose(
        Q.swapaxes(-2, -1) @ Q, np.broadcast_to(np.eye(2), (2, 2, 2)), atol=1e-14
    )
