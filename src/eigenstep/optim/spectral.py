"""``Spectral``, the optimizer: arguments, parameter groups and the step. The arithmetic is in
``kernel``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.curvature import OuterProducts
from ..core.step import Orthogonal, Rotation
from . import checkpoint, kernel, options, storage
from .diagonal import Counts, Diagonals
from .distributed.collectives import local_gradient
from .distributed.ownership import OFF, wanted
from .distributed.sharding import Sharding
from .inspect import Sizes, Summary, metrics_of, name_of, noted, spectra_of, summary_of
from .options import GO, RAISE, SKIP
from .stacks import Stack, Stacks, complete, move
from .user_curvature import equal_vectors, vectors_of

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
Interval = int | list[tuple[int, int]]
Look = tuple[options.Work, Mapping[Tensor, Tensor], Tensor | None]
"""Parameters that have gradients, curvature vectors, and what to do if something is not finite."""


class Spectral(Optimizer):
    """Train with ``W <- W - lr S^(-1/p) M``, where the curvature ``S`` of each layer is learned in
    spectral form.

    A matrix of weights has ``S = alpha C x K``, with an eigenbasis and eigenvalues for each side,
    that follow the gradients by matrix products alone: no decomposition, any root ``p``, and stable
    in bfloat16. Vectors, scalars and embeddings step as in AdamW. Learning rates that suit AdamW
    suit it, too.

    No stream of gradients makes steps large: the root mean square of that of a matrix is at most
    one learning rate. Without ``grafting="descent"``, corrected second moments are still never
    below the square of the momentum, and bound it by ``(1 - w) + w / sqrt(1 - betas[1])`` with
    equal betas and ``w = nesterov`` (1 without momentum), as long as ``betas[0]**2 <= betas[1]``.
    Kronecker eigenvalues have ``clip`` for that, vectors and embeddings AdamW's own, 1.2.

    Examples:
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
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float | Tensor = 0.01,
        *,
        eps: float = 1e-8,
        cautious_weight_decay: bool = False,
        root: float = 2.0,
        interval: Interval = 2,
        eigenvalues: str = "corrected",
        nesterov: float | bool = 0.2,
        clip: float | None = None,
        grafting: str | None = "descent",
        structure: str = "auto",
        max_dim: int | None = 1280,
        max_ratio: float | None = 2.0,
        batch_dims: int | None = None,
        split_sizes: Sequence[int] | None = None,
        num_heads: int | Sequence[int] | None = None,
        split_dim: int = 0,
        decay: float = 1.0,
        damping: float = 1e-10,
        relative_damping: bool = True,
        start: float = 1.0,
        turn_first: bool = False,
        eigenvalues_wait: bool = False,
        rotation: str | Rotation = "bounded",
        basis_lr: float | None = 0.1,
        maps: str | Orthogonal = "quadratic",
        reorthonormalize: bool = True,
        residual: bool = False,
        basis_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | None = None,
        offload: bool = False,
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
        """Set up the optimizer. Every argument but ``compile`` and ``distributed`` can be given per
        parameter group.

        What people change, and when:

        Args: params: parameters, named parameters, or dictionaries that describe parameter groups.
            lr: learning rate, the paper's beta-1. Always tune it. betas: decay of momentum (0:
            none; more for tiny batches) and of curvature, one minus the paper's beta-2.
            weight_decay: decoupled, as in AdamW. Tune it for long runs; a tensor can change while a
            CUDA graph runs. eps: AdamW's, where there is no basis; bases have ``damping``. Raise it
            where small gradients are noise. cautious_weight_decay: shrink only weights that the
            step moves toward zero. ``True`` if decay costs loss. root: the paper's ``p``: steps go
            along ``S^(-1/p)``. 1 for natural gradient, with given curvature. interval: turn the
            bases every so many steps, but at each of the first 100, every second of the next 100,
            and so on; or a schedule such as ``[(0, 1), (1000, 4)]``. 1 where the optimizer's time
            hardly counts, more where it counts most. eigenvalues: "corrected" keeps a second moment
            for each entry in the eigenbasis. "kronecker" uses products of the two sides'
            eigenvalues, as the paper does, where memory is short. nesterov: weight of the newest
            gradient beside the momentum's; ``True`` for Nesterov's own ``1 - betas[0]``, 0 for
            momentum alone. Where gradients swing to and fro, ``grafting="descent"`` lowers it by
            itself. clip: largest root mean square of a layer's step before the learning rate. 1 if
            the loss has spikes. grafting: "descent" evens out the rows and columns of each layer's
            step in the eigenbasis, and lengthens it until it lowers the loss as fast as Adam's
            would at the same learning rate, but not beyond its largest step, nor three times its
            present one. Roots other than 2 want the size of "adam", "rms" or ``None``. structure:
            "kronecker", one factor per side, the first axis against the rest; "auto" is the same,
            but steps the matrices of a stack ``(experts, n, m)`` one by one, and embeddings as
            AdamW does (1024 rows or more, 16 times as many as columns, and 32 of these at least);
            "axes", one factor per axis, for convolutions; "full", one matrix over the whole
            parameter, for tiny ones; "diagonal", no basis, where one brings nothing: this is AdamW,
            as it is for vectors. batch_dims: how many of the first axes count matrices of their
            own; ``None`` for what "auto" recognizes. split_sizes: rows of each matrix that was
            fused, such as queries, keys and values: each steps on its own. num_heads: step so many
            heads as a matrix each: equal parts of the rows, or of (each of) ``split_sizes``.
            split_dim: 1 if columns were fused, as in weights that multiply from the right; 0 for
            rows. max_dim: longest side that gets one basis; longer ones are cut into blocks. Less
            to save time; or ``None``. max_ratio: a side more than this many times longer than the
            other is cut as well. 1 to save time, ``None`` (whole sides, at the price of cubes) if
            time does not count.

        What researchers change, and when:

        Args: decay: the paper's gamma between 1 (running average) and 0 (AdaGrad), to forget more
            slowly. damping: the paper's lambda, added to the curvature, in units of its mean
            eigenvalue (products of eigenvalues get at least 1e-12). Raise it if rare directions
            move too far. relative_damping: ``False`` makes ``damping`` an absolute number, as in
            the paper. start: 1 starts running averages as means, as Adam's bias correction does;
            larger values forget the first gradients as ``start / t``. 0, as in the paper, keeps all
            rates constant. turn_first: turn the bases before preconditioning with them instead of
            after, as the paper does. eigenvalues_wait: learn eigenvalues only when the bases turn,
            another reading of the paper. rotation: "bounded" (ours); "normalized" (the paper's for
            networks) or "moore_penrose" (the paper's) to compare with; or a function, of which
            checkpoints hold only the name. basis_lr: rate of the running average that the basis
            follows (``None``: ``1 - betas[1]``); for "normalized" the paper's beta-bar-2. Raise it
            if eigenvectors change quickly. maps: "quadratic" (Cayley map to second order),
            "truncated" (the paper's truncated Cayley map) or "exact" (exact Cayley and exponential
            maps, which never forget an outlier) to compare with; or a function from generators to
            orthogonal matrices, such as ``maps.cayley`` or ``partial(maps.quadratic, cap=0.3)``.
            reorthonormalize: mend bases by a Newton-Schulz step, at every second turn of
            "quadratic" maps, which need it, and at every turn of others, or if rotations are
            "normalized". residual: remember what rotations have not yet diagonalized: better
            curvature, twice the bases' memory. basis_dtype: number format of the bases; by default
            that of the state. bfloat16 to save memory. state_dtype: number format of momentum and
            second moments; by default float32 (second moments of matrices are kept in two bytes,
            rounded up and down in turn), or float64 for such weights. bfloat16 to save still more;
            int8 for a byte each, and bfloat16 bases. What is tiny stays float32. offload: keep all
            large state on the host, and fetch it stack by stack. ``True`` if the device has no
            room. stochastic_rounding: round bfloat16 weights up or down at random. ``True`` when
            training such. maximize: go up instead of down. ``True`` for rewards. foreach: step
            same-shaped parameters in one batched call, the default. ``False`` to save memory.
            fused: for trainers that ask for it: ``True`` means batched calls, whatever ``foreach``
            says. amsgrad: for torch's signature, can only be ``False``. differentiable: see
            ``amsgrad``. compile: compile the step with ``torch.compile``. ``True`` for runs long
            enough to wait for it. capturable: check that the step can be captured in a CUDA graph
            (``interval=1``, ``nonfinite="ignore"``). nonfinite: NaN or infinite gradients "raise"
            an error, "skip" the whole step, as mixed precision wants, or make it "ignore" such
            entries, which never waits for the device. distributed: split work and state over the
            ranks of ``torch.distributed``. ``False`` if ranks train different things; DTensor
            parameters cannot be stepped so.
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
    posterior: ClassVar[type[Any]]
    for_model: ClassVar[Callable[..., Spectral]]

    def _prepare(self) -> None:
        """Set up what copies and checkpoints leave out."""
        self._kernel: Callable[..., Tensor] = kernel.step
        # a program for each kind of stack, turning or not: more than torch allows for one function
        if self._compile:
            program = torch.compile(kernel.step, fullgraph=True, dynamic=False)
            self._kernel = torch._dynamo.config.patch(recompile_limit=256)(program)
        self._stacks, self._counts = dict[tuple[int, int], Stacks](), Counts()
        self._layouts = {
            id(group): options.fixed(group)
            for group in getattr(self, "param_groups", [])
            if any(self.state.get(param) for param in group["params"])
        }
        self._sharding: Sharding | None = getattr(self, "_sharding", None)
        self._sizes: Sizes | None = getattr(self, "_sizes", None)
        self._skipped: int = getattr(self, "_skipped", 0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with any options of their own."""
        if param_group.get(
            "use_fallback"
        ):  # timm's word for what a matrix optimizer should leave to AdamW
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

        Args: closure: evaluates the loss again and returns it, as for all of torch's optimizers.
            curvature: for some parameters, vectors of shape ``(K, *parameter.shape)``, or an
            ``OuterProducts`` of such, whose outer products are summed instead of the gradient's
            (per-example gradients divided by ``sqrt(K)``, columns of a Gauss-Newton matrix, ...).
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
        shared = (
            self._distributed
            and torch.distributed.is_available()
            and torch.distributed.is_initialized()
        )
        if shared and wanted(param for group in self.param_groups for param in group["params"]):
            self._sharding = self._sharding or Sharding()
            work, samples, verdict = self._sharding.begin(
                self.param_groups, self.state, look, self._name
            )
        else:
            work, samples, flag = look()
            verdict = GO if flag is None else int(flag)
        if verdict == RAISE:
            bad = [
                p
                for _, params in work
                for p in params
                if not torch.isfinite(local_gradient(p)).all()
            ]
            raise ValueError(options.nonfinite_sentence(list(map(self._name, bad)), bool(samples)))
        self._skipped += verdict == SKIP
        if verdict == GO:
            for group, params in work:
                self._step_group(group, params, samples)

    def _look(self, curvature: Mapping[Tensor, Tensor | OuterProducts]) -> Look:
        """Check everything that a step needs, and change nothing."""
        work = []
        for group in self.param_groups:
            if self._layouts.get(id(group)) not in (None, options.fixed(group)):
                names = ", ".join(options.LAYOUT)
                raise ValueError(
                    f"{names} cannot change after the first step: make a new optimizer"
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
            raise ValueError(
                f"curvature cannot be given while ranks share the work: leave it out, {OFF}"
            )
        return work, samples, options.nonfinite(work, samples, local_gradient)

    def _step_group(
        self, group: dict[str, Any], params: list[Tensor], samples: Mapping[Tensor, Tensor]
    ) -> None:
        turn = options.turns_at(group, group["count"])
        group["count"] += 1
        if params or self._sharding is not None:
            self._layouts[id(group)] = options.fixed(group)
        if self._sharding is None:
            gradients = dict(zip(params, map(attrgetter("grad"), params), strict=True))
            stacks = []
            for stack in self._arranged(group, params):
                at_once = self._sizes is None and isinstance(stack, Diagonals)
                if not (at_once and cast(Diagonals, stack).step(group, gradients, samples)):
                    stacks.append(stack)
            for done, steps in self._steps(group, stacks, gradients, samples, turn):
                move(group, done, steps)
        elif params:
            arranged = partial(self._arranged, group)
            compute = partial(self._steps, group, samples={}, turn=turn)
            # Replicas of a shard must be rounded alike, whatever random numbers their ranks have
            # used.
            apply = partial(move, group, seed=group["count"])
            self._sharding.step(params, arranged, compute, apply)

    def _steps(
        self,
        group: dict[str, Any],
        stacks: Sequence[Stack | Diagonals],
        gradients: Mapping[Tensor, Any],
        samples: Mapping[Tensor, Tensor],
        turn: bool,
    ) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Compute stack by stack, and give out parameters with their steps before the learning
        rate.
        """
        compute = partial(self._directions, group, gradients=gradients, samples=samples, turn=turn)
        found = complete(stacks, compute)
        return found if self._sizes is None else noted(self._sizes, found, gradients, group["lr"])

    def _directions(
        self,
        group: dict[str, Any],
        stack: Stack | Diagonals,
        gradients: Mapping[Tensor, Any],
        samples: Mapping[Tensor, Tensor],
        turn: bool,
    ) -> Sequence[Tensor]:
        """Learn from the gradients of a stack and return the directions to go along, one for each
        member.
        """
        if isinstance(stack, Diagonals):
            return stack.directions(group, gradients, samples)
        rates = options.rates_of(group, stack.state["scale"])
        params = list(map(attrgetter("param"), stack.members))
        gradient = stack.gather(list(map(gradients.__getitem__, params)))
        vectors = given = None
        if samples and (equal := equal_vectors(params, samples, gradients)) is not None:
            vectors = stack.gather(equal)
            given = torch.tensor(stack.marked(samples), device=gradient.device)
        if group["nonfinite"] == "ignore":
            gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
            vectors = None if vectors is None else vectors.nan_to_num(0.0, 0.0, 0.0)
        rule = options.rule_of(group, stack.turned() if turn else 0)
        away = stack.packed or group["offload"]
        state = storage.opened(stack.state, gradient.device) if away else stack.state
        stacked = self._kernel(gradient, vectors, state, rule, rates, turn, given)
        if away:
            storage.close(stack.state, state, state["step"])
        return torch.split(stacked, stack.units)

    def _arranged(
        self, group: dict[str, Any], params: list[Tensor], tag: int = 0
    ) -> list[Stack | Diagonals]:
        """Return the stacks of a group's parameters that have a gradient now; those of different
        tags stay apart.
        """
        plan_of = partial(options.plan_of, group) if self._sharding is None else self._sharding.plan
        if (id(group), tag) not in self._stacks:
            self._stacks[id(group), tag] = Stacks(self._stacks.values(), self._counts)
        # Who asks for a fused step wants that
        together = group["foreach"] is not False or bool(group["fused"])
        create = partial(options.initial_state, group)
        return self._stacks[id(group), tag].arrange(params, self.state, plan_of, create, together)

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        """Create the state of a group's parameters, as Megatron asks for before it loads a
        checkpoint.
        """
        for param in group["params"]:
            if (
                param.numel()
                and not (skip_non_grad_params and param.grad is None)
                and not self.state[param]
            ):
                self.state[param].update(
                    options.initial_state(group, param, options.plan_of(group, param))
                )

    def _name(self, param: Tensor) -> str:
        return name_of(param, self.param_groups)

    def state_dict(self, *, bases: bool = True) -> dict[str, Any]:
        """Return everything that a checkpoint needs; of state that ranks share, this rank's part.

        Such parts can only be saved with ``torch.distributed.checkpoint``. Without ``bases``, files
        are half as large: who loads one learns the bases of matrices anew, in moments, from a
        portrait of the curvature that is in it.
        """
        return checkpoint.to_save(super().state_dict(), self.param_groups, self._sharding, bases)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned; what does not fit, or is damaged, raises an error and
        changes nothing.
        """
        with checkpoint.loading(self, state_dict, self._name, self._sharding, self._prepare):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles need."""
        return {
            **super().__getstate__(),
            "_compile": self._compile,
            "_distributed": self._distributed,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied, unpickled or loaded optimizer; options it did not know yet get their
        defaults.
        """
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._prepare()

    def summary(self) -> Summary:
        """Tell structure, memory and matrix-product work per step of each parameter; ``print`` it
        to see a table.
        """
        return summary_of(self.param_groups, self.state)

    def spectra(self) -> dict[str, dict[str, Any]]:
        """Return eigenvalues, condition and speed of rotation of each parameter that has a basis on
        this rank.
        """
        return spectra_of(self.param_groups, self.state)

    def metrics(self) -> dict[str, float]:
        """Return numbers for TensorBoard, W&B or MLflow, read back from the device all at once.

        They are ``weight_norm``, ``condition`` of the curvature and ``rotation_speed``, and after a
        first call also ``gradient_norm`` and ``update_norm``, each with ``/`` and the parameter's
        name, ``steps``, ``skipped_steps``.
        """
        self._sizes = {} if self._sizes is None else self._sizes
        return metrics_of(self.param_groups, self.state, self._sizes, self._skipped)
