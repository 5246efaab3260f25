"""`step(curvature=...)`: other curvature than the gradient's own outer product."""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from eigenstep import Dense, Kronecker, OuterProducts, Spectral, Turning, project
from eigenstep.core import sources
from eigenstep.core.step import normalized
from eigenstep.core.update import update

from .problems import Problem, equal
from .test_reductions import read_matrix

EXAMPLES = Path(__file__).parents[2] / "examples"


class TestVectors:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("options", [{}, {"max_dim": 3}, {"grafting": False}], ids=str)
    def test_the_gradient_as_the_only_vector_changes_no_bit(
        self, options: dict[str, Any], dtype: torch.dtype
    ) -> None:
        """Without momentum, whose square bounds the gradient's own second moments from below."""
        runs = []
        for explicit in (False, True):
            problem = Problem(dtype=dtype)
            optimizer = Spectral(problem.parameters, 0.03, betas=(0.0, 0.95), **options)
            for _ in range(6):
                problem.backward()
                vectors: dict[Tensor, Tensor | OuterProducts] = {}
                for w in problem.parameters:
                    if w.grad is not None and w.numel():
                        vectors[w] = w.grad[None]
                optimizer.step(curvature=vectors if explicit else None)
            runs.append(problem.snapshot())
        assert equal(*runs)

    def test_some_parameters_of_a_stack_and_different_numbers_of_vectors(self) -> None:
        together, alone = (Problem([(6, 4)] * 3, torch.float64) for _ in range(2))
        optimizer = Spectral(together.parameters, 0.03)
        own = [Spectral([w], 0.03) for w in alone.parameters]
        for _ in range(6):
            together.backward()
            alone.backward()
            vectors = {
                index: torch.randn(count, 6, 4, dtype=torch.float64)
                for index, count in ((0, 3), (2, 5))
            }
            optimizer.step(
                curvature={together.parameters[index]: v for index, v in vectors.items()}
            )
            for index, single in enumerate(own):
                single.step(
                    curvature={alone.parameters[index]: vectors[index]}
                    if index in vectors
                    else None
                )
        for w, twin in zip(together.parameters, alone.parameters, strict=True):
            assert_close(w, twin, rtol=1e-10, atol=1e-10)

    def test_order_and_splitting_of_vectors_do_not_matter(self) -> None:
        """Only the sum of the outer products counts: v v^T + v v^T is (sqrt(2) v)(sqrt(2) v)^T."""
        runs = []
        for doubled in (False, True):
            torch.manual_seed(0)
            problem = Problem([(6, 4), (5,)], torch.float64)
            optimizer = Spectral(problem.parameters, 0.03)
            for _ in range(6):
                problem.backward()
                vectors = {
                    w: torch.randn(2, *w.shape, dtype=torch.float64) for w in problem.parameters
                }
                if doubled:
                    vectors = {w: torch.cat([v, v.flip(0)]) / 2**0.5 for w, v in vectors.items()}
                optimizer.step(curvature=vectors)
            runs.append(problem.snapshot())
        for once, twice in zip(*runs, strict=True):
            assert_close(twice, once, rtol=1e-10, atol=1e-10)

    def test_steps_follow_the_gradient_not_the_curvature(self) -> None:
        w = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        w.grad = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
        roots = torch.tensor(
            [[2.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 8.0]], dtype=torch.float64
        )
        Spectral([w], lr=1.0, betas=(0.0, 0.9), weight_decay=0.0, damping=0.0).step(
            curvature={w: roots}
        )
        assert_close(w.detach(), torch.tensor([-1 / 2, 2 / 4, -3 / 8], dtype=torch.float64))

    def test_without_any_curvature_no_step_is_taken(self) -> None:
        w = nn.Parameter(torch.ones(4, 3))
        w.grad = torch.ones(4, 3)
        optimizer = Spectral([w], weight_decay=0.0)
        optimizer.step(curvature={w: torch.zeros(2, 4, 3)})
        assert torch.equal(w, torch.ones(4, 3))
        optimizer.step()
        assert (w < 1).all()

    def test_curvature_of_low_rank_is_damped(self) -> None:
        """Where there is no curvature there is damping: 1e-4 of the mean eigenvalue makes steps of
        about 100.
        """
        w = nn.Parameter(torch.zeros(8, 8))
        w.grad = torch.ones(8, 8)
        vector = torch.zeros(1, 8, 8)
        vector[0, 0, 0] = 8.0
        twin = nn.Parameter(w.detach().clone())
        twin.grad = w.grad.clone()
        options: dict[str, Any] = {
            "lr": 1.0,
            "betas": (0.0, 0.9),
            "weight_decay": 0.0,
            "damping": 1e-4,
        }
        Spectral([w], **options, grafting=False).step(curvature={w: vector})
        assert 10 < w.abs().amax() < 200
        Spectral([twin], **options).step(curvature={twin: vector})
        assert twin.square().mean().sqrt() < 1.001  # steps are never longer by default


