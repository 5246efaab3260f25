"""At the limits of the number format: what is cut is cut at the limit that the formulas name."""

import math

import numpy as np
import pytest
import torch

from eigenstep import Full, Kronecker, OuterProducts, Spectral, update
from eigenstep.core import step
from eigenstep.optim.kernel import FAINT, _normalize, _precondition, _whiten, _within_range
from eigenstep.optim.state import Rates, Rule

from . import formulas
from .test_maps import averages, skew

LIMITS = np.finfo(np.float64)
LARGEST = float(LIMITS.max * LIMITS.eps)
"""The largest number that leaves room for sums of many."""


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_cayley_cuts_entries_on_either_side() -> None:
    N = 1e200 * skew(1.0)[0]
    expected = formulas.cayley(np.clip(N, -(LIMITS.eps**-0.5), LIMITS.eps**-0.5))
    assert abs(step.cayley(torch.from_numpy(N)).numpy() - expected).max() < 1e-6


def test_exponential_map_saturates_at_the_limits_of_the_format() -> None:
    found = step.exp(tensor(1.0, 1.0, 1.0), tensor(-1e6, 1e306, 1e6)).tolist()
    assert found == [LIMITS.tiny, LARGEST, LARGEST]


@pytest.mark.parametrize(
    ("d", "h"),
    [(2.0, h) for h in (-600.0, -1.0, 0.5, 1.5, 20.0, 600.0)]
    + [(1e-300, 1.5), (1e-300, 1000.0), (1e250, -1000.0)],
)
def test_exponential_map_is_exact_wherever_the_result_fits_the_format(d: float, h: float) -> None:
    """Also where ``e^h`` by itself does not."""
    found = float(step.exp(tensor(d), tensor(d + h * d)))
    assert math.log(found) == pytest.approx(math.log(d) + h, abs=1e-11)


def test_truncated_map() -> None:
    found = step.truncated_exp(tensor(3.0, 1e-300, 1.0), tensor(0.0, 0.0, 1e306)).tolist()
    assert found == [3.0 * LIMITS.eps**2, LIMITS.tiny, LARGEST]


def test_normalized_rotation_of_averages_of_any_size() -> None:
    """Unlike the eigenvalues, which stay: so ``N`` would be huge or vanish, were it not
    normalized.
    """
    d, A = averages()
    units = np.array([2.0**800, 1.0, 2.0**-800, 1.0])[:, None, None]
    found = step.normalized(torch.from_numpy(d), torch.from_numpy(A * units), gap=0.2, rate=0.7)
    for at in range(len(d)):
        assert abs(found[at].numpy() - formulas.normalized(d[at], A[at], 0.2, 0.7)).max() < 1e-14


def test_papers_rotation_is_cut_at_the_largest_number() -> None:
    found = step.moore_penrose(tensor(1e-5, 2e-5), 1e306 * tensor(0.0, 1.0, 1.0, 0.0).view(2, 2))
    assert found.flatten().tolist() == [0.0, LIMITS.max, -LIMITS.max, 0.0]


def test_bounded_rotation_of_entries_whose_squares_vanish() -> None:
    """Off the diagonal ``a`` beside a tie: ``N_ij = -a / (2 n sqrt(tiny))`` instead of up to
    ``1/sqrt(2)``.
    """
    floor = 2 * 3 * LIMITS.tiny**0.5
    A = torch.eye(3, dtype=torch.float64)
    A[0, 1] = A[1, 0] = 1e-170
    A[1, 2] = A[2, 1] = -1e-165
    found = step.bounded(torch.ones(1, 1, 3), A[None, None])[0, 0].numpy()
    assert np.allclose(
        found[[0, 1, 1, 2], [1, 0, 2, 1]] * floor, [-1e-170, 1e-170, 1e-165, -1e-165], 1e-12, 0
    )


@pytest.mark.parametrize(
    ("start", "shift", "end"), [(LARGEST / 2, 9.0, LARGEST), (LIMITS.tiny, -9.0, LIMITS.tiny)]
)
def test_scale_of_a_product(start: float, shift: float, end: float) -> None:
    """With ``H = shift S`` and nothing forgotten, every factor grows by ``e^shift``, and so does
    the scale.
    """
    pair = Full(torch.eye(2, dtype=torch.float64), tensor(0.5, 2.0))
    S = Kronecker(tensor(start).squeeze(), (pair, pair))
    zero = torch.zeros(1, 2, 2, dtype=torch.float64)
    found = update(S, OuterProducts(zero, shift=shift), lr=1.0, decay=0.0)
    assert found.scale == end
    assert all(torch.allclose(factor.eigs, pair.eigs) for factor in found.factors)
    middle = Kronecker(tensor(3.0).squeeze(), (pair, pair))
    found = update(middle, OuterProducts(zero, shift=shift), lr=1.0, decay=0.0)
    assert abs(found.scale / (3.0 * math.exp(shift)) - 1) < 1e-14


def test_saturate() -> None:
    found = step.saturate(tensor(1e307, -1e307, math.inf, -math.inf, math.nan, 3.0)).tolist()
    assert found == [LARGEST, -LARGEST, LARGEST, -LARGEST, 0.0, 3.0]


def test_eigenvalues_spread_too_far_are_pulled_together() -> None:
    """``exp(logs - mean)``, with the logarithms shortened so that the largest is half that of the
    largest number.
    """
    bound = math.log(LIMITS.max) / 2
    logs = tensor(1000.0, 0.0, -1000.0, 0.0, 1.0, 5.0).view(2, 3)
    found = step.centered_exp(logs).log().numpy()
    expected = np.array([[bound, 0, -bound], [-2, -1, 3]])
    assert abs(found - expected).max() < 1e-12


