"""Matrices that learn: the state and the step of a batch of equal-shaped matrices.

A batch holds ``b`` gradients ``G``, each of ``k`` blocks of ``n x m`` entries, as one tensor
``(b, k, n, m)``. Its curvature is ``S = alpha C x K``: ``C`` is block-diagonal, with a block
``(n, n)`` for each of the ``k``; the blocks share ``K`` of shape ``(m, m)``. A batch with one side
only, ``(b, 1, n)``, has ``S = alpha C``. A step

1. turns the gradient into the eigenbasis and averages it there: momentum (``average_``);
2. projects it to ``W`` of each side, from which ``core.step.learn`` learns eigenvalues and
   rotations (``learn_``);
3. divides a mixture of momentum and gradient by the ``p``-th root of the eigenvalues
   (``precondition_``), evens out its rows and columns, and lengthens it until it descends as fast
   as Adam's (``lengthened_``);
4. turns this back, and turns the bases (``turn_``).

Gradients are measured in a unit of their own size, and of ``alpha`` the root is kept, the scale.
So multiplying the loss by a constant changes nothing (a power of two, not even a bit), and no
gradient is too large or too small to be squared. Nothing here reads a number back to the host, so
a step never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core.step import (
    HALF,
    Learned,
    accumulation_dtype,
    largest,
    learn,
    matmul,
    normalize,
    project,
    project_diagonal,
    reorthonormalize,
    rotate,
    running_rate,
    squares_,
    truncated_exp,
)
from .options import Options

LARGEST = {
    dtype: largest(accumulation_dtype(dtype)) for dtype in (torch.float64, torch.float32, *HALF)
}
"""Numbers up to which sums of many cannot overflow, for each format of state and bases."""
FAINT = 1e-8
"""Gradients this much smaller than ``sqrt(alpha)`` count as if they were zero."""
MAX_LENGTHENING = 3.0
"""A step is never made longer than this many uniform Adam steps."""
NO_TRUST = 0.6
FULL_TRUST = 0.1
"""The newest gradient gets no extra weight where gradients oppose the momentum by the larger
share, and all of it up to the smaller one.
"""
UNEVEN = 0.1
"""Added to the share of every row and column, so that those without a gradient do not grow."""


class Side(NamedTuple):
    """One side's factor ``B Diag(d) B^T``, with determinant one."""

    eigs: Tensor  # d, shape (b, k, n) of the first side and (b, 1, m) of the second
    basis: Tensor | None = None  # B, shape (b, k, n, n) or (b, 1, m, m); None: diagonal
    speed: Tensor | None = None  # norm of the last generator, shape (b, k) or (b, 1)


class MatrixState(NamedTuple):
    """What a batch keeps between steps; every step changes the tensors in place."""

    step: Tensor  # how many steps were taken, shape (b,)
    turns: Tensor  # how often the bases turned, shape (b,)
    scale: Tensor  # sqrt(alpha), zero before the first gradient, shape (b,)
    sides: tuple[Side, ...]
    momentum: Tensor | None = None  # M in the eigenbasis, shape (b, k, n, m)
    second_moment: Tensor | None = None  # D, mean of squares of G in units of alpha
    gain: Tensor | None = None  # by how much faster steps could descend than Adam's, shape (b,)
    agreement: Tensor | None = None  # of gradients with the momentum, -1 to 1, shape (b,)


class Rates(NamedTuple):
    """Numbers that may change from step to step, as tensors: nothing is compiled anew for them."""

    beta1: Tensor
    beta2: Tensor
    basis: Tensor
    damping: Tensor


class Weights(NamedTuple):
    """Weights of what is newest in running averages, shape ``(b,)``."""

    momentum: Tensor
    curvature: Tensor
    basis: Tensor | None  # of the average that bases turn towards, if they turn


class GivenCurvature(NamedTuple):
    """Curvature that is learned instead of the gradient's."""

    vectors: Tensor  # whose outer products sum up to it, shape (b, k, n, m, K)
    mask: Tensor  # for which elements of the batch it was given, shape (b,)


