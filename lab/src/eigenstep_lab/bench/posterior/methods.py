"""Ways to a posterior. Each trains a network and returns a function that draws predictions.

Draws are class probabilities, or means for regressions, of shape ``(draws, examples, outputs)``, at
a temperature by which the variances of the weights are multiplied. All train for the same number of
epochs with the same batches, warm-up and cosine; peers are their authors' packages, but for SWAG,
dropout and ensembles, which need none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from eigenstep import Spectral

from ...console import require_peer
from .problems import Problem

DRAWS = 32
TEMPERATURES = (1e-4, *(4.0**k for k in range(-3, 4)))
"""Of draws, to choose from on validation data; the first one leaves hardly more than the mean of
the weights.
"""
ALONE = (1.0,)
"""For methods that have no Gaussian whose variances could be multiplied."""
Predict = Callable[[Tensor, float], Tensor]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Method:
    """A way to a posterior.

    Attributes:
        train: Trains with options and returns a function that predicts.
        space: Options, and what random trials choose each from: a list, or the ends of a range of
            magnitudes.
        temperatures: Of draws, to choose from.
        part: The part of our code that it uses, if any: all but IVON start from `Spectral`.
    """

    train: Callable[[Problem, int, Options], Predict]
    space: Mapping[str, Any]
    temperatures: tuple[float, ...] = TEMPERATURES
    part: str = "spectral"


def fit(
    problem: Problem,
    model: nn.Module,
    optimizer: Any,
    seed: int,
    *,
    epochs: float | None = None,
    sampled: bool = False,
    each_step: Callable[[float], None] | None = None,
    tail: float | None = None,
) -> None:
    """Train a model.

    Args: problem: What to train on. model: The model. optimizer: Its optimizer; its learning rates
        are the highest. seed: Of the batches. epochs: How long, if not the problem's own. sampled:
        Whether gradients are computed at weights drawn by the optimizer. each_step: Called after
        each step with how much of training is done. tail: Fraction of the learning rate that the
        last two fifths are trained with, instead of the cosine.
    """
    inputs, targets = problem.train
    per_epoch = math.ceil(problem.size / problem.batch)
    steps = max(1, round((epochs or problem.epochs) * per_epoch))
    generator = Generator().manual_seed(seed)
    peaks = [group["lr"] for group in optimizer.param_groups]
    model.train()
    order: list[Tensor] = []
    for step in range(steps):
        done = step / steps
        factor = min(1.0, (step + 1) / (0.05 * steps)) * 0.5 * (1 + math.cos(math.pi * done))
        if tail is not None and done > 0.6:
            factor = tail
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        order = order or list(
            torch.split(torch.randperm(problem.size, generator=generator), problem.batch)
        )
        some = order.pop()
        with optimizer.sampled_params(train=True) if sampled else nullcontext():
            optimizer.zero_grad()
            problem.loss(model(inputs[some]), targets[some]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if each_step is not None:
            each_step((step + 1) / steps)
    model.eval()


def finished(problem: Problem, outputs: Tensor) -> Tensor:
    """Return outputs as predictions: class probabilities, or values."""
    return outputs.softmax(-1) if problem.variance is None else outputs


def spectral(problem: Problem, model: nn.Module, options: Options) -> Optimizer:
    """Return plain Spectral."""
    return Spectral(model.parameters(), lr=options["lr"], weight_decay=options["weight_decay"])


_MODES: dict[tuple[object, ...], nn.Module] = {}


def train_mode(problem: Problem, seed: int, options: Options) -> nn.Module:
    """Train a point estimate, or return it if it was trained before."""
    key = id(problem), seed, options["lr"], options["weight_decay"]
    if key not in _MODES:
        torch.manual_seed(seed)
        model = problem.build(0.0)
        fit(problem, model, spectral(problem, model, options), seed)
        _MODES[key] = model
    return _MODES[key]


def mode(problem: Problem, seed: int, options: Options) -> Predict:
    """Weights alone, without uncertainty."""
    model = train_mode(problem, seed, options)
    return lambda x, _: finished(problem, model(x))[None]


def posterior_optimizer(problem: Problem, model: nn.Module, options: Options) -> Any:
    """Return ours; a prior in proportion to ``ess`` decays weights alike, however much noise there
    is.
    """
    return Spectral.posterior(
        model.parameters(),
        lr=options["lr"],
        ess=options["ess"] * problem.size,
        batch_size=problem.batch,
        prior_precision=options["decay"] * options["ess"],
    )


def posterior(problem: Problem, seed: int, options: Options) -> Predict:
    """Ours."""
    torch.manual_seed(seed)
    model = problem.build(0.0)
    optimizer = posterior_optimizer(problem, model, options)
    fit(problem, model, optimizer, seed, sampled=True)

    def predict(x: Tensor, temperature: float) -> Tensor:
        generator = Generator().manual_seed(seed)
        return finished(
            problem,
            optimizer.predict(model, x, DRAWS, temperature=temperature, generator=generator),
        )

    return predict


def ivon(problem: Problem, seed: int, options: Options) -> Predict:
    """IVON, a diagonal posterior, of its authors' package."""
    torch.manual_seed(seed)
    model = problem.build(0.0)
    ess = options["ess"] * problem.size
    optimizer = require_peer("ivon").IVON(
        model.parameters(),
        lr=options["lr"],
        ess=ess,
        hess_init=options["hess_init"],
        weight_decay=options["prior"] / ess,
        beta2=0.9995,
    )
    fit(problem, model, optimizer, seed, sampled=True)

    def predict(x: Tensor, temperature: float) -> Tensor:
        torch.manual_seed(seed)
        # From here on, of nothing but the noise
        optimizer.param_groups[0]["ess"] = ess / temperature
        found = []
        for _ in range(DRAWS):
            with optimizer.sampled_params():
                found.append(finished(problem, model(x)))
        return torch.stack(found)

    return predict