class TestOracle:
    @pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5,)], ids=str)
    def test_per_example_curvature_is_learned_as_the_core_does(
        self, shape: tuple[int, ...]
    ) -> None:
        w = nn.Parameter(torch.randn(shape, dtype=torch.float64))
        optimizer = Spectral.paper(
            [w], betas=(0.0, 0.9), basis_lr=0.2, interval=1, damping=1e-3, exact=True
        )
        each = [torch.randn(7, *shape, dtype=torch.float64) / 7**0.5 for _ in range(8)]
        tall = [v.mT if len(shape) == 2 and shape[0] < shape[1] else v for v in each]
        S = Kronecker.identity(
            tall[0].shape[1:], kinds=["full" if len(shape) > 1 else "diagonal"] * len(shape)
        )
        S = Kronecker(tall[0].square().sum(0).mean(), S.to(torch.float64).factors)
        for vectors, events in zip(each, tall, strict=True):
            w.grad = vectors.mean(0)
            optimizer.step(curvature={w: vectors})
            S = update(
                S,
                OuterProducts(events),
                lr=0.1,
                turning=Turning(partial(normalized, rate=0.2, gap=0.1), mend=False),
                damping=1e-3,
            )
        expected = S.dense()
        assert (
            read_matrix(optimizer.state[w]).dense() - expected
        ).abs().amax() <= 1e-9 * expected.abs().amax()

    def test_eigenvalues_move_by_the_projected_curvature(self) -> None:
        """One step, written out with the dense ``W`` of each factor."""
        w = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
        optimizer = Spectral.paper([w], betas=(0.0, 0.9))
        for _ in range(5):
            w.grad = torch.randn(6, 4, dtype=torch.float64)
            optimizer.step(curvature={w: torch.randn(3, 6, 4, dtype=torch.float64)})
        S = read_matrix({name: t.clone() for name, t in optimizer.state[w].items()})
        vectors = torch.randn(3, 6, 4, dtype=torch.float64)
        dense = torch.einsum("ki,kj->ij", vectors.flatten(1), vectors.flatten(1))
        optimizer.step(curvature={w: vectors})
        for axis, (factor, W) in enumerate(zip(S.factors, project(S, Dense(dense)), strict=True)):
            n = 0.9 * factor.eigs + 0.1 * W.diagonal()
            assert_close(optimizer.state[w][f"eigs_{axis}"].flatten(), n / n.log().mean().exp())


def stepped(layer: nn.Linear, curvature: Any) -> Tensor:
    """Return the weights of a layer after three steps with its gradient and given curvature."""
    twin = nn.Parameter(layer.weight.detach().clone())
    optimizer = Spectral([twin], 0.01)
    for _ in range(3):
        twin.grad = layer.weight.grad
        optimizer.step(curvature={twin: curvature})
    return twin.detach()


def roots_of(dense: Tensor, layer: nn.Linear) -> Tensor:
    """Return vectors whose outer products sum up to a matrix over all weights of a layer."""
    values, basis = torch.linalg.eigh(dense)
    return (basis * values.clamp_min(0).sqrt()).mT.reshape(-1, *layer.weight.shape)


