"""Optimizers by name, all built the same way: ours and those we compare with, each from its own
package.

    optimizer = build("soap", model, lr=1e-3, weight_decay=0.01, interval=2)

Learning rates mean about the same to all of them: an update has entries of size about `lr`. Weight
decay is always decoupled (p ← p − lr · weight_decay · p). Everything else is left as its authors
chose it, but for what makes learning rates comparable: Muon's updates have the size of AdamW's
(`match_rms_adamw`), Scalable Shampoo's that of RMSprop's; and HeavyBall's SOAP preconditions sides
of up to 10,000, as that of SOAP's authors does.

In the suite of benchmarks (`build_in_suite`) they run as a demanding user runs them. Muon's kind
gets all hidden matrices there: convolutions as matrices of a row for each channel, each expert of a
stack by itself; AdamW gets the rest, at the same learning rate. Newton-Schulz steps are in float32,
which CPUs do best, and HeavyBall's SOAP has its own defaults.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eigenstep import Spectral, Turning

from .baselines.orthogonal_soap import OrthogonalSOAP
from .console import UserError, require_peer

Named = list[tuple[str, Tensor]]
Options = Mapping[str, Any]

NOT_HIDDEN = ("embed", "position", "head")
"""A parameter whose name has one of these parts is the input or output of a network, not a hidden
layer.
"""
GRID = (1e-3, 3e-3, 1e-2, 3e-2)
HIGHER = (3e-3, 1e-2, 3e-2, 1e-1)
BETAS: tuple[Options, ...] = ({"betas": (0.9, 0.95)}, {"betas": (0.95, 0.95)})
MOMENTUM: tuple[Options, ...] = ({"momentum": 0.95}, {"momentum": 0.9})


@dataclass(frozen=True)
class Rival:
    """One optimizer.

    Attributes:
        summary: What it is and where it comes from.
        make: Called with the named parameters, lr and weight decay, and the options of `build`.
        interval: The option of `make` that says how many steps go by between preconditioner
            updates, if any.
        for_model: Called in place of `make` where a model is given: with it, lr and the same
            options.
        in_suite: Called in place of `make` in the suite.
        lrs: The learning rates with which a search of the suite begins, around its usual best.
        momenta: Options that such a search chooses from, the usual one first.
    """

    summary: str
    make: Callable[..., Optimizer]
    interval: str | None = None
    for_model: Callable[..., Optimizer] | None = None
    in_suite: Callable[..., Optimizer] | None = None
    lrs: Sequence[float] = GRID
    momenta: Sequence[Options] = BETAS


def build(
    name: str,
    parameters: nn.Module | Iterable[tuple[str, Tensor]],
    lr: float,
    weight_decay: float = 0.0,
    *,
    interval: int | list[tuple[int, int]] = 2,
    **options: Any,
) -> Optimizer:
    """Build an optimizer.

    Args:
        name: One of `RIVALS`.
        parameters: A model, of which ours see what its modules are, or what
            `model.named_parameters()` gives; frozen parameters are left out.
        lr: Learning rate.
        weight_decay: Decoupled weight decay.
        interval: Steps between two updates of the preconditioner; optimizers without one do not
            look at it. Ours take a schedule as well.
        **options: Passed on to the optimizer's own constructor.
    """
    rival = find(name)
    _check(lr, weight_decay, interval)
    if rival.interval:
        options = {rival.interval: interval, **options}
    if not isinstance(parameters, nn.Module):
        return rival.make(trained(parameters), lr, weight_decay, **options)
    named = trained(parameters.named_parameters())
    if rival.for_model is None:
        return rival.make(named, lr, weight_decay, **options)
    return rival.for_model(parameters, lr, weight_decay=weight_decay, **options)


def _check(lr: float, weight_decay: float, interval: object) -> None:
    for argument, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"{argument} must be finite and at least 0, got {value}")
    if isinstance(interval, int) and interval < 1:
        raise UserError(f"interval must be at least 1 step, got {interval}")


def build_in_suite(
    name: str, model: nn.Module, lr: float, weight_decay: float, options: Options
) -> Optimizer:
    """Build an optimizer for a network as the suite runs it."""
    rival = find(name)
    if rival.in_suite is None:
        return build(name, model, lr, weight_decay, **options)
    named = trained(model.named_parameters())
    return rival.in_suite(model if name == TABLES else named, lr, weight_decay, **options)


def find(name: str) -> Rival:
    """Return the rival of a name."""
    if name not in RIVALS:
        raise UserError(f"no optimizer {name!r}: expected one of {', '.join(RIVALS)}")
    return RIVALS[name]


def trained(pairs: Iterable[tuple[str, Tensor]]) -> Named:
    """Return the named parameters that are not frozen."""
    named = [(key, parameter) for key, parameter in pairs if parameter.requires_grad]
    if not named:
        raise UserError("there is no parameter that requires a gradient")
    return named


class Together(Optimizer):
    """Several optimizers, each with its own parameters, that step, save and load as one."""

    def __init__(self, parts: list[Optimizer]) -> None:
        """Join optimizers; their parameter groups are kept in their order."""
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        self._share()

    def _share(self) -> None:
        """Make the parts work on this optimizer's groups and state, which are the ones that are
        saved and loaded.
        """
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        """Keep the parts in copies and pickles."""
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state and hand it to the parts."""
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every part."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.parts:
            part.step()
        return loss


