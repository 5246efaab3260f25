"""What tests of runs look at."""

import torch

from eigenstep_lab.train.runlog import read


def weights(directory):
    return torch.load(directory / "model.pt", weights_only=True)


def log(directory):
    """Return the log without the time column, which no two runs share."""
    return [{**line, "seconds": ""} for line in read(directory / "log.csv")]
