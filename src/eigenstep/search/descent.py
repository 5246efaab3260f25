"""A start for smooth functions: quasi-Newton descent, with slopes from differences, before a
distribution takes over.

The inverse Hessian is held as a factor, ``S^-1 = L L^T``, and points as ``m + L z``. In these
coordinates the curvature is one if it is known: the descent goes along the slope, ``z = -t g`` with
``g = L^T grad f``, differences have the same step in every direction, and the update of BFGS (in
product form, Brodlie et al., 1973) needs no solve. For a move ``s`` that changed the slope by
``y``::

    L <- L - L s w^T,    g <- g - w (s^T g),    w = (y + sqrt(s^T y / s^T s) s) / s^T y

Curvature that is too large is unlearned slowly, and one that is too small at once. So wherever a
move finds less curvature than expected, all of it is reduced first (Oren and Luenberger, 1974), and
what was too much comes back.

A move lowers a smooth function by about half of what the slope at its start promises: a parabola
does so at its bottom, where the search along a line ends. Where one of the first moves gains much
less, the slope has told of a ripple, and the descent gives up, mostly after one slope. Later it
gives up where most moves gain nothing or the function falls nowhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..core.numpy_twin import Array
from .space import Integers, Mask, Rng

EPS = float(np.finfo(np.float64).eps)
NOISE = 10 * EPS  # Rounding errors of values, relative to them
SMALLEST = 1e-200  # Squared slopes below this could vanish in products
LONGEST_DIFFERENCE = 1e-7  # Of the points for slopes, in units of sigma0
DECREASE = 1e-4  # The part of what the slope promises that a move must gain, Armijo's constant
PRECISION = 1.2  # Factor by which a step may be longer or shorter than a parabola suggests
MOST_TRIALS = 12  # Points along one direction
LEAST_CURVATURE = 0.05  # Smaller or negative curvature counts as this, relative to the known one
SOFTENING = 0.75  # Power of a curvature, relative to the expected one, that enlarges the factor
LOOK_BACK = 10  # Moves whose gains tell whether a function is smooth
LEAST_GAIN = 0.001  # Median of them, relative to half the squared slope
FIRST_SHARES = (0.5, 0.3, 0.3, 0.3)  # Least gains of the first moves, relative to parabolas'
FIRST_TRIALS = 4  # Points in the first direction that parabolas of a smooth function may need
MOST_MOVES = 150  # In all, without those for each dimension
MOST_MOVES_EACH = 15  # For each dimension
FARTHEST = 1e4  # Longest way, in units of sigma0: beyond it there seems to be no minimum


@dataclass
class Descent:
    """Where the descent is, and what it waits for: slopes, or the value of one trial."""

    mean: Array  # m, where it is
    factor: Array  # L, shape (d, d): what is known of the curvature
    start: Array  # where it began
    unit: float  # sigma0
    tolfun: float  # it is over when moves promise less
    slope: Array  # g at m, or at the last point while the new one is measured
    rising: Array  # the new one, as far as it is measured
    gains: Array  # what the last moves gained, relative to half the squared slope, latest last
    value: float = 0.0  # f(m)
    known: bool = False  # whether there is a value
    measuring: bool = True  # whether it waits for slopes
    measured: int = 0  # of how many directions the slope is known
    trial: float = 0.0  # t that it waits for
    step: float = 0.0  # the best t so far along this direction; 0 if none is good enough
    reached: float = 0.0  # the value there
    trials: int = 0  # along this direction
    moves: int = 0  # so far
    scaled: bool = False  # whether L knows a curvature
    fresh: bool = False  # whether L has forgotten all directions since the last good move
    over: str = ""  # "converged", "rough" (not smooth) or "far" (no minimum in sight)

    @classmethod
    def begin(cls, mean: Array, sigma: float, tolfun: float = 0.0) -> Descent:
        """Return a descent from ``mean``, at first with a step of ``sigma``."""
        factor = cls._unknown(len(mean), sigma)
        zeros = np.zeros_like(mean)
        return cls(mean, factor, mean, sigma, tolfun, zeros, zeros, np.ones(LOOK_BACK))

    @staticmethod
    def _unknown(d: int, size: float) -> Array:
        """Return a factor that knows no curvature."""
        return size * np.eye(d)

    block = 10**9  # How many slopes are measured at once

    # What it asks for.

    def ask(self, rng: Rng, most: int) -> Array:
        """Return the points whose values it waits for, as rows, but not more than ``most``."""
        return self._sample(self._wanted()[:most])

    def tell(self, u: Array, rows: Integers, values: Array) -> None:
        """Go on with the values of all points that it has asked for, whose places are ``rows``;
        with anything else it is over.
        """
        order = rows.argsort()
        if not np.array_equal(rows[order], np.arange(len(self._directions()))):
            self.over = "rough"
        elif self.measuring:
            self._measure(values[order])
        else:
            self._try(float(values[0]))

    def _directions(self) -> Integers:
        """Return the directions whose slope is measured next; one stands for any single point."""
        if not (self.known and self.measuring):
            return np.zeros(1, dtype=np.int64)
        first, last = self.span
        first += self.measured
        return np.arange(first, min(first + self.block, last))

    def _wanted(self) -> Array:
        """Return the points that it waits for, in its own coordinates: its own place, then slopes
        and trials in turn.
        """
        if not self.known:
            return np.zeros((1, len(self.mean)))
        if not self.measuring:
            return self.trial * self.direction[None]
        directions = self._directions()
        z = np.zeros((len(directions), len(self.mean)))
        z[np.arange(len(directions)), directions] = self._differences()[directions]
        return z

    @property
    def span(self) -> tuple[int, int]:
        """First direction whose slope is needed, and the one after the last."""
        return 0, len(self.mean)

    def _differences(self) -> Array:
        """Return the steps for slopes: at best the root of what rounding does to values, where the
        curvature is one.
        """
        step = 2 * math.sqrt(NOISE * abs(self.value)) or 1e-8
        longest = LONGEST_DIFFERENCE * self.unit / self.axes()
        return np.minimum(step if self.scaled else np.inf, longest)

    # What it learns.

    def _measure(self, values: Array) -> None:
        """Take the value where it is, or values for slopes; with the last of them go on."""
        if not np.isfinite(values).all():
            self.over = "rough"
        elif not self.known:
            self.value = float(values[0])
            self.known = True
        else:
            directions = self._directions()
            rising = self.rising.copy()
            with np.errstate(over="ignore"):
                rising[directions] = (values - self.value) / self._differences()[directions]
            self.rising = rising
            self.measured += len(directions)
            if directions[-1] + 1 == self.span[1]:
                self.measured = 0
                self._set_out(rising)

    def _set_out(self, slope: Array) -> None:
        """Learn from a slope, and set out in a new direction."""
        if not np.isfinite(slope).all():
            self.over = "rough"
            return
        if self.step > 0:
            self._learn(self.step * self.direction, slope, slope - self.slope)
        else:
            self.slope = slope
        self.measuring = False
        self.step = 0.0
        self.trials = 0
        self._choose_trial(self.squared)

    def _choose_trial(self, squared: float) -> None:
        """Choose the first step along a direction, unless the slope says that it is over."""
        if not math.isfinite(squared) or (squared == 0 and self.moves == 0):
            self.over = "rough"
        elif squared <= 2 * max(NOISE * abs(self.value), 0.01 * self.tolfun, SMALLEST):
            self.over = "converged"
        else:
            self.trial = 1.0 if self.scaled else self._first_trial(squared)

    def _first_trial(self, squared: float) -> float:
        """Return a step before there is any curvature: as long as sigma0."""
        return 1 / math.sqrt(squared)

    @property
    def direction(self) -> Array:
        """Where it goes, in its own coordinates."""
        return -self.slope

    @property
    def squared(self) -> float:
        """How much a step of 1 promises to gain, to first order."""
        with np.errstate(over="ignore"):
            return -float(self.slope @ self.direction)

    def _learn(self, s: Array, slope: Array, y: Array) -> None:
        """Learn the factor, and the slope in its coordinates, after a move ``s`` that changed the
        slope by ``y``.
        """
        self.slope = slope
        length = float(s @ s)
        product = float(s @ y)
        size = 1.0
        if not self.scaled:
            if product <= 0:
                return
            size = math.sqrt(product / float(y @ y))
        else:
            if product < LEAST_CURVATURE * length:
                share = (1 - LEAST_CURVATURE) * length / (length - product)
                y = share * y + (1 - share) * s
                product = LEAST_CURVATURE * length
            if self.moves <= 3 * len(s):
                size = max(1.0, (length / product) ** SOFTENING)
        factor = self.factor * size
        slope = slope * size
        s = s / size
        y = y * size
        length = length / size**2
        w = (y + math.sqrt(product / length) * s) / product
        self.factor = factor - np.outer(factor @ s, w)
        self.slope = slope - w * float(s @ slope)
        self.scaled = True

    def _try(self, value: float) -> None:
        """Look further along the direction, or nearer, or move."""
        squared = self.squared
        t = self.trial
        best = self._bottom(value, squared)
        self.trials += 1
        if self.step == 0 and not value <= self.value - DECREASE * t * squared:
            self._shorten(best)
            return
        better = self.step == 0 or value < self.reached
        if better:
            self.step = t
            self.reached = value
        if better and self.trials <= MOST_TRIALS and not 1 / PRECISION < best / t < PRECISION:
            self.trial = min(max(best, 0.1 * t), 4 * t)
        else:
            self._move(squared)

    def _shorten(self, best: float) -> None:
        """Try a shorter step, or give up this direction."""
        nearest = 0.1 if self.moves else 0.001  # sigma0 may be much too large
        self.trial = min(max(best, nearest * self.trial), 0.5 * self.trial)
        if self.trials > MOST_TRIALS:
            self._fail()

    def _bottom(self, value: float, squared: float) -> float:
        """Return the step to the bottom of the parabola through a trial's value."""
        t = self.trial
        bend = value - self.value + t * squared  # t^2 / 2 times the curvature
        if bend <= 0:
            return math.inf
        return t * t * squared / (2 * bend) if math.isfinite(bend) else 0.0

    def _move(self, squared: float) -> None:
        self.mean = self._sample(self.step * self.direction[None])[0]
        gained = 2 * (self.value - self.reached)
        # Gains say nothing before L is known.
        self.gains = np.append(self.gains[1:], gained / squared if self.scaled else 1.0)
        self.moves += 1
        if np.abs(self.mean - self.start).max() > FARTHEST * self.unit:
            self.over = "far"
        # A share is 1 at the bottom of a parabola.
        if self._is_rough(gained / (self.step * squared), squared):
            self.over = "rough"
        self.value = self.reached
        self.measuring = True
        self.fresh = self.fresh and self.step <= 0.1

    def _is_rough(self, share: float, squared: float) -> bool:
        """Whether the last move, or many of the last ones, gained too little."""
        most = MOST_MOVES + MOST_MOVES_EACH * len(self.mean)
        short = self.step * math.sqrt(squared) < 1
        return bool(
            np.median(self.gains) < LEAST_GAIN
            or self.moves > most
            or (self.moves <= len(FIRST_SHARES) and share < FIRST_SHARES[self.moves - 1])
            or (self.moves == 1 and self.trials > FIRST_TRIALS and short)
        )

    def _fail(self) -> None:
        """Forget the directions, once; then it is over."""
        if self.fresh or not self.scaled:
            self.over = "rough"
            return
        self._forget()
        self.fresh = True
        self.measuring = True
        self.step = 0.0

    def _forget(self) -> None:
        size = math.exp(float(np.log(self.axes()).mean()))
        self.factor = self._unknown(len(self.mean), size)

    # Where it is.

    def _sample(self, z: Array) -> Array:
        """Return ``m + L z``."""
        return self.mean + z @ self.factor.T

    @property
    def sigma(self) -> Array:
        """The step size with which it began."""
        return np.array(self.unit)

    @property
    def outcome(self) -> Array:
        """Where the search begins: after a minimum, as if there had been no descent."""
        return self.start if self.over == "converged" else self.mean

    def deviations(self) -> Array:
        """Return the lengths of the factor's rows."""
        return np.sqrt((self.factor * self.factor).sum(1))

    def axes(self) -> Array:
        """Return the lengths of the factor's columns."""
        return np.sqrt((self.factor * self.factor).sum(0))

    def reflect(self, mean: Array, flipped: Mask) -> None:
        """Become the mirror image with another mean and some coordinates ``flipped``."""
        self.mean = mean
        self.factor = np.where(flipped, -1.0, 1.0)[:, None] * self.factor