class View(NamedTuple):
    """A matrix that shares memory with a parameter, or with one member of a stack."""

    parameter: Tensor
    matrix: Tensor
    member: int | None


class OnMatrices(Together):
    """Optimizers that step matrices which are views of the parameters of a network."""

    def __init__(self, parts: list[Optimizer], views: list[View]) -> None:
        """Join optimizers, some of which step views."""
        super().__init__(parts)
        self.views = views

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hand the gradients to the views, and step every part."""
        for parameter, matrix, member in self.views:
            gradient = parameter.grad
            if gradient is not None:
                part = gradient if member is None else gradient[member]
                matrix.grad = part.reshape(matrix.shape)
        return super().step(closure)


def split(named: Named) -> tuple[list[View], list[Tensor]]:
    """Return views of the hidden matrices, and all other parameters."""
    views: list[View] = []
    others: list[Tensor] = []
    for name, parameter in named:
        if parameter.ndim < 2 or any(part in name for part in NOT_HIDDEN):
            others.append(parameter)
        elif "experts" in name:
            for number, member in enumerate(parameter.data):
                views.append(View(parameter, nn.Parameter(member), number))
        else:
            views.append(View(parameter, nn.Parameter(parameter.data.flatten(1)), None))
    return views, others


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Tell whether Muon should update a parameter: the matrices, but for a network's input and
    output layers.
    """
    return parameter.ndim == 2 and not any(part in name for part in NOT_HIDDEN)


def _on_matrices(
    make: Callable[..., Optimizer], named: Named, lr: float, weight_decay: float, **options: Any
) -> Optimizer:
    views, others = split(named)
    parts: list[Optimizer] = []
    if views:
        matrices = [view.matrix for view in views]
        parts.append(make(matrices, lr=lr, weight_decay=weight_decay, **options))
    if others:
        parts.append(torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, betas=(0.9, 0.95)))
    return OnMatrices(parts, views)


def _muon_of_suite(matrices: list[Tensor], **options: Any) -> Optimizer:
    from .muon import Muon

    return Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)


def _of_muons_kind(
    kind: str, matrices: list[Tensor], *, lr: float, weight_decay: float, **options: Any
) -> Optimizer:
    muon = "pytorch_optimizer.optimizer.muon"
    name = "zero_power_via_newton_schulz_5"
    plain = getattr(require_peer("pytorch_optimizer.optimizer.utils.matrix"), name)
    module = require_peer(f"{muon}.{kind.lower()}")
    for place in (module, require_peer(f"{muon}.base")):
        setattr(place, name, partial(plain, dtype=torch.float32))  # their default is bfloat16
    group = {"params": matrices, "use_muon": True, "lr": lr, "weight_decay": weight_decay}
    optimizer: Optimizer = getattr(module, kind)([{**group, **options}])
    return optimizer


