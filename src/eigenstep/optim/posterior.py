"""``Spectral.posterior``: train, and have a Gaussian posterior over the weights at the end, in
spectral form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Generator, Tensor

from ..core.checks import check_number, check_size
from ..core.curvature import OuterProducts
from . import checkpoint, options, posterior_kernel
from .diagonal import Diagonals
from .draws import LARGEST_SEED, Drawn, average_gradients, average_over_ranks, draw, joined, moved
from .prediction import linear_part, whitened
from .spectral import Params, Spectral
from .stacks import Stack

FIXED: Mapping[str, Any] = {
    **dict.fromkeys(
        ("relative_damping", "maximize", "residual", "turn_first", "eigenvalues_wait", "offload"),
        False,
    ),
    **{"capturable": False, "state_dtype": None, "weight_decay": 0.0, "decay": 1.0},
}
"""Options of ``Spectral`` that a posterior leaves no choice about."""
NOISY = {
    "betas": (0.9, 0.999),
    "root": 1.0,
    "start": 3.0,
    "eigenvalues": "kronecker",
    "grafting": None,
    "nesterov": 0,
}
SOURCES: Mapping[str, Mapping[str, Any]] = {
    "squared": {"betas": (0.9, 0.99)},
    "reparametrization": NOISY,
}
"""What curvature is learned from, and defaults that are not ``Spectral``'s."""
TEMPERATURES = (0.0, *(2.0**k for k in range(-6, 8)))
"""Temperatures of predictions to choose from; at the first one there is the mean alone."""
Pairs = dict[Tensor, tuple[Tensor, Tensor]]
"""For each parameter, the noise of a draw in the eigenbasis and the gradient at it."""


