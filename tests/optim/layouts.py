"""How `Spectral` lays out a parameter, for the tests of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from eigenstep import Spectral
from eigenstep.optim.layout import Plan, plan_of


def laid_out(shape: Sequence[int], **options: Any) -> Plan:
    """Return the layout of a parameter of a shape."""
    optimizer = Spectral([nn.Parameter(torch.empty(1))], **options)
    return plan_of(optimizer.options_of(optimizer.param_groups[0]), shape)
