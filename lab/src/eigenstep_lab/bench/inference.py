"""Measure Gaussian inference: how close to the exact posterior, at what cost, and how well it
predicts.

Linear regression (diabetes) has an exact posterior. For logistic regression (breast cancer, the ten
features that are means) the best Gaussian is found by quadrature, so that gaps of the ELBO are
exact, not estimated. What Gaussians miss is measured by a long run of Hamiltonian Monte Carlo,
there and for a small network (wine). A Hessian counts as one gradient for each parameter, a
Gauss-Newton matrix as one for each output.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ..behavior import behavior
from ..console import UserError
from ..lines import look
from ..plotting import figure, save
from ..results import Table, Verdict
from ..study import Cell, Plans, figures
from .inference_fits import BIASED, UNBIASED, linear, logistic, network

MODELS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "linear": linear,
    "logistic": logistic,
    "network": network,
}
BARS = {"posterior": 1e-6, "newton": 1e-10, "elbo": 1e-3, "rhat": 1.02}
"""Errors of an exact posterior and of one Newton step, the gap of the ELBO in nats, and the
agreement of chains.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how long to run."""
    add = parser.add_argument
    add("--draws", type=int, default=1000, help="MCMC draws of each chain (default: %(default)s)")
    add("--chains", type=int, default=16, help="MCMC chains (default: %(default)s)")
    add("--steps", type=int, default=1000, help="most steps of a fit (default: %(default)s)")
    add("--seeds", type=int, default=3, help="runs of each unbiased source (default: %(default)s)")
    quick = "few steps, draws and features, to see that it runs"
    add("--quick", action="store_true", help=quick)
    add("--plot", default="runs/bench/inference.png", help="where the picture goes")


def cells(args: argparse.Namespace, found: Mapping[Any, Any]) -> Plans:
    """List a cell for each model."""
    if args.quick:
        args.draws, args.chains, args.steps, args.seeds = 20, 2, 10, 1
    for name, least in (("draws", 4), ("chains", 1), ("steps", 1), ("seeds", 1)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} must be at least {least}, got {getattr(args, name)}")
    features = 3 if args.quick else 10
    sampling = {"draws": args.draws, "chains": args.chains}
    how: dict[str, dict[str, int]] = {
        "linear": {"steps": args.steps, "features": features},
        "logistic": {
            **sampling,
            "steps": args.steps,
            "seeds": args.seeds,
            "features": features,
        },
        "network": {**sampling, "steps": min(args.steps, 100)},
    }
    code = behavior("inference")
    return {
        name: Cell({"model": name, **how[name]}, partial(measure, name, **how[name]), code)
        for name in how
    }


def measure(name: str, **how: int) -> dict[str, Any]:
    """Measure a model in double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    start = time.process_time()
    try:
        found = MODELS[name](**how)
    finally:
        torch.set_default_dtype(before)
    return {**found, "cpu_seconds": time.process_time() - start}


def report(args: argparse.Namespace, found: Mapping[Any, Any]) -> dict[str, Any]:
    """Give the tables and the verdicts, and draw the gaps."""
    result = dict(found)
    draw(result, args.plot)
    seconds = sum(own["cpu_seconds"] for own in found.values())
    plain = {**result, "cpu_seconds": seconds}
    return figures(plain, list(verdicts(result)), list(tables(result)), "Verdicts")


