"""``Spectral``, the optimizer: arguments, parameter groups and the step. The arithmetic is in ``kernel``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.curvature import OuterProducts
from ..core.generators import Rotation
from ..core.maps import Orthogonal
from . import checkpoint, kernel
from .distributed.sharded_state import Pieces
from .distributed.sharding import OFF, Sharding, is_sharded, local_gradient, wanted
from .distributed.together import begin, own_state
from .inspect import Summary, spectra_of, summarize
from .layout import Stack, Stacks
from .options import (
    FAST,
    GO,
    LAYOUT,
    PAPER,
    RAISE,
    Work,
    check_gradient,
    check_group,
    initial_state,
    layout_of,
    nonfinite,
    rates_of,
    rule_of,
    turns_at,
)
from .rounding import add_stochastically
from .user_curvature import padded, vectors_of

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
Interval = int | list[tuple[int, int]]
Look = tuple[Work, Mapping[Tensor, Tensor], Tensor | None]
"""Parameters that have gradients, curvature vectors, and what to do if something is not finite."""


class Spectral(Optimizer):
    """Train with ``W <- W - lr S^(-1/p) M``, where the curvature ``S`` of each layer is learned in spectral form.

    A matrix of weights has ``S = alpha C x K``, with an eigenbasis and eigenvalues for each side, that follow the
    gradients by matrix products alone: no decomposition, any root ``p``, and stable in bfloat16. Vectors and scalars
    get a diagonal ``S``, which makes the method AdamW for them. Learning rates that suit AdamW suit ``Spectral``.

    Example:
        >>> import torch
        >>> from eigenstep import Spectral
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = Spectral(model.parameters(), lr=1e-3)
        >>> loss = model(torch.ones(2, 8)).square().mean()
        >>> loss.backward()
        >>> _ = optimizer.step()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        weight_decay: float = 0.01,
        *,
        root: float = 2.0,
        interval: Interval = 2,
        eigenvalues: str = "corrected",
        nesterov: float | bool = 0.2,
        clip: float | None = None,
        grafting: str | None = None,
        structure: str = "kronecker",
        max_dim: int = 2048,
        max_ratio: float | None = 2.0,
        long_sides: str = "blocks",
        decay: float = 1.0,
        damping: float = 1e-10,
        relative_damping: bool = True,
        start: float = 4.0,
        turn_first: bool = False,
        rotation: str | Rotation = "bounded",
        basis_lr: float | None = 0.1,
        gap: float = 0.1,
        cap: float = 0.5,
        maps: str | Orthogonal = "quadratic",
        reorthonormalize: int = 1,
        residual: bool = False,
        basis_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        maximize: bool = False,
        foreach: bool = True,
        compile: bool = False,
        capturable: bool = False,
        nonfinite: str = "raise",
        distributed: bool = True,
    ) -> None:
        """Set up the optimizer. Every argument but ``compile`` and ``distributed`` can be given per parameter group.

        What people change:

        Args:
            params: parameters, named parameters, or dictionaries that describe parameter groups.
            lr: learning rate, the paper's beta-1.
            betas: decay rates of momentum (0 for none) and of the curvature; the paper's beta-2 is ``1 - betas[1]``.
            weight_decay: decoupled weight decay, as in AdamW.
            root: the paper's ``p``: steps go along ``S^(-1/p)``. 2 as in Adam, 1 as in natural gradient, any ``p > 0``.
            interval: turn the bases every so many steps, but at every step of the first 100; or a schedule such as
                ``[(0, 1), (1000, 4)]``, every step at first and every fourth from step 1000 on.
            eigenvalues: "corrected" keeps a second moment for each entry in the eigenbasis; "kronecker" uses products
                of the two sides' eigenvalues, as the paper does, and needs no memory for them.
            nesterov: weight of the newest gradient in a step, beside the momentum's; 0 or ``False`` for momentum alone,
                ``True`` for Nesterov's own weight ``1 - betas[0]``. A larger one (quasi-hyperbolic momentum) reacts
                quickly and still goes on with long strides.
            clip: largest root mean square of a layer's step before the learning rate; ``None`` for no limit.
            grafting: give each layer's step the size of the step of "adam" or "rms" (RMSprop); ``None`` for neither.
            structure: "kronecker"; "axes" for one factor per axis of tensors with more than two; "full" for one
                matrix over the whole parameter; "diagonal" for none.
            max_dim: longest side that gets one basis.
            max_ratio: a side more than this many times longer than the other counts as too long as well.
            long_sides: sides that are too long are cut into "blocks", each with a basis, or are "diagonal".

        What researchers change:

        Args:
            decay: the paper's gamma between 0 (AdaGrad) and 1 (running average).
            damping: the paper's lambda, added to the curvature, in units of its mean eigenvalue.
            relative_damping: whether ``damping`` is in those units; if not, it is an absolute number as in the paper.
            start: how fast the first gradients are forgotten. 1 starts running averages of curvature as means, as
                Adam's bias correction does; larger values forget as ``start / t``; 0 keeps all rates constant.
            turn_first: turn the bases before preconditioning with them, as the paper does, instead of after.
            rotation: "bounded" (ours), "normalized" (the paper's for networks), "moore_penrose" (the paper's), or a
                function of your own; checkpoints hold only its name.
            basis_lr: rate of the running average that the basis follows; for "normalized" the paper's beta-bar-2.
                ``None`` means ``1 - betas[1]``.
            gap: relative gap below which the paper's rotations count eigenvalues as equal.
            cap: bound on the norm of a rotation's generator for maps that are not exact, at most 0.6.
            maps: "quadratic" (Cayley map to second order, mended by a Newton-Schulz step), "truncated" (the paper's
                truncated Cayley map), "exact" (exact Cayley and exponential maps, by solving linear systems), or a
                function of your own from generators to orthogonal matrices.
            reorthonormalize: mend the bases by a Newton-Schulz step every so many turns; 0 for never, which quadratic
                maps cannot do with.
            residual: remember what the rotations have not yet diagonalized; costs as much memory as the bases.
            basis_dtype: number format of the bases; by default that of the state.
            state_dtype: number format of momentum and second moments; by default float32, or float64 for such weights.
            stochastic_rounding: round bfloat16 weights up or down at random, so that small steps are not lost.
            maximize: go up instead of down.
            foreach: step same-shaped parameters in one batched call; ``False`` saves memory.
            compile: compile the step with ``torch.compile``.
            capturable: make the step safe to capture in a CUDA graph; needs ``interval=1`` and ``nonfinite="ignore"``.
            nonfinite: what to do about NaN or infinite gradients: "raise" an error, "skip" the whole step, or "ignore"
                such entries as if they were zero, which spares reading one flag back from the device.
            distributed: split work and state over the ranks of ``torch.distributed``, if there are any. ``False`` steps
                everything on every rank, as torch's optimizers do; DTensor parameters cannot be stepped so.
        """
        own = ("self", "params", "compile", "distributed", "__class__")
        defaults = {k: v for k, v in locals().items() if k not in (*own, "own")}
        check_group(defaults)
        defaults["betas"] = tuple(betas)
        self._compile, self._distributed = compile, distributed
        self._prepare()
        super().__init__(cast(Any, params), {**defaults, "count": 0})

    def _prepare(self) -> None:
        """Set up what copies and checkpoints leave out."""
        self._kernel = _compiled_kernel() if self._compile else kernel.step
        self._stacks: dict[tuple[int, int], Stacks] = {}
        self._layouts = {
            id(group): itemgetter(*LAYOUT)(group)
            for group in getattr(self, "param_groups", [])
            if any(self.state.get(param) for param in group["params"])
        }
        self._sharding: Sharding | None = getattr(self, "_sharding", None)

    @classmethod
    def paper(cls, params: Params, lr: float = 1e-3, **options: Any) -> Spectral:
        """The paper's recipe for networks: Kronecker eigenvalues, normalized rotation, truncated maps, every 2 steps.

        Args:
            params: as for the constructor.
            lr: learning rate.
            **options: any other argument of the constructor overrides the recipe.
        """
        return cls(params, lr, **{**PAPER, **options})

    @classmethod
    def fast(cls, params: Params, lr: float = 1e-3, **options: Any) -> Spectral:
        """At most Muon's price: like the default, but long sides are cut into square blocks.

        Args:
            params: as for the constructor.
            lr: learning rate.
            **options: any other argument of the constructor.
        """
        return cls(params, lr, **{**FAST, **options})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with any options of their own."""
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                if is_sharded(param) and not self._distributed:
                    raise ValueError(
                        "DTensor parameters cannot be stepped with distributed=False: pass distributed=True"
                    )
                if param.numel():
                    layout_of(self.param_groups[-1], param)  # raises if there is none
        except ValueError:
            self.param_groups.pop()
            raise

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        curvature: Mapping[Tensor, Tensor | OuterProducts] | None = None,
    ) -> Any:
        """Take one step.

        Args:
            closure: evaluates the loss again and returns it, as for all of torch's optimizers.
            curvature: for some or all parameters, other curvature than the outer product of the gradient with itself:
                vectors of shape ``(K, *parameter.shape)`` whose outer products are summed (per-example gradients
                divided by ``sqrt(K)``, columns of a Gauss-Newton matrix, ...), or an ``OuterProducts`` of such.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step(curvature or {})
        return loss

    def _step(self, curvature: Mapping[Tensor, Tensor | OuterProducts]) -> None:
        look = partial(self._look, curvature)
        shared = self._distributed and torch.distributed.is_available() and torch.distributed.is_initialized()
        if shared and wanted(param for group in self.param_groups for param in group["params"]):
            self._sharding = self._sharding or Sharding()
            work, samples, verdict = begin(self._sharding, self.param_groups, self.state, look, self._name)
        else:
            work, samples, flag = look()
            verdict = GO if flag is None else int(flag)
        if verdict == RAISE:
            bad = [p for _, params in work for p in params if not torch.isfinite(local_gradient(p)).all()]
            where = list(map(self._name, bad[:5])) or ["the curvature" if samples else "a parameter on another rank"]
            raise ValueError(
                f"gradient of {', '.join(where)} has NaN or infinite entries; nothing was changed. Lower the "
                'learning rate, clip gradients, or pass nonfinite="skip" to skip such steps'
            )
        if verdict == GO:
            for group, params in work:
                self._step_group(group, params, samples)

    def _look(self, curvature: Mapping[Tensor, Tensor | OuterProducts]) -> Look:
        """Check everything that a step needs, and change nothing."""
        work = []
        for group in self.param_groups:
            if self._layouts.get(id(group)) not in (None, itemgetter(*LAYOUT)(group)):
                raise ValueError(f"{', '.join(LAYOUT)} cannot change after the first step: make a new optimizer")
            params = []
            for param in group["params"]:
                if param.grad is not None and param.numel():
                    check_gradient(param)
                    params.append(param)
            work.append((group, params))
        samples = vectors_of(curvature, self.param_groups) if curvature else {}
        if self._sharding is None:
            return work, samples, nonfinite(work, samples, attrgetter("grad"))
        if samples:
            raise ValueError(f"curvature cannot be given while ranks share the work: leave it out, {OFF}")
        return work, samples, nonfinite(work, samples, local_gradient)

    def _step_group(self, group: dict[str, Any], params: list[Tensor], samples: Mapping[Tensor, Tensor]) -> None:
        turn = turns_at(group, group["count"])
        group["count"] += 1
        if params or self._sharding is not None:
            self._layouts[id(group)] = itemgetter(*LAYOUT)(group)
        if self._sharding is None:
            for stack in self._arranged(group, params):
                gradients: list[Tensor] = list(map(attrgetter("grad"), stack.params))
                self._apply(group, stack.params, self._directions(group, stack, gradients, samples, turn))
        elif params:

            def directions(own: list[Tensor], gradients: list[Tensor], tag: int) -> list[Tensor]:
                given, found = dict(zip(own, gradients, strict=True)), dict[Tensor, Tensor]()
                for stack in self._arranged(group, own, tag):
                    steps = self._directions(group, stack, [given.pop(p) for p in stack.params], {}, turn)
                    found.update(zip(stack.params, steps, strict=True))
                return [found[p] for p in own]

            # Replicas of a shard must be rounded alike, whatever random numbers their ranks have used.
            self._sharding.step(params, directions, partial(self._apply, group, seed=group["count"]))

    def _directions(
        self,
        group: dict[str, Any],
        stack: Stack,
        gradients: list[Tensor],
        samples: Mapping[Tensor, Tensor],
        turn: bool,
    ) -> list[Tensor]:
        """Learn from the gradients of a stack and return the directions to go along."""
        rates = rates_of(group, stack.state["scale"])
        gradient = stack.gather(gradients)
        vectors = None
        if samples and not samples.keys().isdisjoint(stack.params):
            given = [samples.get(p, g[..., None]) for p, g in zip(stack.params, gradients, strict=True)]
            vectors = stack.gather(padded(given))
        if group["nonfinite"] == "ignore":
            gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
            vectors = None if vectors is None else vectors.nan_to_num(0.0, 0.0, 0.0)
        return stack.scatter(self._kernel(gradient, vectors, stack.state, rule_of(group), rates, turn))

    def _apply(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        directions: list[Tensor],
        seed: int | None = None,
    ) -> None:
        """Move the parameters; the directions are used up."""
        lr, weight_decay = group["lr"], group["weight_decay"]
        lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
        torch._foreach_mul_(directions, lr if group["maximize"] else -lr)
        if group["stochastic_rounding"] and params[0].dtype == torch.bfloat16:
            generator = None if seed is None else torch.Generator(params[0].device).manual_seed(seed)
            for param, direction in zip(params, directions, strict=True):
                add_stochastically(param, direction - lr * weight_decay * param.float(), generator)
            return
        if weight_decay:
            torch._foreach_mul_(params, 1 - lr * weight_decay)
        torch._foreach_add_(params, directions)

    def _arranged(self, group: dict[str, Any], params: list[Tensor], tag: int = 0) -> list[Stack]:
        """Return the stacks of the parameters that have a gradient now.

        Args:
            group: their parameter group.
            params: the parameters.
            tag: parameters that are stepped at different times must not be in one stack; this number tells times apart.
        """
        layout = partial(layout_of, group) if self._sharding is None else self._sharding.layout
        if (id(group), tag) not in self._stacks:
            self._stacks[id(group), tag] = Stacks()
        return self._stacks[id(group), tag].arrange(
            params, self.state, layout, partial(initial_state, group), group["foreach"]
        )

    def _name(self, param: Tensor) -> str:
        for index, group in enumerate(self.param_groups):
            for place, other in enumerate(group["params"]):
                if other is param:
                    return str(group["param_names"][place]) if "param_names" in group else f"group {index} #{place}"
        return "unknown parameter"

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a checkpoint needs; of state that ranks share, this rank's part.

        The names are the same on all ranks. Parts are meant for ``torch.distributed.checkpoint``, which puts them
        together; saving them in any other way raises an error.
        """
        saved = super().state_dict()
        saved["param_groups"] = checkpoint.plain_groups(saved["param_groups"])
        if self._sharding is not None:
            params = [param for group in self.param_groups for param in group["params"]]
            for index, own in saved["state"].items():
                if params[index] in self._sharding:
                    start, total, _ = self._sharding.part(params[index])
                    saved["state"][index] = {name: Pieces(value, start, total) for name, value in own.items()}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, every tensor in the number format it was saved in.

        Everything is checked first: what does not fit, or is damaged, raises an error and changes nothing. Where ranks
        share the work, each takes its part of a whole state, or has the parts that were its own.
        """
        checkpoint.check_outline(state_dict)
        states: dict[Tensor, dict[str, Tensor]] = {}

        def check(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            groups, found = checkpoint.check(given, self.param_groups, self.defaults, self._name)
            if self._sharding is not None:
                checkpoint.check_same_layout(groups, self.param_groups)
            for param, own in found.items():
                if self._sharding is not None and param in self._sharding:
                    own = own_state(own, self._sharding, param, self._name(param))
                states[param] = {name: value.to(param.device, copy=True) for name, value in own.items()}
            return {"state": {}, "param_groups": groups}

        def keep(_: Optimizer) -> None:
            # Not left to torch, which casts state to the parameter's format: that would ruin eigenvalues.
            self.state.update(states)
            self._prepare()

        # After the user's hooks that change what is loaded, and before those that look at it.
        hooks = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(keep, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles need."""
        return {**super().__getstate__(), "_compile": self._compile, "_distributed": self._distributed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied, unpickled or loaded optimizer; options it did not know yet get their defaults."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._prepare()

    def summary(self) -> Summary:
        """Tell structure, memory and matrix-product work per step of each parameter; ``print`` it to see a table."""
        return Summary(
            summarize(self._name(param), param, layout_of(group, param), self.state.get(param, {}), group)
            for group in self.param_groups
            for param in group["params"]
            if param.numel()
        )

    def spectra(self) -> dict[str, dict[str, Any]]:
        """Return, for each parameter with a basis, its eigenvalues, condition number and speed of rotation.

        Where ranks share the work, each tells about what it steps itself.
        """
        return {
            self._name(param): spectra_of(self.state[param])
            for group in self.param_groups
            for param in group["params"]
            if any(name.startswith("basis") and len(basis) for name, basis in self.state.get(param, {}).items())
        }


def _compiled_kernel() -> Callable[..., Tensor]:
    compiled = torch.compile(kernel.step, fullgraph=True, dynamic=False)

    def step(*arguments: Any) -> Tensor:
        # One program for each kind of stack, turning or not: more than the few that torch allows for one function.
        with torch._dynamo.config.patch(recompile_limit=256):
            return compiled(*arguments)

    return step