def new_state(
    shape: Sequence[int], options: Options, *, has_basis: bool, device: torch.device | str
) -> MatrixState:
    """Return the state before the first gradient: ``B = I``, ``d = 1``, and no scale yet.

    Args:
        shape: ``(b, k, n, m)`` or ``(b, 1, n)``.
        options: what is kept and in which formats; ``state_dtype`` is floating point here.
        has_basis: whether the sides have a basis; otherwise their factors are diagonal.
        device: where to put the tensors.
    """
    assert options.state_dtype is not None
    wide = accumulation_dtype(options.state_dtype)
    momentum = options.betas[0] > 0
    descends = options.grafting and options.root == 2 and has_basis

    def scalars() -> Tensor:
        return torch.zeros(shape[0], dtype=wide, device=device)

    def entries() -> Tensor:
        return torch.zeros(*shape, dtype=options.state_dtype, device=device)

    sides = []
    for axis, size in enumerate(shape[2:]):
        eigs = torch.ones(shape[0], shape[1] if axis == 0 else 1, size, dtype=wide, device=device)
        if has_basis:
            basis = torch.diag_embed(eigs).to(options.turning.dtype or options.state_dtype)
            sides.append(Side(eigs, basis, torch.zeros_like(eigs[..., 0])))
        else:
            sides.append(Side(eigs))
    return MatrixState(
        step=scalars(),
        turns=scalars(),
        scale=scalars(),
        sides=tuple(sides),
        momentum=entries() if momentum else None,
        second_moment=entries() if options.eigenvalues == "corrected" else None,
        gain=scalars().add_(1) if descends else None,
        agreement=scalars() if descends and momentum else None,
    )