def verdicts(result: Mapping[str, Any]) -> Iterator[Verdict]:
    """Compare the figures with the bars, and the posteriors with each other."""
    runs = result["linear"]["runs"]
    for source in UNBIASED:
        worst = max(runs[source]["mean_error"], runs[source]["covariance_error"])
        yield Verdict(
            "linear regression: exact posterior", source, "largest error", worst, BARS["posterior"]
        )
    newton = max(runs["one Newton step"]["mean_error"], runs["one Newton step"]["covariance_error"])
    yield Verdict(
        "linear regression: Newton in one step", "hessian", "largest error", newton, BARS["newton"]
    )
    runs = result["logistic"]["runs"]
    for source in UNBIASED:
        gap = max(each["gap"] for each in runs[source]["repeats"])
        yield Verdict(
            "logistic regression: the best Gaussian", source, "worst gap in nats", gap, BARS["elbo"]
        )
    unbiased = max(runs[source]["bias"] for source in UNBIASED)
    for source in BIASED:
        claim = "logistic regression: more bias than all unbiased sources"
        yield Verdict(claim, source, "bias", runs[source]["bias"], unbiased, at_least=True)
    for key, ours, theirs in (
        ("logistic", "best Gaussian", "Laplace"),
        ("network", "variational, full", "Laplace, linearized"),
    ):
        mine, rival = (result[key]["posteriors"][name] for name in (ours, theirs))
        claim = f"{key}: held out at least as good as Laplace"
        difference = mine["log_likelihood"] - rival["log_likelihood"]
        yield Verdict(claim, ours, "difference of log-likelihoods", difference, 0.0, at_least=True)
        claim = f"{key}: calibrated at least as well as Laplace"
        difference = mine["calibration_error"] - rival["calibration_error"]
        yield Verdict(claim, ours, "difference of calibration errors", difference, 0.0)
        alone, truth = (result[key]["posteriors"][name] for name in ("mode alone", "Monte Carlo"))
        claim = f"{key}: held out at least as good as the mode alone"
        difference = mine["log_likelihood"] - alone["log_likelihood"]
        yield Verdict(claim, ours, "difference of log-likelihoods", difference, 0.0, at_least=True)
        claim = f"{key}: closer to the predictions of Monte Carlo than Laplace"
        near, far = (
            abs(each["log_likelihood"] - truth["log_likelihood"]) for each in (mine, rival)
        )
        yield Verdict(claim, ours, "distance of log-likelihoods", near, far)
        claim, rhat = f"{key}: Monte Carlo has converged", result[key]["monte_carlo"]["rhat"]
        yield Verdict(claim, "Monte Carlo", "worst R-hat", rhat, BARS["rhat"])


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Give the tables of all figures."""
    part = result["linear"]
    cost = ["steps", "gradients", "values"]
    rows = [
        [name, f"{r['mean_error']:.1e}", f"{r['covariance_error']:.1e}", *_costs([r])]
        for name, r in part["runs"].items()
    ]
    yield Table(
        _title("Linear regression, diabetes", part),
        ["curvature", "error of mean", "of covariance", *cost],
        rows,
    )
    part = result["logistic"]
    rows = [
        [
            name,
            f"{max(each['gap'] for each in run['repeats']):.1e}",
            f"{run['bias']:.3f}" if "bias" in run else "",
            *_costs(run["repeats"]),
            f"{statistics.median(each['cpu_seconds'] for each in run['repeats']):.1f}",
        ]
        for name, run in part["runs"].items()
    ]
    title = _title("Logistic regression, breast cancer", part)
    columns = ["curvature", "worst ELBO gap", "bias", *cost, "CPU s"]
    yield Table(
        f"{title}: nats below the best Gaussian, medians of the costs", columns, rows, timed=True
    )
    for key, name in (
        ("logistic", "Logistic regression, held-out half"),
        ("network", "Network, wine, held-out half"),
    ):
        part = result[key]
        compared = any("std_ratio" in p for p in part["posteriors"].values())
        rows = [
            [
                label,
                f"{p['log_likelihood']:.4f}",
                f"{100 * p['accuracy']:.1f} %",
                f"{p['calibration_error']:.3f}",
                *(_against_monte_carlo(p) if compared else _bound(p)),
            ]
            for label, p in part["posteriors"].items()
        ]
        columns = ["posterior", "log-likelihood", "accuracy", "calibration error"]
        columns += ["mean off by", "std ratio"] if compared else ["ELBO", "steps", "gradients"]
        yield Table(_title(name, part), columns, rows)
    rows = [
        [
            key,
            f"{mc['draws']}",
            f"{mc['acceptance']:.2f}",
            f"{mc['rhat']:.4f}",
            f"{mc['effective']:.0f}",
            f"{mc['ngrad']}",
            f"{mc['cpu_seconds']:.0f}",
        ]
        for key, mc in ((key, result[key]["monte_carlo"]) for key in ("logistic", "network"))
    ]
    columns = [
        "model",
        "draws",
        "acceptance",
        "worst R-hat",
        "least effective size",
        "gradients",
        "CPU s",
    ]
    yield Table("Monte Carlo", columns, rows, timed=True)


def _title(name: str, part: Mapping[str, Any]) -> str:
    return f"{name} ({part['examples']} examples, {part['parameters']} parameters)"


def _costs(runs: list[Mapping[str, Any]]) -> list[str]:
    return [
        f"{statistics.median(run[what] for run in runs):.0f}" for what in ("steps", "ngrad", "nfev")
    ]


def _against_monte_carlo(posterior: Mapping[str, Any]) -> list[str]:
    if "std_ratio" not in posterior:
        return ["", ""]
    low, high = posterior["std_ratio"]
    return [f"{posterior['mean_error']:.2f} std", f"{low:.2f} to {high:.2f}"]


def _bound(posterior: Mapping[str, Any]) -> list[str]:
    if "elbo" not in posterior:
        return ["", "", ""]
    return [f"{posterior['elbo']:.2f} ± {posterior['elbo_error']:.2f}", *_costs([posterior])[:2]]


def draw(result: Mapping[str, Any], path: str) -> None:
    """Draw the gap of the ELBO over the gradients and values that were computed."""
    drawn, axes = figure(width=7.0)
    ax = axes[0, 0]
    for number, (name, found) in enumerate(result["logistic"]["runs"].items()):
        xs, ys = zip(*found["curve"], strict=True)
        ax.plot(
            xs,
            ys,
            label=name,
            **{**look(name, number), "linestyle": "-" if name in UNBIASED else "--"},
        )
    ax.axhline(BARS["elbo"], color="black", linewidth=0.8, linestyle=":")
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="gradients and values computed",
        ylabel="nats below the best Gaussian",
    )
    ax.set(title="Logistic regression, breast cancer")
    ax.legend(fontsize=7)
    save(drawn, path)
