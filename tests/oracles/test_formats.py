"""Whatever torch's default device and number format are: tensors stay where they are and what they
are.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eigenstep import Dense, Full, Kronecker, OuterProducts, Spectral, project, update
from eigenstep.core import step as core
from eigenstep.core.matrices import contract
from eigenstep.core.step import accumulation_dtype, matmul
from eigenstep.optim.kernel import _grafted_step, _precondition, step
from eigenstep.optim.state import Rates, Rule, new_state
from eigenstep_lab.baselines.van_loan import nearest_factors
from eigenstep_lab.orthogonality import inverse_cayley, orthogonality_defect

FORMATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ORTHOGONAL: list[Callable[[Tensor], Tensor]] = [
    *core.ORTHOGONAL.values(),
    inverse_cayley,
    core.reorthonormalize,
]


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """What is created without saying where and how has no numbers, and too few digits if it had."""
    with torch.device("meta"):
        torch.set_default_dtype(torch.bfloat16)
        yield
        torch.set_default_dtype(torch.float32)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).standard_normal(shape))


def matrices() -> list[Full | Kronecker]:
    full = Full(torch.linalg.qr(random(4, 4))[0], random(4).exp())
    pair = Full(torch.linalg.qr(random(2, 2))[0], random(2).exp())
    return [full, Kronecker(full.eigs[0], (pair, pair)).normalized()]


def curvatures(S: Full | Kronecker) -> list[OuterProducts | Dense]:
    vectors = random(3, *S.sizes, seed=1)
    root = random(4, 4, seed=2)
    return [
        OuterProducts(vectors),
        OuterProducts(vectors, random(3).square(), 0.5),
        Dense(root + root.T),
    ]


def numbers() -> list[Tensor]:
    """Return results of everything in the core that makes tensors."""
    found = []
    for S in matrices():
        found += [S.dense(0.3), S.trace(), S.logdet(), S.condition(), S.solve(random(5, *S.sizes))]
        found += [S.sample((2,), generator=torch.Generator("cpu").manual_seed(0))]
        for curvature in curvatures(S):
            found += project(S, curvature)
            for options in (
                {},
                {"turning": core.Turning("normalized", "quadratic"), "damping": 0.1},
            ):
                found.append(update(S, curvature, lr=0.3, **options).dense())
    skew = random(4, 4) - random(4, 4).mT
    found += [function(skew) for function in ORTHOGONAL if function is not inverse_cayley]
    found += [inverse_cayley(core.cayley(skew)), orthogonality_defect(skew)]
    found += nearest_factors(random(6, 6) @ random(6, 6).mT, (2, 3), ("full", "diagonal"))
    found += [Full.from_dense(random(3, 3) @ random(3, 3).mT).dense()]
    return found


def test_core(request: pytest.FixtureRequest) -> None:
    expected = numbers()
    request.getfixturevalue("elsewhere")
    for one, other in zip(numbers(), expected, strict=True):
        assert one.dtype == torch.float64
        assert torch.equal(one, other)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"residual": True, "grafting": "adam"},
    {"structure": "axes", "maps": "exact"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_spectral(options: dict[str, Any], request: pytest.FixtureRequest) -> None:
    gradients = random(4, 2, 3, 2)

    def run() -> Tensor:
        param = gradients[0].clone().requires_grad_()
        optimizer = Spectral([param], lr=0.1, **options)
        for gradient in gradients:
            param.grad = gradient
            optimizer.step()
        assert {
            v.device.type for v in optimizer.state[param].values() if isinstance(v, Tensor)
        } <= {"cpu"}
        return param.detach()

    expected = run()
    request.getfixturevalue("elsewhere")
    assert torch.equal(run(), expected)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("function", ORTHOGONAL)
def test_maps_keep_the_format(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    skew = 0.1 * (random(4, 4) - random(4, 4).mT).to(dtype)
    x = torch.eye(4, dtype=dtype) + skew if function is inverse_cayley else skew
    found, exact = function(x), function(x.double())
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= torch.finfo(dtype).eps


@pytest.mark.parametrize("rotation", core.ROTATIONS.values(), ids=list(core.ROTATIONS))
def test_generators_keep_the_format(rotation: core.Rotation) -> None:
    eigs, average = random(4).exp(), random(4, 4) + random(4, 4).mT
    found = rotation(eigs.float(), average.float())
    assert found.dtype == torch.float32
    assert (found - rotation(eigs, average)).abs().max() < 1e-5 * found.abs().max()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_projections_have_the_format_of_the_eigenvalues(dtype: torch.dtype) -> None:
    for S in matrices():
        for curvature in curvatures(S):
            name = "matrix" if isinstance(curvature, Dense) else "vectors"
            rounded = replace(curvature, **{name: getattr(curvature, name).to(dtype)})
            for wide in (torch.float32, torch.float64):
                for one, other in zip(
                    project(S.to(wide), rounded), project(S, curvature), strict=True
                ):
                    assert one.dtype == wide
                    assert (one - other).abs().max() <= 8 * torch.finfo(
                        dtype
                    ).eps * other.abs().max() + 1e-5
            basis_too = project(S.to(torch.bfloat16), rounded)
            assert {one.dtype for one in basis_too} == {torch.float32}


@pytest.mark.parametrize("basis", [torch.float64, torch.bfloat16], ids=str)
def test_samples_have_the_format_of_the_eigenvalues(basis: torch.dtype) -> None:
    S = Full(torch.eye(3, dtype=basis), torch.ones(3, dtype=torch.float64))
    assert S.sample((2,)).dtype == torch.float64
    assert S.solve(torch.ones(3, dtype=torch.float16)).dtype == torch.float16


@pytest.mark.parametrize(
    "rule", [Rule(), Rule(grafting="adam", clip=1.0), Rule(maps="exact", rotation="normalized")]
)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_state_is_where_and_what_it_is_told(dtype: torch.dtype, rule: Rule) -> None:
    """Without any numbers at all: a step never asks for one, so it never waits for a device."""
    options = {"momentum": True, "residual": True, "dtype": dtype, "basis_dtype": torch.bfloat16}
    state = new_state((2, 3, 4, 5), (True, False), rule, device=torch.device("meta"), **options)
    rates = Rates(*torch.empty(4, device="meta", dtype=accumulation_dtype(dtype)))
    direction = step(
        torch.empty(2, 3, 4, 5, device="meta", dtype=dtype), None, state, rule, rates, True
    )
    assert direction.dtype == accumulation_dtype(dtype)
    assert {tensor.device.type for tensor in (direction, *state.values())} == {"meta"}
    for name, tensor in state.items():
        large, square = (
            name in ("momentum", "second_moment", "graft"),
            name in ("basis_0", "residual_0"),
        )
        assert tensor.dtype == (
            dtype if large else torch.bfloat16 if square else accumulation_dtype(dtype)
        )
        shape = {"eigs_0": (2, 3, 4), "eigs_1": (2, 1, 5), "speed_0": (2, 3)}.get(name, (2,))
        assert tensor.shape == ((2, 3, 4, 5) if large else (2, 3, 4, 4) if square else shape)


@pytest.mark.parametrize("momentum", [False, True])
def test_state_without_bases(momentum: bool) -> None:
    options = {
        "dtype": torch.bfloat16,
        "basis_dtype": torch.float64,
        "device": torch.device("meta"),
    }
    state = new_state((2, 3, 4), (False,), Rule(), momentum=momentum, residual=True, **options)
    assert list(state) == ["step", *["momentum"] * momentum, "second_moment"]
    assert {tensor.device.type for tensor in state.values()} == {"meta"}
    assert [tensor.dtype for tensor in state.values()] == [
        torch.float32,
        *[torch.bfloat16] * (1 + momentum),
    ]


def kernel_state(shape: tuple[int, ...], rule: Rule) -> dict[str, Tensor]:
    options = {
        "momentum": True,
        "residual": False,
        "dtype": torch.float64,
        "basis_dtype": torch.float64,
    }
    return new_state(shape, (True,) * (len(shape) - 2), rule, device=torch.device("cpu"), **options)


def test_curvature_may_have_fewer_digits() -> None:
    rule, rates = (
        Rule(),
        Rates(*(torch.tensor(x, dtype=torch.float64) for x in (0.9, 0.95, 0.1, 1e-10))),
    )
    gradients, curvature = random(3, 1, 1, 4, 3), random(3, 1, 1, 4, 3, 2, seed=1).bfloat16()
    directions = []
    for vectors in (curvature, curvature.double()):
        state = kernel_state((1, 1, 4, 3), rule)
        directions.append(
            [step(g, v, state, rule, rates, True) for g, v in zip(gradients, vectors, strict=True)]
        )
    assert all(torch.equal(one, other) for one, other in zip(*directions, strict=True))


def test_sides_of_size_one_have_a_state_too() -> None:
    state = kernel_state((2, 1, 1), Rule())
    assert (state["basis_0"].shape, state["speed_0"].shape) == ((2, 1, 1, 1), (2, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_half_precision_are_float32_sums(dtype: torch.dtype) -> None:
    x, matrix = random(5, 200).to(dtype), random(200, 200, seed=1).to(dtype)
    expected = (x.float() @ matrix.float()).to(dtype)
    for found in (matmul(x, matrix), contract(x, matrix, -1, 1)):
        assert found.dtype == dtype
        assert torch.equal(found, expected)
    mixed = contract(x, matrix.double(), -1, 1)
    assert mixed.dtype == torch.float64
    assert (mixed - x.double() @ matrix.double()).abs().max() < 1e-11


def test_states_of_half_precision_are_calculated_with_in_full() -> None:
    """Only what is kept is rounded: with bases that do not turn, all of it is exact in bfloat16."""
    basis = torch.linalg.qr(random(1, 1, 3, 3))[0]
    half = {
        name: random(1, 1, 3, seed=at).square().bfloat16()
        for at, name in enumerate(("graft", "second_moment"))
    }
    state = half | {
        "momentum": random(1, 1, 3, seed=2).bfloat16(),
        "step": torch.ones(1),
        "scale": torch.ones(1),
    }
    rates = Rates(*(torch.tensor(x, dtype=torch.float64) for x in (0.9, 0.5, 0.1, 1e-10)))
    rule, gradient = Rule(grafting="adam", nesterov=False, start=0.0), random(1, 1, 3, seed=3)
    momentum, graft, second = (
        state[name].double() for name in ("momentum", "graft", "second_moment")
    )
    direction = _precondition(gradient, state, rule, rates)
    assert direction.dtype == torch.float64
    assert (direction - momentum / second.sqrt()).abs().max() < 1e-14
    step = _grafted_step(gradient, {0: basis}, state, rule, rates)
    mean_square = 0.5 * graft.square() + 0.5 * gradient.square()
    assert (step - (basis @ momentum[..., None])[..., 0] / mean_square.sqrt()).abs().max() < 1e-13
