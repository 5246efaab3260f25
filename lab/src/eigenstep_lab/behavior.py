"""What the code does, by name: results of studies are kept under it, and are stale once it changes.

Each part of the library (the default step, the paper's recipe, search, ...) takes a fixed stream of
inputs, a fraction of a second long, and gives some numbers. If they agree with those of a known
behavior (``behaviors.json``), to a tolerance that rounding cannot reach but changed arithmetic
does, the part has that behavior's name. Otherwise its name is a hash of the numbers. So renaming a
variable or moving code keeps all results, on any machine, and changed arithmetic cannot hide.

``python -m eigenstep_lab.behavior`` shows all names; ``--record`` adds new ones to the known.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

import eigenstep
from eigenstep import Full, OuterProducts, Spectral, Turning

KNOWN = Path(__file__).with_name("behaviors.json")
LR = 0.01

Shape = tuple[int, ...]
Numbers = list[float]
Array = NDArray[np.float64]

SHAPES: Mapping[str, Shape] = {
    "square": (12, 12),
    "steady": (9, 11),
    "swinging": (9, 11),
    "wide": (6, 10),
    "tall, cut": (25, 8),
    "convolution": (8, 4, 3, 3),
    "experts": (2, 17, 18),
    "vector": (7,),
    "row": (1, 5),
    "faint vector": (9,),
    "growing vector": (11,),
}
FEW_SHAPES = ("wide", "tall, cut", "convolution", "vector", "growing vector")
EXTREME_SHAPES: Mapping[str, Shape] = {"faint matrix": (5, 6), "growing matrix": (4, 5)}
LARGE_SHAPES: Mapping[str, Shape] = {
    "square": (32, 32),
    "tall, cut": (66, 32),
    "embedding": (1024, 32),
    "vector": (40,),
}
"""Shapes with so many entries that their state is kept in fewer bytes."""
LAYOUT_SHAPES: tuple[Shape, ...] = (
    (1281, 700),
    (1280, 700),
    (2000, 300),
    (300, 2000),
    (201, 100),
    (200, 100),
    (1600, 100),
    (50_000, 64),
    (64, 8, 3, 3),
    (8, 30, 20),
    (5, 20, 24),
    (2, 16, 18),
    (40, 129, 130),
    (40, 128, 130),
    (2000,),
)
"""Shapes of which only the layout counts, by the cost of a step; many just reach a limit."""

# Options of optimizers, by case. Adapt them here when arguments change their names.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "kronecker": {"eigenvalues": "kronecker"},
    "plain": {"grafting": False, "nesterov": 0.0, "clip": 0.5, "cautious_weight_decay": True},
    "interval": {"interval": 5, "betas": (0.8, 0.99), "max_ratio": None},
    "root": {"root": 1.0, "grafting": False, "damping": 1e-3},
    "diagonal": {"structure": "diagonal", "eps": 1e-3},
    "bfloat16 bases": {"turning": Turning(dtype=torch.bfloat16)},
    "bfloat16": {"state_dtype": torch.bfloat16},
    "int8": {"state_dtype": torch.int8},
}


@dataclass(frozen=True)
class Case:
    """Something that a part of the library computes.

    Attributes:
        compute: Returns numbers of about one to a hundred.
        tolerance: Rounding changes the numbers by less, and changed arithmetic by more.
    """

    compute: Callable[[], Numbers]
    tolerance: float = 1e-8


def _gradients(name: str, shape: Shape, place: int, steps: int) -> Iterator[Tensor]:
    """Give a stream of gradients: noise of few directions and uneven rows beside a signal that
    swings, with a step without any gradient, a spike and a fading end; or what the name says.
    """
    random = np.random.RandomState(place)  # the stream of this generator is frozen
    rows = shape[0]
    columns = math.prod(shape[1:])
    rank = max(1, min(rows, columns) // 2)
    left = random.standard_normal((rows, rank)) * np.logspace(0, -2, rank)
    signal = random.standard_normal((rows, columns))
    uneven = np.logspace(0, -1.5, rows)[:, None]
    kind = name.split()[0]
    for step in range(steps):
        low = left @ random.standard_normal((rank, columns))
        noise = 0.1 * random.standard_normal((rows, columns))
        gradient = uneven * (low + noise + math.cos(0.8 * step) * signal)
        gradient *= {3: 0.0, 7: 30.0}.get(step, 1.0) * 0.9 ** max(0, step - 14)
        if kind == "steady":
            gradient = 0.1 + 1e-4 * noise
        elif kind == "swinging":
            gradient = (-1.0) ** step + 1e-4 * noise
        elif kind == "growing":
            gradient = 1.1**step * signal
        elif kind == "faint":
            gradient *= 1e-7
        yield torch.from_numpy(gradient.reshape(shape))


def _train(optimizer: Optimizer, named: Mapping[str, Tensor], steps: int) -> Numbers:
    """Step through the streams and return how far all weights have come, halfway and at the end, as
    a projection and a size for each of them.
    """
    streams = []
    probes = []
    for place, (name, param) in enumerate(named.items()):
        streams.append((param, _gradients(name, tuple(param.shape), place, steps)))
        random = np.random.RandomState(1000 + place)
        probe = torch.from_numpy(random.standard_normal(tuple(param.shape)))
        probes.append((param, param.detach().clone(), probe / param.numel() ** 0.5))
    numbers = []
    for step in range(steps):
        for param, stream in streams:
            param.grad = next(stream).to(param.dtype)
        optimizer.step()
        if step + 1 in (steps // 2, steps):
            for param, start, probe in probes:
                moved = (param.detach() - start).double() / LR
                numbers.append(float((moved * probe).sum()))
                numbers.append(float(moved.square().mean().sqrt()))
    return numbers


def _weights(shapes: Mapping[str, Shape], dtype: torch.dtype) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for place, (name, shape) in enumerate(shapes.items()):
        start = np.random.RandomState(2000 + place).standard_normal(shape)
        named[name] = nn.Parameter(torch.from_numpy(start).to(dtype))
    return named


def _steps(
    make: Callable[..., Optimizer],
    shapes: Mapping[str, Shape] = SHAPES,
    dtype: torch.dtype = torch.float64,
    steps: int = 20,
) -> Numbers:
    named = _weights(shapes, dtype)
    return _train(make(list(named.values()), lr=LR), named, steps)


def _some(names: tuple[str, ...]) -> dict[str, Shape]:
    return {name: SHAPES[name] for name in names}


def _option(name: str) -> Case:
    # Weights in float64 keep rounding from deciding how numbers of few bits are rounded.
    make = partial(Spectral, **OPTIONS[name])
    if name in ("bfloat16", "int8"):
        return Case(partial(_steps, make, LARGE_SHAPES, steps=6))
    return Case(partial(_steps, make, _some(FEW_SHAPES), steps=10))


class _Network(nn.Module):
    """Modules of all kinds that ``for_model`` tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 8)
        self.names = nn.Embedding(1024, 4)
        self.position = nn.Parameter(torch.zeros(5, 8))
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24, bias=False)
        self.convolution = nn.Conv2d(4, 8, 3)
        self.experts = nn.Parameter(torch.zeros(3, 6, 5))