MEMORY = 16  # Moves that are remembered in large dimensions
BLOCK = 20  # Slopes measured at once there
BLOCKS = 20  # Number of blocks of coordinates along which the first moves go, one after the other
SWEEPS = 2  # How often they go through all blocks
FLAT_BLOCKS = 2  # With so many blocks without a slope at the beginning, values come in steps


@dataclass
class LimitedDescent(Descent):
    """The same with memory and time linear in the dimension, L-BFGS (Nocedal, 1980): it remembers
    the last moves alone.

    Its coordinates are those of the space, in units of sigma0. A whole slope is expensive there,
    and where few directions have most of the curvature, a move along a small part of it gains
    nearly as much. So it first moves along the slopes of blocks of coordinates, one after the
    other.
    """

    remembered: int = 0  # number of moves that it remembers
    swept: int = 0  # blocks of coordinates in which it has moved; then the slopes are whole ones

    block = BLOCK

    @staticmethod
    def _unknown(d: int, size: float) -> Array:
        """Return room for moves and changes of the slope in place of a factor, latest last."""
        return np.zeros((MEMORY, 2, d))

    @property
    def pairs(self) -> Array:
        """The moves that are remembered, with changes of the slope."""
        return self.factor[MEMORY - self.remembered :]

    @property
    def span(self) -> tuple[int, int]:
        """First direction whose slope is needed, and the one after the last."""
        d = len(self.mean)
        if not self._sweeping:
            return 0, d
        block = self.swept % BLOCKS
        return block * d // BLOCKS, (block + 1) * d // BLOCKS

    @property
    def _sweeping(self) -> bool:
        return self.swept < SWEEPS * BLOCKS and len(self.mean) >= BLOCKS

    def _set_out(self, slope: Array) -> None:
        if not self._sweeping:
            super()._set_out(slope)
            return
        first, last = self.span
        block = np.zeros_like(slope)
        block[first:last] = slope[first:last]
        before = self.slope
        super()._set_out(block)
        nothing = not block.any()
        if nothing and not self.moves and self.swept + 1 >= FLAT_BLOCKS:
            return
        if nothing or self.over == "converged":  # on to the next block
            self.slope = before
            self.measuring = True
            self.over = ""
            self.swept += 1

    def _first_trial(self, squared: float) -> float:
        return self.trial if self.moves else super()._first_trial(squared)

    def _move(self, squared: float) -> None:
        super()._move(squared)
        if self._sweeping:
            self.swept += 1
            self.step = 0.0

    @property
    def direction(self) -> Array:
        """Where it goes: minus the inverse Hessian times the slope, by the two-loop recursion."""
        q = -self.slope
        shares = []
        for s, y in self.pairs[::-1]:
            shares.append(float(s @ q) / float(s @ y))
            q = q - shares[-1] * y
        if self.scaled:
            q = q * self._softness
        for s, y in self.pairs:
            q = q + (shares.pop() - float(y @ q) / float(s @ y)) * s
        return q

    @property
    def _softness(self) -> float:
        s, y = self.pairs[-1]
        return float(s @ y) / float(y @ y)

    def _sample(self, z: Array) -> Array:
        """Return ``m + sigma0 z``."""
        return self.mean + self.unit * z

    def _differences(self) -> Array:
        step = LONGEST_DIFFERENCE
        if self.scaled:
            noise = NOISE * abs(self.value)
            step = min(step, 2 * math.sqrt(noise * self._softness) or step)
        return np.full(len(self.mean), step)

    def _learn(self, s: Array, slope: Array, y: Array) -> None:
        self.slope = slope
        if float(s @ y) > 1e-10 * float(y @ y):
            self.factor = np.roll(self.factor, -1, axis=0)
            self.factor[-1] = s, y
            self.remembered = min(self.remembered + 1, MEMORY)
            self.scaled = True

    def _forget(self) -> None:
        self.remembered = 1

    def deviations(self) -> Array:
        """Return the step size for every coordinate."""
        return np.full(len(self.mean), self.unit)

    axes = deviations

    def reflect(self, mean: Array, flipped: Mask) -> None:
        """Become the mirror image with another mean and some coordinates ``flipped``."""
        signs = np.where(flipped, -1.0, 1.0)
        self.mean = mean
        self.slope = signs * self.slope
        self.rising = signs * self.rising
        self.factor = signs * self.factor