def laplace(subset: str, kind: str, problem: Problem, seed: int, options: Options) -> Predict:
    """Laplace's approximation around plain Spectral's weights, by laplace-torch."""
    from torch.utils.data import DataLoader, TensorDataset

    model = train_mode(problem, seed, options)
    what = "classification" if problem.variance is None else "regression"
    extra: dict[str, Any] = (
        {} if problem.variance is None else {"sigma_noise": problem.variance**0.5}
    )
    made = require_peer("laplace").Laplace(
        model,
        what,
        subset_of_weights=subset,
        hessian_structure=kind,
        prior_precision=options["prior"],
        **extra,
    )
    made.fit(DataLoader(TensorDataset(*problem.train), batch_size=250))
    form = "glm" if subset == "last_layer" else "nn"

    def predict(x: Tensor, temperature: float) -> Tensor:
        torch.manual_seed(seed)
        # Of data and prior alike
        made.temperature, made.prior_precision = (temperature, options["prior"] / temperature)
        return torch.cat(
            [made.predictive_samples(part, form, n_samples=DRAWS) for part in torch.split(x, 500)],
            1,
        )

    return predict


def dropout(problem: Problem, seed: int, options: Options) -> Predict:
    """Dropout that stays on for predictions."""
    torch.manual_seed(seed)
    model = problem.build(options["rate"])
    fit(problem, model, spectral(problem, model, options), seed)
    model.train()  # there is nothing else in it that differs

    def predict(x: Tensor, _: float) -> Tensor:
        torch.manual_seed(seed)
        return torch.stack([finished(problem, model(x)) for _ in range(DRAWS)])

    return predict


def swag(problem: Problem, seed: int, options: Options) -> Predict:
    """SWAG: a Gaussian through the weights of the last two fifths of training, diagonal plus rank
    twenty.
    """
    torch.manual_seed(seed)
    model = problem.build(0.0)
    params = list(model.parameters())
    seen: list[Tensor] = []

    def collect(done: float) -> None:
        if done > 0.6 + 0.02 * len(seen):
            seen.append(nn.utils.parameters_to_vector(params).detach().clone())

    fit(
        problem,
        model,
        spectral(problem, model, options),
        seed,
        each_step=collect,
        tail=options["tail"],
    )
    weights = torch.stack(seen)
    mean, spread = weights.mean(0), weights.std(0)
    deviations = (weights - mean) / (len(weights) - 1) ** 0.5

    def predict(x: Tensor, temperature: float) -> Tensor:
        generator, found = Generator().manual_seed(seed), []
        for _ in range(DRAWS):
            noise = spread * torch.randn(len(mean), generator=generator)
            noise = noise + torch.randn(len(deviations), generator=generator) @ deviations
            nn.utils.vector_to_parameters(mean + noise * (temperature / 2) ** 0.5, params)
            found.append(finished(problem, model(x)))
        return torch.stack(found)

    return predict


def ensemble(problem: Problem, seed: int, options: Options) -> Predict:
    """Five networks, each of which trains for a fifth of the time."""
    models = []
    for member in range(5):
        torch.manual_seed(1000 * (member + 1) + seed)
        models.append(problem.build(0.0))
        optimizer = spectral(problem, models[-1], options)
        fit(problem, models[-1], optimizer, 1000 * (member + 1) + seed, epochs=problem.epochs / 5)
    return lambda x, _: torch.stack([finished(problem, model(x)) for model in models])


RATES, DECAYS, PRIORS = (5e-4, 3e-2), [0.0, 0.1, 0.3, 1.0], [3.0, 10.0, 30.0]
POINT = {"lr": RATES, "weight_decay": DECAYS}
OURS = {"lr": (5e-3, 0.15), "ess": [20, 80, 320], "decay": (0.3, 6.0)}
PEER = {"lr": (0.05, 1.5), "ess": [3, 10], "prior": PRIORS, "hess_init": [0.1, 0.3, 1.0, 10.0]}
METHODS: Mapping[str, Method] = {
    "weights alone": Method(mode, POINT, ALONE),
    "Spectral.posterior": Method(posterior, OURS, part="posterior"),
    "IVON": Method(ivon, PEER, part=""),
    "last-layer Laplace": Method(partial(laplace, "last_layer", "kron"), {"prior": (0.03, 100.0)}),
    "Kronecker Laplace": Method(partial(laplace, "all", "kron"), {"prior": (1.0, 3000.0)}),
    "dropout": Method(dropout, {**POINT, "rate": [0.05, 0.1, 0.2, 0.4]}, ALONE),
    "SWAG": Method(swag, {**POINT, "tail": [0.1, 0.3, 0.6]}),
    "ensemble of 5": Method(ensemble, {"lr": (1e-3, 6e-2), "weight_decay": DECAYS}, ALONE),
}
ON_TOP = ("last-layer Laplace", "Kronecker Laplace")
"""Methods that start from the weights alone, with the options that were best for these."""
