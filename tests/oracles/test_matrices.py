"""Methods of matrices with their defaults, and nearest Kronecker products, against the
definitions.
"""

import numpy as np
import pytest
import torch

from eigenstep import Full, Kronecker
from eigenstep_lab.baselines.van_loan import nearest_factors, nearest_kronecker

from .test_update import full, random


def test_defaults() -> None:
    """The power is one by default; for samples -1, as ``S`` is the inverse covariance
    of the paper.
    """
    S = full(3, 1)
    basis = S.basis.numpy()
    eigs = S.eigs.numpy()
    dense = basis @ np.diag(eigs) @ basis.T
    assert abs(S.dense().numpy() - dense).max() < 1e-14
    assert abs(S.trace().item() - eigs.sum()) < 1e-14
    assert abs(S.matmul(torch.ones(3).double()).numpy() - dense.sum(1)).max() < 1e-14
    noise = torch.randn(
        5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    ).numpy()
    samples = S.sample((5,), generator=torch.Generator().manual_seed(3)).numpy()
    assert abs(samples - noise / np.sqrt(eigs) @ basis.T).max() < 1e-14


def test_nearest_product_of_small_matrices() -> None:
    """It is found to the last digits, whatever the size of the matrix."""
    root = random(6, 6)
    matrix = root @ root.mT
    for unit in (1.0, 2.0**-60):
        found = nearest_kronecker(unit * matrix, (2, 3)).dense() / unit
        # Van Loan and Pitsianis: the leading singular vectors of the matrix with its blocks as
        # rows.
        blocks = matrix.numpy().reshape(2, 3, 2, 3).transpose(0, 2, 1, 3).reshape(4, 9)
        u, s, v = np.linalg.svd(blocks)
        expected = s[0] * np.kron(u[:, 0].reshape(2, 2), v[0].reshape(3, 3))
        assert abs(found.numpy() - expected).max() < 1e-9


def test_nearest_product_of_batches() -> None:
    root = random(2, 3, 6, 6)
    matrix = root @ root.mT
    for sizes, kinds in (
        ((2, 3), ("full", "diagonal")),
        ((6,), ("full",)),
        ((3, 2), ("identity", "identity")),
    ):
        found = nearest_factors(matrix, sizes, kinds)
        for i, j in np.ndindex(2, 3):
            single = nearest_factors(matrix[i, j], sizes, kinds)
            products = [kron(factors) for factors in (single, [factor[i, j] for factor in found])]
            assert (products[0] - products[1]).abs().max() < 1e-9


def kron(factors: list[torch.Tensor]) -> torch.Tensor:
    product = torch.ones(1, 1, dtype=torch.float64)
    for factor in factors:
        product = torch.kron(product, factor)
    return product


def test_identity_is_full() -> None:
    S = Kronecker.identity((2, 3), (4,))
    assert all(isinstance(factor, Full) for factor in S.factors)
    assert torch.equal(S.dense(), torch.eye(6).expand(4, 6, 6))


def test_residuals_of_a_batch_are_divided_with_their_matrices() -> None:
    eigs = random(2, 3).exp()
    S = Full(
        torch.eye(3, dtype=torch.float64).expand(2, 3, 3), eigs, random(2, 3, 3)
    ).with_unit_determinant()
    for at in range(2):
        mean = float(np.exp(np.log(eigs[at].numpy()).mean()))
        assert S.residual is not None
        assert abs(S.residual[at] - random(2, 3, 3)[at] / mean).max() < 1e-14
        assert abs(S.eigs[at] - eigs[at] / mean).max() < 1e-14


def test_determinant_of_a_batch_whose_factors_are_not_normalized() -> None:
    basis = torch.eye(2, dtype=torch.float64).expand(3, 2, 2)
    S = Kronecker(
        random(3).exp(), (Full(basis, random(3, 2).exp()), Full(basis, random(3, 2, seed=1).exp()))
    )
    for at in range(3):
        product = (
            np.kron(*(np.diag(factor.eigs[at].numpy()) for factor in S.factors))
            * S.scale[at].item()
        )
        assert abs(S.logdet()[at].item() - np.linalg.slogdet(product)[1]) < 1e-13
        assert abs(S.normalized().dense()[at].numpy() - product).max() < 1e-13 * product.max()


def test_samples_are_where_the_matrix_is() -> None:
    assert Full.identity(3, device="meta").sample((2,)).device.type == "meta"


def test_events_with_too_few_axes_for_a_batch() -> None:
    with pytest.raises(ValueError, match=r"x must have shape \(\.\.\., 2, 3, 4\) to fit"):
        Full.identity(4, (2, 3)).matmul(torch.ones(1))
