"""Run every example and write docs/gallery.md: their subjects, code and output.

    python examples/gallery.py

Pictures that an example writes into its working directory are shown too.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).parent
DOCS = EXAMPLES.parent / "docs"
HEAD = """# Gallery

What you see here was made by `python examples/gallery.py`, which runs every example of the
repository. Some need packages that come with the laboratory: `make demo` installs them into
`.venv`.
"""


def names() -> list[str]:
    """Return the examples that can be run by themselves."""
    return sorted(
        p.stem
        for p in EXAMPLES.glob("*.py")
        if p.name != Path(__file__).name and "__main__" in p.read_text()
    )


def section(name: str) -> str:
    """Run one example and describe it."""
    path = EXAMPLES / f"{name}.py"
    print(f"running {name} ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(path)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        pictures = [keep(picture, name) for picture in sorted(Path(folder).rglob("*.png"))]
    title, _, text = (ast.get_docstring(ast.parse(path.read_text())) or name).partition("\n")
    box = f'??? example "examples/{name}.py"'
    code = f'{box}\n\n    ``` {{.python}}\n    --8<-- "examples/{name}.py"\n    ```'
    output = f"```text\n{done.stdout.strip()}\n```"
    return "\n\n".join(
        part for part in (f"## {title.rstrip('.')}", text.strip(), code, output, *pictures) if part
    )


def keep(picture: Path, name: str) -> str:
    """Copy a picture into the documentation and return the line that shows it."""
    target = DOCS / "gallery" / f"{name}-{picture.name}"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(picture.read_bytes())
    return f"![{picture.stem}](gallery/{target.name})"


if __name__ == "__main__":
    sections = [section(name) for name in names()]
    (DOCS / "gallery.md").write_text("\n\n".join([HEAD.strip(), *sections]) + "\n")
    print(f"{len(sections)} examples are now in {DOCS / 'gallery.md'}")
