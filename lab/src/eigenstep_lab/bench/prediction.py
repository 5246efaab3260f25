"""How well a matrix learned from past gradients predicts the next one.

If ``S`` were the covariance of the gradients of a layer, the next gradient ``G`` would have the
negative log-likelihood ``[vec(G)^T S^-1 vec(G) + log det S] / (n m)`` per entry, up to constants.
Lower is better, and a difference of 0.1 means that each entry is predicted with 10 % more density.
Gradients are recorded once, while AdamW trains, so that all schemes see the same ones; same-shaped
layers and all seeds go through a scheme as one batch.

A learner is asked for ``S`` before it sees each gradient. ``Shipped`` is an optimizer of the
library: it steps a real ``eigenstep.Spectral`` and reads the state that its next step would start
from. The others decompose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Generator, Tensor, nn

from eigenstep import Spectral
from eigenstep.core.curvature import OuterProducts
from eigenstep.core.matrices import Full, Kronecker
from eigenstep.core.step import rotate
from eigenstep.optim.batches import split
from eigenstep.optim.formats import is_matrix, matrix_state, vector_state
from eigenstep.optim.layout import plan_of
from eigenstep.optim.matrix import column, products_of_eigs

from ..baselines import eigen
from ..rivals import is_hidden_matrix
from ..tasks import Classification, loss_of

BETA = 0.95
"""Decay rate of curvature, ``1 - beta-2``, of all that decompose; it is also what ``Spectral`` has
by default.
"""
DAMPING = 1e-8
"""The paper's lambda of those, in units of the mean eigenvalue of ``S``; anything up to 1e-6 gives
the same figures.
"""


@dataclass(frozen=True)
class Layers:
    """Recorded gradients of same-shaped layers.

    Attributes: names: the layers. gradients: shape ``(steps, seeds, layers, n, m)`` with ``n >=
        m``; wide layers are transposed.
    """

    names: tuple[str, ...]
    gradients: Tensor


class Spectrum(NamedTuple):
    """``S`` of a stack of ``b`` matrices, each laid out as ``k`` blocks of ``n`` rows.

    Attributes:
        bases: ``B`` of each side, shape ``(b, k or 1, n, n)``, as it is stored; ``None`` if it has
            none.
        values: eigenvalues of ``S``, shape ``(b, k, n, m)`` or what a gradient is laid out as.
    """

    bases: Sequence[Tensor | None]
    values: Tensor


class Learner(Protocol):
    """Learns ``S`` from gradients, shape ``(b, n, m)``."""

    def lay_out(self, gradient: Tensor) -> Tensor:
        """Return gradients as the stack that ``S`` belongs to."""

    def spectrum(self) -> Spectrum:
        """Return ``S`` as it is now."""

    def learn(self, gradient: Tensor) -> None:
        """Learn from one more gradient of each matrix."""


class Shipped:
    """An optimizer of the library, stepped with a learning rate of zero."""

    def __init__(self, build: Callable[..., Spectral], like: Tensor) -> None:
        """Make one parameter for each matrix.

        Args:
            build: makes the optimizer from parameters.
            like: gradients, shape ``(b, n, m)``.
        """
        self._params = [nn.Parameter(torch.zeros_like(one)) for one in like]
        self._optimizer = build(self._params, lr=0.0, weight_decay=0.0)

    def lay_out(self, gradient: Tensor) -> Tensor:
        """Return gradients as the optimizer lays them out."""
        plan = plan_of(
            self._optimizer.options_of(self._optimizer.param_groups[0]), gradient.shape[1:]
        )
        if not plan.layouts[0].has_basis:
            return gradient.reshape(len(gradient), 1, -1)
        return torch.cat([split(plan, 0, one) for one in gradient])

    def spectrum(self) -> Spectrum:
        """Return what the next step would divide by: corrected eigenvalues, or products."""
        states = [self._optimizer.state[param] for param in self._params]
        tensors = {name: torch.cat([state[name] for state in states]) for name in states[0]}
        if not is_matrix(tensors):  # without a basis: AdamW's second moments
            moments = vector_state(tensors).second_moment.float()
            return Spectrum([None], moments.view(len(states), 1, -1))
        state = matrix_state(tensors)
        values = products_of_eigs(state.sides)
        if state.second_moment is not None:
            values = state.second_moment.float()
        bases = [side.basis for side in state.sides]
        return Spectrum(bases, values * column(state.scale.square(), values))

    def learn(self, gradient: Tensor) -> None:
        """Take a step."""
        for param, one in zip(self._params, gradient, strict=True):
            param.grad = one
        self._optimizer.step()


class KLShampoo:
    """Each factor's running average in units of the other factor, decomposed at every step."""

    def __init__(self, start: float, like: Tensor) -> None:
        """Start from the size of the first gradients.

        Args:
            start: as for ``Spectral``.
            like: gradients, shape ``(b, n, m)``.
        """
        self._start, self._time = start, 0
        identity = Kronecker.identity(like.shape[-2:], like.shape[:-2])
        self._S = Kronecker(like.square().mean((-2, -1)), identity.factors)

    def lay_out(self, gradient: Tensor) -> Tensor:
        """Return gradients as they are, one block each."""
        return gradient[:, None]

    def spectrum(self) -> Spectrum:
        """Return products of eigenvalues."""
        bases = [
            factor.basis[:, None] if isinstance(factor, Full) else None
            for factor in self._S.factors
        ]
        return Spectrum(bases, self._S.spectrum[:, None])

    def learn(self, gradient: Tensor) -> None:
        """Average and decompose."""
        self._time += 1
        damping = DAMPING * self._S.trace() / gradient[0].numel()
        lr = rate(self._time, self._start)
        self._S = eigen.update(self._S, OuterProducts(gradient[None]), lr=lr, damping=damping)


