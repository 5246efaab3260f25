"""Everything else of torch that works on optimizers works on `Spectral`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.testing import assert_close

from eigenstep import Spectral

from .problems import Problem, equal, final

LR = 0.03


class TestClosure:
    def test_runs_with_gradients_and_returns_the_loss(self) -> None:
        problem, calls = Problem(), []
        optimizer = Spectral(problem.parameters, LR)

        def closure() -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = sum(problem.losses()[1:], problem.losses()[0])
            loss.backward()
            return loss

        with torch.no_grad():
            losses = [optimizer.step(closure) for _ in range(6)]
        assert calls == [True] * 6
        assert losses[-1] < losses[0]
        assert all(w.requires_grad and w.is_leaf for w in problem.parameters)
        assert equal(problem.snapshot(), final(lambda ps: Spectral(ps, LR), steps=6))

    def test_without_closure_there_is_no_loss(self) -> None:
        problem = Problem()
        problem.backward()
        assert Spectral(problem.parameters).step() is None


MAKE: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.9),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.05, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=7),
}


class TestSchedulers:
    @pytest.mark.parametrize(
        ("name", "lr"),
        [*((name, LR) for name in MAKE), ("LambdaLR", torch.tensor(LR))],
        ids=str,
    )
    def test_steps_use_the_scheduled_rate(self, name: str, lr: Any) -> None:
        problem = Problem([(6, 4), (5,)])
        optimizer = Spectral(problem.parameters, lr, weight_decay=0.0)
        reference = Problem([(6, 4), (5,)])
        plain = Spectral(reference.parameters, LR, weight_decay=0.0)
        scheduler = MAKE[name](optimizer)
        rates = []
        for _ in range(6):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            plain.param_groups[0].update(lr=rates[-1], betas=optimizer.param_groups[0]["betas"])
            problem.backward()
            optimizer.step()
            reference.backward()
            plain.step()
            scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
        assert len(set(rates)) > 1
        for w, twin in zip(problem.parameters, reference.parameters, strict=True):
            assert_close(w, twin, rtol=1e-6, atol=1e-6)


class TestTensorLearningRate:
    def test_is_the_same_as_a_number(self) -> None:
        expected = final(lambda ps: Spectral(ps, LR))
        for lr in (torch.tensor(LR), torch.tensor([LR])):
            for w, twin in zip(final(lambda ps, lr=lr: Spectral(ps, lr)), expected, strict=True):
                assert_close(w, twin, rtol=1e-5, atol=1e-6)

    def test_can_be_changed_in_place(self) -> None:
        lr, problem = torch.tensor(LR), Problem()
        optimizer = Spectral(problem.parameters, lr)
        problem.descend(optimizer, 2)
        lr.zero_()
        before = problem.snapshot()
        problem.descend(optimizer, 2)
        assert equal(problem.snapshot(), before)


class TestAmp:
    def test_grad_scaler(self) -> None:
        """Scaling by a power of two changes nothing, and a step with infinite gradients is left
        out.
        """
        problem = Problem()
        optimizer = Spectral(problem.parameters, LR, nonfinite="ignore")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        for step in range(6):
            optimizer.zero_grad()
            losses = problem.losses()
            scaler.scale(sum(losses[1:], losses[0])).backward()
            if step == 3:
                problem.parameters[5].grad[0, 0] = torch.inf  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**9
        assert equal(
            problem.snapshot(), final(lambda ps: Spectral(ps, LR, nonfinite="ignore"), steps=5)
        )

    def test_autocast(self) -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = Spectral(model.parameters(), 0.01)
        x = torch.randn(64, 8)
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                losses.append((model(x) - x.sum(1, keepdim=True).tanh()).square().mean())
            losses[-1].backward()
            optimizer.step()
        assert losses[-1] < losses[0] / 3


class TestGradients:
    def test_accumulation(self) -> None:
        """Two halves of a batch, one after the other, are the whole batch."""
        x, y = torch.randn(32, 6, dtype=torch.float64), torch.randn(32, 4, dtype=torch.float64)
        weights = []
        for parts in (1, 2):
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
            optimizer = Spectral(model.parameters(), 0.01)
            for _ in range(8):
                optimizer.zero_grad()
                for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
                    ((model(xs) - ys).square().mean() / parts).backward()
                optimizer.step()
            weights.append([w.detach() for w in model.parameters()])
        for whole, halves in zip(*weights, strict=True):
            assert_close(halves, whole, rtol=1e-8, atol=1e-8)

    def test_clipping_by_torch(self) -> None:
        """It is the same as multiplying all gradients by one number."""
        clipped, scaled = Problem(dtype=torch.float64), Problem(dtype=torch.float64)
        ours, theirs = Spectral(clipped.parameters, LR), Spectral(scaled.parameters, LR)
        for _ in range(5):
            clipped.backward()
            norm = nn.utils.clip_grad_norm_(clipped.parameters, 0.1).item()
            assert norm > 0.1
            ours.step()
            scaled.backward(0.1 / (norm + 1e-6))
            theirs.step()
        for w, twin in zip(clipped.parameters, scaled.parameters, strict=True):
            assert_close(w, twin, rtol=1e-10, atol=1e-10)

    def test_gradients_are_left_alone(self) -> None:
        problem = Problem()
        optimizer = Spectral(problem.parameters, LR, maximize=True)
        for _ in range(3):
            problem.backward()
            gradients = [w.grad for w in problem.parameters if w.grad is not None]
            before = [gradient.clone() for gradient in gradients]
            optimizer.step()
            assert equal(gradients, before)

    def test_maximize_goes_the_other_way(self) -> None:
        up, down = Problem(dtype=torch.float64), Problem(dtype=torch.float64)
        climber = Spectral(up.parameters, LR, maximize=True)
        faller = Spectral(down.parameters, LR)
        for _ in range(6):
            up.backward(scale=-1.0)
            climber.step()
            down.backward()
            faller.step()
        assert equal(up.snapshot(), down.snapshot())
