"""At the limits of the number format: what is cut is cut at the limit that the formulas name."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from eigenstep import Full, Kronecker, OuterProducts, Spectral, Turning, update
from eigenstep.core import step
from eigenstep.optim.matrix import FAINT, Matrices, MatrixState, Side
from eigenstep.paper import PaperMatrices

from . import formulas
from .test_maps import averages, skew

LIMITS = np.finfo(np.float64)
LARGEST = float(LIMITS.max * LIMITS.eps)
"""The largest number that leaves room for sums of many."""


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def matrices(
    scale: torch.Tensor,
    second_moment: torch.Tensor | None = None,
    side: Side | None = None,
    **options: Any,
) -> Matrices:
    """Return what steps a batch of vectors with a basis, in the state that is given."""
    optimizer = Spectral([torch.zeros(1)], **{"betas": (0.0, 0.95), "grafting": False, **options})
    typed = optimizer.options_of(optimizer.param_groups[0])
    state = MatrixState(scale, scale, scale, (side or Side(scale),), second_moment=second_moment)
    return Matrices(state, typed, Matrices.rates_of(typed, scale))


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


@pytest.mark.parametrize("basis", [None, torch.float64, torch.bfloat16], ids=str)
def test_gradients_are_cut_where_sums_could_overflow(basis: torch.dtype | None) -> None:
    """In the narrower of the formats of arithmetic and bases; what is smaller than the inverse
    counts as zero.
    """
    narrow = np.finfo(np.float32)
    most = float(narrow.max) * float(narrow.eps) if basis == torch.bfloat16 else LARGEST
    x = tensor(2 * most, -2 * most, 0.5 * most, 0.5 / most, -0.5 / most, 2 / most)
    side = Side(tensor(1.0), None if basis is None else torch.eye(2, dtype=basis))
    batch = matrices(tensor(0.0), side=side)
    assert batch.within_range(x).tolist() == [most, -most, 0.5 * most, 0.0, 0.0, 2 / most]
    assert batch.within_range(x.float()).dtype == torch.float64


@pytest.mark.parametrize("given", [False, True])
def test_gradients_beyond_the_range_of_bases(given: bool) -> None:
    """They are cut wherever they are used: the first step has the size of Adam's, one, up to the
    bases' rounding.
    """
    param = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    turning = Turning(map="cayley", dtype=torch.bfloat16)
    optimizer = Spectral([param], lr=1.0, weight_decay=0.0, grafting=False, turning=turning)
    param.grad = 1e200 * torch.from_numpy(skew(1.0)[0, :4, 1:4] + 3)
    optimizer.step(curvature={param: param.grad[None]} if given else {})
    assert abs(param.detach().square().mean().sqrt() - 1) < 0.02


UNLIMITED = [
    (partial(Spectral, grafting=False), 1e-30),
    (partial(Spectral.paper, clip=None, structure="diagonal"), 1e-15),
]


@pytest.mark.parametrize("root", [0.5, 3.0])
@pytest.mark.parametrize(("build", "tiny"), UNLIMITED)
def test_steps_are_cut_where_weights_could_overflow(
    build: Callable[..., Spectral], tiny: float, root: float
) -> None:
    """Huge gradients with tiny curvature: ``S^(-1/p) M`` is far beyond float32, on either side."""
    param = torch.zeros(4, 3, requires_grad=True)
    optimizer = build([param], lr=1e-31, weight_decay=0.0, root=root)
    param.grad = 1e30 * torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0] * 2).view(4, 3)
    optimizer.step(curvature={param: tiny * param.grad[None].sign()})
    most = 1e-31 * float(np.finfo(np.float32).max) * float(np.finfo(np.float32).eps)
    assert [param.min().item(), param.max().item()] == pytest.approx([-most, most], rel=1e-6)


def test_scales_far_apart_stay_positive() -> None:
    """After a gradient that is huge beside the scale, ``alpha`` in its units is the smallest
    number, not zero; after one that is tiny, the unit is a small part of the scale.
    """
    batch = matrices(tensor(1e-200, 1e199, 1.0))
    samples = tensor(3e200, 1e200, 1e-20).view(3, 1, 1, 1)
    whitened, past = batch.whiten_(samples)
    assert past.tolist() == pytest.approx([LIMITS.tiny, 0.01, FAINT**-2], rel=1e-12, abs=0)
    assert whitened.flatten().tolist() == pytest.approx([1.0, 1.0, 1e-20 / FAINT], rel=1e-12)
    assert batch.state.scale.tolist() == pytest.approx([3e200, 1e200, FAINT], rel=1e-12)


def test_absolute_damping_counts_as_a_gradient() -> None:
    """Its root is the smallest unit, so that it is a number in the unit's square."""
    optimizer = Spectral.paper([torch.zeros(1)], damping=1e-6)
    options = optimizer.options_of(optimizer.param_groups[0])
    state = MatrixState(*[tensor(1e-200, 1.0)] * 3, (Side(torch.ones(2, 1, 1).double()),))
    batch = PaperMatrices(state, options, PaperMatrices.rates_of(options, state.scale))
    _, past = batch.whiten_(tensor(1e-200, 1e-20).view(2, 1, 1, 1))
    assert state.scale.tolist() == pytest.approx([1e-3, 1e-3], rel=1e-12)
    assert past.tolist() == pytest.approx([LIMITS.tiny, 1e6], rel=1e-12, abs=0)
    assert batch.damping_level(past).tolist() == pytest.approx([1.0, 1.0], rel=1e-12)


def test_roots_of_vanishing_spectra_stay_positive() -> None:
    """And the direction is zero as long as no curvature was seen."""
    batch = matrices(tensor(1e-200, 3.0, 0.0), tensor(1e-300, 4.0, 0.0).view(3, 1, 1))
    found = batch.precondition_(LIMITS.tiny * tensor(1.0, 12.0, 1.0).view(3, 1, 1), None)
    assert found.flatten().tolist() == pytest.approx([1.0, 2 * LIMITS.tiny, 0.0], rel=1e-12, abs=0)


@pytest.mark.parametrize("root", [0.5, 4.0])
def test_no_curvature_no_step_for_any_root(root: float) -> None:
    batch = matrices(tensor(1e-200, 0.0), tensor(4.0, 0.0).view(2, 1, 1), root=root)
    found = batch.precondition_(tensor(0.0, 1.0).view(2, 1, 1), None)
    assert found.flatten().tolist() == [0.0, 0.0]


def test_the_scale_grows_no_farther_than_it_can() -> None:
    """And what divides second moments grows no farther either, so that both stay in the
    same units.
    """
    side = Side(torch.ones(3, 1, 2, dtype=torch.float64))
    batch = matrices(tensor(LARGEST / 4, 3.0, 0.0), side=side)
    new = tensor(1e100, 1e120, 1e5, 1e7, 1e5, 1e7).view(3, 2)
    eigs, log_means = step.normalize([new])
    growth = batch.take_over_(eigs, log_means, [step.Learned(new)])
    expected = [2 * math.log(4), math.log(1e6), math.log(1e6)]
    assert growth.tolist() == pytest.approx(expected, rel=1e-12)
    assert batch.state.scale.tolist() == pytest.approx([LARGEST, 3e3, 0.0], rel=1e-12)
    assert side.eigs[1].flatten().tolist() == pytest.approx([0.1, 10.0], rel=1e-12)