def test_residuals_that_outlive_their_unit_are_shortened() -> None:
    """Each residual of a stack by itself, so that its largest entry is the inverse of what counts
    as nothing.
    """
    residual = torch.from_numpy(skew(1.0)[:2, None]) * tensor(1.0, 1e12).view(2, 1, 1, 1)
    eigs = torch.ones(2, 1, 5, dtype=torch.float64)
    state = {"eigs_0": eigs, "residual_0": residual.clone(), "scale": tensor(1.0, 1.0)}
    assert _normalize([4 * eigs.flatten(1)], state).tolist() == pytest.approx([math.log(4)] * 2)
    short, long = residual / 4
    assert abs(state["residual_0"][0] - short).max() < 1e-15
    assert abs(state["residual_0"][1] * FAINT - long / long.abs().max()).max() < 1e-15
    assert state["scale"].tolist() == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("basis", [None, torch.float64, torch.bfloat16], ids=str)
def test_gradients_are_cut_where_sums_could_overflow(basis: torch.dtype | None) -> None:
    """In the narrower of the formats of arithmetic and bases; what is smaller than the inverse
    counts as zero.
    """
    most = (
        LARGEST
        if basis != torch.bfloat16
        else float(np.finfo(np.float32).max) * float(np.finfo(np.float32).eps)
    )
    x = tensor(2 * most, -2 * most, 0.5 * most, 0.5 / most, -0.5 / most, 2 / most)
    bases = {} if basis is None else {1: torch.eye(2, dtype=basis)}
    found = _within_range(x, {"scale": tensor(0.0)}, bases)
    assert found.tolist() == [most, -most, 0.5 * most, 0.0, 0.0, 2 / most]
    assert _within_range(x.float(), {"scale": tensor(0.0)}, bases).dtype == torch.float64


@pytest.mark.parametrize("given", [False, True])
def test_gradients_beyond_the_range_of_bases(given: bool) -> None:
    """They are cut wherever they are used: the first step has the size of Adam's, one, up to the
    bases' rounding.
    """
    param = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    options = {
        "weight_decay": 0.0,
        "grafting": "adam",
        "basis_dtype": torch.bfloat16,
        "maps": "exact",
    }
    optimizer = Spectral([param], lr=1.0, **options)
    param.grad = 1e200 * torch.from_numpy(skew(1.0)[0, :4, 1:4] + 3)
    optimizer.step(curvature={param: param.grad[None]} if given else {})
    assert abs(param.detach().square().mean().sqrt() - 1) < 0.02


@pytest.mark.parametrize("root", [0.5, 3.0])
def test_steps_are_cut_where_weights_could_overflow(root: float) -> None:
    """Huge gradients with tiny curvature: ``S^(-1/p) M`` is far beyond float32, on either side."""
    param = torch.zeros(4, 3, requires_grad=True)
    optimizer = Spectral([param], lr=1e-31, weight_decay=0.0, grafting=None, root=root)
    param.grad = 1e30 * torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0] * 2).view(4, 3)
    optimizer.step(curvature={param: 1e-30 * param.grad[None].sign()})
    most = 1e-31 * float(np.finfo(np.float32).max) * float(np.finfo(np.float32).eps)
    assert [param.min().item(), param.max().item()] == pytest.approx([-most, most], rel=1e-6)


def test_scales_far_apart_stay_positive() -> None:
    """After a gradient that is huge beside the scale, ``alpha`` in its units is the smallest
    number, not zero.
    """
    rates = Rates(*tensor(0.9, 0.95, 0.1, 1e-10))
    samples = tensor(3e200, 1e200).view(2, 1, 1, 1)
    _, past = _whiten(samples, {"scale": tensor(1e-200, 1e199)}, Rule(), rates)
    assert past.tolist() == pytest.approx([LIMITS.tiny, 0.01], rel=1e-12, abs=0)


def test_roots_of_vanishing_spectra_stay_positive() -> None:
    """And the direction is zero as long as no curvature was seen."""
    state = {
        "second_moment": tensor(1e-300, 4.0, 0.0).view(3, 1, 1, 1),
        "scale": tensor(1e-200, 3.0, 0.0),
    }
    rates = Rates(*tensor(0.9, 0.95, 0.1, 1e-10))
    found = _precondition(
        LIMITS.tiny * tensor(1.0, 12.0, 1.0).view(3, 1, 1, 1), state, Rule(), rates
    )
    assert found.flatten().tolist() == pytest.approx([1.0, 2 * LIMITS.tiny, 0.0], rel=1e-12, abs=0)


def test_the_scale_grows_no_farther_than_it_can() -> None:
    """And what divides second moments grows no farther either, so that both stay in the
    same units.
    """
    state = {
        "scale": tensor(LARGEST / 4, 3.0, 0.0),
        "eigs_0": torch.ones(3, 1, 2, dtype=torch.float64),
    }
    change = _normalize([tensor(1e100, 1e120, 1e5, 1e7, 1e5, 1e7).view(3, 2)], state)
    assert change.tolist() == pytest.approx(
        [2 * math.log(4), math.log(1e6), math.log(1e6)], rel=1e-12
    )
    assert state["scale"].tolist() == pytest.approx([LARGEST, 3e3, 0.0], rel=1e-12)


def test_no_curvature_no_step_for_any_root() -> None:
    state = {"second_moment": tensor(4.0, 0.0).view(2, 1, 1, 1), "scale": tensor(1e-200, 0.0)}
    rates = Rates(*tensor(0.9, 0.95, 0.1, 1e-10))
    for root in (0.5, 4.0):
        found = _precondition(tensor(0.0, 1.0).view(2, 1, 1, 1), state, Rule(root=root), rates)
        assert found.flatten().tolist() == [0.0, 0.0]
