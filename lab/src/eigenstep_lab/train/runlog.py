"""The log of a run: a CSV file always, TensorBoard if it is installed."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from ..console import atomic_write

COLUMNS = ("step", "epoch", "lr", "loss", "test_loss", "test_error", "seconds")


class RunLog:
    """Appends lines to `log.csv`, and scalars to TensorBoard's files in the same folder."""

    def __init__(self, directory: Path, step: int) -> None:
        """Open the log of a run at `step`; lines from beyond it are removed."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import: not before it is needed

        self.path = directory / "log.csv"
        lines = [line for line in read(self.path) if int(line["step"]) <= step]
        with atomic_write(self.path) as file:
            text = io.StringIO()
            writer = csv.DictWriter(text, COLUMNS)
            writer.writeheader()
            writer.writerows(lines)
            file.write(text.getvalue().encode())
        self._file = self.path.open("a", newline="", encoding="utf-8")
        self._csv = csv.DictWriter(self._file, COLUMNS)
        self._board = SummaryWriter(str(directory), purge_step=step + 1)

    def write(self, step: int, **values: float) -> None:
        """Add a line; columns that are not given stay empty."""
        self._csv.writerow({"step": step, **values})
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._board.close()


def read(path: Path) -> list[dict[str, str]]:
    """Read the complete lines of a log; none if there is no log."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        lines = list(csv.DictReader(line.replace("\0", "") for line in file))
    # The last line of a run that was killed may be cut off: what is missing from it is None.
    return [
        line
        for line in lines
        if set(line) == set(COLUMNS) and None not in line.values() and line["step"].isdigit()
    ]
