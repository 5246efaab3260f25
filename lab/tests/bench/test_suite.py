"""The suite's searches, results on disk, optimizers and tables, on a task that takes no time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigenstep_lab import cli
from eigenstep_lab.baselines.orthogonal_soap import OrthogonalSOAP
from eigenstep_lab.bench import suite
from eigenstep_lab.bench.suite import modern, search, speedrun, tables
from eigenstep_lab.bench.suite.catalog import FIRST, TASKS
from eigenstep_lab.bench.suite.networks import Experts
from eigenstep_lab.bench.suite.search import Settings
from eigenstep_lab.muon import orthogonalize
from eigenstep_lab.rivals import EVERYWHERE, RIVALS, SAMPLE, SUITE, build_in_suite, split
from eigenstep_lab.tasks import Outcome, Problem, Task, run_one

GRID = (1e-3, 3e-3, 1e-2, 3e-2)


def tried_by(loss: Any, momenta: int = 2, trials: int = 8) -> tuple[Settings, list[Settings]]:
    """Search, and return what was found and tried."""
    searching = search.Search(GRID, [(f"m={k}",) for k in range(momenta)], trials)
    running = searching.run()
    settings = next(running)
    while True:
        try:
            settings = running.send(loss(settings))
        except StopIteration:
            return searching.best, list(searching.losses)


def searched(
    best_lr: float, momenta: int = 2, best_decay: float = 0.01
) -> tuple[Settings, list[Settings]]:
    """Search where the loss is least at one place, and return what was found and tried."""

    def loss(settings: Settings) -> float:
        wrong = (settings.weight_decay != best_decay) + (settings.momentum != (f"m={momenta - 1}",))
        return abs(math.log(settings.lr / best_lr)) + 0.01 * wrong

    return tried_by(loss, momenta)


@pytest.mark.parametrize("best_lr", [2e-4, 1e-3, 4e-3, 3e-2, 0.2])
@pytest.mark.parametrize("momenta", [1, 2, 3])
def test_all_searches_have_the_same_number_of_trials(best_lr: float, momenta: int) -> None:
    _, tried = searched(best_lr, momenta)
    assert len(tried) == len(set(tried)) == 8


@pytest.mark.parametrize("best_lr", [3.2e-4, 9.5e-2])
def test_grid_grows_beyond_its_edge(best_lr: float) -> None:
    found, tried = searched(best_lr)
    assert found.lr == pytest.approx(best_lr, rel=0.05)
    assert len({settings.lr for settings in tried[4:6]} - set(GRID)) == 2


def test_search_chooses_every_coordinate() -> None:
    found, tried = searched(1e-2, best_decay=0.1)
    assert found == Settings(1e-2, 0.1, ("m=1",))
    # What is left goes to finer rates around the best.
    assert sorted(settings.lr for settings in tried[-2:]) == pytest.approx(
        [1e-2 / 10**0.25, 1e-2 * 10**0.25], rel=0.02
    )


def test_diverged_trials_are_never_chosen() -> None:
    found, _ = tried_by(lambda s: math.inf if s.lr > 2e-3 else 1 / s.lr, momenta=1)
    assert found.lr <= 2e-3


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Add a task of three weights to the suite; the list gets an entry for each run."""
    made: list[int] = []

    def build(seed: int) -> Problem:
        made.append(seed)
        model = nn.Linear(3, 1)
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(seed))

        def loss(generator: torch.Generator | None = None) -> Tensor:
            return (model(x).squeeze(1) - x[:, 0]).square().mean() + 0.1

        return Problem(model, loss, lambda: loss().item())

    task = Task("a line", build, steps=6)
    monkeypatch.setitem(TASKS, "line", task)  # type: ignore[arg-type]
    monkeypatch.setitem(FIRST, "line", task)  # type: ignore[arg-type]
    return made


def arguments(path: Path, *more: str) -> list[str]:
    return ["bench", "suite", "--tasks", "line", "--results", str(path), *more]


def lines_of(path: Path, *more: str) -> dict[str, dict[str, Any]]:
    """Run the command, and return its lines by row."""
    file = path.with_suffix(".json")
    assert cli.main(arguments(path, *more, "--json", str(file))) == 0
    return {line["row"]: line for line in json.loads(file.read_text())["result"]["lines"]}


