import copy
import io

import pytest
import torch
from torch.nn import functional as F

from eigenstep.core import progress as extras
from eigenstep_lab.models.transformers import ViT
from eigenstep_lab.rivals import RIVALS, TRAINERS, Together, build, is_hidden_matrix

STARTS_LATE = ("soap", "soap_2048", "klsoap", "klshampoo", "soap_reference")
"""These use the first gradient for their preconditioner only: the weights stay where they are in
the first step.
"""


def network():
    return ViT((1, 8, 8), 4, patch=4, width=16, depth=1, heads=2)


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 1, 8, 8, generator=generator), torch.randint(
        4, (32,), generator=generator
    )


def train(model, optimizer, steps):
    x, y = batch()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("name", TRAINERS)
def test_every_optimizer_learns_and_repeats_itself(name):
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = network()
        runs.append(
            train(
                model, build(name, model.named_parameters(), lr=2e-3, weight_decay=0.01), steps=30
            )
        )
    assert runs[0][-1] < 0.9 * runs[0][0]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", TRAINERS)
def test_weight_decay_is_decoupled(name):
    """To first order in lr it takes lr · weight_decay · p off the weights in each step."""
    ends = []
    for weight_decay in (0.0, 0.5):
        torch.manual_seed(0)
        model = network()
        start = weights(model)
        train(
            model,
            build(name, model.named_parameters(), lr=1e-4, weight_decay=weight_decay),
            steps=10,
        )
        ends.append(weights(model))
    shrunk = (ends[0] - ends[1]) @ start / (start @ start)
    steps = 9 if name in STARTS_LATE else 10
    assert shrunk == pytest.approx(steps * 1e-4 * 0.5, rel=0.05)


@pytest.mark.parametrize("name", TRAINERS)
def test_who_starts_late(name):
    model = network()
    before = weights(model)
    train(model, build(name, model.named_parameters(), lr=1e-3), steps=1)
    assert torch.equal(weights(model), before) is (name in STARTS_LATE)


@pytest.mark.parametrize("name", [name for name in TRAINERS if RIVALS[name].interval])
def test_interval_reaches_the_optimizer(name):
    """Preconditioners that are updated less often give other weights."""
    ends = []
    for interval in (1, 4):
        torch.manual_seed(0)
        model = network()
        optimizer = build(name, model.named_parameters(), lr=2e-3, interval=interval)
        # Ours has intervals after 100 steps, Scalable Shampoo preconditions after 25.
        train(model, optimizer, steps=110 if name.startswith("spectral") else 40)
        ends.append(weights(model))
    assert not torch.allclose(*ends)


@pytest.mark.parametrize("name", TRAINERS)
def test_schedulers_change_the_learning_rate(name):
    model = network()
    optimizer = build(name, model.named_parameters(), lr=1e-2)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = weights(model)
    train(model, optimizer, steps=3)
    assert torch.equal(weights(model), before)


def test_muon_gets_the_hidden_matrices_and_adamw_the_rest():
    model = network()
    muon, adamw = build("muon", model.named_parameters(), lr=1e-3).parts
    names = {parameter: name for name, parameter in model.named_parameters()}
    hidden = {names[parameter] for group in muon.param_groups for parameter in group["params"]}
    others = {names[parameter] for group in adamw.param_groups for parameter in group["params"]}
    layers = (
        "attention.query",
        "attention.key",
        "attention.value",
        "attention.out",
        "mlp_in",
        "mlp_out",
    )
    assert hidden == {f"blocks.0.{layer}.weight" for layer in layers}
    assert hidden | others == set(names.values())
    assert not hidden & others
    assert not is_hidden_matrix("blocks.0.norm1.weight", model.norm.weight)


def test_muon_in_float32_is_torchs_muon_but_for_rounding():
    """Bfloat16 keeps eight bits: five Newton-Schulz steps of torch's own are off by some
    hundredths.
    """
    moves, torchs = [], torch.optim._muon._zeropower_via_newtonschulz
    for name in ("muon_float32", "muon"):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(12, 20))
        optimizer = build(name, [("blocks.0.mlp_in.weight", weight)], lr=0.1)
        before = weight.detach().clone()
        weight.grad = torch.randn(12, 20)
        optimizer.step()
        moves.append(weight.detach() - before)
    assert 0 < (moves[0] - moves[1]).norm() <= 0.03 * moves[1].norm()
    assert torch.optim._muon._zeropower_via_newtonschulz is torchs


def test_muon_without_hidden_matrices_is_adamw():
    ends = []
    for name in ("muon", "adamw"):
        layer = torch.nn.Linear(3, 2)
        torch.nn.init.ones_(layer.weight)
        torch.nn.init.ones_(layer.bias)
        optimizer = build(name, [("head.weight", layer.weight), ("head.bias", layer.bias)], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
        ends.append(weights(layer))
    assert torch.equal(*ends)


@pytest.mark.parametrize("how", ["state_dict", "deepcopy"])
def test_together_continues_exactly_after_saving(how):
    model = network()
    optimizer = build("muon", model.named_parameters(), lr=2e-3)
    train(model, optimizer, steps=5)
    if how == "deepcopy":
        other, resumed = copy.deepcopy((model, optimizer))
    else:
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        other = network()
        other.load_state_dict(saved["model"])
        resumed = build("muon", other.named_parameters(), lr=9.0)
        resumed.load_state_dict(saved["optimizer"])
    assert isinstance(resumed, Together)
    assert train(other, resumed, steps=5) == train(model, optimizer, steps=5)
    assert torch.equal(weights(other), weights(model))


def test_frozen_parameters_are_left_out():
    model = network()
    model.embed.requires_grad_(False)
    optimizer = build("adamw", model.named_parameters(), lr=1e-3)
    assert model.embed.weight not in set(optimizer.param_groups[0]["params"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "sgdd"}, "no optimizer 'sgdd'.*adamw, muon"),
        ({"lr": -1.0}, "lr must be finite.*-1.0"),
        ({"lr": float("nan")}, "lr must be finite"),
        ({"weight_decay": float("inf")}, "weight_decay must be finite"),
        ({"interval": 0}, "interval must be at least 1"),
        ({"parameters": []}, "no parameter"),
    ],
)
def test_bad_arguments_are_explained(arguments, message):
    defaults = {"name": "adamw", "parameters": network().named_parameters(), "lr": 1e-3}
    with pytest.raises(ValueError, match=message):
        build(**{**defaults, **arguments})


def test_a_missing_package_names_the_extra_to_install(monkeypatch):
    def fail(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(extras.importlib, "import_module", fail)
    with pytest.raises(ImportError, match=r"'heavyball'.*pip install '\./lab\[peers\]'"):
        build("soap", network().named_parameters(), lr=1e-3)
