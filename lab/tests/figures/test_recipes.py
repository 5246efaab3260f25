"""What the reproduction trains with: the paper's recipe and its rivals on the paper's
own networks.
"""

import dataclasses

import pytest
import torch

from eigenstep.optim.layout import plan_of
from eigenstep_lab.models.hiera import HIERA_VIT, Hiera
from eigenstep_lab.models.transformers import PLAIN_VIT, ViT
from eigenstep_lab.rivals import build
from eigenstep_lab.train.building import build_optimizer
from eigenstep_lab.train.settings import Settings
from eigenstep_lab.train.spaces import Range, apply, space_of

NETWORKS = {"PlainViT": (ViT, PLAIN_VIT), "HieraViT": (Hiera, HIERA_VIT)}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_papers_recipe_cuts_no_matrix(name):
    network, options = NETWORKS[name]
    with torch.device("meta"):
        model = network((3, 224, 224), 10, **options)
    optimizer = build("spectral_paper", model.named_parameters(), lr=1e-3)
    group = optimizer.param_groups[0]
    options = optimizer.options_of(group)
    matrices = [p for p in group["params"] if min(p.shape[0], p.numel() // p.shape[0]) > 1]
    assert max(max(p.shape) for p in matrices) > 2048
    for parameter in matrices:
        plan = plan_of(options, parameter.shape)
        assert (plan.units, len(plan.layouts)) == (1, 1), tuple(parameter.shape)
        layout = plan.layouts[0]
        assert (layout.blocks, layout.has_basis) == (1, True), tuple(parameter.shape)


def test_soap_preconditions_long_sides():
    parameter = torch.nn.Parameter(torch.zeros(2050, 2))
    optimizer = build("soap", [("weight", parameter)], lr=1e-3)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    shapes = {
        tuple(tensor.shape[-2:])
        for state in optimizer.state[parameter].values()
        for values in (state.values() if isinstance(state, dict) else [])
        for tensor in (values if isinstance(values, list) else [values])
        if isinstance(tensor, torch.Tensor)
    }
    assert (2050, 2050) in shapes


def test_the_papers_search_draws_what_its_recipe_has():
    space = space_of(Settings(optimizer="spectral_paper"))
    assert "nesterov" not in space
    assert space["gamma"] == (0.0, 1.0)


def test_both_halves_of_muon_are_searched():
    settings = Settings(optimizer="muon")
    values = {"1-adamw_beta1": 0.25, "1-adamw_beta2": 0.125, "adamw_eps": 1e-4, "adamw_ratio": 0.5}
    space = space_of(settings)
    assert all(isinstance(space[name], Range) for name in values)
    chosen = apply(settings, {"lr": 0.02, "weight_decay": 0.1, "1-momentum": 0.05, **values})
    muon, adamw = build_optimizer(
        chosen, ViT((1, 8, 8), 4, patch=4, width=8, depth=1, heads=2)
    ).param_groups
    assert (muon["lr"], muon["momentum"]) == (0.02, 0.95)
    assert (adamw["lr"], adamw["betas"], adamw["eps"]) == (0.01, (0.75, 0.875), 1e-4)
    given = dataclasses.replace(settings, option={"adamw_betas": [0.9, 0.99]})
    assert space_of(given).keys() == space.keys() - {"1-adamw_beta1", "1-adamw_beta2"}