class Matrices:
    """A batch of matrices that learn. The names of methods are those of the mathematics.

    Methods that end in ``_`` change the state, or reuse the memory of their arguments.
    """

    def __init__(self, state: MatrixState, options: Options, rates: Rates) -> None:
        """Take up a batch's state for one step."""
        self.state = state
        self.options = options
        self.rates = rates

    start: ClassVar[float] = 1.0
    """Running averages start as means, as by Adam's bias correction; with 0 rates are constant."""
    least_damping: ClassVar[float] = 1e-12
    """Of products of eigenvalues: with less, sparse gradients lead to steps of any length."""

    @classmethod
    def rates_of(cls, options: Options, like: Tensor) -> Rates:
        """Return the numbers of a step, in the number format and on the device of a tensor."""
        floor = cls.least_damping if options.eigenvalues == "kronecker" else 0.0
        assert isinstance(options.turning.rate, float | int)

        def number(value: float) -> Tensor:
            # Filled in on the device: copying a number to it would wait for it.
            return torch.full((), value, dtype=like.dtype, device=like.device)

        return Rates(
            beta1=number(options.betas[0]),
            beta2=number(options.betas[1]),
            basis=number(options.turning.rate),
            damping=number(max(floor, options.damping)),
        )

    def step(
        self, gradient: Tensor, curvature: GivenCurvature | None, *, turn: bool, mend: bool
    ) -> Tensor:
        """Learn from gradients and return the directions ``S^(-1/p) M`` to go against.

        Args:
            gradient: ``G``, shape ``(b, k, n, m)`` or ``(b, 1, n)``.
            curvature: what to learn from instead of the gradient.
            turn: whether the bases turn in this step.
            mend: whether they are made orthogonal again when they turn.
        """
        state = self.state
        state.step.add_(1)
        plain = self.within_range(gradient)
        bases = [side.basis for side in state.sides]
        weights = self.weights_(turn)
        G = rotate(plain, bases)
        trust = self.trust_(plain, G, weights.curvature)
        del plain  # memory is short while bases turn
        self.average_(G, weights.momentum, trust)
        samples = G[..., None]
        if curvature is not None:
            samples = rotate(self.within_range(curvature.vectors), bases)
        rotations = self.learn_(samples, weights, turn)
        del samples
        direction = self.precondition_(G, trust)
        del G
        if self.options.root != 2:
            direction = cut(direction, gradient.dtype)
        direction = rotate(direction, [None if basis is None else basis.mT for basis in bases])
        self.turn_(rotations, mend=mend, mask=None if curvature is None else curvature.mask)
        return self.limited_(direction)

    def weights_(self, turn: bool) -> Weights:
        """Return the weights of what is newest in all averages, counting a turn."""
        state = self.state
        basis = None
        momentum = running_rate(self.rates.beta1, state.step, self.start)
        curvature = running_rate(self.rates.beta2, state.step, self.start)
        if turn:
            state.turns.add_(1)
            basis = running_rate(1 - self.rates.basis, state.turns, self.start)
        return Weights(momentum, curvature, basis)

    def within_range(self, x: Tensor) -> Tensor:
        """Return numbers in the format of the arithmetic, of which sums of squares are safe.

        They are cut where sums could overflow, and are zero where scales would vanish.
        """
        wide = self.state.scale.dtype
        basis = self.state.sides[0].basis
        most = min(LARGEST[wide], LARGEST[wide if basis is None else basis.dtype])
        return torch.hardshrink(x.to(wide).clamp(-most, most), 1 / most)

    def trust_(self, plain: Tensor, G: Tensor, rate: Tensor) -> Tensor | None:
        """Learn how well steps descend; return how much more the newest gradient may count.

        Steps of unit entries, ``sign(G)``, lower the loss by the sum of magnitudes, which is
        smaller in the eigenbasis: the gain says by how much. Gradients that oppose the momentum
        again and again come from steps across a valley, not from noise: more weight on the newest
        makes the swings worse, and a longer memory averages them out.
        """
        gain = self.state.gain
        if gain is None:
            return None
        # The order of a sum must not depend on how a gradient lies in memory, hence flat.
        scratch = plain.flatten(1).abs_()
        before = scratch.sum(1)
        after = torch.abs(G.flatten(1), out=scratch).sum(1)
        # An all-zero gradient leaves the averages as they are.
        gain.lerp_(torch.where(after > 0, before / after, gain).clamp_min_(1.0), rate)
        momentum = self.state.momentum
        agreement = self.state.agreement
        if momentum is None or agreement is None:
            return None
        signs = torch.sign(momentum.to(scratch.dtype).flatten(1), out=scratch)
        along = signs.mul_(G.flatten(1)).sum(1)
        agreement.lerp_(torch.where(after > 0, along / after, agreement), rate)
        return ((NO_TRUST + agreement) / (NO_TRUST - FULL_TRUST)).clamp_(0.0, 1.0)

    def average_(self, G: Tensor, weight: Tensor, trust: Tensor | None) -> None:
        """Follow the gradients by their average, ``M <- M + w (G - M)``."""
        momentum = self.state.momentum
        if momentum is None:
            return
        if trust is not None:
            weight = weight * (1 + trust) / 2
        weight = column(weight, G).to(momentum.dtype)
        momentum.lerp_(G.to(weight.dtype), weight)

    def learn_(self, samples: Tensor, weights: Weights, turn: bool) -> list[Tensor]:
        """Learn ``d`` of each side, ``alpha`` and ``D``; return the rotation of each side.

        Args:
            samples: gradients in the eigenbasis, with an axis of samples at the end.
            weights: of what is newest.
            turn: whether the bases turn; otherwise there are no rotations.
        """
        sides = self.state.sides
        samples, past = self.whiten_(samples)
        level = self.damping_level(past)
        dampings = self.dampings_of(level)
        inverses = [side.eigs.reciprocal() for side in sides]
        learn_side = self.learning(weights)
        square = None
        W_of = partial(project, samples)
        if not turn or sides[0].basis is None:
            square = squares_(samples)
            W_of = partial(project_diagonal, square)
        results = []
        for axis, side in enumerate(sides):
            W = W_of(axis, inverses)
            results.append(learn_side(past[:, None, None] * side.eigs, W, damping=dampings[axis]))
        eigs, log_means = normalize([result.eigs.flatten(1) for result in results])
        if square is None and self.state.second_moment is not None:
            square = squares_(samples)
        growth = self.take_over_(eigs, log_means, results)
        if self.state.second_moment is not None and square is not None:
            square.add_(column(level, square))
            self.learn_second_moment_(square, past, weights.curvature, growth)
        return [result.turn for result in results if result.turn is not None]

    def learning(self, weights: Weights) -> Callable[..., Learned]:
        """Return ``learn`` with what both sides have in common."""
        turning = self.options.turning
        if weights.basis is not None and self.state.sides[0].basis is not None:
            rate = weights.basis[:, None, None]
            turning = replace(turning, rate=rate, dtype=self.state.sides[0].basis.dtype)
        return partial(
            learn,
            rate=weights.curvature[:, None, None],
            positive=truncated_exp,
            turning=turning,
        )

    def dampings_of(self, level: Tensor) -> list[Tensor]:
        """Return the paper's ``Lambda / (alpha k)`` of each side: ``lambda mean(1/d_other)``."""
        common = level[:, None, None]
        sides = self.state.sides
        if len(sides) == 1:
            return [common]
        dampings = []
        for other in reversed(sides):
            mean = other.eigs.reciprocal().mean((1, 2), keepdim=True)
            dampings.append((common * mean).clamp_max_(LARGEST[level.dtype]))
        return dampings

    def whiten_(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Return samples in a unit in which squares are safe, and ``alpha`` in its square.

        The unit is the largest entry, or ``sqrt(alpha)`` if all entries are far smaller; it is the
        scale until ``normalize_``. The first samples that are not all zero set ``alpha`` to their
        mean square.
        """
        scale = self.state.scale
        axes = tuple(range(1, samples.ndim))
        # The largest entry is faster than a norm.
        unit = torch.maximum(samples.abs().amax(axes), self.smallest_unit())
        unit = torch.where(unit > 0, unit, 1.0)
        whitened = samples / column(unit, samples)
        size = torch.linalg.vector_norm(whitened, dim=axes) / samples.shape[1:-1].numel() ** 0.5
        # The square of this is still a number, however large the newest samples are.
        least = torch.finfo(unit.dtype).tiny ** 0.5
        ratio = torch.where(scale > 0, (scale / unit).clamp_min(least), size)
        torch.mul(unit, ratio > 0, out=scale)
        return whitened, torch.where(ratio > 0, ratio, 1.0).square_()

    def smallest_unit(self) -> Tensor:
        """Return the smallest unit that samples are measured in, shape ``(b,)``."""
        return FAINT * self.state.scale

    def damping_level(self, past: Tensor) -> Tensor:
        """Return ``lambda``, relative to the mean eigenvalue, in the squared unit of samples."""
        level = self.rates.damping * past
        for side in self.state.sides:
            level = (level * side.eigs.mean((1, 2))).clamp_max_(LARGEST[past.dtype])
        return level

    def take_over_(
        self, values: Sequence[Tensor], log_means: Tensor, results: Sequence[Learned]
    ) -> Tensor:
        """Keep new eigenvalues, of product one; return the logarithm of the growth of ``alpha``."""
        scale = self.state.scale
        # No farther than the scale can grow, or second moments would be in other units than it.
        room = 2 * (scale / LARGEST[scale.dtype]).log().neg()
        growth = torch.minimum(log_means.mean(0), room)
        for side, eigs, result in zip(self.state.sides, values, results, strict=True):
            side.eigs.copy_(eigs.view_as(side.eigs))
            if side.speed is not None and result.speed is not None:
                side.speed.copy_(result.speed.clamp_max(LARGEST[scale.dtype]))
        scale.mul_((growth / 2).exp())
        return growth

    def learn_second_moment_(
        self, square: Tensor, past: Tensor, rate: Tensor, growth: Tensor
    ) -> None:
        """Follow the squares of samples by their average ``D``, in units of the new ``alpha``."""
        D = self.state.second_moment
        assert D is not None
        shrink = (-growth).exp()
        D.mul_(column((1 - rate) * past * shrink, D))
        D.addcmul_(square, column(rate * shrink, D))

    def precondition_(self, G: Tensor, trust: Tensor | None) -> Tensor:
        """Return ``S^(-1/p) M`` in the eigenbasis, in the memory of ``G``.

        It is all zero as long as no curvature was seen. ``M`` is the momentum, with more weight on
        the newest gradient as far as there is trust in it.
        """
        momentum = G if self.state.momentum is None else self.state.momentum.to(G.dtype)
        tiny = torch.finfo(G.dtype).tiny
        root = self.root_of_spectrum(G.dtype)
        scale = column(self.state.scale, G)
        unit = torch.where(scale > 0, scale, torch.inf)
        most = None
        if self.state.gain is not None:
            most = self.longest_allowed(momentum / unit, root)
        mixed = self.mixed_(G, momentum, trust)
        direction = torch.div(mixed, root.mul_(unit).clamp_min_(tiny), out=G)
        if most is not None:
            self.lengthen_(direction, most, scratch=root)
        if self.options.root != 2:
            # The rest of alpha^(1/p) = scale^(2/p): in one factor, it could leave the range of the
            # number format.
            direction.div_(scale.pow(2 / self.options.root - 1).clamp_min_(tiny))
        return direction

    def root_of_spectrum(self, dtype: torch.dtype) -> Tensor:
        """Return the ``p``-th root of the eigenvalues of ``S / alpha``, as new memory."""
        if self.state.second_moment is not None:
            spectrum = self.state.second_moment.to(dtype)
        else:
            spectrum = products_of_eigs(self.state.sides)
        tiny = torch.finfo(spectrum.dtype).tiny
        spectrum = spectrum.clamp_min(tiny)
        if self.options.root == 2:
            return spectrum.sqrt_()
        return spectrum.pow_(1 / self.options.root).clamp_min_(tiny)

    def mixed_(self, G: Tensor, momentum: Tensor, trust: Tensor | None) -> Tensor:
        """Return the mixture of momentum and newest gradient that is stepped along."""
        if not self.options.nesterov or self.state.momentum is None:
            return momentum
        newest: Tensor | float = self.options.nesterov
        if self.options.nesterov is True:
            newest = 1 - self.rates.beta1
        if trust is not None:
            newest = newest * column(trust, G)
        return G.lerp_(momentum, 1 - newest)

    def longest_allowed(self, momentum: Tensor, root: Tensor) -> Tensor:
        """Return the norm that no step is lengthened beyond, of momentum over ``sqrt(alpha)``.

        It is that of Adam's largest step, whose entries are one, or of so many of its present ones
        if that is less: ``||M|| / sqrt(E ||G||^2)`` if all second moments are alike, in every
        basis. Thus steps along weak gradients that strong ones hide from Adam are not lengthened
        for what the strong ones gain.
        """
        limit = torch.finfo(root.dtype).max
        size = norm_of(momentum).clamp_max(limit) / norm_of(root).clamp_max(limit)
        return (MAX_LENGTHENING * size).clamp_max(1.0) * root[0].numel() ** 0.5

    def lengthen_(self, direction: Tensor, most: Tensor, *, scratch: Tensor) -> None:
        """Even out a step, and lengthen it by what was gained, but not beyond ``most``.

        Its root mean square never exceeds one.
        """
        assert self.state.gain is not None
        # Sizes beyond the number format count as too large.
        size = norm_of(direction).clamp_min(torch.finfo(direction.dtype).tiny)
        same = 1.0 if direction.ndim == 3 else even_out_(direction, size, scratch)
        longer = torch.minimum(self.state.gain.view_as(size), (most / size).clamp_min(1.0))
        direction.mul_(same * torch.minimum(longer, direction[0].numel() ** 0.5 / size))

    def turn_(self, rotations: Sequence[Tensor], *, mend: bool, mask: Tensor | None) -> None:
        """Turn the bases, ``B <- B Q``, and with them the momentum in their coordinates.

        Second moments stay those of the old coordinates, but are never below the square of the
        momentum in the new ones: without this, steps could be of any size. That holds for elements
        of the batch without given curvature, which the ``mask`` marks.
        """
        if not rotations:
            return
        for side, Q in zip(self.state.sides, rotations, strict=True):
            assert side.basis is not None
            turned = matmul(side.basis, Q)
            side.basis.copy_(reorthonormalize(turned) if mend else turned)
        momentum = self.state.momentum
        if momentum is None:
            return
        momentum.copy_(rotate(momentum, rotations))
        D = self.state.second_moment
        if D is not None:
            scale = self.state.scale
            if mask is not None:
                scale = torch.where(mask, torch.inf, scale)
            scale = column(torch.where(scale > 0, scale, torch.inf), D)
            D.clamp_min_((momentum / scale).square_())

    def limited_(self, direction: Tensor) -> Tensor:
        """Return a step of a root mean square of at most ``clip``, and one if lengthened."""
        if self.state.gain is not None:
            # It was cut in the eigenbasis already, which stretches a little until it is mended.
            size = norm_of(direction)
            direction.mul_((direction[0].numel() ** 0.5 / size).clamp_max_(1.0))
        clip = self.options.clip
        if clip is None:
            return direction
        return direction * (clip / root_mean_square(direction).clamp_min(clip))


class AbsolutelyDamped(Matrices):
    """Matrices whose damping is an absolute number, as in the paper, or a prior's precision."""

    least_damping: ClassVar[float] = 0.0

    def smallest_unit(self) -> Tensor:
        """Return the smallest unit that samples are measured in: damping counts, too."""
        return torch.maximum(super().smallest_unit(), self.rates.damping.sqrt())

    def damping_level(self, past: Tensor) -> Tensor:
        """Return ``lambda``, in the squared unit of the samples."""
        scale = self.state.scale
        return (self.rates.damping.sqrt() / torch.where(scale > 0, scale, 1.0)).square()


def cut(direction: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a step without what cannot be turned back, or what weights cannot hold."""
    most = min(largest(dtype), largest(direction.dtype))
    return direction.clamp(-most, most)


def column(values: Tensor, like: Tensor) -> Tensor:
    """Shape one number for each element of a batch so that it multiplies a tensor."""
    return values.view(-1, *[1] * (like.ndim - 1))


def products_of_eigs(sides: Sequence[Side]) -> Tensor:
    """Return the eigenvalues of ``S / alpha``, shape ``(b, k, n, m)`` or ``(b, 1, n)``."""
    if len(sides) == 1:
        return sides[0].eigs
    return sides[0].eigs[..., None] * sides[1].eigs[:, :, None]


def even_out_(direction: Tensor, size: Tensor, scratch: Tensor) -> Tensor:
    """Even out the rows and columns of steps; return what gives them their norms back.

    Muon makes all singular values of a step equal, which takes 15 products. In the eigenbasis it is
    whole rows and columns that are longer than others, and dividing by their root mean squares
    comes close to it without any product.

    Args:
        direction: steps in the eigenbasis, shape ``(b, k, n, m)``, evened out in place.
        size: their norms.
        scratch: memory of the same shape.
    """
    limits = torch.finfo(size.dtype)
    size = size.clamp_max(limits.max)
    # Squared once for both axes; norms of columns take ten times longer.
    square = torch.div(direction, size, out=scratch).square_()
    factors = []
    for others in ((3,), (1, 2)):
        share = square.sum(others, keepdim=True)
        factors.append(share.mul_(share[0].numel()).add_(UNEVEN).rsqrt_())
    for factor in factors:
        direction.mul_(factor)
    return size / norm_of(direction).clamp_(limits.tiny, limits.max)


def norm_of(x: Tensor) -> Tensor:
    """Return the norm of each element of a batch, shaped to multiply it."""
    return torch.linalg.vector_norm(x, dim=tuple(range(1, x.ndim)), keepdim=True)


def root_mean_square(x: Tensor) -> Tensor:
    """Return that of each element of a batch, shaped to multiply it; entries may have any size."""
    unit = x.abs().amax(tuple(range(1, x.ndim)), keepdim=True)
    unit = unit.clamp_min(torch.finfo(x.dtype).tiny)
    return unit * norm_of(x / unit) / x[0].numel() ** 0.5


def step(
    kind: type[Matrices],
    state: MatrixState,
    options: Options,
    rates: Rates,
    gradient: Tensor,
    curvature: GivenCurvature | None,
    turn: bool,
    mend: bool,
) -> Tensor:
    """Take one step of a batch; a function of its own, so that it can be compiled."""
    return kind(state, options, rates).step(gradient, curvature, turn=turn, mend=mend)
