"""The measurements of the inference benchmark: linear regression, logistic regression and a small
network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from sklearn import datasets
from torch import Tensor
from torch.func import jvp

from eigenstep.inference import FitResult, Gaussian, Supervised, fit_gaussian
from eigenstep.inference.descent import natural_gradient
from eigenstep.inference.estimates import estimate
from eigenstep.inference.models import Target

from ..baselines.hmc import diagnostics, sample_posterior
from ..console import track
from ..problems.regressions import classifier, linear_regression, logistic_regression
from .inference_predictions import (
    calibration_error,
    class_probabilities,
    log_predictive,
    predictive,
)
from .inference_quadrature import Quadrature

UNBIASED = ("hessian", "gauss-newton", "reparametrization", "reinforce")
BIASED = ("gradient-outer-product", "empirical-fisher")
PRIOR = 1.0
"""Precision of the prior of all weights."""
SETS = {"diabetes": "load_diabetes", "breast cancer": "load_breast_cancer", "wine": "load_wine"}


def load(name: str, features: int | None = None) -> tuple[Tensor, Tensor]:
    """Return standardized inputs with a column of ones, and the targets."""
    inputs, targets = getattr(datasets, SETS[name])(return_X_y=True)
    x = torch.tensor(inputs[:, :features])
    x = (x - x.mean(0)) / x.std(0)
    return torch.cat([x, torch.ones(len(x), 1)], 1), torch.tensor(targets)


def halves(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a random half to learn from and the other half to predict."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(x) // 2], order[len(x) // 2 :]
    return x[train], y[train], x[test], y[test]


def linear(steps: int, features: int) -> dict[str, Any]:
    """Compare all sources with the exact posterior of a linear regression, and Newton's method in
    one step.
    """
    x, y = load("diabetes", features)
    y = (y - y.mean()) / y.std()
    noise = 0.7
    model = linear_regression(x, y, noise=noise, prior_precision=PRIOR)
    precision = x.T @ x / noise**2 + PRIOR * torch.eye(x.shape[1])
    mean, covariance = (
        torch.linalg.solve(precision, x.T @ y / noise**2),
        torch.linalg.inv(precision),
    )
    runs = {}
    jobs: dict[str, dict[str, Any]] = {"one Newton step": {"samples": 0, "lr": 1.0, "max_iter": 1}}
    jobs |= {
        source: {"curvature": source, "tol": 1e-13, "max_iter": steps}
        for source in (*UNBIASED, BIASED[0])
    }
    for name, options in track(jobs.items(), "Linear regression", total=len(jobs)):
        found = fit_gaussian(model, torch.zeros(len(mean)), **options)
        runs[name] = {
            "mean_error": distance(found.mean, mean),
            "covariance_error": distance(found.posterior.covariance(), covariance),
            **costs(found),
        }
    return {"examples": len(x), "parameters": len(mean), "runs": runs}


def logistic(draws: int, chains: int, steps: int, seeds: int, features: int) -> dict[str, Any]:
    """Compare all sources with the best Gaussian, and Gaussians with Monte Carlo, on logistic
    regression.
    """
    x, y, x_test, y_test = halves(*load("breast cancer", features))
    model = logistic_regression(x, y, prior_precision=PRIOR)
    exact = Quadrature(x, y, PRIOR)
    best = exact.solve()
    zero = torch.zeros(x.shape[1])
    jobs: dict[str, dict[str, Any]] = {
        source: {"curvature": source} for source in (*UNBIASED, *BIASED)
    }
    jobs["gauss-newton, first order"] = {"curvature": "gauss-newton", "exact": False}
    jobs["gauss-newton, diagonal"] = {"curvature": "gauss-newton", "precision0": "diagonal"}
    jobs["Laplace"] = {"samples": 0}
    runs: dict[str, Any] = {}
    fits: dict[str, Gaussian] = {}
    for name, options in track(jobs.items(), "Logistic regression", total=len(jobs)):
        repeats: list[dict[str, Any]] = []
        curve: list[tuple[int, float]] = []
        for seed in range(seeds if name in UNBIASED else 1):
            start = time.process_time()
            found = fit_gaussian(
                model,
                zero,
                callback=watch(exact, best, curve if seed == 0 else []),
                max_iter=steps,
                seed=seed,
                **options,
            )
            seconds = time.process_time() - start
            repeats.append(
                {"gap": exact.gap(best, found.posterior), **costs(found), "cpu_seconds": seconds}
            )
        fits[name] = found.posterior
        runs[name] = {"repeats": repeats, "curve": curve}
    lots = 2 if steps < 100 else 32
    for source in track((*UNBIASED, *BIASED), "Bias"):
        runs[source]["bias"] = bias(model, best, source, lots)
    sampled, monte_carlo = run_chains(model, best, chains, draws)
    truth = sampled.flatten(0, 1)
    rhat, effective = diagnostics(sampled)
    spread = truth.std(0)
    posteriors: dict[str, Any] = {"Monte Carlo": predictions(model, truth, x_test, y_test)}
    generator = torch.Generator().manual_seed(7)
    compared = {
        "best Gaussian": best,
        "Laplace": fits["Laplace"],
        "diagonal": fits["gauss-newton, diagonal"],
    }
    for name, q in compared.items():
        ratio = q.std() / spread
        posteriors[name] = {
            **predictions(model, q.sample(4000, generator), x_test, y_test),
            "mean_error": ((q.mean - truth.mean(0)).abs() / spread).max().item(),
            "std_ratio": [ratio.min().item(), ratio.max().item()],
        }
    posteriors["mode alone"] = predictions(model, fits["Laplace"].means[""][None], x_test, y_test)
    return {
        "examples": len(x),
        "parameters": len(zero),
        "best_elbo": exact.elbo(best),
        "runs": runs,
        "posteriors": posteriors,
        "monte_carlo": {
            **monte_carlo,
            "rhat": rhat.max().item(),
            "effective": effective.min().item(),
        },
    }


def network(draws: int, chains: int, steps: int) -> dict[str, Any]:
    """Compare posteriors of a small network, with one block for each of its tensors."""
    torch.manual_seed(0)
    x, y = load("wine")
    x, y, x_test, y_test = halves(x[:, :-1], y)
    net = torch.nn.Sequential(
        torch.nn.Linear(x.shape[1], 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)
    )
    model, start = classifier(net, x, y, prior_precision=PRIOR)
    options: dict[str, Any] = {"curvature": "gauss-newton", "max_iter": steps}
    mode = fit_gaussian(model, start, "full", curvature="gauss-newton", samples=0, tol=1e-10)
    fits: dict[str, FitResult] = {"Laplace (Gauss-Newton)": mode}
    for structure in track(("full", "kronecker", "diagonal"), "Network"):
        first = {
            name: S if structure == "full" else structure
            for name, S in mode.posterior.precisions.items()
        }
        fits[f"variational, {structure}"] = fit_gaussian(
            model, mode.mean, first, tol=0.2, max_samples=1024, **options
        )
    posteriors: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(7)
    for name, found in fits.items():
        quality = predictions(model, found.posterior.sample(1000, generator), x_test, y_test)
        posteriors[name] = {
            **quality,
            "elbo": found.elbo,
            "elbo_error": found.elbo_error,
            **costs(found),
        }
    # Laplace's posterior is too wide for a network, but not for the network's linear part at the
    # mode.
    flat = linearized(model, mode.posterior.means)
    posteriors["Laplace, linearized"] = predictions(
        flat, mode.posterior.sample(1000, generator), x_test, y_test
    )
    alone = {name: tensor[None] for name, tensor in mode.posterior.means.items()}
    posteriors["mode alone"] = predictions(model, alone, x_test, y_test)
    sampled, monte_carlo = run_chains(model, fits["variational, full"].posterior, chains, draws)
    stacked = {name: each.flatten(0, 1) for name, each in sampled.items()}
    posteriors["Monte Carlo"] = predictions(model, stacked, x_test, y_test)
    # Hidden units may be exchanged; what must agree between chains is what they predict.
    logits = predictive(model, stacked, x_test).log_softmax(-1)
    rhat, effective = diagnostics(
        logits[:, torch.arange(len(y_test)), y_test].reshape(draws, chains, -1)
    )
    return {
        "examples": len(x),
        "parameters": mode.posterior.size,
        "posteriors": posteriors,
        "monte_carlo": {
            **monte_carlo,
            "rhat": rhat.max().item(),
            "effective": effective.min().item(),
        },
    }


def bias(model: Supervised, best: Gaussian, source: str, lots: int) -> float:
    """Return the relative error of a source's mean step at the best Gaussian, where it should not
    move.

    This is the length of the natural gradient, ``||S^-1/2 (E[curvature] - S) S^-1/2||_F`` and the
    like. The product of two independent estimates is free of their noise on average, unlike the
    square of one.
    """
    target, generator = Target(model), torch.Generator().manual_seed(11)
    estimates = [
        natural_gradient(best, estimate(target, best, source, 512, generator))[0]
        for _ in range(max(2, lots))
    ]
    middle = len(estimates) // 2
    one, two = (torch.stack(part).mean(0) for part in (estimates[:middle], estimates[middle:]))
    return max(0.0, (one @ two).item()) ** 0.5


def run_chains(
    model: Supervised, metric: Gaussian, chains: int, draws: int
) -> tuple[Any, dict[str, Any]]:
    """Return draws of Hamiltonian Monte Carlo, shape ``(draws, chains, ...)``, and what
    they cost.
    """

    def bar(steps: range) -> Iterable[int]:
        return track(steps, "Monte Carlo", total=len(steps))

    start = time.process_time()
    found = sample_posterior(
        model, metric, chains=chains, draws=draws, warmup=max(draws // 4, 10), track=bar
    )
    figures = {"draws": draws * chains, "acceptance": found.acceptance, "ngrad": found.ngrad}
    return found.draws, {**figures, "cpu_seconds": time.process_time() - start}


def predictions(
    model: Supervised, points: Any, inputs: Tensor, targets: Tensor
) -> dict[str, float]:
    """Return mean log-likelihood, accuracy and calibration error on held-out data."""
    chances = class_probabilities(predictive(model, points, inputs))
    return {
        "log_likelihood": log_predictive(model, points, inputs, targets).mean().item(),
        "accuracy": (chances.argmax(-1) == targets).double().mean().item(),
        "calibration_error": calibration_error(chances, targets),
    }


def linearized(model: Supervised, at: dict[str, Tensor]) -> Supervised:
    """Return the model whose outputs are linear in the parameters, and equal to first order around
    a point.
    """

    def predict(parameters: Any, x: Tensor) -> Tensor:
        shift = {name: parameters[name] - at[name] for name in at}
        output, change = jvp(lambda p: model.predict(p, x), (at,), (shift,))[:2]
        return output + change

    return replace(model, predict=predict)


def watch(
    exact: Quadrature, best: Gaussian, curve: list[tuple[int, float]]
) -> Callable[[FitResult], None]:
    """Return a callback that keeps the gap at steps that are ever further apart."""

    def callback(found: FitResult) -> None:
        if found.nit < 10 or found.nit % max(1, found.nit // 10) == 0:
            curve.append((found.ngrad + found.nfev, exact.gap(best, found.posterior)))

    return callback


def costs(found: FitResult) -> Mapping[str, Any]:
    """Return what a fit cost and how it ended; values for the final estimate of the ELBO are not
    counted.
    """
    last = found.history[-1]
    return {"steps": found.nit, "ngrad": last.ngrad, "nfev": last.nfev, "success": found.success}


def distance(a: Any, b: Tensor) -> float:
    """Return the largest difference of two tensors."""
    return (a - b).abs().max().item()
