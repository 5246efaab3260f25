"""The soak finds what is broken, and nothing else."""

import numpy as np
import pytest
import torch

from eigenstep.search import History
from eigenstep_lab import cli, soak
from eigenstep_lab.soak import plans, searches, training

NUMBERS = range(30)


class Sound(torch.optim.Optimizer):
    """A stand-in for Spectral that does nothing wrong: very small steps, all of the same size."""

    size = 0.01

    def __init__(self, params, lr, betas, nonfinite, **_):
        own = [{"params": x["params"]} if isinstance(x, dict) else x for x in params]
        super().__init__(own, {"lr": lr, "nonfinite": nonfinite})

    def step(self):
        group = self.param_groups[0]
        there = [p for own in self.param_groups for p in own["params"] if p.grad is not None]
        if not all(p.grad.isfinite().all() for p in there):
            return self.refuse(group)
        for p in there:
            self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
            p.data -= self.size * group["lr"] * p.grad.sign()

    @classmethod
    def for_model(cls, model, *arguments, **options):
        return cls(model.parameters(), *arguments, **options)

    def state_dict(self, bases=True):
        return super().state_dict()

    def refuse(self, group):
        if group["nonfinite"] == "raise":
            raise ValueError("not finite; nothing was changed")


class TooFast(Sound):
    size = 4.0


class TooFar(Sound):
    size = 2.9


class Forgetful(Sound):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "state": {}})


class Careless(Sound):
    def refuse(self, group):
        group["params"][0].data += 1e-3
        super().refuse(group)


class Fragile(Sound):
    def step(self):
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None and p.grad.isfinite().all() and 0 < p.grad.abs().max() < 1e-40:
                p.data += float("nan")


class Lossy(Sound):
    def step(self):
        super().step()
        self.state.clear()


@pytest.fixture
def trains_only(monkeypatch):
    monkeypatch.setattr(soak, "KINDS", {"train": soak.KINDS["train"]})


@pytest.mark.usefixtures("trains_only")
def test_a_sound_optimizer_passes(monkeypatch):
    monkeypatch.setattr(training, "Spectral", Sound)
    counts, failures = soak.attempt(0, NUMBERS)
    assert failures == []
    assert counts["configurations: train"] == len(NUMBERS)
    for name in training.COUNTED:
        assert counts[name] > 10, name


@pytest.mark.usefixtures("trains_only")
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (TooFast, "learning rates"),
        (TooFar, "where AdamW moves by"),
        (Forgetful, "that was killed"),
        (Careless, "changed something"),
        (Fragile, "are not finite after step"),
        (Lossy, "has no state"),
    ],
)
def test_what_is_broken_is_found_and_can_be_repeated(monkeypatch, capsys, broken, message):
    monkeypatch.setattr(training, "Spectral", broken)
    attempts = (soak.attempt(0, range(number, number + 1))[1] for number in range(100))
    failures = (failure for failures in attempts for failure in failures)
    first = next(failure for failure in failures if message in failure.error)
    with pytest.raises(SystemExit) as stop:
        cli.main(["soak", "--only", str(first.number)])
    assert stop.value.code == 1
    told = capsys.readouterr().out
    assert first.error in told
    assert "options {" in told
    assert first.size > 0


@pytest.mark.usefixtures("trains_only")
def test_the_command_ends_in_time_and_says_what_failed(monkeypatch, capsys):
    monkeypatch.setattr(training, "Spectral", Sound)
    assert cli.main(["soak", "--minutes", "0.02", "--jobs", "1"]) == 0
    assert "Nothing broke." in capsys.readouterr().out
    monkeypatch.setattr(training, "Spectral", TooFast)
    with pytest.raises(SystemExit) as stop:
        # It ends after some failures
        cli.main(["soak", "--minutes", "5", "--jobs", "1", "--seed", "3"])
    assert stop.value.code == 1
    assert "failed. Repeat: eigenstep soak --seed 3 --only " in capsys.readouterr().out


def test_searches_hold(monkeypatch):
    for number in range(8):
        assert searches.search(np.random.default_rng(number))["tells"] > 0
    monkeypatch.setattr(searches, "load_history", lambda _: History())
    with pytest.raises(AssertionError, match="differs after it was saved and loaded"):
        searches.search(np.random.default_rng(0))


def test_a_configuration_follows_from_its_number():
    first, again = (plans.draw(np.random.default_rng([0, 7])) for _ in range(2))
    assert first.options == again.options
    assert all(map(torch.equal, first.streams, again.streams))
    assert not training.same([torch.zeros(2)], [-torch.zeros(2)])
    assert training.same({"a": (1, torch.zeros(()))}, {"a": (1, torch.zeros(()))})
