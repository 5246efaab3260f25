"""Optimizers by name, all built the same way: ours and those we compare with, each from its own
package.

    optimizer = build("soap", model, lr=1e-3, weight_decay=0.01, interval=2)

Learning rates mean about the same to all of them: an update has entries of size about `lr`. Weight
decay is always decoupled (p ← p − lr · weight_decay · p). Everything else is left as its authors
chose it, but for what makes learning rates comparable: Muon's updates have the size of AdamW's
(`match_rms_adamw`), Scalable Shampoo's that of RMSprop's; and HeavyBall's SOAP preconditions sides
of up to 10,000, as that of SOAP's authors does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eigenstep.optim import Spectral

from .console import UserError, require_peer

Named = list[tuple[str, Tensor]]

NOT_HIDDEN = ("embed", "position", "head")
"""A parameter whose name has one of these parts is the input or output of a network, not a hidden
layer.
"""


@dataclass(frozen=True)
class Entry:
    """One optimizer.

    Attributes: summary: What it is and where it comes from. make: Called with the named parameters,
        lr and weight decay, and the options of `build`. interval: The option of `make` that says
        how many steps go by between preconditioner updates, if any. for_model: Called in place of
        `make` where a model is given: with it, lr and the same options.
    """

    summary: str
    make: Callable[..., Optimizer]
    interval: str | None = "interval"
    for_model: Callable[..., Optimizer] | None = None


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

    Args: name: One of `OPTIMIZERS`. parameters: A model, of which ours see what its modules are, or
        what `model.named_parameters()` gives; frozen parameters are left out. lr: Learning rate.
        weight_decay: Decoupled weight decay. interval: Steps between two updates of the
        preconditioner; optimizers without one do not look at it. Ours take a schedule as well.
        **options: Passed on to the optimizer's own constructor.
    """
    if name not in OPTIMIZERS:
        raise UserError(f"no optimizer {name!r}: expected one of {', '.join(OPTIMIZERS)}")
    for argument, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"{argument} must be finite and at least 0, got {value}")
    if isinstance(interval, int) and interval < 1:
        raise UserError(f"interval must be at least 1 step, got {interval}")
    model = parameters if isinstance(parameters, nn.Module) else None
    pairs = parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters
    named = [(key, parameter) for key, parameter in pairs if parameter.requires_grad]
    if not named:
        raise UserError("there is no parameter that requires a gradient")
    entry = OPTIMIZERS[name]
    options = {**({entry.interval: interval} if entry.interval else {}), **options}
    if model is not None and entry.for_model is not None:
        return entry.for_model(model, lr, weight_decay=weight_decay, **options)
    return entry.make(named, lr, weight_decay, **options)


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


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Tell whether Muon should update a parameter: the matrices, but for a network's input and
    output layers.
    """
    return parameter.ndim == 2 and not any(part in name for part in NOT_HIDDEN)


def _tensors(named: Named) -> list[Tensor]:
    return [parameter for _, parameter in named]


def _adamw(named: Named, lr: float, weight_decay: float, **options: Any) -> Optimizer:
    return torch.optim.AdamW(_tensors(named), lr=lr, weight_decay=weight_decay, **options)


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
    parts: list[Optimizer] = []
    adamw = {
        name.removeprefix("adamw_"): options.pop(name)
        for name in list(options)
        if name.startswith("adamw_")
    }
    if hidden:
        # Updates as large as AdamW's, so that one learning rate suits both parts.
        options = {"adjust_lr_fn": "match_rms_adamw", **options}
        parts.append(kind(hidden, lr=lr, weight_decay=weight_decay, **options))
    if others:
        ratio = adamw.pop("ratio", 1.0)
        parts.append(torch.optim.AdamW(others, lr=ratio * lr, weight_decay=weight_decay, **adamw))
    return Together(parts)


def _heavyball(kind: str, **defaults: Any) -> Callable[..., Optimizer]:
    def make(named: Named, lr: float, weight_decay: float, **options: Any) -> Optimizer:
        heavyball = require_peer("heavyball")
        # Schedules do that
        warnings.filterwarnings("ignore", "Learning rate changed between steps")
        if not named[0][1].is_cuda:
            heavyball.utils.compile_mode = (
                None  # on a CPU compiling takes minutes and gains nothing
            )
        options = {"lr": lr, "weight_decay": weight_decay, **defaults, **options}
        optimizer: Optimizer = getattr(heavyball, kind)(_tensors(named), **options)
        return optimizer

    return make


def _psgd_kron(
    named: Named, lr: float, weight_decay: float, interval: int, **options: Any
) -> Optimizer:
    options = {"preconditioner_update_probability": 1 / interval, **options}
    return _heavyball("PSGDKron")(named, lr, weight_decay, **options)


def _soap_reference(named: Named, lr: float, weight_decay: float, **options: Any) -> Optimizer:
    soap = require_peer("pytorch_optimizer").SOAP
    optimizer: Optimizer = soap(_tensors(named), lr=lr, weight_decay=weight_decay, **options)
    return optimizer


def _scalable_shampoo(named: Named, lr: float, weight_decay: float, **options: Any) -> Optimizer:
    package = require_peer("pytorch_optimizer")
    # Grafted on RMSprop, with averaged momentum: the size of its updates is then AdamW's too.
    options = {
        "graft_type": require_peer(
            "pytorch_optimizer.optimizer.utils.graft"
        ).LayerWiseGrafting.RMSPROP,
        "moving_average_for_momentum": True,
        "decoupled_weight_decay": True,
        **options,
    }
    optimizer: Optimizer = package.ScalableShampoo(
        _tensors(named), lr=lr, weight_decay=weight_decay, **options
    )
    return optimizer


def _spectral(recipe: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    def make(named: Named, lr: float, weight_decay: float, **options: Any) -> Optimizer:
        return recipe(named, lr, weight_decay=weight_decay, **options)

    return make


# To add an optimizer, write its maker above and one entry here.
OPTIMIZERS: Mapping[str, Entry] = {
    "spectral": Entry(
        "Spectral, of this package", _spectral(Spectral), for_model=Spectral.for_model
    ),
    "spectral_fast": Entry(
        "Spectral.fast, of this package",
        _spectral(Spectral.fast),
        for_model=Spectral.fast.for_model,
    ),
    "spectral_paper": Entry(
        "Spectral.paper, the paper's recipe, of this package", _spectral(Spectral.paper)
    ),
    "adamw": Entry("AdamW, of torch", _adamw, interval=None),
    "muon": Entry("Muon for hidden matrices, AdamW for the rest, of torch", _muon, interval=None),
    "muon_float32": Entry(
        "the same with Newton-Schulz in float32", partial(_muon, in_float32=True), interval=None
    ),
    "soap": Entry(
        "SOAP, of heavyball", _heavyball("SOAP", max_precond_dim=10_000), "precondition_frequency"
    ),
    "soap_2048": Entry(
        "SOAP, of heavyball, which has no basis for sides above 2048",
        _heavyball("SOAP"),
        "precondition_frequency",
    ),
    "klsoap": Entry("KL-SOAP, of heavyball", _heavyball("KLSOAP"), "precondition_frequency"),
    "klshampoo": Entry(
        "KL-Shampoo, of heavyball", _heavyball("KLShampoo"), "precondition_frequency"
    ),
    "psgdkron": Entry("PSGD Kron, of heavyball", _psgd_kron),
    "soap_reference": Entry(
        "SOAP, of pytorch_optimizer", _soap_reference, "precondition_frequency"
    ),
    "scalable_shampoo": Entry(
        "Scalable Shampoo, of pytorch_optimizer", _scalable_shampoo, "preconditioning_compute_steps"
    ),
}
