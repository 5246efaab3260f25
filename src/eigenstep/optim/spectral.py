"""``Spectral``, the optimizer: arguments, parameter groups and the flow of a step.

Data flows one way: gradients -> batches -> ``Matrices.step`` -> ``apply_steps``. What a matrix
learns is in ``matrix``, what parameters without a basis learn in ``vector``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.curvature import OuterProducts
from ..core.step import Turning
from . import checkpoint, formats, matrix
from .apply import apply_steps
from .batches import (
    Arithmetic,
    Assembly,
    Batch,
    Batches,
    Clock,
    Moment,
    VectorBatch,
    turns_at,
)
from .distributed.agreement import GO, RAISE, SKIP
from .distributed.collectives import local_gradient
from .distributed.ownership import OFF, wanted
from .distributed.sharding import Sharding
from .layout import Plan, plan_of
from .lazy import lazy
from .matrix import Matrices
from .options import LAYOUT, Fused, Interval, Options, check_names, from_torch, names_of
from .report import (
    Sizes,
    Summary,
    metrics_of,
    name_of,
    note_sizes,
    one_line_each,
    spectra_of,
    summary_of,
)
from .user_curvature import vectors_of

if TYPE_CHECKING:
    from ..paper import SpectralPaper
    from ..posterior import SpectralPosterior
    from .recipes import SpectralFast

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
Group = dict[str, Any]
BASIS_RATE = 0.1
"""Rate of the average that bases follow, if ``Turning`` does not say."""
LONGEST_VECTOR = 2**19
"""A vector with more entries than this is no bias, but matrices in a row."""


class Work(NamedTuple):
    """What one step is about."""

    groups: list[tuple[Group, Options, list[Tensor]]]  # parameters that have gradients, by group
    vectors: dict[Tensor, Tensor]  # curvature that was given, with the sample axis last
    verdict: Tensor | int  # GO, SKIP or RAISE; on the device, so that nothing waits for it


class Spectral(Optimizer):
    r"""Train with ``W <- W - lr S^(-1/p) M``, where curvature ``S`` is learned in spectral form.

    A matrix of weights has ``S = alpha C x K``, with an eigenbasis ``B`` and eigenvalues ``d`` for
    each side, which follow the gradients by matrix products alone: no decomposition, any root
    ``p``, and stable in bfloat16. Vectors, scalars and embeddings step as in AdamW. Learning rates
    that suit AdamW suit it, too. A step of a matrix with gradient ``G`` of ``n`` rows and ``m``
    columns::

        G~ = B_C^T G B_K                               into the eigenbasis
        M <- M + w1 (G~ - M)                           momentum
        W_C = G~ Diag(1/d_K) G~^T / (alpha m)          curvature of each side, W_K likewise
        d, alpha <- (1 - w2) d + w2 (diag W + damping) with product one; alpha takes the rest
        D <- D + w2 (G~^2 / alpha + damping - D)       corrected eigenvalues, in units of alpha
        X = ((1 - nu) M + nu G~) / (alpha D)^(1/p)     nu: nesterov, less where gradients swing
        X <- c X, rows and columns evened out          as fast as Adam's, root mean square <= 1
        W <- W - lr (B_C X B_K^T + weight_decay W)

        at every turn, for each side, with d from before the step:
        A = (1 - w3) Diag(d) + w3 W                    w1, w2, w3: bias corrected, as Adam's
        N_ij = -A_ij sgn(D_ij) / (|D_ij| + sqrt(D_ij^2 + 4 e_ij)),  D_ij = A_ii - A_jj
        Q = I + 2 c N + 2 N^2,  B <- B Q,  M <- Q_C^T M Q_K,  D <- max(D, M^2 / alpha)

    No stream of gradients makes steps large: the root mean square of that of a matrix is at most
    one learning rate. Without ``grafting``, corrected second moments are still never below the
    square of the momentum, and bound it by ``(1 - w) + w / sqrt(1 - betas[1])`` with equal betas
    and ``w = nesterov`` (1 without momentum), as long as ``betas[0]**2 <= betas[1]``. Kronecker
    eigenvalues have ``clip`` for that, vectors and embeddings AdamW's own, 1.2.

    Examples:
        >>> import torch
        >>> from eigenstep import Spectral
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = Spectral(model.parameters(), lr=1e-3)
        >>> loss = model(torch.ones(2, 8)).square().mean()
        >>> loss.backward()
        >>> _ = optimizer.step()
    """

    options_kind: ClassVar[type[Options]] = Options
    """The options of a parameter group; a variant of the optimizer may have more."""
    matrices_kind: ClassVar[type[Matrices]] = Matrices
    """The arithmetic of matrices; a variant may have its own."""

    def __init__(  # noqa: PLR0913
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
        grafting: bool = True,
        structure: str = "auto",
        max_dim: int | None = 1280,
        max_ratio: float | None = 2.0,
        fused: Fused | None = None,
        damping: float = 1e-10,
        turning: Turning | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        nonfinite: str = "raise",
        compile: bool = False,
        distributed: bool = True,
        **torch_options: Any,
    ) -> None:
        """Set up the optimizer.

        Every argument but ``compile`` and ``distributed`` can be given per parameter group.

        Args:
            params: parameters, named parameters, or dictionaries that describe parameter groups.
            lr: learning rate, the paper's beta-1. Always tune it.
            betas: decay of momentum (0: none; more for tiny batches) and of curvature, one minus
                the paper's beta-2.
            weight_decay: decoupled, as in AdamW. Tune it for long runs; a tensor can change while
                a CUDA graph runs.
            eps: AdamW's, where there is no basis; bases have ``damping``. Raise it where small
                gradients are noise.
            cautious_weight_decay: shrink only weights that the step moves toward zero. ``True`` if
                decay costs loss.
            root: the paper's ``p``: steps go along ``S^(-1/p)``. 1 for natural gradient, with
                given curvature. Roots other than 2 have the size that they have: tune ``lr``.
            interval: turn the bases every so many steps, but at each of the first 100, every
                second of the next 100, and so on; or a schedule such as ``[(0, 1), (1000, 4)]``. 1
                where the optimizer's time hardly counts, more where it counts most.
            eigenvalues: "corrected" keeps a second moment for each entry in the eigenbasis.
                "kronecker" uses products of the two sides' eigenvalues, as the paper does, where
                memory is short.
            nesterov: weight of the newest gradient beside the momentum's; ``True`` for Nesterov's
                own ``1 - betas[0]``, 0 for momentum alone. Where gradients swing to and fro,
                ``grafting`` lowers it by itself.
            clip: largest root mean square of a layer's step before the learning rate. 1 if the
                loss has spikes.
            grafting: even out the rows and columns of each layer's step in the eigenbasis, and
                lengthen it until it lowers the loss as fast as Adam's would at the same learning
                rate, but not beyond its largest step, nor three times its present one. ``False``
                for the bare step. Only for a root of 2.
            structure: "kronecker", one factor per side, the first axis against the rest; "auto" is
                the same, but steps the matrices of a stack ``(experts, n, m)`` one by one, and
                embeddings as AdamW does (1024 rows or more, 16 times as many as columns, and 32 of
                these at least); "full", one matrix over the whole parameter, for tiny ones;
                "diagonal", no basis, where one brings nothing: this is AdamW, as for vectors.
            max_dim: longest side that gets one basis; longer ones are cut into blocks. Less to
                save time; or ``None``.
            max_ratio: a side more than this many times longer than the other is cut as well. 1 to
                save time, ``None`` (whole sides, at the price of cubes) if time does not count.
            fused: which matrices lie in one parameter: queries, keys and values, heads, experts.
            damping: the paper's lambda, added to the curvature, in units of its mean eigenvalue
                (products of eigenvalues get at least 1e-12). Raise it if rare directions move too
                far.
            turning: how the bases turn: rotation, map, rate, mending, number format. By default a
                bounded rotation towards a running average of rate 0.1, by a quadratic map.
            state_dtype: number format of momentum and second moments; by default float32 (second
                moments of matrices are kept in two bytes, rounded up and down in turn), or float64
                for such weights. bfloat16 to save still more; int8 for a byte each, and bfloat16
                bases. What is tiny stays float32.
            stochastic_rounding: round bfloat16 weights up or down at random. ``True`` when
                training such.
            nonfinite: NaN or infinite gradients "raise" an error, "skip" the whole step, as mixed
                precision wants, or make it "ignore" such entries, which never waits for the device.
            compile: compile the step with ``torch.compile``. ``True`` for runs long enough to wait
                for it.
            distributed: split work and state over the ranks of ``torch.distributed``. ``False`` if
                ranks train different things; DTensor parameters cannot be stepped so.
            **torch_options: arguments of torch's own optimizers: ``maximize=True`` goes up instead
                of down, for rewards; ``capturable=True`` checks that the step can be captured in a
                CUDA graph (``interval=1``, ``nonfinite="ignore"``). ``foreach`` and ``fused=True``
                change nothing: steps are always taken in batches.
        """
        known = {name: value for name, value in locals().items() if name in names_of(Options)}
        options = {"maximize": False, "capturable": False, **known, **torch_options, **self._more}
        options = self._resolved(options)
        check_names(options, self.options_kind, place="")
        self.options_kind(**options)
        self._compile = compile
        self._distributed = distributed
        self._prepare()
        super().__init__(cast(Any, params), {**options, "count": 0})

    _more: Mapping[str, Any] = {}
    """Options that a variant of the optimizer has of its own, set before the constructor here."""

    @lazy
    def fast(cls) -> type[SpectralFast]:
        """At most Muon's price: long sides are cut into square blocks."""
        from .recipes import SpectralFast

        return SpectralFast

    @lazy
    def paper(cls) -> type[SpectralPaper]:
        """The paper's own step."""
        from ..paper import SpectralPaper

        return SpectralPaper

    @lazy
    def posterior(cls) -> type[SpectralPosterior]:
        """Training with a Gaussian posterior over the weights at the end."""
        from ..posterior import SpectralPosterior

        return SpectralPosterior

    @lazy
    def for_model(cls) -> Callable[..., Any]:
        """Set up the optimizer for a model, with groups by the kind of its modules."""
        from .for_model import for_model

        return partial(for_model, cls)  # type: ignore[arg-type]

    def _resolved(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options in their own types, with defaults filled in."""
        resolved = from_torch(dict(options))
        if "turning" in resolved:
            turning = resolved["turning"] or Turning()
            if isinstance(turning, Turning):
                rate = BASIS_RATE if turning.rate is None else turning.rate
                turning = replace(turning, rate=rate, map=turning.map or "quadratic")
            resolved["turning"] = turning
        if isinstance(resolved.get("betas"), list):
            resolved["betas"] = tuple(resolved["betas"])
        return resolved

    def _prepare(self) -> None:
        """Set up what copies and checkpoints leave out."""
        program: Callable[..., Tensor] = matrix.step
        if self._compile:
            # A program for each kind of batch, turning or not: more than torch allows by default.
            compiled = torch.compile(matrix.step, fullgraph=True, dynamic=False)
            program = torch._dynamo.config.patch(recompile_limit=256)(compiled)
        self._arithmetic = Arithmetic(self.matrices_kind, program)
        self._names = names_of(self.options_kind)
        self._clock = Clock()
        self._batches: dict[tuple[int, int], Batches] = {}
        self._known_options: dict[int, tuple[list[Any], Options]] = {}
        self._layouts: dict[int, tuple[object, ...]] = {}
        for group in getattr(self, "param_groups", []):
            if any(self.state.get(param) for param in group["params"]):
                self._layouts[id(group)] = tuple(group[name] for name in LAYOUT)
        self._sharding: Sharding | None = getattr(self, "_sharding", None)
        self._sizes: Sizes | None = getattr(self, "_sizes", None)
        self._skipped: int = getattr(self, "_skipped", 0)

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, with any options of their own."""
        group = self._resolved(param_group)
        if group.get("use_fallback"):  # timm's word for what matrix optimizers leave to AdamW
            group = {"structure": "diagonal", **group}
        check_names(group, self.options_kind)
        options = {**self.defaults, **group}
        typed = self.options_kind(**{name: options[name] for name in names_of(self.options_kind)})
        super().add_param_group(group)
        try:
            self._check_parameters(typed, self.param_groups[-1]["params"])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_parameters(self, options: Options, params: Sequence[Tensor]) -> None:
        """Raise unless all parameters of a group can be stepped."""
        for param in params:
            if hasattr(param, "device_mesh") and not self._distributed:
                raise ValueError(
                    "DTensor parameters cannot be stepped with distributed=False: pass "
                    "distributed=True"
                )
            if param.numel():
                plan_of(options, param.shape)  # raises if there is none
        if options.structure != "diagonal":
            warn_of_long_vectors(params)

    def options_of(self, group: Group) -> Options:
        """Return the options of a parameter group as one object, checked when one has changed."""
        values = [group[name] for name in self._names]
        known = self._known_options.get(id(group))
        if known is not None and all(a is b for a, b in zip(values, known[0], strict=True)):
            return known[1]
        options = self.options_kind(*values)
        self._known_options[id(group)] = (values, options)
        return options

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        curvature: Mapping[Tensor, Tensor | OuterProducts] | None = None,
    ) -> Any:
        """Take one step.

        Args:
            closure: evaluates the loss again and returns it, as for all of torch's optimizers.
            curvature: for some parameters, vectors of shape ``(K, *parameter.shape)``, or an
                ``OuterProducts`` of such, whose outer products are summed instead of the gradient's
                (per-example gradients divided by ``sqrt(K)``, columns of a Gauss-Newton matrix,
                ...).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            work = self._agreed_work(curvature or {})
            self._skipped += int(work.verdict) == SKIP
            if work.verdict == GO:
                for group, options, params in work.groups:
                    self._step_group(group, options, params, work.vectors)
        return loss

    def _agreed_work(self, curvature: Mapping[Tensor, Tensor | OuterProducts]) -> Work:
        """Return what to do, with the verdict on the host, that of all ranks if they share work."""
        if self._shares_work():
            self._sharding = self._sharding or Sharding()
            check = partial(self._checked_work, curvature)
            work = self._sharding.begin(self.param_groups, self.state, check, self._name)
        else:
            work = self._checked_work(curvature)
            work = work._replace(verdict=int(work.verdict))
        if work.verdict == RAISE:
            raise ValueError(self._nonfinite_sentence(work))
        return work

    def _shares_work(self) -> bool:
        """Tell whether other ranks step with this one."""
        if not self._distributed or not torch.distributed.is_available():
            return False
        if not torch.distributed.is_initialized():
            return False
        return wanted(param for group in self.param_groups for param in group["params"])

    def _checked_work(self, curvature: Mapping[Tensor, Tensor | OuterProducts]) -> Work:
        """Check everything that a step needs, and change nothing."""
        groups = []
        for group in self.param_groups:
            options = self.options_of(group)
            layout = tuple(group[name] for name in LAYOUT)
            if self._layouts.get(id(group), layout) != layout:
                names = ", ".join(LAYOUT)
                raise ValueError(
                    f"{names} cannot change after the first step: make a new optimizer"
                )
            params = [param for param in group["params"] if has_gradient(param)]
            groups.append((group, options, params))
        vectors = vectors_of(curvature, self.param_groups) if curvature else {}
        if self._sharding is not None and vectors:
            raise ValueError(
                f"curvature cannot be given while ranks share the work: leave it out, {OFF}"
            )
        read = attrgetter("grad") if self._sharding is None else local_gradient
        return Work(groups, vectors, verdict_on(groups, vectors, read))

    def _nonfinite_sentence(self, work: Work) -> str:
        """Say which gradients are not finite; if none, the curvature that was given may be."""
        names = []
        for _, _, params in work.groups:
            for param in params:
                if not torch.isfinite(local_gradient(param)).all():
                    names.append(self._name(param))
        if not names:
            names = ["the curvature" if work.vectors else "a parameter on another rank"]
        return (
            f"gradient of {', '.join(names[:5])} has NaN or infinite entries; nothing was changed. "
            'Lower the learning rate, clip gradients, or pass nonfinite="skip" to skip such steps'
        )

    def _step_group(
        self,
        group: Group,
        options: Options,
        params: list[Tensor],
        vectors: Mapping[Tensor, Tensor],
    ) -> None:
        """Step the parameters of a group."""
        count = group["count"]
        group["count"] += 1
        if params or self._sharding is not None:
            self._layouts[id(group)] = tuple(group[name] for name in LAYOUT)
        if self._sharding is None:
            gradients = {param: self._gradient(param, options) for param in params}
            batches = self._arranged(group, options, params)
            now = Moment(count, turns_at(options, count))
            for done, steps in self._steps(options, batches, gradients, vectors, now):
                apply_steps(options, done, steps)
        elif params:
            now = Moment(count, turns_at(options, count))
            compute = partial(self._compute_shared, group, options, now)
            # Replicas of a shard must be rounded alike, whatever random numbers their ranks used.
            apply = partial(apply_steps, options, seed=group["count"])
            self._sharding.step(params, compute, apply)

    def _gradient(self, param: Tensor, options: Options) -> Tensor:
        """Return the gradient that a parameter learns from."""
        return cast(Tensor, param.grad)

    def _compute_shared(
        self,
        group: Group,
        options: Options,
        now: Moment,
        params: list[Tensor],
        gradients: list[Tensor],
        number: int,
    ) -> list[Tensor]:
        """Return the steps of what this rank owns in one round of work, before the rate."""
        batches = self._arranged(group, options, params, number)
        known = dict(zip(params, gradients, strict=True))
        steps: dict[Tensor, Tensor] = {}
        for done, parts in self._steps(options, batches, known, {}, now):
            steps.update(zip(done, parts, strict=True))
        return [steps[param] for param in params]

    def _steps(
        self,
        options: Options,
        batches: Sequence[Batch],
        gradients: Mapping[Tensor, Tensor],
        vectors: Mapping[Tensor, Tensor],
        now: Moment,
    ) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Step batch by batch; give out parameters with their steps before the learning rate.

        Parameters without a basis that can move at once do so, and are not given out.
        """
        at_once = self._sizes is None and self._sharding is None
        assembly = Assembly()
        for batch in batches:
            if at_once and isinstance(batch, VectorBatch) and batch.can_step_at_once(options):
                batch.step_at_once(options, gradients, vectors)
                continue
            steps = batch.steps(options, gradients, vectors, now)
            params, whole = assembly.complete(batch.members, steps)
            if self._sizes is not None:
                note_sizes(self._sizes, params, whole, gradients, options.lr)
            if params:
                yield params, whole

    def _arranged(
        self, group: Group, options: Options, params: Sequence[Tensor], number: int = 0
    ) -> list[Batch]:
        """Return the batches of parameters that have a gradient now, in one round of work."""
        key = (id(group), number)
        if key not in self._batches:
            self._batches[key] = Batches(self._batches.values(), self._clock, self._arithmetic)
        plan = partial(self._plan, options)
        create = partial(self._new_state, options)
        return self._batches[key].arrange(params, self.state, plan, create)

    def _plan(self, options: Options, param: Tensor) -> Plan:
        """Return how what is stepped here of a parameter is laid out."""
        if self._sharding is not None:
            return self._sharding.plan(param)
        return plan_of(options, param.shape)

    def _new_state(self, options: Options, param: Tensor, plan: Plan) -> formats.State:
        return formats.initial_state(options, plan, param.dtype, param.device)

    def _init_group(self, group: Group, skip_non_grad_params: bool = True) -> None:
        """Create the state of a group, as Megatron asks for before it loads a checkpoint."""
        options = self.options_of(group)
        for param in group["params"]:
            skipped = skip_non_grad_params and param.grad is None
            if param.numel() and not skipped and not self.state[param]:
                plan = plan_of(options, param.shape)
                self.state[param].update(self._new_state(options, param, plan))

    def _name(self, param: Tensor) -> str:
        return name_of(param, self.param_groups)

    def __repr__(self) -> str:
        """Show what differs from the defaults, with one line for each parameter group."""
        return one_line_each(type(self), self.defaults, self.param_groups)

    def state_dict(self, *, bases: bool = True) -> dict[str, Any]:
        """Return everything that a checkpoint needs; of state that ranks share, this rank's part.

        Such parts can only be saved with ``torch.distributed.checkpoint``. Without ``bases``, files
        are half as large: who loads one learns the bases of matrices anew, in moments, from a
        portrait of the curvature that is in it.
        """
        return checkpoint.to_save(super().state_dict(), self, bases)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned; what does not fit raises and changes nothing."""
        with checkpoint.loading(self, state_dict):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles need."""
        more = {"_compile": self._compile, "_distributed": self._distributed, "_more": self._more}
        return {**super().__getstate__(), **more}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied, unpickled or loaded optimizer; new options get their defaults."""
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._prepare()

    def summary(self) -> Summary:
        """Tell structure, memory and matrix-product work per step of each parameter.

        ``print`` it to see a table.
        """
        return summary_of(self._with_options(), self.state)

    def spectra(self) -> dict[str, dict[str, Any]]:
        """Return eigenvalues, condition and speed of rotation of each matrix stepped here."""
        return spectra_of(self._with_options(), self.state, self._plan)

    def metrics(self) -> dict[str, float]:
        """Return numbers for TensorBoard, W&B or MLflow, read back from the device all at once.

        They are ``weight_norm``, ``condition`` of the curvature and ``rotation_speed``, and after a
        first call also ``gradient_norm`` and ``update_norm``, each with ``/`` and the parameter's
        name, ``steps``, ``skipped_steps``.
        """
        self._sizes = {} if self._sizes is None else self._sizes
        numbers = metrics_of(self._with_options(), self.state, self._sizes, self._plan)
        return {**numbers, "skipped_steps": self._skipped}

    def _with_options(self) -> list[tuple[Group, Options]]:
        return [(group, self.options_of(group)) for group in self.param_groups]


def has_gradient(param: Tensor) -> bool:
    """Tell whether a parameter has a gradient; raise if it is one that cannot be used."""
    gradient = param.grad
    if gradient is None or not param.numel():
        return False
    if gradient.layout != torch.strided:
        raise TypeError(
            f"a gradient of shape {tuple(gradient.shape)} is sparse; Spectral needs dense "
            "gradients (for torch.nn.Embedding, pass sparse=False)"
        )
    if not gradient.is_floating_point():
        raise TypeError(
            f"gradients must be real floating point, got {gradient.dtype}; view complex weights as "
            "real"
        )
    return True


def verdict_on(
    groups: Sequence[tuple[Group, Options, list[Tensor]]],
    vectors: Mapping[Tensor, Tensor],
    read: Callable[[Tensor], Any],
) -> Tensor | int:
    """Return ``GO``, ``SKIP`` or ``RAISE`` after a look at gradients, as ``read``, and vectors.

    It is a tensor unless nothing was looked at, so that nothing waits for the device.
    """
    verdict: Tensor | int = GO
    for _, options, params in groups:
        if options.nonfinite == "ignore" or not params:
            continue
        tensors = [read(param) for param in params]
        tensors += [vectors[param] for param in params if param in vectors]
        worst = SKIP if options.nonfinite == "skip" else RAISE
        newest = ~all_finite(tensors) * worst
        if isinstance(verdict, Tensor):
            newest = torch.maximum(verdict, newest.to(verdict.device))
        verdict = newest
    return verdict


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether no entry is NaN or infinite, as a tensor on the device of the first."""
    # The least and the largest entry show NaN as well, and take one reading of a tensor.
    ends: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel():
            ends += [end.to(tensors[0].device) for end in torch.aminmax(tensor)]
    return torch.isfinite(torch.stack(ends)).all() if ends else torch.tensor(True)


def warn_of_long_vectors(params: Sequence[Tensor]) -> None:
    """Warn of vectors that look like matrices in a row."""
    lengths = [param.numel() for param in params if param.ndim == 1]
    longest = max(lengths, default=0)
    if longest > LONGEST_VECTOR:
        warnings.warn(
            f"a vector of {longest:,} entries looks like matrices in a row, as DeepSpeed ZeRO and "
            "FSDP1 make: it steps as in AdamW, for its matrices cannot be seen. Use DDP or FSDP2 "
            '(fully_shard), which keep them, or pass structure="diagonal" if this is meant',
            stacklevel=5,
        )
