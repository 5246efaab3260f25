"""The log of an optimizer's spectra."""

from __future__ import annotations

import pytest

from eigenstep import Spectral
from eigenstep_lab.extras import SpectraLog
from optim.test_report import network, train


@pytest.fixture(autouse=True)
def _always():
    """In single precision, unlike the rest."""


def watch(model, optimizer, steps, log):
    for _ in range(steps):
        train(model, optimizer, 1)
        log.record(optimizer)


def test_records_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    model, log = network(), SpectraLog(points=5)
    optimizer = Spectral(model.named_parameters(), max_ratio=None)
    watch(model, optimizer, 12, log)
    assert log.steps == list(range(1, 13))
    assert list(log.snapshots) == [
        f"{name}, side {axis}" for name in ("0.weight", "2.weight") for axis in (0, 1)
    ]
    step, snapshot = log.snapshots["0.weight, side 0"][-1]
    found = optimizer.spectra()["0.weight"]
    assert step == 12
    assert len(snapshot.eigenvalues) == 5
    assert snapshot.condition == pytest.approx(found["condition_0"].item())
    assert snapshot.eigenvalues[0] / snapshot.eigenvalues[-1] == pytest.approx(snapshot.condition)
    assert snapshot.speed == pytest.approx(found["speed_0"].item())
    picture = log.plot(tmp_path / "spectra.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "spectra.png" in capsys.readouterr().out
    assert log.plot(tmp_path / "one.svg", side="2.weight, side 1").exists()


def test_mistakes(tmp_path):
    with pytest.raises(ValueError, match="points must be at least 2"):
        SpectraLog(points=1)
    log = SpectraLog()
    log.record(Spectral(network().parameters()))
    with pytest.raises(ValueError, match="nothing to draw"):
        log.plot(tmp_path / "empty.png")
    model = network()
    optimizer = Spectral(model.named_parameters())
    watch(model, optimizer, 2, log)
    with pytest.raises(ValueError, match=r"side must be one of '0\.weight, side 0'"):
        log.plot(tmp_path / "wrong.png", side="bias")
