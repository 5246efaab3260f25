"""One step of learning in eigen-coordinates, which everything else is built on.

For one factor with eigenvalues ``d``, curvature ``W = B^T H B``, damping ``lam`` and the average
``M`` of the curvature so far, which is ``Diag(d)`` unless the factor keeps a residual::

    n = (1 - gamma beta) d + beta (diag W + lam)   where the linear update would put the eigenvalues
    A = (1 - gamma beta) M + beta (W + lam I)      average of old and new curvature
    N = rotation(d, A)                             skew-symmetric generator
    Q = map(N)                                     orthogonal matrix
    d <- positive(d, n)                            new eigenvalues

``learn`` is this step. The caller multiplies ``Q`` into the basis and into whatever else lives in
its coordinates. ``update`` (``eigenstep.core.update``) does so for one matrix, the optimizer for
its stacks of gradients. ``Turning`` says how the basis turns: which generator, which map, how far.

Generators and maps agree to first order in ``beta`` where eigenvalues are distinct. Generators
differ in what happens where eigenvalues are close. Maps come exact and truncated; the truncated
ones need matrix products only, so they run in low precision and on every accelerator.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import diagonal

from .checks import check_number, check_size, choose, show

HALF = (torch.bfloat16, torch.float16)
"""Formats in which only bases are stored; eigenvalues then stay in float32."""
Rotation = Callable[[Tensor, Tensor], Tensor]
"""``rotation(d, A) -> N``: eigenvalues ``(*batch, n)``, average ``(*batch, n, n)``, generator
``(*batch, n, n)``.
"""
Orthogonal = Callable[[Tensor], Tensor]
"""``map(N) -> Q``: skew-symmetric generators to orthogonal matrices, shape ``(*batch, n, n)``."""
Positive = Callable[[Tensor, Tensor], Tensor]
"""``positive(d, n) -> d``: old eigenvalues and the linear update's to new ones, shape
``(*batch, n)``.
"""
Rate = float | Tensor
"""A tensor broadcasts against the eigenvalues: one rate for each matrix of a batch."""


# ---- generators: rotation(d, A) -> N ----


def moore_penrose(eigs: Tensor, average: Tensor, *, gap: float = 1e-6) -> Tensor:
    """The paper's rotation, ``N_ij = -A_ij / (2 (d_i - d_j))``, zero for nearly equal eigenvalues.

    Those differ by at most the fraction ``gap`` of the larger one (Moore-Penrose inverse of the
    Fisher metric).
    """
    difference = eigs[..., :, None] - eigs[..., None, :]
    larger = torch.maximum(eigs[..., :, None], eigs[..., None, :])
    apart = difference.abs() > gap * larger
    generator = -0.5 * average / difference.where(apart, 1.0)
    limit = torch.finfo(generator.dtype).max
    return torch.where(apart, generator.clamp(-limit, limit), 0.0)


def normalized(
    eigs: Tensor, average: Tensor, *, rate: float | Tensor = 0.5, gap: float = 0.1
) -> Tensor:
    """The paper's rotation for neural networks: ``moore_penrose`` rescaled to norm ``rate / 2``.

    The rate is the paper's second step size, beta-bar-2: below 2, so that the truncated Cayley map
    converges.
    """
    direction = moore_penrose(eigs, average, gap=gap)
    # The entries may be huge: scale by the largest before squaring them.
    largest = direction.abs().amax((-2, -1), keepdim=True)
    direction = direction / largest.clamp_min(torch.finfo(direction.dtype).tiny)
    norm = torch.linalg.matrix_norm(direction, keepdim=True)
    return (rate / 2) * direction / norm.clamp_min(torch.finfo(direction.dtype).tiny)


def bounded(eigs: Tensor, average: Tensor, *, pairwise: bool = False) -> Tensor:
    """Our rotation: Jacobi angles softened so that they stay bounded and move at exact ties.

    ``N_ij = -A_ij sgn(D_ij) / (|D_ij| + sqrt(D_ij^2 + 4 e_ij))`` with ``D_ij = A_ii - A_jj``. Every
    row has a norm of at most ``1/sqrt(2)``, without any threshold for eigenvalues that are nearly
    equal. By default ``e_ij`` is the mean squared norm of rows ``i`` and ``j`` off the diagonal,
    best for noisy gradients. With ``pairwise`` it is ``A_ij^2``, which gives the exact Jacobi angle
    of each pair by itself, best for low-rank or deterministic curvature.
    """
    # Scaling A leaves N unchanged; at unit size, squares neither overflow nor vanish.
    tiny = torch.finfo(average.dtype).tiny
    off = average.abs()
    torch.div(average, off.amax((-2, -1), keepdim=True).clamp_min_(tiny), out=off)
    values = diagonal(off).clone()
    diagonal(off).zero_()
    # The rest is in place: these matrices are as large as the bases, and memory takes the time.
    size = values[..., None, :] - values[..., :, None]  # -D
    # This decides the sign where two eigenvalues are equal, and is too small to matter elsewhere.
    size.sub_(torch.full_like(off[(0,) * (off.ndim - 2)], 2 * tiny).triu_().sub_(tiny))
    # This floor keeps rows short whose entries have squares that vanish in the number format.
    floor = 2 * off.shape[-1] ** 2 * tiny
    if pairwise:
        root = (4 * off).mul_(off).add_(2 * floor)
    else:
        rows = torch.linalg.vector_norm(off, dim=-1).square_().mul_(2).add_(floor)
        root = rows[..., :, None] + rows[..., None, :]
    root.addcmul_(size, size).sqrt_()
    return off.div_(size.add_(root.copysign_(size)))


ROTATIONS: Mapping[str, Rotation] = {
    "bounded": bounded,
    "pairwise": partial(bounded, pairwise=True),
    "normalized": normalized,
    "moore_penrose": moore_penrose,
}
"""Generators by name."""


# ---- maps: generators to orthogonal matrices, tangent vectors to positive eigenvalues ----


def cayley(generator: Tensor) -> Tensor:
    """Return ``Cayley(N) = (I + N)(I - N)^-1``, orthogonal for every skew-symmetric ``N``.

    Entries are cut at ``1 / sqrt(eps)``, where a pair of axes turns by half a turn up to
    ``sqrt(eps)``: beyond it, rounding in the solve would spoil the orthogonality.
    """
    n = generator.to(accumulation_dtype(generator.dtype))
    limit = torch.finfo(n.dtype).eps ** -0.5
    n = n.clamp(-limit, limit)
    # The two factors commute, so one solve from the left is enough.
    return torch.linalg.solve(_plus_identity(-n), _plus_identity(n)).to(generator.dtype)


def truncated_cayley(generator: Tensor, cap: float | None = 0.6) -> Tensor:
    """Return the Cayley map with its Neumann series cut, ``(I + N)^2 (I + N^2)(I + N^4)``.

    With ``Y = N^2`` this is ``(I + Y)(I + Y^2)(I + Y + 2N)``: four products here, and a fifth with
    the basis. It misses orthogonality by ``2 ||N||^8``, so generators are shortened until
    ``||N^2||_F^(1/2)``, a bound on the spectral norm, is at most the cap; ``None`` leaves them as
    they are, as the paper does after normalizing: the series converges.
    """
    n = generator
    y = matmul(n, n)
    if cap is not None:
        shrink = shrink_factor(y, cap)
        n = n * shrink
        y = y * shrink.square()
    tail = matmul(_plus_identity(y), _plus_identity(matmul(y, y)))
    return matmul(tail, _plus_identity(y + 2 * n))


def shrink_factor(square: Tensor, cap: float) -> Tensor:
    """Return ``min(1, cap / ||N^2||_F^(1/2))`` for each generator of a batch, of ``N^2``."""
    norm = torch.linalg.matrix_norm(
        square.float() if square.dtype in HALF else square, keepdim=True
    )
    return (cap / norm.sqrt_().clamp_min_(cap)).to(square.dtype)


def quadratic(generator: Tensor, cap: float = 0.5) -> Tensor:
    """Return the Cayley map to second order, ``I + 2 c N + 2 N^2``: one product.

    Squares of lengths in a plane that turns by ``s`` become ``1 + 4 s^2 (s^2 + c^2 - 1)`` times
    what they were. Here ``1 - c^2`` is ``||N^2||_F^2 / ||N||_F^2``, the mean of all ``s^2`` with
    weights ``s^2``: one plane turns exactly, and otherwise at most ``4 ||N||^4`` is missing, which
    a Newton-Schulz step on the turned basis makes good.
    """
    result = matmul(generator, generator)
    dtype = result.dtype
    norm = torch.linalg.matrix_norm(result.float() if dtype in HALF else result, keepdim=True)
    # An infinite generator shrinks to nothing.
    norm.clamp_max_(torch.finfo(norm.dtype).max)
    trace = diagonal(result).sum(-1, keepdim=True, dtype=norm.dtype)[..., None]  # -||N||_F^2
    trace.clamp_max_(-torch.finfo(norm.dtype).tiny)
    shrink = norm.clamp_min(cap**2).reciprocal_().mul_(cap**2)  # of N^2
    norm.mul_(shrink).square_()
    tilted = shrink.addcdiv(norm, trace).clamp_min_(0.0).sqrt_()
    result.mul_(shrink.mul_(2).to(dtype)).addcmul_(generator, tilted.to(dtype), value=2)
    diagonal(result).add_(1)
    return result


ORTHOGONAL: Mapping[str, Orthogonal] = {
    "cayley": cayley,
    "truncated_cayley": truncated_cayley,
    "quadratic": quadratic,
}
"""Maps from generators to orthogonal matrices by name."""


def exp(eigs: Tensor, target: Tensor) -> Tensor:
    """Move eigenvalues from ``d`` towards ``n`` by the factor ``e^((n - d)/d)``, which is positive.

    Results that the number format cannot hold are cut at its limits, so that one huge curvature
    matrix leaves finite, positive eigenvalues behind, with which one can still calculate.
    """
    limits = torch.finfo(eigs.dtype)
    # The factor alone may overflow where the result fits: hence its root, twice.
    root = ((target - eigs) / eigs / 2).exp()
    return (eigs * root * root).clamp(limits.tiny, limits.max * limits.eps)


def truncated_exp(eigs: Tensor, target: Tensor) -> Tensor:
    """Return ``n``, the first-order truncation of ``exp``, for ``n >= 0``.

    What vanishes against ``d`` is set to ``eps^2 d``, so that eigenvalues stay positive and can be
    inverted.
    """
    limits = torch.finfo(eigs.dtype)
    return torch.maximum(target, limits.eps**2 * eigs).clamp(limits.tiny, limits.max * limits.eps)


POSITIVE: Mapping[str, Positive] = {"exp": exp, "truncated_exp": truncated_exp}
"""Maps that move eigenvalues by name."""


# ---- the step ----


@dataclass(frozen=True, repr=False)
class Turning:
    """How a basis turns: what researchers vary.

    A generator's own options go by ``functools.partial``, as in
    ``Turning(partial(normalized, rate=1.9, gap=0.1))``.

    Attributes:
        rotation: the generator: "bounded", "pairwise", "normalized", "moore_penrose" or a function
            (``eigenstep.core.step``).
        map: map from generators to orthogonal matrices: "cayley", "truncated_cayley", "quadratic"
            or a function. ``None``: "cayley" for ``update``, "quadratic" for ``Spectral``.
        rate: rate of the running average that the basis turns towards. ``None``: ``lr`` for
            ``update``, 0.1 for ``Spectral``. With 0 the basis stays as it is.
        mend: whether to mend the turned basis by a Newton-Schulz step, which keeps it orthogonal in
            any precision. The paper does not.
        sweeps: how many times the basis turns towards the same average, which pays while it is far
            from the eigenvectors.
        rayleigh: whether to read the new eigenvalues off in the new basis (Rayleigh quotients)
            instead of the old one, as the paper does. Better when curvature is exact; with noisy
            curvature it fits the noise.
        dtype: number format in which the turn is computed; ``Spectral`` keeps its bases in it, too.
    """

    rotation: str | Rotation = "bounded"
    map: str | Orthogonal | None = None
    rate: Rate | None = None
    mend: bool = True
    sweeps: int = 1
    rayleigh: bool = False
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Raise unless all choices are possible."""
        if not callable(self.rotation) and self.rotation not in ROTATIONS:
            choose(self.rotation, ROTATIONS, "rotation")
        if not (self.map is None or callable(self.map) or self.map in ORTHOGONAL):
            choose(self.map, ORTHOGONAL, "map")
        if self.rate is not None and not isinstance(self.rate, Tensor):
            check_number(self.rate, "rate", 0.0)
        if type(self.sweeps) is not int or self.sweeps < 1:
            check_size(self.sweeps, "sweeps")
        if self.dtype not in (None, torch.float64, torch.float32, torch.bfloat16):
            raise ValueError(f"dtype must be None, float64, float32 or bfloat16, got {self.dtype}")

    def __repr__(self) -> str:
        """Show what is not the default."""
        return show(self)