def test_runs_are_never_repeated(line: list[int], tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    adamw = ["--optimizers", "adamw", "--seeds"]
    lines_of(path, *adamw, "2")
    assert len(line) == 8 + 2
    lines_of(path, *adamw, "2")
    assert len(line) == 10
    lines_of(path, *adamw, "3")
    assert len(line) == 11
    lines_of(path, "--optimizers", "spectral", "--seeds", "2")
    assert len(line) in (11 + 10, 11 + 12)  # also at AdamW's rate, unless it is the same


def test_half_a_line_does_no_harm(line: list[int], tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    lines_of(path, "--optimizers", "adamw", "--seeds", "1")
    path.write_text(path.read_text()[:-40])  # killed while the last result was written
    assert lines_of(path, "--optimizers", "adamw", "--seeds", "1", "--show") == {}
    assert len(lines_of(path, "--optimizers", "adamw", "--seeds", "1")) == 1
    assert len(line) == 9 + 1


def test_infinite_losses_survive_the_file() -> None:
    plain = {"loss": None, "train_loss": None, "optimizer_ms": 1.0, "seconds": 2.0}
    assert search.outcome(plain) == Outcome(math.inf, math.inf, 1.0, 2.0)


def test_runs_of_another_behavior_are_made_anew(
    line: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.jsonl"
    ours = ["--optimizers", "spectral", "--seeds", "1"]
    for name in ("one", "two"):
        monkeypatch.setattr(search, "behavior_of", lambda *_, name=name: name)
        lines_of(path, *ours)
    assert len(line) == 2 * 9
    lines_of(path, *ours, "--code", "one")
    assert len(line) == 2 * 9


def test_tables_compare_with_the_best_rival(line: list[int], tmp_path: Path) -> None:
    rows = ["--optimizers", "adamw", "soap_orthogonal", "spectral", "--option", "interval=3"]
    found = lines_of(tmp_path / "results.jsonl", *rows, "--seeds", "2")
    assert list(found) == ["adamw", "soap_orthogonal", "spectral", "spectral interval=3"]
    rivals = min(found[name]["loss"] for name in ("adamw", "soap_orthogonal"))
    ours = found["spectral"]
    assert ours["ratio"] == ours["loss"] / rivals
    assert ours["to_soap"] is None
    assert ours["at_adamw_ratio"] == ours["at_adamw_lr"] / found["adamw"]["loss"]
    assert found["spectral interval=3"]["half"] == "first"
    lines = list(found.values())
    assert len(tables.task_table("first", lines).rows) == 4
    shown = dict(tables.loss_table("first", lines).rows)
    best = min(found, key=lambda name: found[name]["loss"])
    assert list(shown) == list(found)
    assert {name for name, cell in shown.items() if "*" in cell} == {best}
    assert shown["adamw"].removesuffix(" *") == f"{found['adamw']['loss']:.4g}"
    assert [cells[0] for cells in tables.rate_table(lines).rows] == ["line", "line"]
    assert len(tables.summary_table(lines).rows) == 4


def test_units_come_in_order() -> None:
    units = suite.units_of(list(TASKS), None, [])
    assert [row.optimizer for _, row in units[: len(TASKS) * 6 : len(TASKS)]] == list(EVERYWHERE)
    assert (
        {task for task, row in units if row.optimizer not in EVERYWHERE}
        == set(SAMPLE)
        <= set(FIRST)
    )
    assert {row.optimizer for _, row in units} == set(SUITE)
    variants = suite.units_of(["vit"], None, [["betas=(0.9,0.95)", "start=1"]])
    assert [row.name for _, row in variants] == ["spectral", "spectral betas=(0.9,0.95) start=1"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, out = tmp_path / "none.jsonl", tmp_path / "out.json"
    assert (
        cli.main(["bench", "suite", "--show", "--results", str(results), "--json", str(out)]) == 0
    )
    assert json.loads(out.read_text())["result"]["lines"] == []
    assert (
        cli.main(["bench", "suite", "--show", "--option", "betas", "--results", str(results)]) == 2
    )
    assert "key=value" in capsys.readouterr().err


class Mixed(nn.Module):
    """Every kind of parameter that the suite has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.conv = nn.Conv2d(1, 4, 3)
        self.mixture = Experts(8, 6, 3)
        self.head = nn.Linear(8, 1)

    def forward(self) -> Tensor:
        x = self.mixture(self.embed.weight[None])
        return self.head(x).square().mean() + self.conv(torch.ones(1, 1, 4, 4)).square().mean()


@pytest.mark.parametrize("name", [name for name in SUITE if not name.endswith(("_1", "_10"))])
def test_every_optimizer_learns_with_every_momentum(name: str) -> None:
    pytest.importorskip("heavyball")
    pytest.importorskip("pytorch_optimizer")

    def build(seed: int) -> Problem:
        model = Mixed()
        return Problem(model, lambda generator: model(), lambda: model().item())

    task = Task("mixed", build, steps=12)
    start = run_one(task, lambda model: torch.optim.SGD(model.parameters(), lr=0.0)).loss
    for momentum in RIVALS[name].momenta:

        def made(model: nn.Module, momentum: Any = momentum) -> torch.optim.Optimizer:
            return build_in_suite(name, model, RIVALS[name].lrs[-1], 0.01, momentum)

        assert run_one(task, made).loss < 0.9 * start


def test_matrices_are_views_of_the_parameters() -> None:
    model = Mixed()
    views, others = split([(n, p) for n, p in model.named_parameters()])
    shapes = [tuple(view.matrix.shape) for view in views]
    assert shapes == [(4, 9), *[(6, 8)] * 3, *[(8, 6)] * 3, (3, 8)]
    assert {tuple(p.shape) for p in others} == {(12, 8), (4,), (1, 8), (1,)}
    optimizer = build_in_suite("muon", model, 0.1, 0.0, {})
    before = model.mixture.experts_in.detach().clone()
    model().backward()
    assert model.mixture.experts_in.grad is not None
    model.mixture.experts_in.grad[1] = 0.0
    optimizer.step()
    moved = (model.mixture.experts_in - before).flatten(1).norm(dim=1)
    assert moved[1] == 0.0
    assert moved[0] > 0.0 or moved[2] > 0.0


def test_orthogonalization_and_its_scale() -> None:
    torch.manual_seed(0)
    for shape in ((5, 12), (12, 5)):
        singular = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert singular.min() > 0.6
        assert singular.max() < 1.3
    matrix = nn.Parameter(torch.randn(6, 10))
    optimizer = OrthogonalSOAP([matrix], lr=0.01)
    for _ in range(4):
        before = matrix.detach().clone()
        matrix.grad = torch.randn(6, 10)
        optimizer.step()
    # The rows of the step have about norm 1: its root mean square is 0.2 · √10 · √(6 / 60) · lr.
    assert (matrix.detach() - before).square().mean().sqrt() == pytest.approx(0.2 * 0.01, rel=0.25)


def test_orthogonal_soap_is_adam_in_the_eigenbasis() -> None:
    """With a diagonal gradient the bases are permutations, so Adam's step in them is Adam's step
    itself.
    """
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.zeros(4, 4))
    optimizer = OrthogonalSOAP([matrix], lr=1.0)
    for scale in (1.0, 1.0, 1.0):
        matrix.grad = scale * torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]))
        optimizer.step()
    step = -matrix.detach() / (0.2 * 2 * 2)  # two steps of length 0.2 · √4
    assert torch.allclose(step, torch.diag(step.diagonal()), atol=1e-5)
    assert step.diagonal().min() > 0.6


def raced(losses: Any, target: float) -> tuple[dict[str, Any], list[int]]:
    """Count steps, and return what was counted and the lengths that were tried."""
    seen: dict[int, list[float]] = {}
    for length in speedrun.lengths(seen, target, 800):
        seen[length] = losses(length)
    return speedrun.count(seen, target, 800), list(seen)


def test_steps_to_a_loss_are_interpolated() -> None:
    def losses(steps: int) -> list[float]:
        return [1000 / steps + noise for noise in (-0.001, 0.0, 0.001)]

    target = 1000 / 500
    found, _ = raced(losses, target)
    assert found["steps"] == pytest.approx(500, rel=0.02)
    assert found["sure"] == 560
    slower, _ = raced(lambda steps: losses(steps // 2), target)
    assert slower["steps"] == pytest.approx(1000, rel=0.02)
    never, _ = raced(lambda steps: [3.0, math.inf], target)
    assert (never["steps"], never["sure"]) == (math.inf, None)


def test_who_is_far_behind_tries_the_longest_schedule_next() -> None:
    found, tried = raced(lambda steps: [2.0, 2.1], 1.0)
    assert (tried, found["steps"]) == ([800, speedrun.LONGEST], math.inf)
    line = {"optimizer": "slow", "lr": 1e-3, "weight_decay": 0.1, "momentum": "", **found}
    muon = {**line, "optimizer": "muon", "steps": 800.0}
    assert speedrun.table(muon, [muon, line]).rows[1][5:7] == ("> 1280", "> 1.600")


def test_z_score_is_the_distance_in_standard_errors() -> None:
    assert speedrun.z_score([1.0, 3.0], 4.0) == pytest.approx(2.0)  # deviation √2, standard error 1


def test_modern_network_begins_with_equal_chances_and_sees_no_future() -> None:
    torch.manual_seed(0)
    model = modern.ModernGPT(16, width=8, depth=2, heads=2)
    numbers = torch.randint(16, (1, 6))
    assert torch.equal(model(numbers), torch.zeros(1, 6, 16))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    changed = numbers.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 16
    before, after = model(numbers), model(changed)
    assert torch.allclose(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])


def test_rotation_depends_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(8).expand(1, 1, 9, 8) for _ in range(2))
    products = modern.rotated(q) @ modern.rotated(k).transpose(-1, -2)
    diagonals = [products[0, 0].diagonal(offset) for offset in range(-8, 9)]
    assert all(torch.allclose(d, d[:1].expand_as(d), atol=1e-4) for d in diagonals)
    assert not torch.allclose(diagonals[3][:1], diagonals[8][:1])
