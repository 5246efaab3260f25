"""While one round is computed, gradients of the next and steps of the last are on their way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from eigenstep.optim.distributed.sharding import Team


class NotedRound:
    """A round that only notes what it is asked to do."""

    def __init__(self, number: int, log: list[str]) -> None:
        self.number, self.log = number, log
        self.members = [SimpleNamespace(param=torch.full((), float(number)))]

    def send_gradients(self) -> None:
        self.log.append(f"send gradients {self.number}")

    def own_gradients(self, _: Any) -> dict[int, Tensor]:
        self.log.append(f"have gradients {self.number}")
        return {0: torch.ones(())}

    def send_steps(self, *_: Any) -> None:
        self.log.append(f"send steps {self.number}")

    def receive_steps(self, *_: Any) -> None:
        self.log.append(f"take steps {self.number}")


def test_rounds_overlap() -> None:
    log: list[str] = []
    team = Team.__new__(Team)
    team._rounds = {(): [NotedRound(number, log) for number in range(3)]}  # type: ignore[misc]

    def compute(params: list[Tensor], gradients: list[Tensor], tag: int) -> list[Tensor]:
        assert params[0] == tag
        log.append(f"compute {tag}")
        return gradients

    team.step([], compute, lambda *_: None)
    for number in range(3):
        at = log.index(f"compute {number}")
        assert log.index(f"have gradients {number}") < at
        if number < 2:
            assert (
                log.index(f"send gradients {number + 1}")
                < at
                < log.index(f"have gradients {number + 1}")
            )
            assert log.index(f"send steps {number}") < log.index(f"compute {number + 1}")
            assert log.index(f"compute {number + 1}") < log.index(f"take steps {number}")
    assert sorted(log) == sorted(set(log))
    assert log[-1] == "take steps 2"