TURNING = Turning()


class Learned(NamedTuple):
    """What one step changed in one factor."""

    eigs: Tensor
    """New eigenvalues, shape ``(*batch, n)``."""
    turn: Tensor | None = None
    """``Q`` by which the basis turns, ``B <- B Q``; ``None`` if only eigenvalues were learned."""
    residual: Tensor | None = None
    """The average ``A`` in the turned basis, shape ``(*batch, n, n)``, if the factor keeps one."""
    speed: Tensor | None = None
    """Norm of the last generator ``N``, shape ``(*batch,)``: how fast the basis turns."""


def learn(
    eigs: Tensor,
    W: Tensor,
    *,
    rate: Rate,
    decay: float = 1.0,
    damping: Rate = 0.0,
    residual: Tensor | None = None,
    positive: Positive = exp,
    turning: Turning = TURNING,
) -> Learned:
    """Take one step in eigen-coordinates.

    Args:
        eigs: ``d``, shape ``(*batch, n)``.
        W: curvature in the eigenbasis, shape ``(*batch, n, n)``; or ``(*batch, n)``, its diagonal,
            to turn no basis.
        rate: the paper's beta-2.
        decay: the paper's gamma.
        damping: the paper's ``Lambda / (alpha k)``, added to the eigenvalues of ``W``.
        residual: ``M``, if the factor keeps one; then the new one is returned.
        positive: map that moves ``d`` towards where the linear update would put it.
        turning: how the basis turns.
    """
    if W.ndim == eigs.ndim:
        return Learned(positive(eigs, blend(eigs, W + damping, rate, decay)), residual=residual)
    target = blend(eigs, diagonal(W) + damping, rate, decay)
    rate = rate if turning.rate is None else turning.rate
    matrix_rate = rate[..., None] if isinstance(rate, Tensor) else rate
    # Made exactly symmetric: where eigenvalues are equal, the rounding of W would make generators
    # that are not skew.
    average = W.add(W.mT).mul_(0.5 * matrix_rate)
    if residual is None:  # the past is diagonal, as damping is
        diagonal(average).add_(blend(eigs, damping, rate, decay))
    else:
        average.add_((1 - decay * matrix_rate) * residual)
        diagonal(average).add_(rate * damping)
    carried = turning.rayleigh or residual is not None
    turn, turned, speed = _turn(eigs, average, turning, carried)
    if turning.rayleigh:
        target = target + diagonal(turned) - diagonal(average)
    return Learned(positive(eigs, target), turn, None if residual is None else turned, speed)