def _model_steps() -> Numbers:
    network = _Network().double()
    named = dict(network.named_parameters())
    with torch.no_grad():
        for place, param in enumerate(named.values()):
            start = np.random.RandomState(3000 + place).standard_normal(tuple(param.shape))
            param.copy_(torch.from_numpy(start))
    return _train(Spectral.for_model(network, lr=LR), named, 8)


def _layout() -> Numbers:
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in LAYOUT_SHAPES]
    return [math.log1p(row.flops) for row in Spectral(params, lr=LR).summary()]


def _posterior_steps() -> Numbers:
    named = _weights(_some(("wide", "tall, cut", "vector")), torch.float64)
    optimizer = Spectral.posterior(
        list(named.values()), LR, ess=1000.0, batch_size=10.0, prior_precision=20.0
    )
    streams = {}
    for place, (name, param) in enumerate(named.items()):
        streams[param] = _gradients(name, tuple(param.shape), place, 8)
    numbers = []
    for _ in range(8):
        with optimizer.sampled_params(train=True):
            for param, stream in streams.items():
                param.grad = next(stream) + param.detach()
        optimizer.step()
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        with optimizer.sampled_params(temperature=0.5, generator=generator):
            numbers += [float(param.detach().cos().sum()) for param in named.values()]
    numbers += [float(param.detach().sin().sum()) / LR for param in named.values()]
    return numbers


def _valley(x: Array) -> float:
    """Return the value of a curved valley with uneven, rotated coordinates."""
    y = x + 0.3 * np.roll(x, 1)
    return float((10 * (y[1:] - y[:-1] ** 2) ** 2 + (1 - y[:-1]) ** 2).sum())


