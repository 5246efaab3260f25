"""``Spectral``, the optimizer: arguments, parameter groups and the step. The arithmetic is in ``kernel``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.curvature import OuterProducts
from ..core.generators import Rotation
from ..core.maps import Orthogonal
from . import checkpoint, kernel, options
from .compiled import compiled
from .distributed.sharding import OFF, Sharding, local_gradient, wanted
from .distributed.together import begin, directions_here
from .inspect import Summary, name_of, spectra_of, summary_of
from .layout import Stack, Stacks
from .moving import move
from .options import GO, RAISE
from .user_curvature import padded, vectors_of

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
Interval = int | list[tuple[int, int]]
Look = tuple[options.Work, Mapping[Tensor, Tensor], Tensor | None]
"""Parameters that have gradients, curvature vectors, and what to do if something is not finite."""


class Spectral(Optimizer):
    """Train with ``W <- W - lr S^(-1/p) M``, where the curvature ``S`` of each layer is learned in spectral form.

    A matrix of weights has ``S = alpha C x K``, with an eigenbasis and eigenvalues for each side, that follow the
    gradients by matrix products alone: no decomposition, any root ``p``, and stable in bfloat16. Vectors and scalars
    get a diagonal ``S``, as in AdamW. No stream of gradients makes a default step large: in the eigenbasis, second
    moments are never below the square of the momentum. The best learning rate is often larger than AdamW's.

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
        weight_decay: float | Tensor = 0.01,
        *,
        cautious_weight_decay: bool = False,
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
        start: float = 2.0,
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
        foreach: bool | None = None,
        fused: bool | None = None,
        amsgrad: bool = False,
        differentiable: bool = False,
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
            weight_decay: decoupled weight decay, as in AdamW; a tensor can change while a CUDA graph is replayed.
            cautious_weight_decay: shrink only the weights that the step itself moves toward zero.
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
            damping: the paper's lambda, added to the curvature, in units of its mean eigenvalue; products of
                eigenvalues get at least 1e-12.
            relative_damping: whether ``damping`` is in those units; if not, it is an absolute number as in the paper.
            start: how fast the first gradients are forgotten. 1 starts running averages of curvature as means, as
                Adam's bias correction does; larger values forget as ``start / t``, and the momentum at least half as
                fast, or steps would grow where gradients vanish; 0 keeps all rates constant.
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
            foreach: step same-shaped parameters in one batched call, the default; ``False`` saves memory.
            fused: for trainers that ask for it: ``True`` means batched calls, whatever ``foreach`` says.
            amsgrad: here for torch's signature, can only be ``False``; so is ``differentiable``.
            differentiable: see ``amsgrad``.
            compile: compile the step with ``torch.compile``.
            capturable: make the step safe to capture in a CUDA graph; needs ``interval=1`` and ``nonfinite="ignore"``.
            nonfinite: what to do about NaN or infinite gradients: "raise" an error, "skip" the whole step, or "ignore"
                such entries as if they were zero, which spares reading one flag back from the device.
            distributed: split work and state over the ranks of ``torch.distributed``, if there are any. ``False`` steps
                everything on every rank, as torch's optimizers do; DTensor parameters cannot be stepped so.
        """
        own = ("self", "params", "compile", "distributed", "__class__")
        defaults = {k: v for k, v in locals().items() if k not in (*own, "own")}
        options.check_group(defaults)
        defaults["betas"] = tuple(betas)
        self._compile, self._distributed = compile, distributed
        self._prepare()
        super().__init__(cast(Any, params), {**defaults, "count": 0})

    fast: ClassVar[type[Spectral]]
    paper: ClassVar[type[Spectral]]

    def _prepare(self) -> None:
        """Set up what copies and checkpoints leave out."""
        self._kernel = compiled(kernel.step) if self._compile else kernel.step
        self._stacks: dict[tuple[int, int], Stacks] = {}
        self._layouts = {
            id(group): options.fixed(group)
            for group in getattr(self, "param_groups", [])
            if any(self.state.get(param) for param in group["params"])
        }
        self._sharding: Sharding | None = getattr(self, "_sharding", None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with any options of their own."""
        if param_group.get("use_fallback"):  # timm's word for what a matrix optimizer should leave to AdamW
            param_group = {"structure": "diagonal", **param_group}
        options.check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            options.check_parameters(self.param_groups[-1], self._distributed)
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
            raise ValueError(options.nonfinite_sentence(list(map(self._name, bad)), bool(samples)))
        if verdict == GO:
            for group, params in work:
                self._step_group(group, params, samples)

    def _look(self, curvature: Mapping[Tensor, Tensor | OuterProducts]) -> Look:
        """Check everything that a step needs, and change nothing."""
        work = []
        for group in self.param_groups:
            if self._layouts.get(id(group)) not in (None, options.fixed(group)):
                raise ValueError(
                    f"{', '.join(options.LAYOUT)} cannot change after the first step: make a new optimizer"
                )
            params = []
            for param in group["params"]:
                if param.grad is not None and param.numel():
                    options.check_gradient(param)
                    params.append(param)
            work.append((group, params))
        samples = vectors_of(curvature, self.param_groups) if curvature else {}
        if self._sharding is None:
            return work, samples, options.nonfinite(work, samples, attrgetter("grad"))
        if samples:
            raise ValueError(f"curvature cannot be given while ranks share the work: leave it out, {OFF}")
        return work, samples, options.nonfinite(work, samples, local_gradient)

    def _step_group(self, group: dict[str, Any], params: list[Tensor], samples: Mapping[Tensor, Tensor]) -> None:
        turn = options.turns_at(group, group["count"])
        group["count"] += 1
        if params or self._sharding is not None:
            self._layouts[id(group)] = options.fixed(group)
        if self._sharding is None:
            for stack in self._arranged(group, params):
                gradients: list[Tensor] = list(map(attrgetter("grad"), stack.params))
                move(group, stack.params, self._directions(group, stack, gradients, samples, turn))
        elif params:
            arranged = partial(self._arranged, group)
            compute = partial(self._directions, group, samples={}, turn=turn)
            # Replicas of a shard must be rounded alike, whatever random numbers their ranks have used.
            apply = partial(move, group, seed=group["count"])
            self._sharding.step(params, directions_here(arranged, compute), apply)

    def _directions(
        self, group: dict[str, Any], stack: Stack, gradients: list[Tensor], samples: Mapping[Tensor, Tensor], turn: bool
    ) -> list[Tensor]:
        """Learn from the gradients of a stack and return the directions to go along."""
        rates = options.rates_of(group, stack.state["scale"])
        gradient = stack.gather(gradients)
        vectors = given = None
        if samples and not samples.keys().isdisjoint(stack.params):
            found = [samples.get(p, g[..., None]) for p, g in zip(stack.params, gradients, strict=True)]
            vectors = stack.gather(padded(found))
            flags = [
                p in samples
                for p, layout in zip(stack.params, stack.layouts, strict=True)
                for _ in range(layout.pieces)
            ]
            given = torch.tensor(flags, device=gradient.device)
        if group["nonfinite"] == "ignore":
            gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
            vectors = None if vectors is None else vectors.nan_to_num(0.0, 0.0, 0.0)
        rule = options.rule_of(group)
        return stack.scatter(self._kernel(gradient, vectors, stack.state, rule, rates, turn, given))

    def _arranged(self, group: dict[str, Any], params: list[Tensor], tag: int = 0) -> list[Stack]:
        """Return the stacks of the parameters that have a gradient now.

        Args:
            group: their parameter group.
            params: the parameters.
            tag: parameters that are stepped at different times must not be in one stack; this number tells times apart.
        """
        layout = partial(options.layout_of, group) if self._sharding is None else self._sharding.layout
        if (id(group), tag) not in self._stacks:
            self._stacks[id(group), tag] = Stacks()
        return self._stacks[id(group), tag].arrange(
            params, self.state, layout, partial(options.initial_state, group), options.batched(group)
        )

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        """Create the state of a group's parameters, as Megatron asks for before it loads a checkpoint."""
        for param in group["params"]:
            if param.numel() and not self.state[param] and not (skip_non_grad_params and param.grad is None):
                self.state[param].update(options.initial_state(group, param, options.layout_of(group, param)))

    def _name(self, param: Tensor) -> str:
        return name_of(param, self.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a checkpoint needs; of state that ranks share, this rank's part.

        The names are the same on all ranks. Parts are meant for ``torch.distributed.checkpoint``, which puts them
        together; saving them in any other way raises an error.
        """
        return checkpoint.to_save(super().state_dict(), self.param_groups, self._sharding)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, every tensor in the number format it was saved in.

        Everything is checked first: what does not fit, or is damaged, raises an error and changes nothing. Where ranks
        share the work, each takes its part of a whole state, or has the parts that were its own.
        """
        checkpoint.check_outline(state_dict)
        functions: list[dict[str, Any]] = []
        states: dict[Tensor, dict[str, Tensor]] = {}

        def check(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            groups, found = checkpoint.read(given, self.param_groups, self.defaults, self._name, self._sharding)
            functions.extend({name: group[name] for name in options.CUSTOM if name in group} for group in groups)
            states.update(found)
            return {"state": {}, "param_groups": groups}

        def keep(_: Optimizer) -> None:
            # Not left to torch, which copies functions, and casts state to the parameter's format: that would ruin
            # eigenvalues.
            for group, own in zip(self.param_groups, functions, strict=True):
                group.update(own)
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
        return summary_of(self.param_groups, self.state)

    def spectra(self) -> dict[str, dict[str, Any]]:
        """Return, for each parameter with a basis, its eigenvalues, condition number and speed of rotation.

        Where ranks share the work, each tells about what it steps itself.
        """
        return spectra_of(self.param_groups, self.state)
