"""``Spectral`` written out: one tensor at a time, dense matrices, float64, in the order of the
paper's boxes.

The curvature of a tensor is ``S = alpha B Diag(s) B^T`` with ``B = B_1 x ... x B_L``, one factor
for each side. Each factor has eigenvalues ``d_l`` with product one. The spectrum ``s`` is ``d_1 x
... x d_L`` ("kronecker"), or an average ``D`` of the squares of gradients in eigen-coordinates, in
units of alpha ("corrected").
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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
    "eps": 1e-8,
    "cautious_weight_decay": False,
    "root": 2.0,
    "interval": 2,
    "eigenvalues": "corrected",
    "nesterov": 0.2,
    "clip": None,
    "grafting": True,
    "structure": "auto",
    "max_dim": 1280,
    "max_ratio": 2.0,
    "batch_dims": None,
    "sizes": None,
    "heads": None,
    "axis": 0,
    "damping": 1e-10,
    "rotation": "bounded",
    "map": "quadratic",
    "rate": 0.1,
    "mend": True,
    "maximize": False,
    "half": False,
    "paper": False,
    "gamma": 1.0,
    "gap": None,
    "basis_lr": 0.5,
    "exact": False,
}
FAST = {**DEFAULTS, "max_ratio": 1.0}
PAPER = {
    **DEFAULTS,
    "paper": True,
    "eigenvalues": "kronecker",
    "nesterov": False,
    "clip": 1.0,
    "grafting": False,
    "structure": "kronecker",
    "max_dim": None,
    "max_ratio": None,
    "damping": 1e-12,
    "rotation": "normalized",
    "map": "truncated_cayley",
    "mend": False,
}
GAPS = {"moore_penrose": 1e-6, "normalized": 0.1}
EARLY_STEPS, UNEVEN = 100, 0.1
CAPS = {"truncated_cayley": 0.6, "quadratic": 0.5}
LEAST_DAMPING = 1e-12
"""Of products of eigenvalues, but for the paper's."""


class Factor:
    """One side's ``B Diag(d) B^T``, block-diagonal if the side is cut."""

    def __init__(self, side: Side) -> None:
        self.size, self.blocks = side.size, side.blocks
        self.d, self.B = np.ones(side.size), np.eye(side.size)
        self.speeds: list[float] = []  # lengths of the last generators, block by block


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
        early = isinstance(o["interval"], int) and self.count < EARLY_STEPS
        turning = turns_at(o, self.count)
        self.count += 1
        for at, (param, gradient) in enumerate(zip(self.params, gradients, strict=True)):
            if gradient is None:
                continue
            own = curvature is None or at not in curvature
            vectors = [gradient] if own else list(curvature[at])
            step = np.zeros_like(in_order(param, o))
            pieces = [
                views_of(x, o)[0] for x in (step, *(in_order(x, o) for x in (gradient, *vectors)))
            ]
            for tensor, piece, own_gradient, *own_vectors in zip(
                self.tensors[at], *pieces, strict=True
            ):
                piece += tensor.direction(own_gradient, own_vectors, Turn(turning, early, own))
            step = step.transpose(np.argsort(order(param, o))) * (1 if o["maximize"] else -1)
            shrinks = param * step <= 0 if o["cautious_weight_decay"] else True
            param += o["lr"] * (step - o["weight_decay"] * param * shrinks)


def in_order(x: Array, options: dict[str, Any]) -> Array:
    """Return a copy of a parameter, or of its gradient, with its axes in the order of the
    optimizer.
    """
    return x.transpose(order(x, options)).copy()


