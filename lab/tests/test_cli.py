import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import types

import pytest

from eigenstep_lab import bench, cli, console
from eigenstep_lab.cli import COMMANDS, Command
from eigenstep_lab.console import UserError, write_json


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("EIGENSTEP_DATA", str(tmp_path / "root"))


@pytest.fixture
def benchmark_module(monkeypatch):
    """A benchmark named 'toy' whose `run` the test may replace."""
    module = types.ModuleType("toy_benchmark", "A toy.")
    module.add_arguments = lambda parser: parser.add_argument("--size", type=int, default=3)
    module.cells = lambda args, found: {}
    module.report = lambda args, found: {
        "size": args.size,
        "diverged": float("nan"),
        "list": (1.5, float("inf")),
    }
    monkeypatch.setitem(sys.modules, "toy_benchmark", module)
    toy = Command("toy_benchmark", "a toy")
    monkeypatch.setattr(bench, "BENCHMARKS", {"toy": toy, "all": bench.BENCHMARKS["all"]})
    return module


@pytest.mark.parametrize("command", [*COMMANDS.values(), *bench.BENCHMARKS.values()])
def test_every_command_keeps_the_contract(command):
    module = importlib.import_module(command.module)
    module.add_arguments(argparse.ArgumentParser())
    needed = ("run",) if hasattr(module, "run") else ("cells", "report")
    assert all(callable(getattr(module, name)) for name in needed)
    assert module.__doc__


@pytest.mark.parametrize(
    "words", [[], *([name] for name in COMMANDS), *(["bench", name] for name in bench.BENCHMARKS)]
)
def test_help_explains_every_command(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--help"])
    assert stop.value.code == 0
    assert "usage: eigenstep" in capsys.readouterr().out


def test_help_is_instant_because_nothing_heavy_is_imported():
    code = (
        "import sys, eigenstep_lab.cli as c\ntry: c.main(['--help'])\nfinally: assert "
        "'torch' not in sys.modules"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode
        == 0
    )


def test_benchmark_figures_go_to_json_with_the_command_that_made_them(
    benchmark_module, tmp_path, capsys
):
    assert (
        cli.main(["bench", "toy", "--size", "4", "--json", str(tmp_path / "new" / "toy.json")]) == 0
    )
    written = json.loads((tmp_path / "new" / "toy.json").read_text())
    assert written["result"] == {"size": 4, "diverged": None, "list": [1.5, None]}
    assert written["command"].startswith("eigenstep bench toy --size 4")
    assert {"eigenstep", "torch", "python"} <= set(written)
    assert "toy.json" in capsys.readouterr().out


def test_all_benchmarks_run_even_if_one_fails(benchmark_module, tmp_path, monkeypatch, capsys):
    broken = types.ModuleType("broken_benchmark", "Breaks.")
    broken.add_arguments = lambda parser: None
    monkeypatch.setitem(sys.modules, "broken_benchmark", broken)

    def fail(args, found):
        raise UserError("out of luck")

    broken.cells = fail
    table = {"broken": Command("broken_benchmark", "breaks"), **bench.BENCHMARKS}
    monkeypatch.setattr(bench, "BENCHMARKS", table)
    assert cli.main(["bench", "all", "--directory", str(tmp_path)]) == 2
    assert [path.name for path in tmp_path.glob("*.json")] == ["toy.json"]
    assert "failed, see above: broken" in capsys.readouterr().err


def test_mistakes_end_in_one_sentence_and_status_2(capsys):
    assert cli.main(["data", "check", "cifar"]) == 2
    assert capsys.readouterr().err == (
        "eigenstep: error: no dataset cifar: expected digits, fashion-mnist, cifar-10, shakespeare "
        "or all\n"
    )
    assert cli.main(["data", "fetch"]) == 2
    assert "say which dataset to fetch" in capsys.readouterr().err


def test_interruption_ends_with_status_130(benchmark_module, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    benchmark_module.run = interrupt
    assert cli.main(["bench", "toy"]) == 130
    assert capsys.readouterr().err == "eigenstep: interrupted\n"


def test_data_lists_checks_and_says_what_is_missing(capsys):
    assert cli.main(["data"]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert "shakespeare" in listed
    assert "eigenstep" in listed
    assert cli.main(["data", "check", "digits"]) == 0
    assert capsys.readouterr().out == "digits: 1,437 + 360 pictures of 1 × 8 × 8\n"
    assert cli.main(["data", "check", "shakespeare"]) == 2
    assert "eigenstep data fetch shakespeare" in capsys.readouterr().err
    assert cli.main(["data", "fetch", "digits"]) == 0


def test_doctor_reports_torch_bf16_peers_and_data(tmp_path, capsys):
    assert cli.main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert "bf16 matmul" in found["machine"]["bf16 on the CPU"]
    assert [name for name, version in found["peers"].items() if version.startswith("missing")] == []
    assert [row[0] for row in found["datasets"]] == [
        "digits",
        "fashion-mnist",
        "cifar-10",
        "shakespeare",
    ]
    assert "torch" in capsys.readouterr().out


def test_demo_trains_with_four_optimizers_and_draws(tmp_path, capsys):
    assert cli.main(["demo", "--steps", "60", "--plot", str(tmp_path / "demo.png")]) == 0
    rows = [
        line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")
    ]
    losses = {row[1].strip(): float(row[3]) for row in rows}
    assert set(losses) == {"spectral", "soap", "muon", "adamw"}
    assert losses["spectral"] < math.log(10) - 0.3  # clearly better than guessing one of ten digits
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def test_a_result_file_is_whole_or_not_there(tmp_path):
    with pytest.raises(TypeError):
        write_json(tmp_path / "result.json", {"bad": object()})

    def interrupted_write():
        with console.atomic_write(tmp_path / "result.json") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "--plot", "file/demo.png"], "cannot write to file/demo.png: file: "),
        (["demo", "--plot", "folder"], "cannot write to folder: it is a folder"),
        (["demo", "--plot", "demo.xyz"], "--plot must end in .png, .svg, .pdf, got .xyz"),
        (["doctor", "--json", "file/doctor.json"], "cannot write to file/doctor.json: file: "),
        (["bench", "step", "--plot", "file/step.png"], "cannot write to file/step.png: file: "),
        (["bench", "all", "--directory", "file"], "cannot write to file: it is no folder"),
        (
            ["reproduce", "all", "--directory", "file/figures"],
            "cannot write to file/figures: file: ",
        ),
    ],
)
def test_what_cannot_be_written_is_told_before_the_work(
    words, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith(f"eigenstep: error: {message}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_folder_without_permission_is_told_before_the_work(tmp_path, monkeypatch, capsys):
    def denied(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", denied)  # the superuser may write anywhere
    assert cli.main(["demo", "--plot", str(tmp_path / "new" / "demo.png")]) == 2
    assert capsys.readouterr().err.endswith(f"demo.png: {tmp_path}: Permission denied\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [28, 30])
def test_a_disk_that_is_full_or_read_only_ends_in_one_sentence(
    number, benchmark_module, tmp_path, monkeypatch, capsys
):
    def fail(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    assert cli.main(["bench", "toy", "--json", str(tmp_path / "toy.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"eigenstep: error: {tmp_path / 'toy.json'}: {os.strerror(number)}")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--seed", str(2**64)],
        ["demo", "--seed", "-1"],
        ["demo", "--steps", "0"],
        ["reproduce", "all", "--seed", str(10**30)],
        ["bench", "step", "--threads", "100000000"],
    ],
)
def test_numbers_beyond_all_limits_are_refused(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert "must be between" in capsys.readouterr().err
