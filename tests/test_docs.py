"""The README and the documentation: Python runs as it stands, and what they speak of exists."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{index}")
    for page in PAGES
    for index, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_code_block_runs(block: str) -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(compile(block, "documentation", "exec"), names)
    assert names, "a block defines something"


@pytest.mark.parametrize("seed", range(5))
def test_readme_learns_the_covariance(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    torch.manual_seed(seed)
    exec(compile(block, "README.md", "exec"), {})
    assert float(re.search(r"tensor\((.*)\)", capsys.readouterr().out)[1]) < 0.1  # type: ignore[index]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_files_that_a_page_mentions_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"(?:`|^::: )(eigenstep(?:_lab)?(?:\.\w+)+)", text, re.MULTILINE):
        pkgutil.resolve_name(name)
    for path in re.findall(r"`((?:src|lab|tests|examples)/[\w/.]+)", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    "package", ["", ".optim", ".search", ".manifold", ".inference", ".integrations"]
)
def test_the_reference_explains_every_public_name(package: str) -> None:
    pages = (ROOT / "docs").glob("api*.md")
    shown = {
        name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)
    }
    home = importlib.import_module(f"eigenstep{package}")
    for name in home.__all__:
        thing = getattr(home, name)
        if hasattr(thing, "__qualname__"):
            assert {thing.__module__, f"{thing.__module__}.{thing.__qualname__}"} & shown, name


def test_the_gallery_shows_every_example() -> None:
    shown = set(
        re.findall(r'--8<-- "examples/(.*)\.py"', (ROOT / "docs" / "gallery.md").read_text())
    )
    runnable = {p.stem for p in (ROOT / "examples").glob("*.py") if "__main__" in p.read_text()} - {
        "gallery"
    }
    assert shown == runnable, "run `python examples/gallery.py`"


def test_the_index_and_the_navigation_name_every_page() -> None:
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    index = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert pages == index | {"index.md"}
    assert pages == set(
        re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    )


def test_docstrings_have_no_roles_that_the_site_would_show_raw() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {role}"
        for folder in ("src", "lab/src")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for role in re.findall(r":(?:func|class|meth|mod|attr|data|obj):`[^`]*`", path.read_text())
    ]
    assert found == []


def test_examples_of_docstrings_are_shown_as_code() -> None:
    """What is below "Example:" is prose to the site, and >>> would be three quotations."""
    for folder in ("src", "lab/src"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"^ +Example:\n +>>>", path.read_text(), re.MULTILINE), path


def test_bring_your_model_has_ten_situations_each_with_code() -> None:
    sections = re.split(
        r"^## ", (ROOT / "docs" / "bring-your-model.md").read_text(), flags=re.MULTILINE
    )[1:]
    wanted = (
        "Vision transformer",
        "GPT",
        "Mixture of experts",
        "LoRA",
        "Convolutional",
        "Embeddings",
        "Tied",
        "Frozen",
    )
    wanted += ("Mixed precision", "Several processes")
    assert [
        s.startswith(w) and "```python" in s for s, w in zip(sections, wanted, strict=False)
    ] == [True] * 10
