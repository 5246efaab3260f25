"""``Spectral.posterior``: train, and have a Gaussian posterior over the weights at the end, in spectral form."""

from __future__ import annotations

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
from .prediction import linear_outputs
from .spectral import Params, Spectral
from .stacks import Stack, complete

FIXED: Mapping[str, Any] = {"relative_damping": False, "grafting": None, "weight_decay": 0.0, "nesterov": 0.0}
"""Options of ``Spectral`` that a posterior leaves no choice about, and what they are."""
FREE = (
    "interval", "structure", "max_dim", "max_ratio", "batch_dims", "split_sizes", "num_heads", "split_dim", "start",
    "rotation", "basis_lr", "maps", "reorthonormalize", "basis_dtype", "foreach", "fused", "nonfinite", "root", "clip",
    "stochastic_rounding", "eigenvalues",
)  # fmt: skip
"""Options of ``Spectral`` that can be given."""
SOURCES = ("squared", "reparametrization")
LARGEST_SEED = 2**62
Pairs = dict[Tensor, tuple[Tensor, Tensor]]
"""For each parameter, the noise of a draw in the eigenbasis and the gradient at it."""
Drawn = dict[Tensor, tuple[Tensor | None, Tensor]]
"""For each parameter, the noise of a draw in the eigenbasis, if it will be needed, and the deviation from the mean."""


