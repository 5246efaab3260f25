"""``Spectral.posterior``: train, and have a Gaussian posterior over the weights at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Generator, Tensor

from ..core.checks import check_number, check_size
from ..core.curvature import OuterProducts
from ..core.step import Turning
from ..optim.batches import Batch, VectorBatch, split
from ..optim.matrix import AbsolutelyDamped, Matrices
from ..optim.options import Options
from ..optim.spectral import Params, Spectral
from .draws import (
    PosteriorOptions,
    average_gradients,
    draw,
    moved,
    seed_of,
    whitened,
)

FIXED: Mapping[str, Any] = {
    "maximize": False,
    "capturable": False,
    "state_dtype": None,
    "weight_decay": 0.0,
}
"""Options of ``Spectral`` that a posterior leaves no choice about."""
TEMPERATURES = (0.0, *(2.0**k for k in range(-6, 8)))
"""Temperatures of predictions to choose from; at the first one there is the mean alone."""


class SpectralPosterior(Spectral):
    """Train a Gaussian posterior ``N(mu, (ess S)^-1)`` over the weights.

    Also known as ``Spectral.posterior``. The model's weights are ``mu``. Gradients are computed at
    weights drawn from the posterior: where training comes to rest, their expected loss, plus the
    divergence from the prior over ``ess``, is smallest (variational inference). The curvature
    learns from outer products of gradients, times ``batch_size``, which have little noise and are
    right where the model explains the data; or from what ``step(curvature=...)`` is given.

    Examples:
        >>> import torch
        >>> from eigenstep import Spectral
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = Spectral.posterior(model.parameters(), lr=1e-2, ess=1000, batch_size=2)
        >>> with optimizer.sampled_params(train=True):
        ...     model(torch.ones(2, 8)).square().mean().backward()
        >>> _ = optimizer.step()
        >>> optimizer.predict(model, torch.ones(2, 8), samples=16).shape
        torch.Size([16, 2, 4])
    """

    options_kind: ClassVar[type[Options]] = PosteriorOptions
    matrices_kind: ClassVar[type[Matrices]] = AbsolutelyDamped

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 0.99),
        *,
        ess: float,
        batch_size: float,
        prior_precision: float = 1.0,
        seed: int = 0,
        distributed: bool = True,
        **options: Any,
    ) -> None:
        """Set up the optimizer. What is not about processes can be given per parameter group.

        Args:
            params: parameters, named parameters, or dictionaries that describe parameter groups.
            lr: learning rate of the mean. Steps are ``Spectral``'s, damped by the prior: 0.01 to
                0.03 for networks, or 0.03 to 0.3 with the natural gradients of ``root=1``. Always
                tune it.
            betas: decay of momentum and of curvature.
            ess: the effective number of examples, ``lambda``: how many the training data have. More
                makes the posterior narrower ("colder"), as if each had been seen several times;
                networks often predict best with 5 to 10.
            batch_size: how many examples the gradient of a step is the mean of, those of all ranks,
                and of all batches that accumulate, together.
            prior_precision: of the prior ``N(0, 1 / prior_precision)`` of each weight; divided by
                ``ess`` it is what others call weight decay. 1 is the textbook's; networks want 15
                to 100.
            seed: of the draws of training, which depend on this, the step, the number of the draw
                and the rank alone.
            distributed: average gradients over ranks, unless DDP has; these draw different weights,
                and keep all state.
            **options: options of ``Spectral``, such as ``structure``, ``interval``, ``root``,
                ``clip`` and ``nonfinite``.
        """
        for name in ("damping", "eps"):
            if name in options:
                raise TypeError(
                    f"{name} of a posterior is prior_precision / ess: choose these instead"
                )
        self._more = {
            "ess": ess,
            "batch_size": batch_size,
            "prior_precision": prior_precision,
            "seed": seed,
        }
        self._averaging = distributed
        turning = options.pop("turning", None) or Turning()
        if turning.rate is None:
            turning = replace(turning, rate=1 - betas[1])
        fixed = {**FIXED, **options}
        super().__init__(params, lr, betas, turning=turning, distributed=False, **fixed)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with any options of their own."""
        for name, value in FIXED.items():
            wanted = {**self.defaults, **param_group}[name]
            if wanted != value:
                raise ValueError(f"a posterior has {name} fixed at {value!r}, got {wanted!r}")
        super().add_param_group(param_group)
        if any(hasattr(param, "device_mesh") for param in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise ValueError(
                "a posterior needs whole parameters on every rank, got a DTensor: use DDP instead"
            )

    def _prepare(self) -> None:
        super()._prepare()
        self._inside = False
        self._draws = 0

    def _posterior_options(self, group: dict[str, Any]) -> PosteriorOptions:
        """Return the options of a group: the prior is damping, and gradients are in units in which
        their squares are the curvature.
        """
        options = cast(PosteriorOptions, super().options_of(group))
        damping = options.prior_precision / options.ess
        unit = options.batch_size**0.5
        return replace(
            options,
            damping=damping,
            eps=damping ** (1 / options.root),
            # Steps of root 2 have no unit.
            lr=options.lr * unit ** (1 - 2 / options.root),
        )

    def options_of(self, group: dict[str, Any]) -> Options:
        """Return the options of a parameter group; damping is that of the prior."""
        return self._posterior_options(group)

    def _gradient(self, param: Tensor, options: Options) -> Tensor:
        """Return the gradient of loss and prior, in the unit of the curvature."""
        unit = cast(PosteriorOptions, options).batch_size ** 0.5
        return cast(Tensor, param.grad).add(param, alpha=options.damping).mul_(unit)

    @contextmanager
    def sampled_params(
        self, train: bool = False, *, temperature: float = 1.0, generator: Generator | None = None
    ) -> Iterator[None]:
        """Draw weights from the posterior, which the model has inside of the ``with``.

        Afterwards it has the mean again. The first step of training is taken at the mean: nothing
        is known of the posterior before it.

        Args:
            train: whether gradients computed inside are for the next ``step``. Gradients inside of
                one ``with`` add up (accumulation); several before a step are several draws, and
                ``step`` takes the mean of their gradients.
            temperature: of variances, for predictions: below 1 for draws closer to the mean.
            generator: source of random numbers for predictions; by default torch's global one.
        """
        self._check_draw(train, temperature, generator)
        before = {param: param.grad for param in self._params()} if train else {}
        if train and all(gradient is None for gradient in before.values()):
            self._draws = 0  # forgotten since the last draw
        deviations = self._drawn(temperature, generator, self._draws if train else None)
        finished = False
        self._inside = True
        try:
            with moved(deviations):
                for param in before:
                    param.grad = None
                yield
            finished = True
        finally:
            self._inside = False
            if train:
                self._collect(before, finished)

    def _check_draw(self, train: bool, temperature: float, generator: Generator | None) -> None:
        """Raise unless weights can be drawn now, and so."""
        if self._inside:
            raise RuntimeError(
                "sampled_params cannot be used inside of itself: leave the first one before"
            )
        check_number(temperature, "temperature", 0.0)
        if train and (temperature != 1 or generator is not None):
            raise ValueError(
                "temperature and generator are for predictions: training has ess and seed instead"
            )

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def _drawn(
        self, temperature: float, generator: Generator | None, number: int | None
    ) -> dict[Tensor, Tensor]:
        """Return deviations of all parameters from the mean.

        ``number`` says how many draws this step of training has had; ``None`` for predictions.
        Then random numbers come from the generator.
        """
        drawn: dict[Tensor, Tensor] = {}
        devices = {param.device for param in self._params()}
        generators = dict.fromkeys(devices, generator)
        for index, group in enumerate(self.param_groups):
            options = self._posterior_options(group)
            if number is not None and index == 0:
                rank = dist.get_rank() if self._ranks() > 1 else 0
                seed = seed_of(options, group["count"], number, rank)
                generators = {device: Generator(device).manual_seed(seed) for device in devices}
            batches = self._known(group, options)
            drawn |= draw(options, batches, temperature, generators)
        return drawn

    def _ranks(self) -> int:
        if not (self._averaging and dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size()

    def _known(self, group: dict[str, Any], options: Options) -> list[Batch]:
        """Return the batches of parameters of which something is known."""
        params = [param for param in group["params"] if self.state.get(param)]
        return self._arranged(group, options, params) if params else []

    def _collect(self, before: Mapping[Tensor, Tensor | None], finished: bool) -> None:
        """Leave with each parameter the mean of its draws' gradients."""
        for param, old in before.items():
            if param.grad is None or not finished:  # an exception: the draw does not count
                param.grad = old
            elif old is not None:
                param.grad = torch.lerp(old, param.grad, 1 / (self._draws + 1))
        self._draws += finished

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        curvature: Mapping[Tensor, Tensor | OuterProducts] | None = None,
    ) -> Any:
        """Take one step of the mean, and learn the curvature.

        Args:
            closure: computes the gradients again, with ``sampled_params`` inside of it, and returns
                the loss.
            curvature: as for ``Spectral``; outer products of the vectors add up to the curvature of
                one example's loss.
        """
        if self._inside:
            raise RuntimeError("step cannot be taken at drawn weights: leave sampled_params before")
        loss = None if closure is None else torch.enable_grad()(closure)()
        if self._ranks() > 1:
            average_gradients(self._params())
        super().step(curvature=curvature)
        self._draws = 0
        return loss

    def predict(
        self,
        model: Callable[[Tensor], Tensor],
        inputs: Tensor,
        samples: int = 32,
        *,
        temperature: float = 1.0,
        only: Iterable[Tensor] | None = None,
        generator: Generator | None = None,
    ) -> Tensor:
        """Return what a model says at drawn weights, shape ``(samples, *outputs)``.

        Args:
            model: the model that was trained, in evaluation mode.
            inputs: examples along the first axis.
            samples: how many draws, every second one the mirror image of the one before.
            temperature: of the posterior's variances, below 1 for more confidence.
            only: parameters to draw, such as those of the last layer; all others have their mean.
            generator: source of random numbers; by default torch's global one.
        """
        check_size(samples, "samples")
        check_number(temperature, "temperature", 0.0)
        known = set(self._params())
        wanted = known if only is None else set(only)
        if not wanted <= known:
            raise ValueError("only must name parameters of this optimizer")
        if self._inside:
            raise RuntimeError("predict draws weights itself: leave sampled_params before")
        outputs: list[Tensor] = []
        with torch.no_grad():
            while len(outputs) < samples:
                drawn = self._drawn(temperature, generator, None)
                for sign in (1, -1)[: samples - len(outputs)]:
                    kept = {param: sign * x for param, x in drawn.items() if param in wanted}
                    with moved(kept):
                        outputs.append(model(inputs))
        return torch.stack(outputs)

    def tune_temperature(
        self,
        model: Callable[[Tensor], Tensor],
        inputs: Tensor,
        log_loss: Callable[[Tensor], float | Tensor],
        samples: int = 32,
        *,
        temperatures: Iterable[float] = TEMPERATURES,
        only: Iterable[Tensor] | None = None,
    ) -> float:
        """Return the temperature at which ``predict`` has the smallest log loss on held-out data.

        Thus ``ess`` need not be right. All are tried with the same random numbers; torch's own stay
        as they were.

        Args:
            model: the model that was trained, in evaluation mode.
            inputs: examples that it was not trained on, along the first axis.
            log_loss: of predictions; for classes
                ``lambda x: nll_loss(x.softmax(-1).mean(0).log(), targets)``.
            samples: how many draws at each temperature.
            temperatures: what to choose from.
            only: as for ``predict``.
        """
        losses: dict[float, float] = {}
        params = None if only is None else list(only)
        for temperature in temperatures:
            with torch.random.fork_rng(range(torch.cuda.device_count())):
                torch.manual_seed(0)
                predictions = self.predict(
                    model, inputs, samples, temperature=temperature, only=params
                )
                losses[temperature] = float(log_loss(predictions))
        known = {temperature: loss for temperature, loss in losses.items() if math.isfinite(loss)}
        if not known:
            raise ValueError(
                f"log_loss must be finite at one of the temperatures at least, got {losses}"
            )
        return min(known, key=known.__getitem__)

    @torch.no_grad()
    def covariance(self, param: Tensor) -> Tensor:
        """Return the covariance of the entries of a small parameter, as an ordinary matrix."""
        if not self.state.get(param):
            raise ValueError(
                "nothing is known of this parameter's posterior: take a step with its gradient "
                "before"
            )
        first = next(iter(self.state[param].values()))
        unit = torch.eye(param.numel()).to(first).view(*param.shape, -1)
        parts = []
        for group in self.param_groups:
            options = self._posterior_options(group)
            for batch in self._known(group, options):
                parts += [x.mT @ x for x in _whitened_parts(batch, options, param, unit)]
        return torch.stack(parts).sum(0)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles need."""
        return {**super().__getstate__(), "_averaging": self._averaging}


def _whitened_parts(
    batch: Batch, options: PosteriorOptions, param: Tensor, vectors: Tensor
) -> Iterator[Tensor]:
    """Give out ``(ess S)^(-1/2) v`` of a parameter's parts in a batch, shape ``(weights, K)``."""
    if isinstance(batch, VectorBatch):
        yield from _whitened_vectors(batch, options, param, vectors)
    elif any(member.param is param for member in batch.members):
        zero = vectors.new_zeros(())
        full = {
            member.param: vectors
            if member.param is param
            else zero.expand(*member.param.shape, vectors.shape[-1])
            for member in batch.members
        }
        yield whitened(batch.open_state(), batch.gather(full)).flatten(0, -2) / options.ess**0.5


def _whitened_vectors(
    batch: VectorBatch, options: PosteriorOptions, param: Tensor, vectors: Tensor
) -> Iterator[Tensor]:
    for flat in batch.flats:
        moments = torch.split(flat.state["second_moment"], flat.sizes)
        for member, v in zip(flat.members, moments, strict=True):
            if member.param is param:
                own = split(member.plan, member.part, vectors).flatten(0, -2)
                yield own / (options.ess * (v + options.damping)).sqrt()[:, None]