class SpectralPosterior(Spectral):
    """Train a Gaussian posterior ``N(mu, (ess S)^-1)`` over the weights. Also known as
    ``Spectral.posterior``.

    The model's weights are ``mu``. Gradients are computed at weights drawn from the posterior:
    where training comes to rest, their expected loss, plus the divergence from the prior over
    ``ess``, is smallest (variational inference).

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

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] | None = None,
        *,
        ess: float,
        batch_size: float | None = None,
        prior_precision: float = 1.0,
        curvature: str = "squared",
        antithetic: bool = False,
        seed: int = 0,
        distributed: bool = True,
        **more: Any,
    ) -> None:
        """Set up the optimizer. What is not about processes can be given per parameter group.

        Args: params: parameters, named parameters, or dictionaries that describe parameter groups.
            lr: learning rate of the mean. Steps are ``Spectral``'s, damped by the prior: 0.01 to
            0.03 for networks, or 0.03 to 0.3 with the natural gradients of ``root=1``. Always tune
            it. betas: decay of momentum and of curvature: (0.9, 0.99), with 0.999 for the noisy
            "reparametrization". ess: the effective number of examples, ``lambda``: how many the
            training data have. More makes the posterior narrower ("colder"), as if each had been
            seen several times; networks often predict best with 5 to 10. batch_size: how many
            examples the gradient of a step is the mean of, those of all ranks, and of all batches
            that accumulate, together. Needed for ``curvature="squared"``. prior_precision: of the
            prior ``N(0, 1 / prior_precision)`` of each weight; divided by ``ess`` it is what others
            call weight decay. 1 is the textbook's; networks want 15 to 100. curvature: what ``S``
            learns from. "squared": outer products of gradients, times ``batch_size``, which have
            little noise and are right where the model explains the data; or what
            ``step(curvature=...)`` is given. "reparametrization": the gradients' dependence on the
            drawn weights, right everywhere, negative curvature included, but noisy: for small
            models, large batches and antithetic pairs. It has ``root=1``. antithetic: mirror every
            second draw of a step at the mean, against noise in "reparametrization". seed: of the
            draws of training, which depend on this, the step, the number of the draw and the rank
            alone. distributed: average gradients over ranks, unless DDP has; these draw different
            weights, and keep all state. **more: options of ``Spectral``, such as ``structure``,
            ``interval``, ``root``, ``clip`` and ``nonfinite``.
        """
        kind = SOURCES["reparametrization" if curvature == "reparametrization" else "squared"]
        defaults = {
            "basis_lr": None,
            **kind,
            **FIXED,
            **more,
            **({} if betas is None else {"betas": betas}),
        }
        own = {
            "ess": ess,
            "batch_size": batch_size,
            "prior_precision": prior_precision,
            "curvature": curvature,
        }
        self._own = {**own, "antithetic": antithetic, "seed": seed}
        self._averaging = distributed
        super().__init__(params, lr, distributed=False, damping=1.0, **defaults)
        self.defaults.update(self._own)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with any options of their own."""
        group = {**self._own, **param_group}
        _check({**self.defaults, **group})
        super().add_param_group(group)
        if any(hasattr(param, "device_mesh") for param in group["params"]):
            self.param_groups.pop()
            raise ValueError(
                "a posterior needs whole parameters on every rank, got a DTensor: use DDP instead"
            )

    def _prepare(self) -> None:
        super()._prepare()
        self._plain_kernel = self._kernel
        self._inside, self._repeated = False, 1.0
        self._pairs: list[Pairs] = []

    @contextmanager
    def sampled_params(
        self, train: bool = False, *, temperature: float = 1.0, generator: Generator | None = None
    ) -> Iterator[None]:
        """Draw weights from the posterior; inside of the ``with`` the model has these, afterwards
        the mean again.

        The first step of training is taken at the mean: nothing is known of the posterior before
        it.

        Args: train: whether gradients computed inside are for the next ``step``. Gradients inside
            of one ``with`` add up (accumulation); several before a step are several draws, and
            ``step`` takes the mean of their gradients. temperature: of variances, for predictions:
            below 1 for draws closer to the mean. generator: source of random numbers for
            predictions; by default torch's global one.
        """
        if self._inside:
            raise RuntimeError(
                "sampled_params cannot be used inside of itself: leave the first one before"
            )
        check_number(temperature, "temperature", 0.0)
        if train and (temperature != 1 or generator is not None):
            raise ValueError(
                "temperature and generator are for predictions: training has ess and seed instead"
            )
        before = (
            {param: param.grad for group in self.param_groups for param in group["params"]}
            if train
            else {}
        )
        if train and all(
            gradient is None for gradient in before.values()
        ):  # forgotten since the last draw
            self._pairs = []
        number = len(self._pairs) if train else None
        with torch.no_grad():
            drawn = draw(
                self.param_groups, self._known, temperature, generator, number, self._ranks()
            )
        finished, self._inside = False, True
        try:
            with moved({param: deviation for param, (_, deviation) in drawn.items()}):
                for param in before:
                    param.grad = None
                yield
            finished = True
        finally:
            self._inside = False
            if train:
                self._collect(drawn, before, finished)

    def _ranks(self) -> int:
        return (
            dist.get_world_size()
            if self._averaging and dist.is_available() and dist.is_initialized()
            else 1
        )

    def _known(self, group: dict[str, Any]) -> list[Stack | Diagonals]:
        params = [param for param in group["params"] if self.state.get(param)]
        return self._arranged(group, params) if params else []

    def _collect(
        self, drawn: Drawn, before: Mapping[Tensor, Tensor | None], finished: bool
    ) -> None:
        """Keep noise and gradients of a draw, and leave with each parameter the mean of its draws'
        gradients.
        """
        pairs: Pairs = {}
        for param, old in before.items():
            if param.grad is None or not finished:  # an exception: the draw does not count
                param.grad = old
                continue
            if (noise := drawn.get(param, (None,))[0]) is not None:
                pairs[param] = noise, param.grad
            if old is not None:
                param.grad = torch.lerp(old, param.grad, 1 / (len(self._pairs) + 1))
        self._pairs += [pairs] if finished else []

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        curvature: Mapping[Tensor, Tensor | OuterProducts] | None = None,
    ) -> Any:
        """Take one step of the mean, and learn the curvature.

        Args: closure: computes the gradients again, with ``sampled_params`` inside of it, and
            returns the loss. curvature: as for ``Spectral``; outer products of the vectors add up
            to the curvature of one example's loss.
        """
        if self._inside:
            raise RuntimeError("step cannot be taken at drawn weights: leave sampled_params before")
        loss = None if closure is None else torch.enable_grad()(closure)()
        given = dict(curvature or {})
        with torch.no_grad():
            for group in self.param_groups:
                group["damping"] = group["prior_precision"] / group["ess"]
                group["eps"] = group["damping"] ** (1 / group["root"])
                if group["curvature"] == "reparametrization":
                    given |= self._vectors(group, given)
            if self._ranks() > 1:
                self._repeated = average_gradients(self.param_groups)
            with self._total_gradients():
                super().step(curvature=given)
        self._pairs = []
        return loss

    @contextmanager
    def _total_gradients(self) -> Iterator[None]:
        """Let gradients be those of loss and prior for a while, in units in which their squares are
        the curvature.
        """
        kept, rates = dict[Tensor, Tensor](), [group["lr"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        options.check_gradient(param)
                        kept[param] = param.grad
                        param.grad = param.grad.add(param, alpha=group["damping"]).mul_(
                            _unit(group)
                        )
                # Steps of root 2 have no unit
                group["lr"] = group["lr"] * _unit(group) ** (1 - 2 / group["root"])
            yield
        finally:
            for param, gradient in kept.items():
                param.grad = gradient
            for group, lr in zip(self.param_groups, rates, strict=True):
                group["lr"] = lr

    def _step_group(
        self, group: dict[str, Any], params: list[Tensor], samples: Mapping[Tensor, Tensor]
    ) -> None:
        """Step; the reparametrization trick starts with a first gradient as if it came from ``ess``
        examples.
        """
        for param in params if group["curvature"] == "reparametrization" else ():
            if not self.state.get(param):
                state = options.initial_state(group, param, options.plan_of(group, param))
                posterior_kernel.begin(
                    state, cast(Tensor, param.grad), group["ess"], group["damping"]
                )
                self.state[param].update(state)
        super()._step_group(group, params, samples)

    def _vectors(self, group: dict[str, Any], given: Mapping[Tensor, Any]) -> dict[Tensor, Tensor]:
        """Return the draws' noise and gradients for parameters that learn from the
        reparametrization trick.
        """
        if any(param in given for param in group["params"]):
            raise ValueError('curvature can be given to parameters of curvature="squared" alone')
        found = {}
        for param in (param for param in group["params"] if param.grad is not None):
            pairs = [pairs[param] for pairs in self._pairs if param in pairs]
            if not pairs and self.state.get(param):
                raise ValueError(
                    "a gradient was computed outside of sampled_params(train=True): compute it "
                    "inside"
                )
            found[param] = joined(param, pairs, max(len(self._pairs), 1), group["damping"])
        return found

    def _directions(
        self, group: dict[str, Any], stack: Stack | Diagonals, *arguments: Any, **more: Any
    ) -> Any:
        average = (
            partial(average_over_ranks, self._repeated)
            if self._ranks() > 1
            else torch.Tensor.contiguous
        )
        trick = partial(posterior_kernel.reparametrized, group["ess"], average)
        self._kernel = trick if group["curvature"] == "reparametrization" else self._plain_kernel
        return super()._directions(group, stack, *arguments, **more)

    def predict(
        self,
        model: Callable[[Tensor], Tensor],
        inputs: Tensor,
        samples: int = 32,
        *,
        temperature: float = 1.0,
        only: Iterable[Tensor] | None = None,
        linearized: bool = False,
        generator: Generator | None = None,
    ) -> Tensor:
        """Return what a model says at weights drawn from the posterior, shape ``(samples,
        *outputs)``.

        Args: model: the model that was trained, in evaluation mode. inputs: examples along the
            first axis. samples: how many draws, every second one the mirror image of the one
            before. temperature: of the posterior's variances, below 1 for more confidence. only:
            parameters to draw, such as those of the last layer; all others have their mean.
            linearized: draw outputs of the model's linear part in the weights, whose Gaussian is
            exact, instead of weights. Costs a gradient for each example and output. The model must
            return ``(examples, outputs)``. generator: source of random numbers; by default torch's
            global one.
        """
        check_size(samples, "samples")
        check_number(temperature, "temperature", 0.0)
        wanted = known = {param for group in self.param_groups for param in group["params"]}
        if only is not None and not (wanted := set(only)) <= known:
            raise ValueError("only must name parameters of this optimizer")
        if self._inside:
            raise RuntimeError("predict draws weights itself: leave sampled_params before")
        if linearized:
            mean, root = linear_part(
                model, inputs, wanted, partial(whitened, self.param_groups, self._known)
            )
            shape = (-(-samples // 2), *mean.shape)
            noise = torch.randn(shape, dtype=root.dtype, device=root.device, generator=generator)
            half = temperature**0.5 * torch.einsum("ecd,sed->sec", root, noise).to(mean.dtype)
            return mean + torch.stack([half, -half], 1).flatten(0, 1)[:samples]
        outputs: list[Tensor] = []
        with torch.no_grad():
            while len(outputs) < samples:
                drawn = draw(self.param_groups, self._known, temperature, generator, None, 1)
                for sign in (1, -1)[: samples - len(outputs)]:
                    with moved(
                        {param: sign * x for param, (_, x) in drawn.items() if param in wanted}
                    ):
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
        **more: Any,
    ) -> float:
        """Return the temperature at which ``predict`` has the smallest log loss on data that were
        held out.

        Thus ``ess`` need not be right. All are tried with the same random numbers; torch's own stay
        as they were.

        Args: model: the model that was trained, in evaluation mode. inputs: examples that it was
            not trained on, along the first axis. log_loss: of predictions; for classes ``lambda x:
            nll_loss(x.softmax(-1).mean(0).log(), targets)``. samples: how many draws at each
            temperature. temperatures: what to choose from. **more: options of ``predict``: ``only``
            and ``linearized``.
        """
        losses: dict[float, float] = {}
        for each in temperatures:
            with torch.random.fork_rng(range(torch.cuda.device_count())):
                torch.manual_seed(0)
                losses[each] = float(
                    log_loss(self.predict(model, inputs, samples, temperature=each, **more))
                )
        known = {temperature: loss for temperature, loss in losses.items() if math.isfinite(loss)}
        if not known:
            raise ValueError(
                f"log_loss must be finite at one of the temperatures at least, got {losses}"
            )
        return min(known, key=known.__getitem__)

    @torch.no_grad()
    def covariance(self, param: Tensor) -> Tensor:
        """Return the covariance of the entries of a small parameter, in their order, as an ordinary
        matrix.
        """
        if not self.state.get(param):
            raise ValueError(
                "nothing is known of this parameter's posterior: take a step with its gradient "
                "before"
            )
        unit = (
            torch.eye(param.numel())
            .to(next(iter(self.state[param].values())))
            .view(*param.shape, -1)
        )
        return torch.stack(
            [x.mT @ x for x in whitened(self.param_groups, self._known, {param: unit})]
        ).sum(0)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles need."""
        return {**super().__getstate__(), "_own": self._own, "_averaging": self._averaging}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned; what does not fit, or is damaged, raises an error and
        changes nothing.
        """
        for group in checkpoint.check_outline(state_dict)[0]:
            _check({**self.defaults, **group})
        super().load_state_dict(state_dict)


def _unit(group: Mapping[str, Any]) -> float:
    """Return by what gradients are multiplied: the variance of a batch's gradient is that of one
    example's over B.
    """
    return group["batch_size"] ** 0.5 if group["curvature"] == "squared" else 1.0


def _check(group: Mapping[str, Any]) -> None:
    """Raise unless a group's options for the posterior are possible."""
    for name in ("ess", "prior_precision", "batch_size"):
        if group[name] is not None or name != "batch_size":
            check_number(group[name], name, 0.0)
            if group[name] == 0:
                raise ValueError(f"{name} must be greater than 0, got {group[name]}")
    if group["curvature"] not in SOURCES:
        raise ValueError(
            f"curvature must be one of {', '.join(map(repr, SOURCES))}, got {group['curvature']!r}"
        )
    if group["curvature"] == "squared" and group["batch_size"] is None:
        raise ValueError(
            'batch_size must be given for curvature="squared": how many examples a gradient is the '
            "mean of"
        )
    if not isinstance(group["antithetic"], bool):
        raise TypeError(f"antithetic must be True or False, got {group['antithetic']!r}")
    if (
        not isinstance(group["seed"], int)
        or isinstance(group["seed"], bool)
        or not 0 <= group["seed"] < LARGEST_SEED
    ):
        raise ValueError(f"seed must be a whole number from 0, got {group['seed']!r}")
    if group["curvature"] == "reparametrization" and group["eigenvalues"] != "kronecker":
        raise ValueError(
            'curvature="reparametrization" needs eigenvalues="kronecker": more of them would be '
            "noise"
        )
    if group["grafting"] not in ("descent", None):
        raise ValueError(
            f"grafting of a posterior must be 'descent' or None, got {group['grafting']!r}"
        )
    for name, value in FIXED.items():
        if group[name] != value:
            raise ValueError(f"a posterior has {name} fixed at {value!r}, got {group[name]!r}")


Spectral.posterior = SpectralPosterior