class SpectralPosterior(Spectral):
    """Train a Gaussian posterior ``N(mu, (ess S)^-1)`` over the weights. Also known as ``Spectral.posterior``.

    The weights of the model are ``mu``; the curvature ``S`` is a Kronecker product in spectral form for each matrix.
    Gradients are computed at weights drawn from the posterior, and where training comes to rest, the expected loss of
    such draws, plus the divergence from the prior divided by ``ess``, is as small as it can be (variational inference).

    Examples:
        >>> import torch
        >>> from eigenstep import Spectral
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = Spectral.posterior(model.parameters(), lr=1e-2, ess=1000, batch_size=2)
        >>> for _ in range(3):
        ...     with optimizer.sampled_params(train=True):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(2, 8)).square().mean().backward()
        ...     _ = optimizer.step()
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
        compile: bool = False,
        **more: Any,
    ) -> None:
        """Set up the optimizer. What is not about processes or compilation can be given per parameter group.

        Args:
            params: parameters, named parameters, or dictionaries that describe parameter groups.
            lr: learning rate of the mean.
            betas: decay of momentum and of curvature. By default (0.9, 0.99), and 0.999 for curvature from the
                reparametrization trick, which is far more noisy.
            ess: the effective number of examples, ``lambda``: how many examples the training data have. More makes
                the posterior narrower ("colder"), as if each had been seen several times.
            batch_size: how many examples the gradient of a step is the mean of, those of all ranks, and of all batches
                that accumulate, together. Needed for ``curvature="squared"``.
            prior_precision: of the prior ``N(0, 1 / prior_precision)`` of each weight. It takes the place of
                weight decay, which is this divided by ``ess`` in other optimizers' words.
            curvature: what ``S`` learns from. "squared": gradients' outer products times ``batch_size``, little noise,
                and right where the model explains the data (empirical Fisher); or what ``step(curvature=...)`` is
                given, such as gradients of single examples or columns of Gauss-Newton matrices. "reparametrization":
                the gradients' dependence on the drawn weights, right everywhere, negative curvature included, but
                noisy: for small models, large batches or antithetic pairs.
            antithetic: mirror every second draw of a step at the mean. With two draws a step on the same batch, the
                noise of the batch then cancels in curvature from the reparametrization trick.
            seed: of the draws of training, which depend on this, the step, the number of the draw and the rank alone: a
                run that goes on from a checkpoint draws what it would have drawn.
            distributed: whether gradients are averaged over the ranks of ``torch.distributed``, which draw different
                weights. Every rank then keeps the whole state. It is noticed if DDP has averaged already.
            compile: as in ``Spectral``.
            **more: options of ``Spectral``: layout (``structure``, ``max_dim``, ...), ``interval``, ``root``, ``clip``,
                ``start``, ``rotation``, ``basis_lr``, ``maps``, ``basis_dtype``, ``nonfinite``, ...
        """
        if strange := sorted(more.keys() - set(FREE)):
            why = "a posterior has it fixed" if strange[0] in options.OPTIONS else "there is no such option"
            raise ValueError(f"{strange[0]} cannot be given: {why}. What can be: {', '.join(sorted(FREE))}")
        noisy = curvature == "reparametrization"
        defaults = {
            "eigenvalues": "kronecker" if noisy else "corrected",
            "root": 1.0,
            "basis_lr": None if noisy else 0.1,
            **more,
        }
        own = {"ess": ess, "batch_size": batch_size, "prior_precision": prior_precision, "curvature": curvature}
        self._own = {**own, "antithetic": antithetic, "seed": seed}
        self._averaging = distributed
        betas = ((0.9, 0.999) if noisy else (0.9, 0.99)) if betas is None else betas
        _check({**self._own, **FIXED, "eigenvalues": defaults["eigenvalues"]})
        super().__init__(params, lr, betas, distributed=False, compile=compile, damping=1.0, **defaults, **FIXED)
        self.defaults.update(self._own)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with any options of their own."""
        group = {**self._own, **param_group}
        _check({**FIXED, **group})
        super().add_param_group(group)
        if any(hasattr(param, "device_mesh") for param in group["params"]):
            self.param_groups.pop()
            raise ValueError("a posterior needs whole parameters on every rank, got a DTensor: use DDP instead")

    def _prepare(self) -> None:
        super()._prepare()
        self._plain_kernel = self._kernel
        self._inside, self._repeated = False, 1.0
        self._pairs: list[Pairs] = []

    @contextmanager
    def sampled_params(
        self, train: bool = False, *, temperature: float = 1.0, generator: Generator | None = None
    ) -> Iterator[None]:
        """Draw weights from the posterior; inside of the ``with`` the model has these, afterwards the mean again.

        The first step of training is taken at the mean, since nothing is known of the posterior before it.

        Args:
            train: whether gradients computed inside are for the next ``step``. Gradients inside of one ``with`` add up
                (accumulation); several before a step are several draws, and ``step`` takes the mean of their gradients.
            temperature: of variances, for predictions: below 1 for draws closer to the mean.
            generator: source of random numbers, for predictions; by default torch's global one. Those of training
                follow from the ``seed`` and the step.
        """
        if self._inside:
            raise RuntimeError("sampled_params cannot be used inside of itself: leave the first one before")
        check_number(temperature, "temperature", 0.0)
        if train and (temperature != 1 or generator is not None):
            raise ValueError(
                "temperature and generator are for predictions: give ess and seed to the optimizer instead"
            )
        with torch.no_grad():
            drawn = self._draw(generator, temperature, len(self._fresh_pairs()) if train else None)
        before = {param: param.grad for group in self.param_groups for param in group["params"]}
        finished = False
        self._inside = True
        try:
            with _moved({param: deviation for param, (_, deviation) in drawn.items()}):
                if train:
                    for param in before:
                        param.grad = None
                yield
            finished = True
        finally:
            self._inside = False
            if train:
                self._collect(drawn, before, finished)

    def _draw(self, generator: Generator | None, temperature: float, number: int | None) -> Drawn:
        """Return noise in the eigenbasis and deviation from the mean for each parameter whose curvature is known.

        Args:
            generator: source of random numbers, if not torch's global one.
            temperature: of variances.
            number: how many draws this step has had, if it is one for training: then the seed decides.
        """
        drawn: Drawn = {}
        sources: dict[torch.device, Generator] = {}
        for group in self.param_groups:
            mirrored = number is not None and group["antithetic"] and number % 2 == 1
            width = (-1.0 if mirrored else 1.0) * (temperature / group["ess"]) ** 0.5
            noises: dict[int, list[Tensor]] = {}
            stacks = self._known(group)

            def deviations(stack: Stack | Diagonals) -> list[Tensor]:
                device = stack.members[0].param.device
                if number is not None and device not in sources:
                    seed = _seed(group, number // 2 if group["antithetic"] else number, self._averaging)  # noqa: B023
                    sources[device] = Generator(device).manual_seed(seed)
                noises[id(stack)], found = _deviations(stack, sources.get(device, generator), group["damping"])  # noqa: B023
                torch._foreach_mul_(found, width)  # noqa: B023
                return found

            for params, found in complete(stacks, deviations):
                drawn.update((param, (None, each)) for param, each in zip(params, found, strict=True))
            if number is not None and group["curvature"] == "reparametrization":
                for params, found in complete(stacks, lambda stack: noises[id(stack)]):  # noqa: B023
                    signed = [-each for each in found] if mirrored else found
                    drawn.update((p, (z, drawn[p][1])) for p, z in zip(params, signed, strict=True))
        return drawn

    def _known(self, group: dict[str, Any]) -> list[Stack | Diagonals]:
        """Return the stacks of all parameters of a group that have learned."""
        params = [param for param in group["params"] if self.state.get(param)]
        return self._arranged(group, params) if params else []

    def _fresh_pairs(self) -> list[Pairs]:
        """Return the draws since the last step, none if gradients were set to zero in the meantime."""
        if all(param.grad is None for group in self.param_groups for param in group["params"]):
            self._pairs = []
        return self._pairs

    def _collect(self, drawn: Mapping[Tensor, Any], before: Mapping[Tensor, Tensor | None], complete: bool) -> None:
        """Keep noise and gradients of a draw, and leave with each parameter the mean of its draws' gradients."""
        if not complete:  # an exception: the draw does not count
            for param, gradient in before.items():
                param.grad = gradient
            return
        pairs: Pairs = {}
        count = len(self._pairs) + 1
        for param, old in before.items():
            if param.grad is None:
                param.grad = old
                continue
            if param in drawn and drawn[param][0] is not None:
                pairs[param] = drawn[param][0], param.grad
            if old is not None:
                param.grad = torch.lerp(old, param.grad, 1 / count)
        self._pairs.append(pairs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients; outside of ``sampled_params`` the draws of this step, too."""
        super().zero_grad(set_to_none)
        if not self._inside:
            self._pairs = []

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        curvature: Mapping[Tensor, Tensor | OuterProducts] | None = None,
    ) -> Any:
        """Take one step of the mean, and learn the curvature.

        Args:
            closure: computes the gradients again, with ``sampled_params`` inside of it, and returns the loss.
            curvature: as for ``Spectral``; vectors ``(K, *parameter.shape)`` whose outer products add up to the
                curvature of one example's loss, such as gradients of ``K`` examples divided by ``sqrt(K)``.
        """
        if self._inside:
            raise RuntimeError("step cannot be taken at drawn weights: leave sampled_params before")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = dict(curvature or {})
        with torch.no_grad():
            for group in self.param_groups:
                group["damping"] = group["prior_precision"] / group["ess"]
                group["eps"] = group["damping"] ** (1 / group["root"])
                if group["curvature"] == "reparametrization":
                    given |= self._vectors(group, given)
            self._repeated = self._average_gradients()
            with self._total_gradients():
                super().step(curvature=given)
        self._pairs = []
        return loss

    @contextmanager
    def _total_gradients(self) -> Iterator[None]:
        """Let gradients be those of loss and prior for a while, in units in which their squares are the curvature."""
        kept, rates = {}, [group["lr"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                params = [param for param in group["params"] if param.grad is not None]
                unit = group["batch_size"] ** 0.5 if group["curvature"] == "squared" else 1.0
                kept.update({param: param.grad for param in params})
                if params:
                    total = torch._foreach_add([p.grad for p in params], params, alpha=group["damping"])
                    torch._foreach_mul_(total, unit)
                    for param, gradient in zip(params, total, strict=True):
                        param.grad = gradient
                    self._begin(group, params, unit)
                group["lr"] = group["lr"] / unit
            yield
        finally:
            for param, gradient in kept.items():
                param.grad = gradient
            for group, lr in zip(self.param_groups, rates, strict=True):
                group["lr"] = lr

    def _begin(self, group: dict[str, Any], params: list[Tensor], unit: float) -> None:
        """Make the state of parameters that have none yet, as if their first gradient came from ``ess`` examples."""
        for param in params:
            gradient = cast(Tensor, param.grad)
            if self.state.get(param) or not param.numel() or gradient.layout != torch.strided:
                continue
            if gradient.isfinite().all():
                state = options.initial_state(group, param, options.plan_of(group, param))
                posterior_kernel.begin(state, gradient, group["ess"] / unit**2, group["damping"])
                self.state[param].update(state)

    def _vectors(self, group: dict[str, Any], given: Mapping[Tensor, Any]) -> dict[Tensor, Tensor]:
        """Return the draws' noise and gradients for parameters that learn from the reparametrization trick."""
        if any(param in given for param in group["params"]):
            raise ValueError('curvature can be given to parameters of curvature="squared" alone')
        found = {}
        for param in (param for param in group["params"] if param.grad is not None):
            pairs = [pairs[param] for pairs in self._pairs if param in pairs]
            if not pairs and self.state.get(param):
                raise ValueError(
                    "a gradient was not computed inside of sampled_params(train=True), so that no curvature can be "
                    'learned from it: compute it there, or use curvature="squared"'
                )
            found[param] = _joined(param, pairs, max(len(self._pairs), 1), group["damping"])
        return found

    def _average_gradients(self) -> float:
        """Average gradients over ranks, and return how many times too small they then are beside their own noise.

        The noise of a rank meets its own gradient in one of as many parts of the average.
        """
        if not (self._averaging and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return 1.0
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum((gradient.double().abs().sum() for gradient in gradients), torch.zeros((), dtype=torch.float64))
        ends = torch.stack([total, -total]).to(gradients[0].device if gradients else "cpu")
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        if ends[0] == -ends[1]:
            return float(dist.get_world_size())
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient.div_(dist.get_world_size())
        return 1.0

    def _average(self, tensor: Tensor) -> Tensor:
        if self._averaging and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(tensor)
            tensor = tensor * (self._repeated / dist.get_world_size())
        return tensor

    def _directions(self, group: dict[str, Any], stack: Stack | Diagonals, *arguments: Any, **more: Any) -> Any:
        trick = partial(posterior_kernel.reparametrized, group["ess"], self._average)
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
        """Return what a model says at weights drawn from the posterior, shape ``(samples, *outputs)``.

        Means over the first axis are predictions: of ``softmax`` for classes, of the outputs for regression.

        Args:
            model: the model that was trained, in evaluation mode.
            inputs: examples along the first axis.
            samples: how many draws, every second one the mirror image of the one before.
            temperature: of the posterior's variances, below 1 for more confidence.
            only: parameters to draw, such as those of the last layer; all others have their mean.
            linearized: draw outputs of the model's linear part in the weights, whose Gaussian is exact, instead of
                weights. Costs a gradient for each example and output. The model must return ``(examples, outputs)``.
            generator: source of random numbers; by default torch's global one.
        """
        check_size(samples, "samples")
        wanted = None if only is None else set(only)
        known = {param for group in self.param_groups for param in group["params"]}
        if wanted is not None and not wanted <= known:
            raise ValueError("only must name parameters of this optimizer")
        if self._inside:
            raise RuntimeError("predict draws weights itself: leave sampled_params before")
        if linearized:
            scale = self._whitened_jacobians
            return linear_outputs(model, inputs, samples, wanted or known, scale, temperature, generator)
        outputs: list[Tensor] = []
        with torch.no_grad():
            for number in range(samples):
                if number % 2 == 0:
                    drawn = self._draw(generator, temperature, None)
                sign = 1.0 if number % 2 == 0 else -1.0
                chosen = {p: sign * x for p, (_, x) in drawn.items() if wanted is None or p in wanted}
                with _moved(chosen):
                    outputs.append(model(inputs))
        return torch.stack(outputs)

    @torch.no_grad()
    def covariance(self, param: Tensor) -> Tensor:
        """Return the covariance of the entries of one parameter as an ordinary matrix, for parameters that are small."""
        if not self.state.get(param):
            raise ValueError("nothing is known of this parameter's posterior: take a step with its gradient before")
        like = next(iter(self.state[param].values()))
        unit = torch.eye(param.numel(), dtype=like.dtype, device=like.device).view(*param.shape, -1)
        return sum(root.mT @ root for root in self._whitened_jacobians({param: unit}))

    def _whitened_jacobians(self, jacobians: Mapping[Tensor, Tensor]) -> Iterator[Tensor]:
        """Give out ``(ess S)^(-1/2) J`` for each stack, shape ``(weights, K)``, given Jacobians ``(*shape, K)``."""
        for group in self.param_groups:
            for stack in self._known(group):
                own = [jacobians[m.param] for m in stack.members if m.param in jacobians]
                if isinstance(stack, Stack) and own:
                    zero = own[0].new_zeros(())
                    shapes = [(*m.param.shape, own[0].shape[-1]) for m in stack.members]
                    full = [jacobians.get(m.param, zero).expand(s) for m, s in zip(stack.members, shapes, strict=True)]
                    yield (
                        posterior_kernel.whitened(stack.gather(full), stack.state).flatten(0, -2) / group["ess"] ** 0.5
                    )
                for m in stack.members if isinstance(stack, Diagonals) else ():
                    if m.param in jacobians:
                        variances = self.state[m.param]["second_moment" + m.suffix].flatten() + group["damping"]
                        vectors = m.plan.split(jacobians[m.param], m.part).flatten(0, -2)
                        yield vectors / (group["ess"] * variances).sqrt()[:, None]

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles need."""
        return {**super().__getstate__(), "_own": self._own, "_averaging": self._averaging}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned; what does not fit, or is damaged, raises an error and changes nothing."""
        groups, _ = checkpoint.check_outline(state_dict)
        for group in groups:
            _check({**self._own, **FIXED, **{name: group[name] for name in (*self._own, *FIXED) if name in group}})
        super().load_state_dict(state_dict)
        self._pairs = []


@contextmanager
def _moved(deviations: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Add deviations to parameters, and take back the very same numbers at the end."""
    means = {param: param.detach().clone() for param in deviations}
    try:
        with torch.no_grad():
            for param, deviation in deviations.items():
                param.copy_(means[param].to(deviation.dtype) + deviation)
        yield
    finally:
        with torch.no_grad():
            for param, mean in means.items():
                param.copy_(mean)


def _deviations(
    stack: Stack | Diagonals, generator: Generator | None, damping: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Return noise and ``S^(-1/2)`` times the noise for each member of a stack."""
    if isinstance(stack, Stack):
        root = posterior_kernel.roots(stack.state)
        noise = torch.randn(root.shape, dtype=root.dtype, device=root.device, generator=generator)
        both = noise, posterior_kernel.colored(noise, root, stack.state)
        return list(torch.split(both[0], stack.units)), list(torch.split(both[1], stack.units))
    found: list[Tensor] = []
    for moments, sizes in stack.second_moments():
        noise = torch.randn(moments.shape, dtype=moments.dtype, device=moments.device, generator=generator)
        found += torch.split(noise / (moments + damping).sqrt_(), sizes)
    return [], found


def _joined(param: Tensor, pairs: list[tuple[Tensor, Tensor]], count: int, prior: float) -> Tensor:
    """Return noise and gradients of so many draws along the first axis, with the gradient of the prior at the mean.

    A parameter that had no gradient at some of the draws has others of its draws twice.
    """
    gradient = cast(Tensor, param.grad)
    if not pairs:
        return torch.stack([torch.zeros_like(gradient), gradient.add(param, alpha=prior)])
    noise = torch.stack([pairs[at % len(pairs)][0] for at in range(count)])
    found = torch.stack([pairs[at % len(pairs)][1] for at in range(count)]).to(noise.dtype)
    if gradient is not pairs[0][1]:  # it may have been unscaled or clipped since
        mean = found.mean(0)
        found = found * ((gradient * mean).sum() / mean.square().sum().clamp_min(torch.finfo(mean.dtype).tiny))
    return torch.cat([noise, found.add(param, alpha=prior)])


def _seed(group: Mapping[str, Any], number: int, ranks: bool) -> int:
    """Return the seed of a draw: another one for each step, draw and rank."""
    rank = dist.get_rank() if ranks and dist.is_available() and dist.is_initialized() else 0
    found = int(group["seed"])
    for part in (group["count"], number, rank):
        found = (found * 6364136223846793005 + part + 1442695040888963407) % LARGEST_SEED
    return found


def _check(group: Mapping[str, Any]) -> None:
    """Raise unless a group's options for the posterior are possible."""
    for name in ("ess", "prior_precision", *(["batch_size"] if group["batch_size"] is not None else [])):
        check_number(group[name], name, 0.0)
        if group[name] == 0:
            raise ValueError(f"{name} must be greater than 0, got {group[name]}")
    if group["curvature"] not in SOURCES:
        raise ValueError(f"curvature must be one of {', '.join(map(repr, SOURCES))}, got {group['curvature']!r}")
    if group["curvature"] == "squared" and group["batch_size"] is None:
        raise ValueError(
            'batch_size must be given for curvature="squared": how many examples the gradient of a step is the mean of'
        )
    if not isinstance(group["antithetic"], bool):
        raise TypeError(f"antithetic must be True or False, got {group['antithetic']!r}")
    if not isinstance(group["seed"], int) or isinstance(group["seed"], bool) or not 0 <= group["seed"] < LARGEST_SEED:
        raise ValueError(f"seed must be a whole number from 0, got {group['seed']!r}")
    if group["curvature"] == "reparametrization" and group.get("eigenvalues", "kronecker") != "kronecker":
        raise ValueError(
            'curvature="reparametrization" needs eigenvalues="kronecker": it is too noisy for more of them'
        )
    for name, value in FIXED.items():
        if group[name] != value:
            raise ValueError(f"a posterior has {name} fixed at {value!r}, got {group[name]!r}")


Spectral.posterior = SpectralPosterior
