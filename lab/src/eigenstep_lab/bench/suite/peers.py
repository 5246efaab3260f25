"""The optimizers of the suite as a demanding user runs them: their packages, usual options, and
what a search tries.

Muon's kind gets the hidden matrices: convolutions as matrices of a row for each channel, each
expert of a stack by itself; AdamW gets the rest, at the same learning rate, as the updates of both
are scaled to be about as large. Newton-Schulz steps are in float32, which CPUs do best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eigenstep.optim import Spectral

from ...console import UserError, require_peer
from ...muon import Muon
from ...registry import NOT_HIDDEN, Named, Together, build
from .orthogonal_soap import OrthogonalSOAP

Options = Mapping[str, Any]
GRID = (1e-3, 3e-3, 1e-2, 3e-2)
HIGHER = (3e-3, 1e-2, 3e-2, 1e-1)
BETAS: tuple[Options, ...] = ({"betas": (0.9, 0.95)}, {"betas": (0.95, 0.95)})
MOMENTUM: tuple[Options, ...] = ({"momentum": 0.95}, {"momentum": 0.9})


@dataclass(frozen=True)
class Peer:
    """One optimizer.

    Attributes: summary: What it is and where it comes from. make: Called with named parameters (or
        the model, `WHOLE`), learning rate, weight decay and options. lrs: The learning rates with
        which a search begins, around its usual best. momenta: Options that a search chooses from,
        the usual one first.
    """

    summary: str
    make: Callable[..., Optimizer]
    lrs: Sequence[float] = GRID
    momenta: Sequence[Options] = BETAS


class OnMatrices(Together):
    """Optimizers that step matrices which are views of the parameters of a network."""

    def __init__(
        self, parts: list[Optimizer], views: list[tuple[Tensor, Tensor, int | None]]
    ) -> None:
        """Join optimizers.

        Args:
            parts: The optimizers.
            views: Parameters, their views, and for a view of one member of a stack, which.
        """
        super().__init__(parts)
        self.views = views

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hand the gradients to the views, and step every part."""
        for parameter, view, member in self.views:
            if parameter.grad is not None:
                view.grad = (parameter.grad if member is None else parameter.grad[member]).reshape(
                    view.shape
                )
        return super().step(closure)


def split(named: Named) -> tuple[list[tuple[Tensor, Tensor, int | None]], list[Tensor]]:
    """Return views of the hidden matrices, with what they are views of, and all other
    parameters.
    """
    views: list[tuple[Tensor, Tensor, int | None]] = []
    others: list[Tensor] = []
    for name, parameter in named:
        if parameter.ndim < 2 or any(part in name for part in NOT_HIDDEN):
            others.append(parameter)
        elif "experts" in name:
            views += [
                (parameter, nn.Parameter(member), k) for k, member in enumerate(parameter.data)
            ]
        else:
            views.append((parameter, nn.Parameter(parameter.data.flatten(1)), None))
    return views, others


def _on_matrices(
    matrix_optimizer: Callable[..., Optimizer],
    named: Named,
    lr: float,
    weight_decay: float,
    **options: Any,
) -> Optimizer:
    views, others = split(named)
    parts: list[Optimizer] = []
    if views:
        parts.append(
            matrix_optimizer(
                [view for _, view, _ in views], lr=lr, weight_decay=weight_decay, **options
            )
        )
    if others:
        parts.append(torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, betas=(0.9, 0.95)))
    return OnMatrices(parts, views)


def _muon(matrices: list[Tensor], **options: Any) -> Optimizer:
    return Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)


def _of_muons_kind(
    kind: str, matrices: list[Tensor], *, lr: float, weight_decay: float, **options: Any
) -> Optimizer:
    muon, name = "pytorch_optimizer.optimizer.muon", "zero_power_via_newton_schulz_5"
    plain = getattr(require_peer("pytorch_optimizer.optimizer.utils.matrix"), name)
    module = require_peer(f"{muon}.{kind.lower()}")
    for place in (module, require_peer(f"{muon}.base")):
        setattr(place, name, partial(plain, dtype=torch.float32))  # their default is bfloat16
    group = {
        "params": matrices,
        "use_muon": True,
        "lr": lr,
        "weight_decay": weight_decay,
        **options,
    }
    optimizer: Optimizer = getattr(module, kind)([group])
    return optimizer


def _registered(
    name: str, model: nn.Module, lr: float, weight_decay: float, **options: Any
) -> Optimizer:
    return build(name, model, lr, weight_decay, **options)