def _search(method: str = "spectral", dimension: int = 5, **options: Any) -> Numbers:
    from eigenstep.search import Search

    start = np.linspace(-0.4, 0.3, dimension)
    probe = np.cos(1.7 * np.arange(dimension))
    search = Search(start, 0.4, method=method, seed=3, **options)
    numbers = []
    while search.stop() is None:
        points = search.ask()
        search.tell(points, [_valley(point) for point in points])
        numbers.append(float(np.mean(points @ probe)))
    return [*numbers[:: max(1, len(numbers) // 8)], math.log1p(search.best_fun), len(numbers)]


def _spd_costs(**options: Any) -> Numbers:
    random = np.random.RandomState(5)
    factor = torch.from_numpy(random.standard_normal((5, 5)))
    target = factor @ factor.mT + 0.1 * torch.eye(5, dtype=torch.float64)

    def cost(S: Tensor) -> Tensor:
        return torch.linalg.solve(S, target).diagonal().sum() + torch.logdet(S)

    start = torch.diag(torch.linspace(1, 3, 5, dtype=torch.float64))
    result = eigenstep.minimize_spd(cost, start, max_iter=6, **options)
    numbers = [float(step.fun) for step in result.history]
    return [*numbers, float(result.S.dense().sum()), float(result.ngrad)]


def _learned(**options: Any) -> Numbers:
    random = np.random.RandomState(6)
    S = Full.from_dense(torch.diag(torch.linspace(1, 2, 4, dtype=torch.float64)))
    for _ in range(6):
        vectors = torch.from_numpy(random.standard_normal((2, 4)))
        S = eigenstep.update(S, OuterProducts(vectors), lr=0.2, damping=1e-3, **options)
    return [float(x) for x in S.dense()[0]]


def _fit(**options: Any) -> Numbers:
    random = np.random.RandomState(7)
    inputs = torch.from_numpy(random.standard_normal((20, 3)))

    def log_joint(w: Tensor) -> Tensor:
        return nn.functional.logsigmoid(inputs @ w).sum() - 0.5 * w.square().sum()

    start = torch.zeros(3, dtype=torch.float64)
    result = eigenstep.fit_gaussian(log_joint, start, max_iter=3, elbo_samples=8, **options)
    mean = result.posterior.mean
    assert isinstance(mean, Tensor)
    return [*map(float, mean), float(result.elbo)]


_SEARCHES: Mapping[str, dict[str, Any]] = {
    "spectral": {"max_evals": 300},
    "restarts": {"max_evals": 400, "restarts": "ipop", "tolfun": 1e-1, "bounds": (-1.0, 2.0)},
    "lowrank": {"method": "lowrank", "dimension": 20, "max_evals": 240},
    "separable": {"method": "separable", "max_evals": 120},
    "cautious": {"method": "cautious", "max_evals": 120, "noisy": True},
    "noisy": {"max_evals": 200, "noisy": True},
    "mixed": {"max_evals": 200, "integers": [1], "categories": {4: 3}},
}
_DESCENTS: Mapping[str, dict[str, Any]] = {
    "auto": {"method": "auto", "max_evals": 150},
    "auto large": {"method": "auto", "dimension": 401, "max_evals": 1300},
}
"""Searches whose slopes are differences of values, which rounding reaches."""

PARTS: Mapping[str, Mapping[str, Case]] = {
    "spectral": {
        "steps": Case(partial(_steps, Spectral)),
        "float32": Case(partial(_steps, Spectral, LARGE_SHAPES, torch.float32, 6), 1e-3),
        "turns": Case(partial(_steps, Spectral, {"one": (3, 2)}, steps=106)),
        "model": Case(_model_steps),
        "layout": Case(_layout, 1e-3),
    },
    "fast": {"steps": Case(partial(_steps, Spectral.fast, _some(FEW_SHAPES), steps=10))},
    "paper": {
        "steps": Case(partial(_steps, Spectral.paper, _some(FEW_SHAPES))),
        "extremes": Case(partial(_steps, Spectral.paper, EXTREME_SHAPES, steps=30)),
    },
    "options": {name: _option(name) for name in OPTIONS},
    "posterior": {"steps": Case(_posterior_steps)},
    "search": {
        **{name: Case(partial(_search, **options)) for name, options in _SEARCHES.items()},
        **{name: Case(partial(_search, **options), 1e-3) for name, options in _DESCENTS.items()},
    },
    "spd": {
        "lbfgs": Case(_spd_costs),
        "gradient": Case(partial(_spd_costs, method="gradient", retraction="spectral")),
        "paper": Case(partial(_spd_costs, lr=0.05, momentum=0.5, retraction="paper")),
    },
    "update": {
        "bounded": Case(_learned),
        "paper": Case(partial(_learned, turning=Turning(rotation="normalized"))),
    },
    "inference": {
        "hessian": Case(_fit),
        "reparametrization": Case(partial(_fit, curvature="reparametrization", samples=8)),
    },
}
"""All parts of the library, and what tells whether they still do the same."""


def measure(part: str) -> dict[str, Numbers]:
    """Return the numbers of all cases of a part."""
    return {name: case.compute() for name, case in PARTS[part].items()}


def agree(part: str, measured: Mapping[str, Numbers], known: Mapping[str, Numbers]) -> bool:
    """Tell whether numbers are those of a known behavior; cases that only one of them has do not
    count.
    """
    shared = [name for name in measured if name in known]
    return bool(shared) and all(
        _close(measured[name], known[name], PARTS[part][name].tolerance) for name in shared
    )


def _close(numbers: Numbers, others: Numbers, tolerance: float) -> bool:
    if len(numbers) != len(others):
        return False
    return all(abs(a - b) <= tolerance * (1 + abs(b)) for a, b in zip(numbers, others, strict=True))


def name_of(measured: Mapping[str, Numbers]) -> str:
    """Return the name of a behavior that is not known: a hash of its rounded numbers."""
    rounded = {case: [f"{x:.2e}" for x in numbers] for case, numbers in sorted(measured.items())}
    return hashlib.sha256(json.dumps(rounded).encode()).hexdigest()[:8]


def known_behaviors() -> dict[str, dict[str, dict[str, Numbers]]]:
    """Return the numbers of known behaviors, by part and name."""
    known: dict[str, dict[str, dict[str, Numbers]]] = json.loads(KNOWN.read_text("utf-8"))
    return known


def recognize(part: str, measured: Mapping[str, Numbers]) -> str:
    """Return the name of the behavior that has these numbers."""
    for name, numbers in known_behaviors().get(part, {}).items():
        if agree(part, measured, numbers):
            return name
    return name_of(measured)


@lru_cache
def behavior(*parts: str) -> str:
    """Return what some parts of the library do today, as "part:name+part:name"."""
    return "+".join(f"{part}:{recognize(part, measure(part))}" for part in parts)


def stale(behaviors: Iterable[str]) -> list[str]:
    """Return the parts, of some "part:name", that have another name today."""
    named = (name.partition(":")[0] for name in behaviors if not is_today(name))
    return list(dict.fromkeys(named))


def is_today(name: str) -> bool:
    """Tell whether a "part:name" is what the part does today."""
    part = name.partition(":")[0]
    return part in PARTS and behavior(part) == name


RECIPES: Mapping[str, str] = {
    "spectral": "spectral",
    "spectral_fast": "fast",
    "spectral_paper": "paper",
}
"""Our optimizers, by their names in benchmarks, and the parts that they are."""


def behavior_of(optimizer: str, changed: bool = False) -> str:
    """Return the behavior that runs of an optimizer depend on, which is none for rivals.

    Args:
        optimizer: Its name in benchmarks.
        changed: Whether any of its options is not the default.
    """
    if optimizer not in RECIPES:
        return ""
    parts = [RECIPES[optimizer], *(["options"] if changed else [])]
    return behavior(*parts)


def record() -> list[str]:
    """Add today's behaviors to the known ones, and return the names of the new."""
    known = known_behaviors() if KNOWN.exists() else {}
    new = []
    for part in PARTS:
        measured = measure(part)
        names = known.setdefault(part, {})
        if not any(agree(part, measured, numbers) for numbers in names.values()):
            name = name_of(measured)
            new.append(f"{part} {name}")
            names[name] = {
                case: [float(f"{x:.12g}") for x in numbers] for case, numbers in measured.items()
            }
    KNOWN.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    return new


def main() -> None:
    """Show the names of today's behaviors, or record them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--record", action="store_true", help="add new ones to the known")
    if parser.parse_args().record:
        print("new:", *(record() or ["none"]), sep="\n")
        return
    known = known_behaviors()
    for part in PARTS:
        name = behavior(part)
        print(name, "" if name.partition(":")[2] in known.get(part, {}) else "(not known)")


if __name__ == "__main__":
    main()
