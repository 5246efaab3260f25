import os
import platform
import subprocess
import sys

import pytest

from eigenstep_lab import cpu

VARIABLE, VALUE = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
DIE = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture
def environment(monkeypatch):
    """The environment without the setting, put back afterwards; and no answer remembered."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != VARIABLE})
    cpu.prepare.cache_clear()
    yield os.environ
    cpu.prepare.cache_clear()


def child(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_real_probe_gives_a_verdict_and_remembers_it(environment):
    found = cpu.prepare()
    assert found.verdict in ("works", f"works with {VARIABLE}={VALUE}", "does not work")
    assert found.verdict.split(" with")[0] in found.explain()
    assert cpu.prepare() is found
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


def test_working_bf16_needs_no_setting(environment, monkeypatch):
    monkeypatch.setattr(cpu, "_PROBE", "pass")
    assert cpu.prepare() == cpu.Bf16(works=True, failure="", settings={})
    assert VARIABLE not in environment


def test_illegal_instruction_is_repaired_by_the_setting(environment, monkeypatch):
    monkeypatch.setattr(
        cpu, "_PROBE", f"import os\nif os.environ.get({VARIABLE!r}) != {VALUE!r}: {DIE}"
    )
    found = cpu.prepare()
    assert found.verdict == f"works with {VARIABLE}={VALUE}"
    assert found.failure == "SIGILL"
    assert environment[VARIABLE] == VALUE
    assert f"export {VARIABLE}={VALUE}" in found.explain()


def test_a_processor_beyond_repair_is_reported_and_nothing_is_set(environment, monkeypatch):
    monkeypatch.setattr(cpu, "_PROBE", DIE)
    found = cpu.prepare()
    assert (found.works, found.verdict, found.failure) == (False, "does not work", "SIGILL")
    assert VARIABLE not in environment
    assert "SIGILL" in found.explain()
    assert "float32" in found.explain()


@pytest.mark.parametrize("probe", ["raise SystemExit(3)", "assert False, 'wrong numbers'"])
def test_a_probe_that_fails_in_python_counts_as_failure(environment, monkeypatch, probe):
    monkeypatch.setattr(cpu, "_PROBE", probe)
    found = cpu.prepare()
    assert not found.works
    assert found.failure in ("an error", "AssertionError: wrong numbers")


def test_no_interpreter_to_probe_with_is_no_crash(environment, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "/nowhere/python" in cpu.prepare().failure


def test_importing_the_package_sets_up_nothing_and_prints_nothing():
    code = """
import os, sys
before = dict(os.environ)
import eigenstep, eigenstep_lab.cpu
assert "torch" not in sys.modules and dict(os.environ) == before
"""
    assert child(code) == ""


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="oneDNN's names of x86 instruction sets"
)
@pytest.mark.parametrize(
    ("first", "expected"), [("", True), ("torch.randn(512, 512) @ torch.randn(512, 512)", False)]
)
def test_the_setting_counts_until_the_first_matmul(first, expected):
    """What the docstring of eigenstep_lab.cpu promises, shown with an instruction set that every
    x86 has.
    """
    code = f"""
import os, torch
{first}
os.environ[{VARIABLE!r}] = "SSE41"
with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
    torch.nn.functional.conv2d(torch.randn(8, 16, 32, 32), torch.randn(32, 16, 3, 3))
"""
    assert ("isa:Intel SSE4.1" in child(code)) is expected