def turns_at(options: dict[str, Any], count: int) -> bool:
    """Tell whether bases turn after ``count`` steps: each ``interval``, which is reached slowly,
    but by the paper.
    """
    interval = options["interval"]
    if not isinstance(interval, int):
        interval = [every for first, every in interval if first <= count][-1]
    elif not options["paper"]:
        interval = min(interval, count // EARLY_STEPS + 1)
    return count % interval == 0


class Turn(NamedTuple):
    """What a step does: whether bases ``turn``, ``early`` in training, by gradients of their
    ``own``.
    """

    turn: bool
    early: bool
    own: bool


class Adam:
    """The state of one tensor without bases, and its step: Adam, as it was published."""

    def __init__(self, side: Side, options: dict[str, Any]) -> None:
        self.o, self.t = options, 0
        self.m = self.v = np.zeros(side.size)

    def direction(self, gradient: Array, vectors: list[Array], now: Turn) -> Array:
        o, (beta1, beta2) = self.o, self.o["betas"]
        self.t += 1
        self.m = beta1 * self.m + (1 - beta1) * gradient
        newest = rate(beta2, self.t)  # of an average whose bias is corrected at once
        self.v = (1 - newest) * self.v + newest * sum(v**2 for v in vectors)
        step = self.m / (1 - beta1**self.t) / (self.v ** (1 / o["root"]) + o["eps"])
        clip = o["clip"]
        return step if clip is None else step * (clip / max(clip, size(step)))


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
        self.momentum, self.D = np.zeros(shape), np.zeros(shape)

    def rate(self, beta: float, t: int) -> float:
        """Return the weight of the newest term of an average, which the paper never corrects."""
        return 1 - beta if self.o["paper"] else rate(beta, t)

    def direction(self, gradient: Array, vectors: list[Array], now: Turn) -> Array:
        """Learn from a gradient, or other vectors than its own, and return ``S^(-1/p) M`` to go
        along.
        """
        self.t += 1
        G = self.rotate(gradient)
        if np.any(G):
            weight = self.rate(self.o["betas"][1], self.t)
            newest = max(1.0, np.abs(gradient).sum() / np.abs(G).sum())
            self.gain += weight * (newest - self.gain)
            along = np.sum(np.sign(self.momentum) * G) / np.abs(G).sum()
            self.agreement += weight * (along - self.agreement)
        self.average(G)
        samples = [self.rotate(v) for v in vectors]
        if self.alpha is None:  # the first one not zero sets the scale
            self.alpha = sum(np.mean(v**2) for v in samples) or None
        rotations = self.learn(samples, now.turn)
        if rotations and self.o["paper"]:
            G = self.turned(G, rotations)
            self.turn(rotations, now)
        step = self.unrotate(self.lengthened(self.mixed(G) * self.inverse_root(), G))
        if rotations and not self.o["paper"]:
            self.turn(rotations, now)
        return self.limited(step)

    def average(self, G: Array) -> None:
        """Follow the gradients by their average."""
        beta = self.o["betas"][0]
        if beta == 0:
            return
        weight = self.rate(beta, self.t)
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
        return self.o["grafting"] and self.o["root"] == 2 and any(f.blocks for f in self.factors)

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
        if o["paper"]:
            damping = o["damping"] / alpha
        else:
            least = LEAST_DAMPING if o["eigenvalues"] == "kronecker" else 0.0
            damping = max(least, o["damping"]) * math.prod(map(np.mean, d))
        H = sum(np.outer(v, v) for v in samples) / alpha + damping * np.eye(samples[0].size)
        curvatures = [factor_curvature(H, d, at) for at in range(len(d))]
        self.turns += turning
        pairs = list(zip(self.factors, curvatures, strict=True))
        rotations = [self.rotation(factor, W) for factor, W in pairs] if turning else []
        beta = self.rate(o["betas"][1], self.t)
        means = []
        for factor, W in pairs:
            n = (1 - o["gamma"] * beta) * factor.d + beta * np.diag(W)
            if o["exact"]:
                n = factor.d * np.exp((n - factor.d) / factor.d)
            factor.d, mean = unit_determinant(n)
            means.append(mean)
        growth = math.prod(means) ** (1 / len(means))
        self.D = ((1 - beta) * self.D + beta * np.diag(H).reshape(self.D.shape)) / growth
        if self.alpha is not None:
            self.alpha *= growth
        return rotations

    def rotation(self, factor: Factor, W: Array) -> Array:
        """Return ``Q`` of one factor, block by block."""
        o = self.o
        beta = self.rate(o["betas"][1] if o["paper"] else 1 - o["rate"], self.turns)
        Q = np.eye(factor.size)
        factor.speeds = []
        for block in factor.blocks:
            d = factor.d[block]
            A = (1 - o["gamma"] * beta) * np.diag(d) + beta * W[block, block]
            N = self.generator(d, A)
            factor.speeds.append(float(np.linalg.norm(N)))
            Q[block, block] = self.orthogonal(self.format.round(N))
        return Q

    def generator(self, d: Array, A: Array) -> Array:
        name = self.o["rotation"]
        if name in ("bounded", "pairwise"):
            return bounded(A, pairwise=name == "pairwise")
        gap = self.o["gap"] or GAPS[name]
        if name == "moore_penrose":
            return moore_penrose(d, A, gap)
        return normalized(d, A, gap, self.o["basis_lr"])

    def orthogonal(self, N: Array) -> Array:
        name = self.o["map"]
        if name == "cayley" or self.o["exact"]:
            return cayley(N, self.format)
        function = truncated_cayley if name == "truncated_cayley" else quadratic_cayley
        return function(N, None if self.o["paper"] else CAPS[name], self.format)

    def turn(self, rotations: list[Array], now: Turn) -> None:
        """``B <- B Q``, and the momentum turns with it, for it lives in eigen-coordinates.

        ``D`` stays what it is, but no second moment of gradients, ``alpha D``, is less than the
        square of the first.
        """
        # Quadratic maps of short generators stretch a basis by 1.25 in two turns, at most.
        mends = self.o["map"] != "quadratic" or now.early or self.turns % 2 == 0
        for factor, Q in zip(self.factors, rotations, strict=True):
            factor.B = self.format.product(factor.B, Q)
            if self.o["mend"] and mends:
                factor.B = newton_schulz(factor.B, self.format)
        self.momentum = self.turned(self.momentum, rotations)
        if now.own and self.alpha is not None:
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

    def limited(self, step: Array) -> Array:
        """Give the step a size of 1 at most, and clip its root mean square."""
        if self.descends():
            step = step / max(1.0, size(step))  # bases that wait to be mended stretch it
        clip = self.o["clip"]
        return step if clip is None else step * (clip / max(clip, size(step)))

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
    """Divide rows and columns by their sizes, and keep the size of all."""
    if step.ndim < 2:
        return step
    share = [np.mean(step**2, axis=axis, keepdims=True) / size(step) ** 2 for axis in (0, 1)]
    result = step / np.sqrt(share[0] + UNEVEN) / np.sqrt(share[1] + UNEVEN)
    return result * (size(step) / size(result))


def size(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))