class SOAP:
    """Shampoo's running averages ``G G^T`` and ``G^T G``, decomposed; second moments in their
    eigenbasis.
    """

    def __init__(self, start: float, interval: int, exact: bool, like: Tensor) -> None:
        """Start without any past.

        Args: start: as for ``Spectral``; 1 is Adam's bias correction, as in SOAP. interval: steps
            between decompositions. exact: decompose exactly and carry second moments over to the
            new eigenvectors; or, as SOAP does, take one step of the power method with a QR
            decomposition, second moments staying what they are. like: gradients, shape ``(b, n,
            m)``.
        """
        self._start, self._interval, self._exact, self._time = start, interval, exact, 0
        self._averages = [like.new_zeros(len(like), n, n) for n in like.shape[1:]]
        self._bases = [torch.eye(n).expand(len(like), n, n) for n in like.shape[1:]]
        self._second = torch.zeros_like(like)

    def lay_out(self, gradient: Tensor) -> Tensor:
        """Return gradients as they are, one block each."""
        return gradient[:, None]

    def spectrum(self) -> Spectrum:
        """Return second moments, damped."""
        values = self._second + DAMPING * self._second.mean((-2, -1), keepdim=True)
        return Spectrum([basis[:, None] for basis in self._bases], values[:, None])

    def learn(self, gradient: Tensor) -> None:
        """Average, and decompose if it is time."""
        self._time += 1
        weight = rate(self._time, self._start)
        self._averages[0].lerp_(gradient @ gradient.mT / gradient.shape[-1], weight)
        self._averages[1].lerp_(gradient.mT @ gradient / gradient.shape[-2], weight)
        if self._time == 1:  # the first gradient only sets the bases, as in SOAP
            self._bases = [torch.linalg.eigh(average)[1].flip(-1) for average in self._averages]
        self._second.lerp_((self._bases[0].mT @ gradient @ self._bases[1]).square(), weight)
        if self._time > 1 and self._time % self._interval == 0:
            self._decompose()

    def _decompose(self) -> None:
        for axis, (average, basis) in enumerate(zip(self._averages, self._bases, strict=True)):
            second = self._second if axis == 0 else self._second.mT
            if self._exact:
                new = torch.linalg.eigh(average)[1].flip(-1)
                second = (new.mT @ basis).square() @ second
            else:
                size = (basis.mT @ average @ basis).diagonal(dim1=-2, dim2=-1)
                order = size.argsort(-1, descending=True)
                second = second.gather(-2, order[..., None].expand_as(second))
                new = torch.linalg.qr(average @ basis.gather(-1, order[:, None].expand_as(basis)))[
                    0
                ]
            self._bases[axis], self._second = new, (second if axis == 0 else second.mT)