class TestSources:
    """What `eigenstep.core.sources` returns can be passed on as it is."""

    def gradients(self) -> tuple[nn.Linear, Tensor, Tensor]:
        layer = nn.Linear(6, 4, bias=False, dtype=torch.float64)
        x = torch.randn(16, 6, dtype=torch.float64)
        y = torch.randint(4, (16,))
        cross_entropy(layer(x), y).backward()
        return layer, x, y

    def test_gauss_newton(self) -> None:
        layer, x, y = self.gradients()
        weight = layer.weight.detach()
        found = sources.gauss_newton(lambda p, one: p @ one, cross_entropy, weight, x, y)
        p = (x @ weight.mT).softmax(-1)
        hessians = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        dense = torch.einsum("kab,ki,kj->aibj", hessians, x, x).reshape(24, 24) / len(x)
        assert_close(stepped(layer, found), stepped(layer, roots_of(dense, layer)))

    def test_sampled_fisher(self) -> None:
        layer, x, _ = self.gradients()
        found = sources.sampled_fisher(
            lambda p, one: p @ one,
            lambda f: Categorical(logits=f),
            layer.weight.detach(),
            x,
            draws=2,
        )
        vectors = found.vectors.flatten(1)
        dense = vectors.mT @ vectors
        assert_close(stepped(layer, found), stepped(layer, roots_of(dense, layer)))

    def test_per_example_gradients_are_a_mean(self) -> None:
        layer, *_ = self.gradients()
        each = torch.randn(5, 4, 6)
        found = sources.per_example_gradients(each)
        assert torch.equal(stepped(layer, found), stepped(layer, each / 5**0.5))

    def test_weights(self) -> None:
        layer, *_ = self.gradients()
        vectors = torch.randn(5, 4, 6)
        weights = torch.rand(5)
        found = OuterProducts(vectors, weights, semidefinite=True)
        twin = vectors * weights.sqrt()[:, None, None]
        assert torch.equal(stepped(layer, found), stepped(layer, twin))


class TestMistakes:
    @pytest.mark.parametrize(
        ("value", "error", "message"),
        [
            (torch.ones(4, 3), ValueError, r"curvature must have shape \('K', 4, 3\) with K >= 1"),
            (torch.ones(2, 3, 4), ValueError, "curvature must have shape"),
            (torch.ones(0, 4, 3), ValueError, "K >= 1"),
            (
                torch.ones(2, 4, 3, dtype=torch.long),
                TypeError,
                "real floating-point tensor or OuterProducts",
            ),
            (Dense(torch.eye(12)), TypeError, "got Dense"),
            ([1.0], TypeError, "got list"),
            (
                OuterProducts(torch.ones(2, 4, 3), torch.tensor([1.0, -1.0])),
                ValueError,
                "without negative weights",
            ),
            (OuterProducts(torch.ones(2, 4, 3), shift=1.0), ValueError, "sum of outer products"),
        ],
        ids=str,
    )
    def test_impossible_curvature(self, value: Any, error: type[Exception], message: str) -> None:
        w = nn.Parameter(torch.ones(4, 3))
        w.grad = torch.ones(4, 3)
        optimizer = Spectral([w])
        with pytest.raises(error, match=message):
            optimizer.step(curvature={w: value})
        assert torch.equal(w, torch.ones(4, 3))
        assert not optimizer.state

    def test_unknown_parameter(self) -> None:
        w = nn.Parameter(torch.ones(3))
        w.grad = torch.ones(3)
        with pytest.raises(ValueError, match="not a parameter of this optimizer"):
            Spectral([w]).step(curvature={nn.Parameter(torch.ones(3)): torch.ones(1, 3)})


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("curvature_*.py")))
def test_examples(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each runs, and with the curvature that it shows training works about as well as without, or
    better.
    """
    pytest.importorskip("sklearn")
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    plain, own = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert own < 1.2 * plain