def _package(
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
        module.utils.compile_mode = None  # on a CPU compiling takes minutes and gains nothing
    parameters = [parameter for _, parameter in named]
    optimizer: Optimizer = getattr(module, kind)(
        parameters, lr=lr, weight_decay=weight_decay, **{**defaults, **options}
    )
    return optimizer


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


def _of(package: str, kind: str, **defaults: Any) -> Callable[..., Optimizer]:
    return partial(_package, package, kind, defaults)


def _every(interval: int, name: str, kind: str) -> Peer:
    make = _of("heavyball", kind, precondition_frequency=interval)
    return Peer(f"{name} of heavyball, every {interval} steps", make)


# To add an optimizer, write one entry here. `momenta` begins with what its package or paper
# recommends.
PEERS: Mapping[str, Peer] = {
    "spectral": Peer("Spectral, of this package", partial(_registered, "spectral"), momenta=({},)),
    "spectral_fast": Peer(
        "Spectral.fast, of this package", partial(_registered, "spectral_fast"), momenta=({},)
    ),
    "adamw": Peer(
        "AdamW, of torch",
        _of("torch.optim", "AdamW"),
        momenta=({"betas": (0.9, 0.95)}, {"betas": (0.9, 0.999)}, {"betas": (0.95, 0.95)}),
    ),
    "muon": Peer("Muon, of torch, in float32", partial(_on_matrices, _muon), HIGHER, MOMENTUM),
    "soap": _every(2, "SOAP", "SOAP"),
    "klsoap": _every(2, "KL-SOAP", "KLSOAP"),
    "normuon": Peer(
        "NorMuon, of pytorch_optimizer, in float32",
        partial(_on_matrices, partial(_of_muons_kind, "NorMuon", update_scale="match_rms")),
        HIGHER,
        MOMENTUM,
    ),
    "adamuon": Peer(
        "AdaMuon, of pytorch_optimizer, in float32",
        partial(_on_matrices, partial(_of_muons_kind, "AdaMuon")),
        HIGHER,
        ({"betas": (0.95, 0.95)}, {"betas": (0.9, 0.95)}),
    ),
    "soap_orthogonal": Peer(
        "SOAP followed by orthogonalization, ours, every 2 steps",
        partial(_on_matrices, OrthogonalSOAP),
        HIGHER,
    ),
    "soap_tables": Peer(
        "SOAP every 2 steps, with Spectral's rates of positions and small embeddings", _with_tables
    ),
    "soap_1": _every(1, "SOAP", "SOAP"),
    "soap_10": _every(10, "SOAP", "SOAP"),
    "klsoap_1": _every(1, "KL-SOAP", "KLSOAP"),
    "klsoap_10": _every(10, "KL-SOAP", "KLSOAP"),
    "klshampoo": _every(2, "KL-Shampoo", "KLShampoo"),
    "klshampoo_1": _every(1, "KL-Shampoo", "KLShampoo"),
    "klshampoo_10": _every(10, "KL-Shampoo", "KLShampoo"),
    "psgd_pro": Peer(
        "PSGD PRO, of heavyball",
        _of("heavyball", "PSGDPRO"),
        (3e-4, 1e-3, 3e-3, 1e-2),
        ({"betas": (0.9, 0.999)}, {"betas": (0.95, 0.999)}),
    ),
    "hyperball": Peer(
        "AdamW on hyperballs, of heavyball",
        _of("heavyball", "HyperBallAdamW"),
        HIGHER,
        ({"betas": (0.9, 0.99)}, {"betas": (0.95, 0.99)}),
    ),
    # Their default intervals are made for long runs; SPlus's averaged weights are not for rates
    # that decay to 0.
    "splus": Peer(
        "SPlus, of pytorch_optimizer, every 10 steps",
        _of("pytorch_optimizer", "SPlus", inverse_steps=10),
        (3e-2, 1e-1, 3e-1, 1.0),
        ({"betas": (0.9, 0.999)}, {"betas": (0.95, 0.999)}),
    ),
    "conda": Peer(
        "Conda, of pytorch_optimizer, every 10 steps",
        _of("pytorch_optimizer", "Conda", update_proj_gap=10),
        GRID,
        ({"betas": (0.9, 0.999)}, {"betas": (0.9, 0.95)}),
    ),
    "dash": Peer(
        "DASH, of pytorch_optimizer, every 2 steps",
        _of("pytorch_optimizer", "DASH", precondition_frequency=2),
    ),
    # In its own blocks of 1024 a step of the recommender takes many seconds, in smaller ones a
    # third of a second.
    "dash_128": Peer(
        "DASH in blocks of 128",
        _of("pytorch_optimizer", "DASH", precondition_frequency=2, block_size=128),
    ),
    "dash_10": Peer(
        "DASH in blocks of 128, every 10 steps", _of("pytorch_optimizer", "DASH", block_size=128)
    ),
}
OURS = ("spectral", "spectral_fast")
WHOLE = (*OURS, "soap_tables")
"""Those that are made for a model, the others for its parameters."""
EVERYWHERE = ("adamw", "soap", "muon", "spectral", "normuon", "klsoap")
"""These run on every task, in this order; the others on four, `SAMPLE`, unless they are named."""
SAMPLE = ("vit", "gpt_characters", "recommender", "autoencoder")


def make_optimizer(
    name: str, model: nn.Module, lr: float, weight_decay: float, options: Mapping[str, Any]
) -> Optimizer:
    """Build an optimizer for the parameters of a network that are not frozen."""
    if name not in PEERS:
        raise UserError(f"no optimizer {name!r}: expected one of {', '.join(PEERS)}")
    named = [
        (key, parameter) for key, parameter in model.named_parameters() if parameter.requires_grad
    ]
    return PEERS[name].make(model if name in WHOLE else named, lr, weight_decay, **options)