def _muon(
    named: Named, lr: float, weight_decay: float, in_float32: bool = False, **options: Any
) -> Optimizer:
    """Options "adamw_..." are those of the part that AdamW steps; `adamw_ratio` is its learning
    rate over `lr`.
    """
    if not hasattr(torch.optim, "Muon"):
        raise UserError(f"torch.optim.Muon needs torch 2.9 or newer, this is {torch.__version__}")
    from . import muon

    kind = muon.Muon if in_float32 else torch.optim.Muon
    hidden = [parameter for name, parameter in named if is_hidden_matrix(name, parameter)]
    others = [parameter for name, parameter in named if not is_hidden_matrix(name, parameter)]
    adamw = {
        name.removeprefix("adamw_"): options.pop(name)
        for name in list(options)
        if name.startswith("adamw_")
    }
    parts: list[Optimizer] = []
    if hidden:
        # Updates as large as AdamW's, so that one learning rate suits both parts.
        options = {"adjust_lr_fn": "match_rms_adamw", **options}
        parts.append(kind(hidden, lr=lr, weight_decay=weight_decay, **options))
    if others:
        ratio = adamw.pop("ratio", 1.0)
        parts.append(torch.optim.AdamW(others, lr=ratio * lr, weight_decay=weight_decay, **adamw))
    return Together(parts)


def _of(package: str, kind: str, **defaults: Any) -> Callable[..., Optimizer]:
    """Return what makes an optimizer of a package."""
    return partial(_make, package, kind, defaults)


def _make(
    package: str,
    kind: str,
    defaults: Options,
    named: Named,
    lr: float,
    weight_decay: float,
    **options: Any,
) -> Optimizer:
    module = require_peer(package)
    if package == "heavyball":
        # Schedules change learning rates between steps.
        warnings.filterwarnings("ignore", "Learning rate changed between steps")
        if not named[0][1].is_cuda:
            # On a CPU compiling takes minutes and gains nothing.
            module.utils.compile_mode = None
    parameters = [parameter for _, parameter in named]
    more = {**defaults, **options}
    optimizer: Optimizer = getattr(module, kind)(
        parameters, lr=lr, weight_decay=weight_decay, **more
    )
    return optimizer


def _psgd_kron(
    named: Named, lr: float, weight_decay: float, interval: int, **options: Any
) -> Optimizer:
    options = {"preconditioner_update_probability": 1 / interval, **options}
    return _of("heavyball", "PSGDKron")(named, lr, weight_decay, **options)


def _scalable_shampoo(named: Named, lr: float, weight_decay: float, **options: Any) -> Optimizer:
    # Grafted on RMSprop, with averaged momentum: the size of its updates is then AdamW's too.
    graft = require_peer("pytorch_optimizer.optimizer.utils.graft").LayerWiseGrafting.RMSPROP
    defaults = {"graft_type": graft, "moving_average_for_momentum": True}
    make = _of("pytorch_optimizer", "ScalableShampoo", decoupled_weight_decay=True, **defaults)
    return make(named, lr, weight_decay, **options)


def _with_tables(model: nn.Module, lr: float, weight_decay: float, **options: Any) -> Optimizer:
    """SOAP, with the learning rates that `Spectral.for_model` gives to positions and small
    embeddings.
    """
    groups = Spectral.for_model(model, lr).param_groups
    rates = {parameter: group["lr"] for group in groups for parameter in group["params"]}
    heavyball = require_peer("heavyball")
    heavyball.utils.compile_mode = None
    parts = [
        {"params": [p for p in rates if rates[p] == rate], "lr": rate}
        for rate in sorted(set(rates.values()))
    ]
    optimizer: Optimizer = heavyball.SOAP(
        parts, weight_decay=weight_decay, precondition_frequency=2, **options
    )
    return optimizer