def blend(past: Tensor, newest: Rate, rate: Rate, decay: float) -> Tensor:
    """Return ``(1 - gamma beta) past + beta newest``: all learning follows it to first order."""
    if decay == 1 and isinstance(newest, Tensor):
        return torch.lerp(past, newest, rate)
    return (1 - decay * rate) * past + rate * newest


def _turn(
    eigs: Tensor, average: Tensor, turning: Turning, carried: bool
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Return ``Q``, the average (turned if ``carried``) and the norm of the last generator."""
    rotation = turning.rotation
    orthogonal = turning.map or cayley
    if isinstance(rotation, str):
        rotation = ROTATIONS[rotation]
    if isinstance(orthogonal, str):
        orthogonal = ORTHOGONAL[orthogonal]
    turn = speed = None
    for left in reversed(range(turning.sweeps)):
        generator = rotation(eigs, average)
        speed = torch.linalg.matrix_norm(generator)
        q = orthogonal(generator if turning.dtype is None else generator.to(turning.dtype))
        del generator  # as large as a basis
        turn = q if turn is None else matmul(turn, q)
        if left or carried:
            average = symmetrize(matmul(matmul(q.mT, average), q))
    return turn, average, speed


def reorthonormalize(basis: Tensor) -> Tensor:
    """Pull an almost orthogonal basis back with one Newton-Schulz step, ``1.5 B - 0.5 B B^T B``.

    The defect ``||B^T B - I||`` is squared, up to the rounding of the basis' own number format.
    """
    b = basis.float() if basis.dtype in HALF else basis
    return (b @ (b.mT @ b)).lerp_(b, 1.5).to(basis.dtype)


def running_rate(beta: Tensor, time: Tensor, start: float) -> Tensor:
    """Return the weight of the newest term of a running average at each time 1, 2, ...

    With ``start = 1`` it is ``(1 - beta) / (1 - beta^t)``, Adam's bias correction written as a
    recursion: the average starts as a mean. Larger values forget the first terms faster, about as
    ``start / t``; 0 means ``1 - beta`` always.
    """
    if start == 0:
        return (1 - beta).expand_as(time)
    return (beta - 1) / (beta.pow(time if start == 1 else 1 + (time - 1) / start) - 1)


def normalize(factors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Scale vectors of eigenvalues to product one; also return the means of their logarithms."""
    centered = []
    means = []
    for eigs in factors:
        logs = eigs.log()
        means.append(logs.mean(-1, keepdim=True))
        centered.append(centered_exp(logs, means[-1]))
    return centered, torch.stack(means)[..., 0]


# ---- batches of gradients, shape (b, k, n, m) or (b, 1, n), in eigen-coordinates ----


def rotate(x: Tensor, matrices: Sequence[Tensor | None]) -> Tensor:
    """Return ``x`` with each side multiplied by the transpose of a matrix, if it has one.

    ``x`` has shape ``(b, k, n, m)`` or ``(b, 1, n)``, and may have an axis of samples at the end.
    """
    dtype = x.dtype
    first = matrices[0]
    if first is not None:  # block by block
        x = x.to(first.dtype)
        x = matmul(first.mT, x.flatten(3) if x.ndim > 3 else x[..., None]).view_as(x)
    if len(matrices) > 1 and matrices[1] is not None:  # shared by the blocks
        second = matrices[1]
        moved = x.to(second.dtype).movedim(3, -1)
        product = matmul(moved.flatten(1, -2), second[:, 0])
        x = product.view(moved.shape).movedim(-1, 3)
    return x.to(dtype)


def project(samples: Tensor, axis: int, inverses: Sequence[Tensor]) -> Tensor:
    """Return ``W`` of a side, given ``1/d`` of all sides.

    It is the mean of the products of rows (of columns, for ``axis`` 1), over all others and
    divided by the other side's eigenvalues.
    """
    left = samples
    if len(inverses) > 1:
        other = inverses[1 - axis]
        left = left * (other[:, :, None, :, None] if axis == 0 else other[..., None, None])
    if axis == 0:
        left = left.flatten(3).mT
        right = samples.flatten(3).mT
    else:
        left = left.movedim(3, -1).flatten(1, -2)[:, None]
        right = samples.movedim(3, -1).flatten(1, -2)[:, None]
    return matmul(left.mT, right).div_(right.shape[-2] / samples.shape[-1])


def project_diagonal(square: Tensor, axis: int, inverses: Sequence[Tensor]) -> Tensor:
    """Return ``diag(W)`` of a side, given squares of samples and ``1/d`` of all sides."""
    if len(inverses) == 1:
        return square
    other = inverses[1 - axis]
    if axis == 0:
        total = (square.flatten(1, -2) @ other.mT).view(square.shape[:-1])
    else:
        product = other.flatten(1)[:, None] @ square.flatten(1, 2)
        total = product.view(len(square), 1, square.shape[-1])
    return total / (square.numel() / total.numel())


def squares_(samples: Tensor) -> Tensor:
    """Return the sum of the samples' squares, entry by entry, in their place."""
    if samples.shape[-1] == 1:
        return samples.square_()[..., 0]
    return samples.square_().sum(-1)


# ---- arithmetic that a step needs ----


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the format in which sums over ``dtype`` numbers are kept: float32 for half formats."""
    return torch.float32 if dtype in HALF else dtype


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices in their common format, accumulating half precision in float32.

    Accelerators do so by themselves; many CPUs are a hundred times slower in half precision than in
    float32, or crash.
    """
    if a.dtype != b.dtype:
        dtype = torch.promote_types(a.dtype, b.dtype)
        a = a.to(dtype)
        b = b.to(dtype)
    if a.dtype in HALF and a.device.type == "cpu":
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def largest(dtype: torch.dtype) -> float:
    """Return the largest number of a format that leaves room for sums of many: ``max * eps``."""
    limits = torch.finfo(dtype)
    return limits.max * limits.eps


def saturate(x: Tensor) -> Tensor:
    """Cut numbers, also infinite ones, at ``largest``; NaN becomes zero."""
    return x.nan_to_num(0.0).clamp(-largest(x.dtype), largest(x.dtype))


def symmetrize(matrix: Tensor) -> Tensor:
    """Return ``(M + M^T) / 2``, which rounding leaves exactly symmetric."""
    return (matrix + matrix.mT).mul_(0.5)


def centered_exp(logs: Tensor, mean: Tensor | None = None) -> Tensor:
    """Return ``exp(logs - mean(logs))``, positive vectors with product one.

    Vectors that spread beyond the square root of the number format's range are shortened to it,
    which keeps their product at one and leaves room for products and inverses of eigenvalues. The
    mean, if known, has a last axis of one.
    """
    centered = logs - (logs.mean(-1, keepdim=True) if mean is None else mean)
    bound = 0.5 * math.log(torch.finfo(logs.dtype).max)
    spread = centered.abs().amax(-1, keepdim=True).clamp_min(bound)
    return (centered * spread.reciprocal().mul(bound)).exp()


def _plus_identity(matrix: Tensor) -> Tensor:
    result = matrix.clone()
    diagonal(result).add_(1)
    return result
