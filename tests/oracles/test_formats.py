"""Whatever torch's default device and number format are: tensors stay where they are and what they
are.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eigenstep import Dense, Full, Kronecker, OuterProducts, Spectral, Turning, project, update
from eigenstep.core import step as core
from eigenstep.core.matrices import contract
from eigenstep.core.step import accumulation_dtype, matmul
from eigenstep.optim import matrix, vector
from eigenstep.optim.formats import to_names
from eigenstep.optim.matrix import GivenCurvature, Matrices, MatrixState
from eigenstep.optim.options import Options
from eigenstep.paper import PaperMatrices
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


OPTIMIZERS: list[Callable[..., Spectral]] = [
    Spectral,
    partial(Spectral, structure="full", turning=Turning(map="cayley")),
    Spectral.paper,
]


@pytest.mark.parametrize("build", OPTIMIZERS)
def test_spectral(build: Callable[..., Spectral], request: pytest.FixtureRequest) -> None:
    gradients = random(4, 2, 3, 2)

    def run() -> Tensor:
        param = gradients[0].clone().requires_grad_()
        optimizer = build([param], lr=0.1)
        for gradient in gradients:
            param.grad = gradient
            optimizer.step()
        assert {tensor.device.type for tensor in optimizer.state[param].values()} == {"cpu"}
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


def options_of(
    build: Callable[..., Spectral], dtype: torch.dtype = torch.float64, **options: Any
) -> Options:
    """Return options as the arithmetic gets them: with all formats of numbers."""
    optimizer = build([torch.zeros(1)], **{"state_dtype": dtype, **options})
    return optimizer.options_of(optimizer.param_groups[0])


KINDS: list[tuple[type[Matrices], Callable[..., Spectral], dict[str, Any]]] = [
    (Matrices, Spectral, {"turning": Turning(dtype=torch.bfloat16)}),
    (Matrices, Spectral, {"turning": Turning("normalized", "cayley", dtype=torch.bfloat16)}),
    (Matrices, Spectral, {"eigenvalues": "kronecker"}),
    (PaperMatrices, Spectral.paper, {"basis_dtype": torch.bfloat16}),
]


@pytest.mark.parametrize(("kind", "build", "more"), KINDS)
@pytest.mark.parametrize("has_basis", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_state_is_where_and_what_it_is_told(
    dtype: torch.dtype,
    has_basis: bool,
    kind: type[Matrices],
    build: Callable[..., Spectral],
    more: dict[str, Any],
) -> None:
    """Without any numbers at all: a step never asks for one, so it never waits for a device."""
    options = options_of(build, dtype, clip=1.0, **more)
    bases = dtype if more == {"eigenvalues": "kronecker"} else torch.bfloat16
    wide = accumulation_dtype(dtype)
    state = matrix.new_state((2, 3, 4, 5), options, has_basis=has_basis, device="meta")
    gradient = torch.empty(2, 3, 4, 5, device="meta", dtype=dtype)
    rates = kind.rates_of(options, state.scale)
    direction = matrix.step(kind, state, options, rates, gradient, None, True, True)
    assert direction.dtype == wide
    named = to_names(state)
    assert {tensor.device.type for tensor in (direction, *named.values(), *rates)} == {"meta"}
    assert {rate.dtype for rate in rates} == {wide}
    shapes = {
        "momentum": (2, 3, 4, 5),
        "second_moment": (2, 3, 4, 5),
        "basis_0": (2, 3, 4, 4),
        "basis_1": (2, 1, 5, 5),
        "eigs_0": (2, 3, 4),
        "eigs_1": (2, 1, 5),
        "speed_0": (2, 3),
        "speed_1": (2, 1),
    }
    formats = {"momentum": dtype, "second_moment": dtype, "basis_0": bases, "basis_1": bases}
    assert ("basis_0" in named) == has_basis
    assert ("second_moment" in named) == (options.eigenvalues == "corrected")
    for name, tensor in named.items():
        assert tensor.shape == shapes.get(name, (2,))
        assert tensor.dtype == formats.get(name, wide)


@pytest.mark.parametrize("momentum", [False, True])
def test_state_without_bases(momentum: bool) -> None:
    options = options_of(Spectral, torch.bfloat16, betas=(0.9 * momentum, 0.95))
    state = to_names(vector.new_state((2, 1, 4), options, device="meta"))
    assert list(state) == ["step", "second_moment", *["momentum"] * momentum]
    assert {tensor.device.type for tensor in state.values()} == {"meta"}
    assert [tensor.dtype for tensor in state.values()] == [
        torch.float32,
        *[torch.bfloat16] * (1 + momentum),
    ]


def test_curvature_may_have_fewer_digits() -> None:
    options = options_of(Spectral)
    gradients, curvature = random(3, 1, 1, 4, 3), random(3, 1, 1, 4, 3, 2, seed=1).bfloat16()
    found = []
    for vectors in (curvature, curvature.double()):
        state = matrix.new_state((1, 1, 4, 3), options, has_basis=True, device="cpu")
        rates = Matrices.rates_of(options, state.scale)
        for gradient, some in zip(gradients, vectors, strict=True):
            given = GivenCurvature(some, torch.tensor([True]))
            arguments = (Matrices, state, options, rates, gradient, given, True, True)
            found.append(matrix.step(*arguments))
    assert all(torch.equal(one, other) for one, other in zip(found[:3], found[3:], strict=True))


def test_sides_of_size_one_have_a_state_too() -> None:
    state = matrix.new_state((2, 1, 1), options_of(Spectral), has_basis=True, device="cpu")
    (side,) = state.sides
    assert side.basis is not None
    assert side.speed is not None
    assert (side.basis.shape, side.speed.shape) == ((2, 1, 1, 1), (2, 1))


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
    momentum, second = random(1, 1, 3, seed=2).bfloat16(), random(1, 1, 3).square().bfloat16()
    scale = torch.full((1,), 2.0, dtype=torch.float64)
    state = MatrixState(scale, scale, scale, (), momentum, second)
    options = options_of(Spectral, nesterov=0.0, grafting=False)
    matrices = Matrices(state, options, Matrices.rates_of(options, scale))
    direction = matrices.precondition_(random(1, 1, 3, seed=3), None)
    assert direction.dtype == torch.float64
    assert (direction - momentum.double() / second.double().sqrt() / 2).abs().max() < 1e-14
