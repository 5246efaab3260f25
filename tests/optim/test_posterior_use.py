"""How the posterior is used: draws, mixed precision, checkpoints, predictions and mistakes."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigenstep import Spectral
from eigenstep.posterior import SpectralPosterior

SQUARED: dict[str, Any] = {"ess": 50.0, "batch_size": 8.0, "lr": 0.02}
INPUTS = torch.randn(8, 6, generator=torch.Generator().manual_seed(5))
TARGETS = torch.arange(8) % 3


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def loss_of(model: nn.Module, part: slice = slice(None)) -> Tensor:
    dtype = next(model.parameters()).dtype
    return nn.functional.cross_entropy(model(INPUTS[part].to(dtype)), TARGETS[part])


def train(
    model: nn.Module, optimizer: SpectralPosterior, steps: int, draws: int = 1, scale: float = 1.0
) -> SpectralPosterior:
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(draws):
            with optimizer.sampled_params(train=True):
                (scale * loss_of(model)).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.div_(scale)  # as GradScaler does
        optimizer.step()
    return optimizer


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_training_lowers_the_loss_and_leaves_uncertainty() -> None:
    model = network()
    before = loss_of(model).item()
    optimizer = train(model, Spectral.posterior(model.parameters(), **{**SQUARED, "lr": 0.1}), 60)
    assert loss_of(model) < 0.7 * before
    assert optimizer.predict(model, INPUTS).std(0).min() > 0.01


def test_inside_weights_differ_and_outside_they_are_the_same_bits() -> None:
    model = network()
    optimizer = train(model, Spectral.posterior(model.parameters(), **SQUARED), 2)
    mean = weights(model)
    with optimizer.sampled_params():
        drawn = weights(model)
        assert (drawn != mean).all()
    assert torch.equal(weights(model), mean)
    with optimizer.sampled_params():
        assert (weights(model) != drawn).all()


def test_an_exception_inside_restores_weights_and_gradients() -> None:
    model = network()
    optimizer = train(model, Spectral.posterior(model.parameters(), **SQUARED), 2)
    optimizer.zero_grad()
    with optimizer.sampled_params(train=True):
        loss_of(model).backward()
    mean, gradients = weights(model), [p.grad for p in model.parameters()]

    def fails() -> None:
        with optimizer.sampled_params(train=True):
            loss_of(model).backward()
            raise KeyError("the user's own")

    with pytest.raises(KeyError):
        fails()
    assert torch.equal(weights(model), mean)
    assert all(a is b.grad for a, b in zip(gradients, model.parameters(), strict=True))
    optimizer.step()  # with the draw that was finished


def test_gradients_accumulate_inside() -> None:
    models = network(torch.float64), network(torch.float64)
    whole, parts = (Spectral.posterior(model.parameters(), **SQUARED) for model in models)
    train(models[0], whole, 4)
    for _ in range(4):
        parts.zero_grad()
        with parts.sampled_params(train=True):
            for part in (slice(0, 4), slice(4, 8)):
                (loss_of(models[1], part) / 2).backward()
        parts.step()
    torch.testing.assert_close(weights(models[0]), weights(models[1]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("draws", [1, 2])
def test_scaled_losses_change_nothing(draws: int) -> None:
    """Mixed precision multiplies the loss, and divides gradients only before the step."""
    models = network(), network()
    for model, scale in zip(models, (1.0, 1024.0), strict=True):
        train(model, Spectral.posterior(model.parameters(), **SQUARED), 5, draws, scale)
    torch.testing.assert_close(
        weights(models[0]), weights(models[1]), rtol=0.0, atol=1e-6 * (draws - 1)
    )


def test_a_step_that_the_scaler_skips_leaves_no_draw_behind() -> None:
    model = network()
    optimizer = train(model, Spectral.posterior(model.parameters(), **SQUARED), 2)
    other = copy.deepcopy(model)
    twin = Spectral.posterior(other.parameters(), **SQUARED)
    twin.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    with optimizer.sampled_params(train=True):
        (1e3 * loss_of(model)).backward()  # and no step
    with optimizer.sampled_params():
        model(INPUTS)
    model.zero_grad()
    for trained, own in ((model, optimizer), (other, twin)):
        train(trained, own, 1)
    assert torch.equal(weights(model), weights(other))


def test_several_draws_average_their_gradients() -> None:
    model = network(torch.float64)
    optimizer = train(model, Spectral.posterior(model.parameters(), **SQUARED), 2)
    optimizer.zero_grad()
    each = []
    for _ in range(3):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()  # as users of IVON do
            loss_of(model).backward()
            each.append(model[0].weight.grad.clone())  # type: ignore[union-attr,operator]
    torch.testing.assert_close(model[0].weight.grad, torch.stack(each).mean(0))
    assert not torch.allclose(each[0], each[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_is_exact(dtype: torch.dtype) -> None:
    models = network(dtype), network(dtype)
    straight = train(models[0], Spectral.posterior(models[0].parameters(), **SQUARED), 7)
    train(models[1], first := Spectral.posterior(models[1].parameters(), **SQUARED), 4)
    file = io.BytesIO()
    torch.save({"model": models[1].state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = network(dtype)
    other.load_state_dict(saved["model"])
    resumed = Spectral.posterior(other.parameters(), **{**SQUARED, "seed": 77, "ess": 3.0})
    resumed.load_state_dict(saved["optimizer"])
    torch.manual_seed(99)  # draws do not depend on it
    train(other, resumed, 3)
    assert torch.equal(weights(models[0]), weights(other))
    for a, b in zip(models[0].parameters(), other.parameters(), strict=True):
        assert all(torch.equal(x, resumed.state[b][name]) for name, x in straight.state[a].items())


def test_copies_and_plain_checkpoints_work() -> None:
    model = network()
    optimizer = train(model, Spectral.posterior(model.parameters(), **SQUARED), 2)
    assert copy.deepcopy(optimizer).param_groups[0]["ess"] == 50.0
    # To go on without a posterior
    Spectral(model.parameters()).load_state_dict(optimizer.state_dict())


def test_bfloat16_weights_are_drawn_and_restored() -> None:
    model = network(torch.bfloat16)
    optimizer = train(model, Spectral.posterior(model.parameters(), **SQUARED), 3)
    mean = weights(model)
    with optimizer.sampled_params():
        assert weights(model).dtype == torch.bfloat16
        assert (weights(model) != mean).any()
    assert torch.equal(weights(model), mean)
    assert optimizer.state[model[0].weight]["scale"].dtype == torch.float32


def test_parameters_without_gradients_and_groups_of_their_own() -> None:
    model = network()
    frozen = nn.Parameter(torch.ones(3))
    groups = [
        {"params": model[0].parameters()},
        {"params": [*model[2].parameters(), frozen], "prior_precision": 1e6},
    ]
    optimizer = train(model, Spectral.posterior(groups, **SQUARED), 3)
    first, last = (optimizer.covariance(model[at].bias).diagonal().max() for at in (0, 2))
    assert last < 2e-6 < first
    with optimizer.sampled_params():
        assert torch.equal(frozen, torch.ones(3))


def linear() -> tuple[nn.Module, SpectralPosterior]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    return model, train(model, Spectral.posterior(model.parameters(), **SQUARED), 20)


def test_predictions_of_a_linear_model() -> None:
    """Their covariance follows from that of the weights."""
    model, optimizer = linear()
    x = INPUTS[:2].double()
    mean = model(x).detach()
    drawn = optimizer.predict(model, x, 6000) - mean
    assert drawn.shape == (6000, 2, 3)
    weights_apart = optimizer.covariance(model.weight).view(3, 6, 3, 6)
    want = torch.einsum("ei,cidj,ej->ecd", x, weights_apart, x) + optimizer.covariance(model.bias)
    covariance = torch.einsum("sec,sed->ecd", drawn, drawn) / len(drawn)
    assert (covariance - want).abs().max() < 0.1 * want.abs().max()
    own = optimizer.predict(model, x, 5, temperature=0.0)
    torch.testing.assert_close(own, mean.expand(5, 2, 3))
    hot = optimizer.predict(model, x, 4000, temperature=4.0) - mean
    assert 3.5 < hot.square().mean() / drawn.square().mean() < 4.5


def test_every_second_draw_of_a_prediction_is_a_mirror_image() -> None:
    model, optimizer = linear()
    x = INPUTS[:2].double()
    apart = optimizer.predict(model, x, 5) - model(x).detach()
    torch.testing.assert_close(apart[0], -apart[1])
    torch.testing.assert_close(apart[2], -apart[3])
    assert (apart[0] != apart[2]).all()


def test_the_last_layer_alone() -> None:
    model = network()
    optimizer = train(model, Spectral.posterior(model.parameters(), **SQUARED), 20)
    hidden = model[:2]
    before = hidden(INPUTS)
    seen: list[Tensor] = []

    def watched(x: Tensor) -> Tensor:
        seen.append(hidden(x))
        return model(x)

    last = optimizer.predict(watched, INPUTS, 8, only=model[2].parameters())
    everything = optimizer.predict(model, INPUTS, 8)
    assert 0 < last.var(0).mean() < everything.var(0).mean()
    assert all(torch.equal(x, before) for x in seen)


@pytest.mark.parametrize("right", [0.125, 2.0])
def test_the_right_temperature_is_found(right: float) -> None:
    """Held-out targets come from the posterior itself, at a temperature that is known."""
    model, optimizer = linear()
    x = torch.randn(400, 6).double()
    rows = [optimizer.predict(model, row[None], 1, temperature=right)[0] for row in x]
    targets = torch.cat(rows)

    def log_loss(outputs: Tensor) -> Tensor:
        spread = outputs.var(0).add(1e-9).sqrt()
        return -torch.distributions.Normal(outputs.mean(0), spread).log_prob(targets).mean()

    state = torch.get_rng_state()
    assert optimizer.tune_temperature(model, x, log_loss, 200) == right
    assert torch.equal(torch.get_rng_state(), state)
    two = [0.9 * right, 30 * right]
    assert optimizer.tune_temperature(model, x, log_loss, 200, temperatures=two) == 0.9 * right


def test_a_mean_that_is_sure_and_right_wants_no_noise() -> None:
    model = network()
    optimizer = train(model, Spectral.posterior(model.parameters(), **SQUARED), 20)
    targets = model(INPUTS).argmax(-1)
    with torch.no_grad():
        model[2].weight.mul_(50)
        model[2].bias.mul_(50)

    def log_loss(outputs: Tensor) -> Tensor:
        return nn.functional.nll_loss(outputs.softmax(-1).mean(0).log(), targets)

    assert optimizer.tune_temperature(model, INPUTS, log_loss) == 0.0
    for temperatures, loss, message in (
        ([], log_loss, "log_loss must be finite at one of the temperatures"),
        ([1.0], lambda outputs: outputs.mean() * float("nan"), "log_loss must be finite"),
        ([-1.0], log_loss, "temperature must be"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.tune_temperature(model, INPUTS, loss, temperatures=temperatures)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"ess": 0.0}, "ess must be greater than 0"),
    ({"ess": float("nan")}, "ess must be"),
    ({"ess": "many"}, "ess must be"),
    ({"batch_size": 0.0}, "batch_size must be greater than 0"),
    ({"prior_precision": 0.0}, "prior_precision must be greater than 0"),
    ({"seed": -1}, "seed must be"),
    ({"seed": 1.5}, "seed must be"),
    ({"damping": 0.1}, "damping of a posterior is prior_precision / ess"),
    ({"weight_decay": 0.1}, "weight_decay fixed"),
    ({"maximize": True}, "maximize fixed"),
    ({"grafting": "adam"}, "grafting"),
    ({"lr": -1.0}, "lr must be"),
    ({"no_such_option": 1}, "no_such_option"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=lambda x: str(x)[:40])
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Spectral.posterior([nn.Parameter(torch.ones(3))], **{**SQUARED, **options})


def test_damaged_checkpoints_change_nothing() -> None:
    model = network()
    optimizer = train(model, Spectral.posterior(model.parameters(), **SQUARED), 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["ess"] = -3.0
    with pytest.raises(ValueError, match="ess"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["ess"] == 50.0


def test_mistakes_inside_and_outside_of_draws() -> None:
    model = network()
    optimizer = train(model, Spectral.posterior(model.parameters(), **SQUARED), 2)
    with optimizer.sampled_params():
        with pytest.raises(RuntimeError, match="inside of itself"):
            optimizer.sampled_params().__enter__()
        with pytest.raises(RuntimeError, match="drawn weights"):
            optimizer.step()
    with optimizer.sampled_params(train=True):
        outside = loss_of(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outside.backward()
    with pytest.raises(ValueError, match="for predictions"):
        optimizer.sampled_params(train=True, temperature=0.5).__enter__()
    with pytest.raises(ValueError, match="nothing is known"):
        optimizer.covariance(nn.Parameter(torch.ones(2)))


def test_nonfinite_gradients_change_nothing() -> None:
    model = network()
    optimizer = Spectral.posterior(model.parameters(), **SQUARED)
    with optimizer.sampled_params(train=True):
        (loss_of(model) * float("nan")).backward()
    before = weights(model)
    with pytest.raises(ValueError, match="NaN"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    assert not any(optimizer.state.get(param) for param in model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert all(param.grad is not None and param.grad.isnan().any() for param in model.parameters())