def rate(time: int, start: float) -> float:
    """Return the weight of the newest term of a running average at time 1, 2, ...; ``Spectral`` has
    the same.
    """
    return (1 - BETA) / (1 - BETA ** (1 + (time - 1) / start))


def record(task: Classification, steps: int, seed: int, lr: float = 1e-3) -> dict[str, Tensor]:
    """Train with AdamW and return all gradients of each hidden layer's matrix, shape ``(steps, n,
    m)``.
    """
    model, generator = task.model(seed), Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    hidden = {name: p for name, p in model.named_parameters() if is_hidden_matrix(name, p)}
    recorded = {name: torch.empty(steps, *p.shape) for name, p in hidden.items()}
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, task.batch(generator, True)).backward()  # type: ignore[no-untyped-call]
        for name, parameter in hidden.items():
            assert parameter.grad is not None
            recorded[name][step] = parameter.grad
        optimizer.step()
    return recorded


def stack(recordings: Sequence[Mapping[str, Tensor]]) -> list[Layers]:
    """Put same-shaped layers of several recordings together."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, gradients in recordings[0].items():
        by_shape.setdefault(tuple(sorted(gradients.shape[1:], reverse=True)), []).append(name)
    groups = []
    for (n, _), names in by_shape.items():
        tall = [
            [r[name] if r[name].shape[1] == n else r[name].mT for name in names] for r in recordings
        ]
        groups.append(
            Layers(tuple(names), torch.stack([torch.stack(layers, 1) for layers in tall], 1))
        )
    return groups


def predictive_nll(S: Spectrum, gradient: Tensor) -> Tensor:
    """Return the negative log-likelihood per entry of gradients under ``S``, shape ``(b,)``.

    ``S^-1`` is taken as it is applied, ``B Diag(1/d) B^T`` with the bases as they are stored. Those
    in half precision are not quite orthogonal, and their determinants count.

    Args:
        S: the matrices.
        gradient: laid out as they are.
    """
    values = S.values.double().clamp_min(torch.finfo(torch.float32).tiny)
    nll = (rotate(gradient, S.bases).double().square() / values + values.log()).flatten(1).mean(1)
    for basis in S.bases:
        if basis is None:
            continue
        nll = nll - 2 * torch.linalg.slogdet(basis.double()).logabsdet.mean(1) / basis.shape[-1]
    return nll


def follow(gradients: Tensor, build: Callable[[Tensor], Learner]) -> Tensor:
    """Learn from gradients one by one; return how well each but the first was predicted by those
    before it.

    Args:
        gradients: shape ``(steps, seeds, layers, n, m)``.
        build: makes the learner, given gradients, shape ``(b, n, m)``.

    Returns:
        The predictive NLL, shape ``(steps - 1, seeds, layers)``.
    """
    flat = gradients.flatten(1, 2)
    learner, found = build(flat[0]), []
    for past, future in pairwise(flat):
        learner.learn(past)
        found.append(predictive_nll(learner.spectrum(), learner.lay_out(future)))
    return torch.stack(found).view(len(flat) - 1, *gradients.shape[1:3])
