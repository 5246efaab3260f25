"""Measure Gaussian inference: how close to the exact posterior, at what cost, and how well it predicts.

Linear regression (diabetes) has an exact posterior. For logistic regression (breast cancer, the ten features that are
means) the best Gaussian is found by quadrature, because the product of an input and the weights is Gaussian in one
dimension: gaps of the ELBO are exact, not estimated. What Gaussians miss is measured by a long run of Hamiltonian Monte
Carlo, there and for a small network (wine). A Hessian counts as one gradient for each parameter, a Gauss-Newton matrix
as one for each output.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from ...inference import (
    Gaussian,
    Result,
    classifier,
    fit_gaussian,
    linear_regression,
    logistic_regression,
    sample_posterior,
)
from ...inference.estimates import Target, estimate
from ...inference.gaussian import ONLY
from ...inference.hmc import diagnostics
from ...inference.models import Supervised, calibration_error, class_probabilities, log_predictive, predictive
from ...inference.steps import tangent_vector
from ...spd import Full
from ..console import UserError, require, track
from ..plots import figure, save
from ..results import Table

UNBIASED = ("hessian", "gauss-newton", "reparametrization", "reinforce")
BIASED = ("gradient-outer-product", "empirical-fisher")
PRIOR = 1.0
"""Precision of the prior of all weights."""
BARS = {"posterior": 1e-6, "newton": 1e-10, "elbo": 1e-3}
"""What is to be reached: errors of an exact posterior and of one Newton step, and the gap of the ELBO in nats."""
SETS = {"diabetes": "load_diabetes", "breast cancer": "load_breast_cancer", "wine": "load_wine"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how long to run."""
    parser.add_argument("--draws", type=int, default=500, help="MCMC draws of each chain (default: %(default)s)")
    parser.add_argument("--chains", type=int, default=16, help="MCMC chains (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="most steps of a fit (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few steps, draws and features, to see that it runs")
    parser.add_argument(
        "--plot", default="runs/bench/inference.png", help="where the picture goes (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the tables and the verdicts, and draw the gaps."""
    if args.quick:
        args.draws, args.chains, args.steps = 20, 2, 20
    for name in ("draws", "chains", "steps"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1, got {getattr(args, name)}")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        result = measure(args)
    finally:
        torch.set_default_dtype(before)
    draw(result, args.plot)
    return {**result, "tables": [asdict(table) for table in tables(result)]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything."""
    start = time.process_time()
    result: dict[str, Any] = {"linear": linear(args.steps, 3 if args.quick else 10)}
    result["logistic"] = logistic(args, 3 if args.quick else 10)
    result["network"] = network(args)
    result["verdicts"] = list(verdicts(result))
    return {**result, "cpu_seconds": time.process_time() - start}


def load(name: str, features: int | None = None) -> tuple[Tensor, Tensor]:
    """Return standardized inputs with a column of ones, and the targets."""
    inputs, targets = getattr(require("sklearn.datasets", "experiments"), SETS[name])(return_X_y=True)
    x = torch.tensor(inputs[:, :features])
    x = (x - x.mean(0)) / x.std(0)
    return torch.cat([x, torch.ones(len(x), 1)], 1), torch.tensor(targets)


def halves(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a random half to learn from and the other half to predict."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(x) // 2], order[len(x) // 2 :]
    return x[train], y[train], x[test], y[test]


def linear(steps: int, features: int) -> dict[str, Any]:
    """Compare all sources with the exact posterior of a linear regression, and Newton's method in one step."""
    x, y = load("diabetes", features)
    y = (y - y.mean()) / y.std()
    noise = 0.7
    model = linear_regression(x, y, noise=noise, prior_precision=PRIOR)
    precision = x.T @ x / noise**2 + PRIOR * torch.eye(x.shape[1])
    mean, covariance = torch.linalg.solve(precision, x.T @ y / noise**2), torch.linalg.inv(precision)
    runs = {}
    jobs: dict[str, dict[str, Any]] = {"one Newton step": {"samples": 0, "lr": 1.0, "max_iter": 1}}
    jobs |= {source: {"curvature": source, "tol": 1e-13, "max_iter": steps} for source in (*UNBIASED, BIASED[0])}
    for name, options in track(jobs.items(), "Linear regression", total=len(jobs)):
        found, seconds = timed(fit_gaussian, model, torch.zeros(len(mean)), **options)
        runs[name] = {
            "mean_error": distance(found.mean, mean),
            "covariance_error": distance(found.posterior.covariance(), covariance),
            **costs(found, seconds),
        }
    return {"examples": len(x), "parameters": len(mean), "runs": runs}


def logistic(args: argparse.Namespace, features: int) -> dict[str, Any]:
    """Compare all sources with the best Gaussian, and Gaussians with Monte Carlo, on logistic regression."""
    x, y, x_test, y_test = halves(*load("breast cancer", features))
    model = logistic_regression(x, y, prior_precision=PRIOR)
    exact = Quadrature(x, y.to(x), PRIOR)
    best = exact.solve()
    zero = torch.zeros(x.shape[1])
    jobs: dict[str, dict[str, Any]] = {
        source: {"curvature": source, "max_iter": args.steps, "tol": 1e-3 if source in UNBIASED else 1e-2}
        for source in (*UNBIASED, *BIASED)
    }
    jobs["gauss-newton, first order"] = {**jobs["gauss-newton"], "exact": False}
    jobs["gauss-newton, diagonal"] = {**jobs["gauss-newton"], "precision0": "diagonal"}
    jobs["Laplace"] = {"samples": 0}
    runs: dict[str, Any] = {}
    fits: dict[str, Any] = {}
    for name, options in track(jobs.items(), "Logistic regression", total=len(jobs)):
        curve: list[tuple[int, float]] = []
        found, seconds = timed(fit_gaussian, model, zero, callback=watch(exact, best, curve), **options)
        fits[name] = found.posterior
        gap = exact.gap(best, found.posterior)
        runs[name] = {"gap": gap, **costs(found, seconds), "curve": curve}
    for source in (*UNBIASED[:2], *BIASED):
        runs[source]["bias"] = bias(model, best, source, 256 if args.quick else 4096)
    warmup = max(args.draws // 5, 10)
    chains, seconds = timed(
        sample_posterior,
        model,
        best,
        chains=args.chains,
        draws=args.draws,
        warmup=warmup,
        track=bar("Monte Carlo"),
    )
    rhat, effective = diagnostics(chains.draws)
    truth = chains.stacked()
    compared: dict[str, Any] = {
        "best Gaussian": best,
        "Laplace": fits["Laplace"],
        "diagonal": fits["gauss-newton, diagonal"],
    }
    generator = torch.Generator().manual_seed(7)
    draws = {name: q.sample(4000, generator) for name, q in compared.items()}
    posteriors: dict[str, Any] = {"Monte Carlo": predictions(model, truth, x_test, y_test)}
    for name, points in draws.items():
        spread = truth.std(0)
        posteriors[name] = {
            **predictions(model, points, x_test, y_test),
            "mean_error": ((compared[name].mean - truth.mean(0)).abs() / spread).max().item(),
            "std_ratio": [(compared[name].std() / spread).min().item(), (compared[name].std() / spread).max().item()],
        }
    posteriors["mode alone"] = predictions(model, fits["Laplace"].mean[None], x_test, y_test)
    return {
        "examples": len(x),
        "parameters": len(zero),
        "best_elbo": exact.elbo(best),
        "runs": runs,
        "posteriors": posteriors,
        "monte_carlo": {
            "draws": args.draws * args.chains,
            "ngrad": chains.ngrad,
            "acceptance": chains.acceptance,
            "worst_rhat": rhat.max().item(),
            "least_effective": effective.min().item(),
            "cpu_seconds": seconds,
        },
    }


def network(args: argparse.Namespace) -> dict[str, Any]:
    """Compare posteriors of a small network, with one block for each of its tensors."""
    torch.manual_seed(0)
    x, y = load("wine")
    x, y, x_test, y_test = halves(x[:, :-1], y)
    net = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    model, start = classifier(net, x, y, prior_precision=PRIOR)
    posteriors: dict[str, Any] = {}
    options: dict[str, Any] = {"curvature": "gauss-newton", "max_iter": min(args.steps, 100), "tol": 0.1}
    mode = fit_gaussian(model, start, "full", curvature="gauss-newton", samples=0, max_iter=min(args.steps, 100))
    fits: dict[str, Result] = {"Laplace (Gauss-Newton)": mode}
    for structure in track(("full", "kronecker", "diagonal"), "Network"):
        first = {name: structure if structure != "full" else S for name, S in mode.posterior.precisions.items()}
        fits[f"variational, {structure}"] = fit_gaussian(model, mode.mean, first, samples=16, **options)
    generator = torch.Generator().manual_seed(7)
    for name, found in fits.items():
        quality = predictions(model, found.posterior.sample(1000, generator), x_test, y_test)
        posteriors[name] = {**quality, "elbo": found.elbo, "elbo_error": found.elbo_error, **costs(found, 0.0)}
    alone = {name: tensor[None] for name, tensor in mode.posterior.means.items()}
    posteriors["mode alone"] = predictions(model, alone, x_test, y_test)
    metric = fits["variational, full"].posterior
    draws = max(args.draws // 2, 10)
    warmup = max(draws // 3, 10)
    chains, seconds = timed(
        sample_posterior,
        model,
        metric,
        chains=args.chains,
        draws=draws,
        warmup=warmup,
        track=bar("Monte Carlo"),
    )
    posteriors["Monte Carlo"] = predictions(model, chains.stacked(), x_test, y_test)
    # Weights of a network may be exchanged; what must agree between chains is what they predict.
    logits = predictive(model, chains.stacked(), x_test).log_softmax(-1)
    rhat, effective = diagnostics(logits[:, torch.arange(len(y_test)), y_test].reshape(draws, args.chains, -1))
    monte_carlo = {
        "draws": draws * args.chains,
        "ngrad": chains.ngrad,
        "acceptance": chains.acceptance,
        "worst_rhat": rhat.max().item(),
        "least_effective": effective.min().item(),
        "cpu_seconds": seconds,
    }
    return {
        "examples": len(x),
        "parameters": metric.size,
        "posteriors": posteriors,
        "monte_carlo": monte_carlo,
    }


class Quadrature:
    """Logistic regression with exact expectations under a Gaussian."""

    def __init__(self, inputs: Tensor, targets: Tensor, prior: float) -> None:
        """Prepare the nodes of a Gauss-Hermite rule."""
        self.inputs, self.targets, self.prior = inputs, targets, prior
        nodes, weights = np.polynomial.hermite_e.hermegauss(64)
        self.nodes, self.weights = torch.tensor(nodes), torch.tensor(weights / weights.sum())

    def _products(self, mean: Tensor, covariance: Tensor) -> Tensor:
        spread = ((self.inputs @ covariance) * self.inputs).sum(1).sqrt()
        return (self.inputs @ mean)[:, None] + spread[:, None] * self.nodes

    def elbo(self, q: Gaussian) -> float:
        """Return the evidence lower bound of a Gaussian."""
        mean, covariance = q.means[ONLY], q.precisions[ONLY].dense(-1)
        fit = (softplus(self._products(mean, covariance)) @ self.weights - self.targets * (self.inputs @ mean)).sum()
        square = mean @ mean + covariance.trace()
        log_prior = 0.5 * len(mean) * math.log(self.prior / (2 * math.pi)) - 0.5 * self.prior * square
        return (log_prior - fit).item() + q.entropy()

    def gap(self, best: Gaussian, q: Gaussian) -> float:
        """Return by how much the bound of a Gaussian falls short of the best one's."""
        return self.elbo(best) - self.elbo(q)

    def solve(self) -> Gaussian:
        """Return the best Gaussian, by dense linear algebra until the gradient vanishes."""
        size = self.inputs.shape[1]
        mean, precision = torch.zeros(size), torch.eye(size)
        for _ in range(1000):
            p = self._products(mean, torch.linalg.inv(precision)).sigmoid()
            gradient = self.inputs.T @ (p @ self.weights - self.targets) + self.prior * mean
            weights = (p * (1 - p)) @ self.weights
            hessian = self.inputs.T @ (weights[:, None] * self.inputs) + self.prior * torch.eye(size)
            precision = (precision + hessian) / 2
            mean = mean - 0.5 * torch.linalg.solve(precision, gradient)
            if gradient.norm() < 1e-10:
                return Gaussian.start(mean, Full.from_dense(precision))
        raise RuntimeError("the reference did not converge")


def bias(model: Supervised, best: Gaussian, source: str, samples: int) -> float:
    """Return the mean relative error of a source's curvature at the best Gaussian, where it should be ``S`` itself.

    This is ``||S^-1/2 (E[curvature] - S) S^-1/2||_F / sqrt(N)``, with Monte Carlo noise, which unbiased sources show.
    """
    found = estimate(Target(model), best, source, samples, torch.Generator().manual_seed(11))
    vector = tangent_vector(best.precisions[ONLY], found.curvatures[ONLY], found.damping)[0]
    return (2**0.5 * vector.norm() / best.size**0.5).item()


def predictions(model: Supervised, points: Any, inputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Return mean log-likelihood, accuracy and calibration error on held-out data."""
    chances = class_probabilities(predictive(model, points, inputs))
    return {
        "log_likelihood": log_predictive(model, points, inputs, targets).mean().item(),
        "accuracy": (chances.argmax(-1) == targets).double().mean().item(),
        "calibration_error": calibration_error(chances, targets),
    }


def watch(exact: Quadrature, best: Gaussian, curve: list[tuple[int, float]]) -> Callable[[Result], None]:
    """Return a callback that keeps the gap at steps that are ever further apart."""

    def callback(found: Result) -> None:
        if found.nit < 10 or found.nit % max(1, found.nit // 10) == 0:
            curve.append((found.ngrad + found.nfev, exact.gap(best, found.posterior)))

    return callback


def timed(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, float]:
    """Return the result of a function and the CPU time it took."""
    start = time.process_time()
    return function(*arguments, **options), time.process_time() - start


def bar(title: str) -> Callable[[range], Any]:
    """Return what wraps a range in a progress bar."""
    return lambda steps: track(steps, title, total=len(steps))


def costs(found: Result, seconds: float) -> dict[str, Any]:
    """Return what a fit cost and how it ended; values for the final estimate of the ELBO are not counted."""
    last = found.history[-1]
    return {
        "steps": found.nit,
        "ngrad": last.ngrad,
        "nfev": last.nfev,
        "success": found.success,
        "cpu_seconds": seconds,
    }


def distance(a: Any, b: Tensor) -> float:
    """Return the largest difference of two tensors."""
    return (a - b).abs().max().item()


def verdicts(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Compare the figures with the bars."""

    def verdict(what: str, value: float, bar: float) -> dict[str, Any]:
        return {"what": what, "value": value, "bar": bar, "holds": value <= bar}

    runs = result["linear"]["runs"]
    for source in UNBIASED:
        worst = max(runs[source]["mean_error"], runs[source]["covariance_error"])
        yield verdict(f"exact posterior of linear regression, {source}", worst, BARS["posterior"])
    newton = runs["one Newton step"]
    yield verdict("Newton in one step", max(newton["mean_error"], newton["covariance_error"]), BARS["newton"])
    for source in UNBIASED:
        gap = result["logistic"]["runs"][source]["gap"]
        yield verdict(f"ELBO gap of logistic regression, {source}", gap, BARS["elbo"])


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Give the tables of all figures."""
    part = result["linear"]
    cost = ["steps", "gradients", "values"]
    rows = [
        [name, f"{r['mean_error']:.1e}", f"{r['covariance_error']:.1e}", *_costs(r)] for name, r in part["runs"].items()
    ]
    yield Table(_title("Linear regression, diabetes", part), ["", "error of mean", "of covariance", *cost], rows)
    part = result["logistic"]
    rows = [
        [name, f"{r['gap']:.2e}", f"{r['bias']:.3f}" if "bias" in r else "", *_costs(r), f"{r['cpu_seconds']:.1f}"]
        for name, r in part["runs"].items()
    ]
    title = _title("Logistic regression, breast cancer", part)
    columns = ["", "ELBO gap", "bias", *cost, "CPU s"]
    yield Table(f"{title}: nats below the best Gaussian", columns, rows, timed=True)
    for key, name in (("logistic", "Logistic regression, held-out half"), ("network", "Network, wine, held-out half")):
        part = result[key]
        rows = [
            [
                label,
                f"{p['log_likelihood']:.4f}",
                f"{100 * p['accuracy']:.1f} %",
                f"{p['calibration_error']:.3f}",
                *_against_monte_carlo(p),
            ]
            for label, p in part["posteriors"].items()
        ]
        columns = ["", "log-likelihood", "accuracy", "calibration error", "mean off by", "std ratio", "ELBO"]
        yield Table(_title(name, part), columns, rows)
        mc = part["monte_carlo"]
        figures = [
            f"{mc['draws']}",
            f"{mc['acceptance']:.2f}",
            f"{mc['worst_rhat']:.4f}",
            f"{mc['least_effective']:.0f}",
        ]
        columns = ["draws", "acceptance", "worst R-hat", "least effective size", "gradients"]
        yield Table(f"Monte Carlo of the {key} model", columns, [[*figures, f"{mc['ngrad']}"]])
    rows = [
        [v["what"], f"{v['value']:.1e}", f"{v['bar']:.0e}", "holds" if v["holds"] else "DOES NOT HOLD"]
        for v in result["verdicts"]
    ]
    yield Table("Verdicts", ["", "reached", "bar", "verdict"], rows)


def _title(name: str, part: Mapping[str, Any]) -> str:
    return f"{name} ({part['examples']} examples, {part['parameters']} parameters)"


def _costs(run: Mapping[str, Any]) -> list[str]:
    return [f"{run['steps']}", f"{run['ngrad']}", f"{run['nfev']}"]


def _against_monte_carlo(posterior: Mapping[str, Any]) -> list[str]:
    ratio = posterior.get("std_ratio")
    return [
        f"{posterior['mean_error']:.2f} std" if "mean_error" in posterior else "",
        f"{ratio[0]:.2f} to {ratio[1]:.2f}" if ratio else "",
        f"{posterior['elbo']:.2f} ± {posterior['elbo_error']:.2f}" if "elbo" in posterior else "",
    ]


def draw(result: Mapping[str, Any], path: str) -> None:
    """Draw the gap of the ELBO over the gradients and values that were computed."""
    drawn, axes = figure(width=7.0)
    ax = axes[0, 0]
    for name, found in result["logistic"]["runs"].items():
        xs, ys = zip(*found["curve"], strict=True)
        ax.plot(xs, ys, label=name, linestyle="-" if name in UNBIASED else "--")
    ax.axhline(BARS["elbo"], color="black", linewidth=0.8, linestyle=":")
    ax.set(xscale="log", yscale="log", xlabel="gradients and values computed", ylabel="nats below the best Gaussian")
    ax.set(title="Logistic regression, breast cancer")
    ax.legend(fontsize=7)
    save(drawn, path)