def _ours(
    summary: str,
    recipe: Callable[..., Optimizer],
    for_model: Callable[..., Optimizer] | None = None,
) -> Rival:
    def make(named: Named, lr: float, weight_decay: float, **options: Any) -> Optimizer:
        return recipe(named, lr, weight_decay=weight_decay, **with_turning(options))

    def make_for(model: nn.Module, lr: float, **options: Any) -> Optimizer:
        assert for_model is not None
        return for_model(model, lr, **with_turning(options))

    by_model = None if for_model is None else make_for
    return Rival(f"{summary}, of this package", make, "interval", by_model, momenta=({},))


TURNING = {"rotation": "rotation", "map": "map", "basis_lr": "rate", "basis_dtype": "dtype"}
"""Options of one word each, as files and command lines have them, by the part of `Turning`."""


def with_turning(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `Spectral` with those that say how bases turn as one `Turning`."""
    others = {name: value for name, value in options.items() if name not in TURNING}
    parts = {TURNING[name]: value for name, value in options.items() if name in TURNING}
    if parts:
        others["turning"] = Turning(**parts)
    return others


def _paper(named: Named, lr: float, weight_decay: float, **options: Any) -> Optimizer:
    return Spectral.paper(named, lr, weight_decay=weight_decay, **options)


def _heavyball(kind: str, summary: str, interval: int | None = None, **defaults: Any) -> Rival:
    """Return an optimizer of HeavyBall, whose bases follow `build`'s interval if it has none of its
    own.
    """
    option = "precondition_frequency"
    if interval is None:
        in_suite = _of("heavyball", kind, **{option: 2})
        make = _of("heavyball", kind, **defaults)
        return Rival(f"{summary}, of heavyball", make, option, in_suite=in_suite)
    make = _of("heavyball", kind, **{option: interval})
    return Rival(f"{summary}, of heavyball, every {interval} steps", make, in_suite=make)


def _in_suite(
    summary: str,
    make: Callable[..., Optimizer],
    lrs: Sequence[float] = GRID,
    momenta: Sequence[Options] = BETAS,
) -> Rival:
    return Rival(summary, make, in_suite=make, lrs=lrs, momenta=momenta)


_ADAMW = _of("torch.optim", "AdamW")
_BETA2 = ({"betas": (0.9, 0.999)}, {"betas": (0.95, 0.999)})

# To add an optimizer, write its maker above and one entry here. `momenta` begins with what its
# package or paper recommends.
RIVALS: Mapping[str, Rival] = {
    "spectral": _ours("Spectral", Spectral, Spectral.for_model),
    "spectral_fast": _ours("Spectral.fast", Spectral.fast, Spectral.fast.for_model),
    "spectral_paper": Rival(
        "Spectral.paper, the paper's recipe, of this package", _paper, "interval", momenta=({},)
    ),
    "adamw": _in_suite(
        "AdamW, of torch",
        _ADAMW,
        momenta=({"betas": (0.9, 0.95)}, {"betas": (0.9, 0.999)}, {"betas": (0.95, 0.95)}),
    ),
    "muon": Rival(
        "Muon for hidden matrices, AdamW for the rest, of torch",
        _muon,
        in_suite=partial(_on_matrices, _muon_of_suite),
        lrs=HIGHER,
        momenta=MOMENTUM,
    ),
    "muon_float32": Rival(
        "the same with Newton-Schulz in float32", partial(_muon, in_float32=True)
    ),
    "soap": _heavyball("SOAP", "SOAP", max_precond_dim=10_000),
    "soap_2048": _heavyball("SOAP", "SOAP without a basis for sides above 2048"),
    "klsoap": _heavyball("KLSOAP", "KL-SOAP"),
    "klshampoo": _heavyball("KLShampoo", "KL-Shampoo"),
    "psgdkron": Rival("PSGD Kron, of heavyball", _psgd_kron, "interval"),
    "soap_reference": Rival(
        "SOAP, of pytorch_optimizer", _of("pytorch_optimizer", "SOAP"), "precondition_frequency"
    ),
    "scalable_shampoo": Rival(
        "Scalable Shampoo, of pytorch_optimizer", _scalable_shampoo, "preconditioning_compute_steps"
    ),
    "normuon": _in_suite(
        "NorMuon, of pytorch_optimizer, in float32",
        partial(_on_matrices, partial(_of_muons_kind, "NorMuon", update_scale="match_rms")),
        HIGHER,
        MOMENTUM,
    ),
    "adamuon": _in_suite(
        "AdaMuon, of pytorch_optimizer, in float32",
        partial(_on_matrices, partial(_of_muons_kind, "AdaMuon")),
        HIGHER,
        ({"betas": (0.95, 0.95)}, {"betas": (0.9, 0.95)}),
    ),
    "soap_orthogonal": _in_suite(
        "SOAP followed by orthogonalization, ours, every 2 steps",
        partial(_on_matrices, OrthogonalSOAP),
        HIGHER,
    ),
    "soap_tables": _in_suite(
        "SOAP every 2 steps, with Spectral's rates of positions and small embeddings", _with_tables
    ),
    "soap_1": _heavyball("SOAP", "SOAP", 1),
    "soap_10": _heavyball("SOAP", "SOAP", 10),
    "klsoap_1": _heavyball("KLSOAP", "KL-SOAP", 1),
    "klsoap_10": _heavyball("KLSOAP", "KL-SOAP", 10),
    "klshampoo_1": _heavyball("KLShampoo", "KL-Shampoo", 1),
    "klshampoo_10": _heavyball("KLShampoo", "KL-Shampoo", 10),
    "psgd_pro": _in_suite(
        "PSGD PRO, of heavyball",
        _of("heavyball", "PSGDPRO"),
        (3e-4, 1e-3, 3e-3, 1e-2),
        _BETA2,
    ),
    "hyperball": _in_suite(
        "AdamW on hyperballs, of heavyball",
        _of("heavyball", "HyperBallAdamW"),
        HIGHER,
        ({"betas": (0.9, 0.99)}, {"betas": (0.95, 0.99)}),
    ),
    # Their default intervals are made for long runs; SPlus's averaged weights are not for rates
    # that decay to 0.
    "splus": _in_suite(
        "SPlus, of pytorch_optimizer, every 10 steps",
        _of("pytorch_optimizer", "SPlus", inverse_steps=10),
        (3e-2, 1e-1, 3e-1, 1.0),
        _BETA2,
    ),
    "conda": _in_suite(
        "Conda, of pytorch_optimizer, every 10 steps",
        _of("pytorch_optimizer", "Conda", update_proj_gap=10),
        momenta=({"betas": (0.9, 0.999)}, {"betas": (0.9, 0.95)}),
    ),
    "dash": _in_suite(
        "DASH, of pytorch_optimizer, every 2 steps",
        _of("pytorch_optimizer", "DASH", precondition_frequency=2),
    ),
    # In its own blocks of 1024 a step of the recommender takes many seconds, in smaller ones a
    # third of a second.
    "dash_128": _in_suite(
        "DASH in blocks of 128",
        _of("pytorch_optimizer", "DASH", precondition_frequency=2, block_size=128),
    ),
    "dash_10": _in_suite(
        "DASH in blocks of 128, every 10 steps",
        _of("pytorch_optimizer", "DASH", block_size=128),
    ),
}
TABLES = "soap_tables"
"""The rival that is made for a model; the others are made for its parameters."""
OURS = ("spectral", "spectral_fast")
"""Those of ours that run in the suite."""
SUITE = tuple(n for n, r in RIVALS.items() if n in OURS or (r.in_suite and n != "soap_2048"))
"""Optimizers of the suite."""
TRAINERS = tuple(name for name, r in RIVALS.items() if r.in_suite is not r.make or name == "adamw")
"""Optimizers of the trainer and of the price of a step."""
EVERYWHERE = ("adamw", "soap", "muon", "spectral", "normuon", "klsoap")
"""These run on every task of the suite, in this order; the others on four, `SAMPLE`, unless they
are named.
"""
SAMPLE = ("vit", "gpt_characters", "recommender", "autoencoder")
