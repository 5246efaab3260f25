"""``Spectral`` written out: one tensor at a time, dense matrices, float64, in the order of the
paper's boxes.

The curvature of a tensor is ``S = alpha B Diag(s) B^T`` with ``B = B_1 x ... x B_L``, one factor
for each side. Each factor has eigenvalues ``d_l`` with product one. The spectrum ``s`` is ``d_1 x
... x d_L`` ("kronecker"), or an average ``D`` of the squares of gradients in eigen-coordinates, in
units of alpha ("corrected").
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .formulas import (
    Array,
    Format,
    bounded,
    cayley,
    factor_curvature,
    moore_penrose,
    newton_schulz,
    normalized,
    quadratic_cayley,
    rate,
    truncated_cayley,
    unit_determinant,
)
from .layouts import Side, order, views_of

DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "weight_decay": 0.01,
    "root": 2.0,
    "interval": 2,
    "eigenvalues": "corrected",
    "nesterov": 0.2,
    "clip": None,
    "grafting": "descent",
    "eps": 1e-8,
    "structure": "auto",
    "batch_dims": None,
    "split_sizes": None,
    "num_heads": None,
    "split_dim": 0,
    "max_dim": 1280,
    "max_ratio": 2.0,
    "decay": 1.0,
    "damping": 1e-10,
    "relative_damping": True,
    "start": 1.0,
    "turn_first": False,
    "eigenvalues_wait": False,
    "rotation": "bounded",
    "basis_lr": 0.1,
    "maps": "quadratic",
    "reorthonormalize": True,
    "residual": False,
    "half": False,
    "maximize": False,
}
FAST = {**DEFAULTS, "max_ratio": 1.0}
PAPER = {
    **DEFAULTS,
    **{"betas": (0.9, 0.95), "eigenvalues": "kronecker", "rotation": "normalized", "basis_lr": 0.5},
    "structure": "kronecker",
    **{
        "maps": "truncated",
        "reorthonormalize": False,
        "start": 0.0,
        "turn_first": True,
        "nesterov": False,
    },
    **{
        "relative_damping": False,
        "damping": 1e-12,
        "clip": 1.0,
        "max_dim": None,
        "max_ratio": None,
        "grafting": None,
    },
}
EARLY_STEPS, GAP, CAP, UNEVEN = 100, 0.1, 0.5, 0.1


class Factor:
    """One side's ``B Diag(d) B^T``, block-diagonal if the side is cut, and the average ``M`` that
    its basis follows.
    """

    def __init__(self, side: Side) -> None:
        self.size, self.blocks = side.size, side.blocks
        self.d, self.B, self.M = np.ones(side.size), np.eye(side.size), np.eye(side.size)


class Oracle:
    """The optimizer: a list of numpy arrays, each changed by :meth:`step`."""

    def __init__(self, params: list[Array], options: dict[str, Any]) -> None:
        self.params, self.options, self.count = params, options, 0
        self.tensors: list[list[Tensor | Adam]] = []
        for param in params:
            _, sides = views_of(in_order(param, options), options)
            self.tensors.append([tensor_of(own, options) for own in sides])

    def step(
        self, gradients: list[Array | None], curvature: dict[int, Array] | None = None
    ) -> None:
        """Move all parameters that have a gradient.

        Args: gradients: one for each parameter, or ``None``. curvature: for some parameters, by
            number: vectors whose outer products replace the gradient's.
        """
        o = self.options
        turning = turns_at(o["interval"], o["start"], self.count)
        self.count += 1
        for at, (param, gradient) in enumerate(zip(self.params, gradients, strict=True)):
            if gradient is None:
                continue
            vectors = (
                [gradient] if curvature is None or at not in curvature else list(curvature[at])
            )
            param *= 1 - o["lr"] * o["weight_decay"]
            moved = in_order(param, o)
            pieces = [
                views_of(x, o)[0] for x in (moved, *(in_order(x, o) for x in (gradient, *vectors)))
            ]
            for tensor, weight, own_gradient, *own_vectors in zip(
                self.tensors[at], *pieces, strict=True
            ):
                direction = tensor.direction(
                    own_gradient, own_vectors, turning, not curvature or at not in curvature
                )
                weight += o["lr"] * direction if o["maximize"] else -o["lr"] * direction
            param[...] = moved.transpose(np.argsort(order(param, o)))


def in_order(x: Array, options: dict[str, Any]) -> Array:
    """Return a copy of a parameter, or of its gradient, with its axes in the order of the
    optimizer.
    """
    return x.transpose(order(x, options)).copy()


def turns_at(interval: Any, start: float, count: int) -> bool:
    """Tell whether bases turn after ``count`` steps: each ``interval``, reached slowly if there is
    a start.
    """
    if isinstance(interval, int):
        hundreds = count // EARLY_STEPS
        return count % (min(interval, hundreds + 1) if start > 0 else interval) == 0
    current = [every for first, every in interval if first <= count][-1]
    return count % current == 0


class Adam:
    """The state of one tensor without bases, and its step: Adam, as it was published."""

    def __init__(self, side: Side, options: dict[str, Any]) -> None:
        self.o, self.t = options, 0
        self.m = self.v = np.zeros(side.size)

    def direction(self, gradient: Array, vectors: list[Array], turning: bool, own: bool) -> Array:
        o, (beta1, beta2) = self.o, self.o["betas"]
        self.t += 1
        self.m = beta1 * self.m + (1 - beta1) * gradient
        newest = (1 - beta2) / (1 - beta2**self.t)  # of an average whose bias is corrected at once
        self.v = (1 - o["decay"] * newest) * self.v + newest * sum(v**2 for v in vectors)
        step = self.m / (1 - beta1**self.t) / (self.v ** (1 / o["root"]) + o["eps"])
        if o["clip"] is not None and size(step) > o["clip"]:
            step = step * (o["clip"] / size(step))
        return step


def tensor_of(sides: list[Side], options: dict[str, Any]) -> Tensor | Adam:
    """Return a tensor with state: Adam's if there are no bases, and the paper does not say
    otherwise.
    """
    if len(sides) == 1 and not sides[0].blocks and options["eigenvalues"] == "corrected":
        return Adam(sides[0], options)
    return Tensor(sides, options)


class Tensor:
    """The state of one tensor, and its step."""

    def __init__(self, sides: list[Side], options: dict[str, Any]) -> None:
        self.o, self.format = options, Format(options["half"])
        self.factors = [Factor(side) for side in sides]
        shape = [side.size for side in sides]
        self.t = self.turns = 0
        self.alpha: float | None = None
        self.gain, self.agreement = 1.0, 0.0
        self.momentum, self.D, self.adam = np.zeros(shape), np.zeros(shape), np.zeros(shape)

    def direction(self, gradient: Array, vectors: list[Array], turning: bool, own: bool) -> Array:
        """Learn from a gradient, or other vectors than its ``own``, and return ``S^(-1/p) M`` to go
        along.
        """
        o = self.o
        self.t += 1
        G = self.rotate(gradient)
        if np.any(G):
            weight = rate(o["betas"][1], self.t, o["start"])
            newest = max(1.0, np.abs(gradient).sum() / np.abs(G).sum())
            self.gain += weight * (newest - self.gain)
            along = np.sum(np.sign(self.momentum) * G) / np.abs(G).sum()
            self.agreement += weight * (along - self.agreement)
        self.average(G)
        samples = [self.rotate(v) for v in vectors]
        if self.alpha is None and (
            turning or not o["eigenvalues_wait"]
        ):  # the first one not zero sets the scale
            self.alpha = sum(np.mean(v**2) for v in samples) or None
        rotations = self.learn(samples, turning) if turning or not o["eigenvalues_wait"] else []
        if rotations and o["turn_first"]:
            G = self.turned(G, rotations)
            self.turn(rotations, own)
            if (
                own and self.alpha is not None
            ):  # stepped along in new coordinates, it counts in them as well
                self.D = np.maximum(
                    self.D, rate(o["betas"][1], self.t, o["start"]) * G**2 / self.alpha
                )
        step = self.unrotate(self.lengthened(self.mixed(G) * self.inverse_root(), G))
        if rotations and not o["turn_first"]:
            self.turn(rotations, own)
        return self.limited(step, gradient)

    def average(self, G: Array) -> None:
        """Follow the gradients by their average."""
        o, beta = self.o, self.o["betas"][0]
        if beta == 0:
            return
        weight = rate(beta, self.t, max(min(o["start"], 1.0), o["start"] / 2))
        weight *= (1 + self.trust()) / 2  # gradients that swing are remembered twice as long
        self.momentum = (1 - weight) * self.momentum + weight * G

    def trust(self) -> float:
        """Return 1 for gradients of which up to a tenth, net, opposes the momentum, and 0 from six
        tenths on.
        """
        if not self.descends():
            return 1.0
        return min(1.0, max(0.0, (0.6 + self.agreement) / 0.5))

    def descends(self) -> bool:
        """Tell whether steps are sized by how fast they descend."""
        return (
            self.o["grafting"] == "descent"
            and self.o["root"] == 2
            and any(f.blocks for f in self.factors)
        )

    def mixed(self, G: Array) -> Array:
        """Return the mixture of momentum and newest gradient that is stepped along."""
        o, beta = self.o, self.o["betas"][0]
        if beta == 0:
            return G
        newest = (1 - beta if o["nesterov"] is True else float(o["nesterov"])) * self.trust()
        return (1 - newest) * self.momentum + newest * G

    def learn(self, samples: list[Array], turning: bool) -> list[Array]:
        """Learn ``d``, ``alpha`` and ``D`` from outer products; return the rotation of each factor,
        if bases turn.

        As long as all gradients were zero, ``alpha`` counts as one.
        """
        o, alpha = self.o, self.alpha or 1.0
        d = [factor.d for factor in self.factors]
        damping = (
            o["damping"] * math.prod(map(np.mean, d))
            if o["relative_damping"]
            else o["damping"] / alpha
        )
        H = sum(np.outer(v, v) for v in samples) / alpha + damping * np.eye(samples[0].size)
        curvatures = [factor_curvature(H, d, at) for at in range(len(d))]
        self.turns += turning
        pairs = list(zip(self.factors, curvatures, strict=True))
        rotations = [self.rotation(factor, W) for factor, W in pairs] if turning else []
        beta = rate(o["betas"][1], self.t, o["start"])
        means = []
        for factor, W in pairs:
            n = self.moved(factor.d, (1 - o["decay"] * beta) * factor.d + beta * np.diag(W))
            factor.d, mean = unit_determinant(n)
            factor.M = factor.M / mean if o["residual"] else np.diag(factor.d)
            means.append(mean)
        growth = math.prod(means) ** (1 / len(means))
        self.D = (
            (1 - o["decay"] * beta) * self.D + beta * np.diag(H).reshape(self.D.shape)
        ) / growth
        if self.alpha is not None:
            self.alpha *= growth
        return rotations

    def moved(self, d: Array, n: Array) -> Array:
        """Return ``n``, or the exact ``d exp((n - d)/d)``."""
        return d * np.exp((n - d) / d) if self.o["maps"] == "exact" else n

    def rotation(self, factor: Factor, W: Array) -> Array:
        """Return ``Q`` of one factor, block by block, and take the average that it follows to the
        new basis.
        """
        o, form = self.o, self.format
        rate_beta = (
            o["betas"][1]
            if o["rotation"] == "normalized" or o["basis_lr"] is None
            else 1 - o["basis_lr"]
        )
        beta = rate(rate_beta, self.turns, o["start"])
        Q = np.eye(factor.size)
        for block in factor.blocks:
            A = (1 - o["decay"] * beta) * factor.M[block, block] + beta * W[block, block]
            Q[block, block] = self.orthogonal(form.round(self.generator(factor.d[block], A)))
            own = Q[block, block]
            factor.M[block, block] = form.product(form.product(own.T, form.round(A)), own)
        return Q

    def generator(self, d: Array, A: Array) -> Array:
        o = self.o
        if o["rotation"] == "bounded":
            return bounded(A)
        if o["rotation"] == "moore_penrose":
            return moore_penrose(d, A, GAP)
        second_rate = 1 - o["betas"][1] if o["basis_lr"] is None else o["basis_lr"]
        return normalized(d, A, GAP, second_rate)

    def orthogonal(self, N: Array) -> Array:
        cap = None if self.o["rotation"] == "normalized" else CAP
        if self.o["maps"] == "exact":
            return cayley(N, self.format)
        if self.o["maps"] == "truncated":
            return truncated_cayley(N, cap, self.format)
        return quadratic_cayley(N, cap, self.format)

    def turn(self, rotations: list[Array], own: bool) -> None:
        """``B <- B Q`` and ``M <- Q^T M``, for the momentum lives in eigen-coordinates.

        ``D`` stays what it is, but no second moment of gradients, ``alpha D``, is less than the
        square of the first.
        """
        for factor, Q in zip(self.factors, rotations, strict=True):
            factor.B = self.format.product(factor.B, Q)
            # Quadratic maps of short generators stretch a basis by 1.25 in two turns, at most.
            always = self.o["maps"] != "quadratic" or self.o["rotation"] == "normalized"
            early = (
                isinstance(self.o["interval"], int)
                and self.o["start"] > 0
                and self.turns <= EARLY_STEPS
            )
            if self.o["reorthonormalize"] and (always or early or self.turns % 2 == 0):
                factor.B = newton_schulz(factor.B, self.format)
        self.momentum = self.turned(self.momentum, rotations)
        if own and self.alpha is not None:
            self.D = np.maximum(self.D, self.momentum**2 / self.alpha)

    def inverse_root(self) -> Array:
        """Return the eigenvalues of ``S^(-1/p)``; all zero as long as all gradients were zero."""
        if self.alpha is None:
            return np.zeros_like(self.D)
        spectrum = self.D
        if self.o["eigenvalues"] == "kronecker":
            spectrum = np.ones(1)
            for factor in self.factors:
                spectrum = np.multiply.outer(spectrum, factor.d)
            spectrum = spectrum[0]
        return (self.alpha * np.maximum(spectrum, 1e-300)) ** (-1 / self.o["root"])

    def lengthened(self, step: Array, G: Array) -> Array:
        """Even out a step, and lengthen it by what was gained up to three times an even one of
        Adam's; never over 1.
        """
        if not self.descends() or not np.any(step):
            return step
        momentum = G if self.o["betas"][0] == 0 else self.momentum
        longest = min(1.0, 3 * size(momentum) / size(1 / self.inverse_root()))
        return evened(step) * min(self.gain, max(1.0, longest / size(step)), 1 / size(step))

    def limited(self, step: Array, gradient: Array) -> Array:
        """Give the step the size of Adam's or RMSprop's, or one of 1 at most; clip its root mean
        square.
        """
        o = self.o
        if self.descends():
            step = step / max(1.0, size(step))  # bases that wait to be mended stretch it
        if o["grafting"] in ("adam", "rms"):
            weight = rate(o["betas"][1], self.t, min(o["start"], 1.0))
            self.adam = (1 - weight) * self.adam + weight * gradient**2
            numerator = gradient
            if o["grafting"] == "adam" and o["betas"][0] > 0:
                numerator = self.unrotate(self.momentum)
            other = np.divide(
                numerator, np.sqrt(self.adam), out=np.zeros_like(step), where=self.adam > 0
            )
            step = step / max(size(step), 1e-300) * size(np.clip(other, -10, 10))
        if o["clip"] is not None and size(step) > o["clip"]:
            step = step * (o["clip"] / size(step))
        return step

    def rotate(self, x: Array) -> Array:
        return self.turned(x, [factor.B for factor in self.factors])

    def unrotate(self, x: Array) -> Array:
        return self.turned(x, [factor.B.T for factor in self.factors])

    def turned(self, x: Array, rotations: list[Array]) -> Array:
        """Multiply each side of a tensor by ``Q^T``."""
        for axis, (factor, Q) in enumerate(zip(self.factors, rotations, strict=True)):
            if factor.blocks:
                rows = np.moveaxis(self.format.round(x), axis, 0)
                product = self.format.product(Q.T, rows.reshape(factor.size, -1))
                x = np.moveaxis(product.reshape(rows.shape), 0, axis)
        return x


def evened(step: Array) -> Array:
    """Divide rows and columns (slices of each axis, if there are more) by their sizes, and keep the
    size of all.
    """
    if step.ndim < 2:
        return step
    result = step.copy()
    for axis in range(step.ndim):
        for at in range(step.shape[axis]):
            share = (size(step.take(at, axis)) / size(step)) ** 2
            np.moveaxis(result, axis, 0)[at] /= math.sqrt(share + UNEVEN)
    return result * (size(step) / size(result))


def size(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))
