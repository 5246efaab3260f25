"""Weight decay of every kind, and what torch's own optimizers and trainers pass to an optimizer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigenstep import Spectral
from eigenstep.optim.recipes import SpectralFast
from eigenstep.paper import SpectralPaper


def stepped(
    shape: tuple[int, ...] = (6, 4),
    dtype: torch.dtype = torch.float64,
    steps: int = 5,
    **options: Any,
) -> Any:
    """Take steps with gradients that depend on nothing; return the weights before and
    after each.
    """
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
    optimizer = Spectral([param], 0.05, **options)
    history = [param.detach().clone()]
    for _ in range(steps):
        param.grad = torch.randn(shape, generator=generator).to(dtype)
        optimizer.step()
        history.append(param.detach().clone())
    return history


@pytest.mark.parametrize("maximize", [False, True])
def test_cautious_decay_shrinks_only_what_the_step_shrinks(maximize: bool) -> None:
    plain = stepped(weight_decay=0.0, maximize=maximize)
    cautious = stepped(weight_decay=0.3, cautious_weight_decay=True, maximize=maximize)
    expected = plain[0]
    for before, after, now in zip(plain[:-1], plain[1:], cautious[1:], strict=True):
        step = after - before  # gradients do not depend on weights, so neither do steps
        expected = expected + step - 0.05 * 0.3 * expected * (expected * step <= 0)
        torch.testing.assert_close(now, expected, rtol=0, atol=1e-13)
    assert not torch.allclose(plain[-1], cautious[-1])


def test_stochastic_rounding_decays_cautiously_as_well() -> None:
    options = {
        "dtype": torch.bfloat16,
        "stochastic_rounding": True,
        "weight_decay": 5.0,
        "steps": 1,
        "shape": (64, 64),
    }
    torch.manual_seed(0)
    before, cautious = stepped(cautious_weight_decay=True, **options)
    torch.manual_seed(0)
    _, everywhere = stepped(**options)
    kept = cautious != everywhere
    grown = cautious.abs() > before.abs()
    assert kept.float().mean() > 0.3
    assert grown[kept].all(), "only weights that the step moves away from zero are spared"


@pytest.mark.parametrize("cautious", [False, True])
def test_weight_decay_in_a_tensor(cautious: bool) -> None:
    decay = torch.tensor(0.3, dtype=torch.float64)
    number = stepped(weight_decay=0.3, cautious_weight_decay=cautious)
    tensor = stepped(weight_decay=decay, cautious_weight_decay=cautious)
    torch.testing.assert_close(tensor[-1], number[-1], rtol=0, atol=1e-15)


def test_weight_decay_in_a_tensor_is_read_by_the_device_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    param, decay = nn.Parameter(torch.ones(4, 4)), torch.tensor(0.0)
    optimizer = Spectral([param], 0.1, weight_decay=decay, nonfinite="ignore")
    param.grad = torch.zeros(4, 4)

    def refuse(_: Tensor) -> Any:
        raise AssertionError("a number was read back")

    with monkeypatch.context() as patch:
        for name in ("item", "__bool__", "__float__", "tolist"):
            patch.setattr(Tensor, name, refuse)
        optimizer.step()
        before = param.detach().clone()
        decay.fill_(1.0)  # as a schedule would between replays of a graph
        optimizer.step()
    assert torch.equal(before, torch.ones(4, 4))
    torch.testing.assert_close(param.detach(), torch.full((4, 4), 0.9))


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}], ids=str)
def test_steps_are_batched_whatever_implementation_is_asked_for(options: dict[str, Any]) -> None:
    params = [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    optimizer = Spectral(params, **options)
    group = optimizer.param_groups[0]
    assert len(optimizer._arranged(group, optimizer.options_of(group), params)) == 1


@pytest.mark.parametrize("name", ["amsgrad", "differentiable"])
def test_what_only_torch_can_do_is_explained(name: str) -> None:
    params = [nn.Parameter(torch.ones(2))]
    Spectral(params, **{name: False})
    with pytest.raises(ValueError, match=f"cannot do {name}=True: its"):
        Spectral(params, **{name: True})


@pytest.mark.parametrize(
    ("recipe", "kind", "options"),
    [
        (Spectral.fast, SpectralFast, {"max_ratio": 1.0, "eigenvalues": "corrected"}),
        (Spectral.paper, SpectralPaper, {"max_ratio": None, "eigenvalues": "kronecker"}),
    ],
)
def test_recipes_are_classes(recipe: Any, kind: type[Spectral], options: dict[str, Any]) -> None:
    assert recipe is kind
    assert issubclass(recipe, torch.optim.Optimizer)
    optimizer = recipe([nn.Parameter(torch.ones(4, 2))], 0.1, weight_decay=0.5, clip=None)
    group = optimizer.param_groups[0]
    assert {**group, **options, "lr": 0.1, "weight_decay": 0.5, "clip": None} == group
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(twin) is recipe
        twin.load_state_dict(optimizer.state_dict())


def test_fallback_groups_of_timm_are_diagonal() -> None:
    head, body = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    groups = [{"params": [head], "use_fallback": True}, {"params": [body], "use_fallback": False}]
    summary = Spectral(groups).summary()
    assert [item.structure for item in summary] == ["diag 16", "4 x 4"]


def test_state_exists_before_the_first_step_if_megatron_asks_for_it() -> None:
    params = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4))]
    params[0].grad = torch.ones(4, 3)
    optimizer = Spectral(params)
    optimizer._init_group(optimizer.param_groups[0])
    assert list(optimizer.state) == params[:1]
    optimizer._init_group(optimizer.param_groups[0], skip_non_grad_params=False)
    assert optimizer.state[params[1]]
    twin = Spectral([nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4))])
    for optimizer_now in (optimizer, twin):
        for param in optimizer_now.param_groups[0]["params"]:
            param.grad = torch.full_like(param, 0.5)
        optimizer_now.step()
    for param, other in zip(params, twin.param_groups[0]["params"], strict=True):
        assert torch.equal(param, other)
    twin.load_state_dict(optimizer.state_dict())
