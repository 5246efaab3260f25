import csv
import json
import math

import pytest
import torch
from torch.nn import functional as F

from eigenstep_lab.train.feeds import MIX, chance
from eigenstep_lab.train.runlog import RunLog, read
from eigenstep_lab.train.trainer import Diverged, Run, cross_entropy, train
from many_processes.cases import equal

from .runs import log, weights


def gradients(settings):
    """The gradient of the first step, and its loss."""
    run = Run(settings)
    loss = run.step(0, next(run.feed.batches(0, 1)))
    return torch.cat([p.grad.flatten() for p in run.model.parameters()]), loss


def test_a_run_learns_and_leaves_everything_behind(tiny, tmp_path):
    settings = tiny(train_for="80 steps", batch=32, lr=1e-2)
    result = train(settings, tmp_path, command="eigenstep train ...")
    assert (result.step, result.steps) == (80, 80)
    assert result.test_error < 0.4
    names = {path.name.partition(".")[0] for path in tmp_path.iterdir() if path.name != ".lock"}
    assert names == {"log", "model", "result", "step-000000075", "step-000000080", "events"}
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["test_loss"] == result.test_loss
    assert written["command"] == "eigenstep train ..."
    assert written["settings"]["lr"] == 1e-2


def test_the_log_says_what_happened_when(tiny, tmp_path):
    result = train(tiny(), tmp_path)
    with (tmp_path / "log.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [int(line["step"]) for line in lines] == [5, 6, 10, 12]
    assert [bool(line["loss"]) for line in lines] == [True, False, True, True]
    assert [bool(line["test_loss"]) for line in lines] == [False, True, False, True]
    assert float(lines[-1]["test_error"]) == result.test_error
    assert float(lines[0]["lr"]) == pytest.approx(3e-3 * 0.5 * (1 + math.cos(math.pi * 2 / 10)))
    assert float(lines[0]["epoch"]) == pytest.approx(5 / (1437 // 8))
    assert float(lines[-1]["seconds"]) == pytest.approx(result.seconds)


def test_the_learning_rate_warms_up_and_falls_as_a_cosine(tiny):
    run = Run(tiny(train_for="12 steps", warmup="4 steps", floor=0.1))
    factors = [run.schedule(step) for step in range(12)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[8] == pytest.approx(0.1 + 0.9 * 0.5)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    highest = [group["lr"] for group in run.optimizer.param_groups]
    assert highest == [1.2e-2, 3e-3, 3e-3]  # positions step farther
    run.step(1, next(run.feed.batches(1, 2)))
    assert [group["lr"] for group in run.optimizer.param_groups] == [0.5 * lr for lr in highest]


@pytest.mark.parametrize(("steps", "warmup"), [(10, 1), (1000, 100), (3000, 179)])
def test_warmup_adapts_to_short_runs(tiny, steps, warmup):
    run = Run(tiny(train_for=f"{steps} steps", warmup="auto"))
    assert run.feed.per_epoch == 179
    assert run.warmup == warmup


def test_the_same_settings_give_the_same_numbers(tiny, tmp_path):
    first, second, other = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    for number, (directory, seed) in enumerate(((first, 0), (second, 0), (other, 1))):
        torch.manual_seed(number)  # the global state must not matter
        train(tiny(seed=seed, mixup=0.2, crop=0.5), directory)
    assert equal(weights(first), weights(second))
    assert log(first) == log(second)
    assert not equal(weights(first), weights(other))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "mixed"])
def test_a_stopped_run_goes_on_exactly(tiny, tmp_path, precision):
    """Everything that uses chance is on; the stop falls between two lines of the log."""
    option = {"stochastic_rounding": True, "basis_dtype": "bfloat16"}
    settings = tiny(precision=precision, mixup=0.4, cutmix=1.0, crop=0.5, flip=True, option=option)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(settings, whole)
    steps = []
    stopped = train(
        settings, parts, on_step=lambda *now: steps.append(now), stop=lambda: len(steps) == 7
    )
    assert stopped.step == 8
    assert not (parts / "model.pt").exists()
    assert train(settings, parts).step == 12
    assert equal(weights(whole), weights(parts))
    assert log(whole) == log(parts)


def test_a_finished_run_is_not_trained_again(tiny, tmp_path):
    first = train(tiny(), tmp_path)
    steps = []
    assert train(tiny(), tmp_path, on_step=lambda *now: steps.append(now)) == first
    assert not steps


def test_another_run_in_the_same_folder_is_refused(tiny, tmp_path):
    train(tiny(), tmp_path)
    before = weights(tmp_path)
    message = r"other settings: lr \(0.003, now 0.1\), batch .*--directory, or --fresh"
    with pytest.raises(ValueError, match=message):
        train(tiny(lr=0.1, batch=4), tmp_path)
    assert equal(weights(tmp_path), before)
    assert train(tiny(checkpoint_every="3", threads=1), tmp_path).step == 12  # these change nothing


def test_parts_of_a_batch_add_up_to_its_gradient(tiny):
    whole, loss = gradients(tiny(mixup=0.3, label_smoothing=0.1))
    parts, same_loss = gradients(tiny(mixup=0.3, label_smoothing=0.1, accumulate=4))
    assert torch.allclose(parts, whole, atol=1e-6)
    assert torch.allclose(same_loss, loss)
    assert not torch.equal(parts, whole)


def test_the_loss_of_mixed_and_smoothed_labels_matches_its_definition(tiny):
    settings = tiny(mixup=0.5, label_smoothing=0.2)
    run = Run(settings)
    inputs, labels = next(run.feed.batches(0, 1))
    share = chance(settings.seed, MIX, 0).beta(0.5, 0.5)
    with torch.no_grad():
        log_p = run.model(share * inputs + (1 - share) * inputs.roll(1, 0)).double().log_softmax(-1)
    one_hot = F.one_hot(labels, 10).double()
    targets = 0.8 * (share * one_hot + (1 - share) * one_hot.roll(1, 0)) + 0.2 / 10
    expected = -(targets * log_p).sum(-1).mean()
    assert run.step(0, (inputs, labels)).item() == pytest.approx(expected.item(), rel=1e-5)


def test_held_out_loss_and_error_are_means_over_all_examples(tiny):
    run = Run(tiny(batch=100, test_batches=0))  # the last batch is smaller
    inputs, labels = (torch.cat(parts) for parts in zip(*run.feed.held_out(), strict=True))
    with torch.no_grad():
        logits = run.model(inputs)
    loss, error = run.evaluate()
    assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert error == pytest.approx((logits.argmax(-1) != labels).float().mean().item())


def test_text_is_learned_character_by_character(tiny, poem, tmp_path):
    settings = tiny(data=str(poem), length=16, train_for="60 steps", lr=1e-2, batch=16)
    assert train(settings, tmp_path).test_loss < 0.8 * math.log(28)
    logits, targets = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    expected = F.cross_entropy(logits.transpose(1, 2), targets)
    assert torch.allclose(cross_entropy(logits, targets), expected)


HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("precision", "weight", "product"),
    [("fp32", SINGLE, SINGLE), ("bf16", HALF, HALF), ("mixed", SINGLE, HALF)],
)
def test_precision_decides_where_numbers_are_rounded(tiny, precision, weight, product):
    run = Run(tiny(precision=precision))
    seen = []
    layer = run.model.blocks[0].mlp_in
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    run.step(0, next(run.feed.batches(0, 1)))
    assert layer.weight.dtype == weight
    assert seen == [product]


@pytest.mark.parametrize("optimizer", ["spectral", "adamw", "soap"])
def test_divergence_is_told_as_such(tiny, tmp_path, optimizer):
    with pytest.raises(Diverged, match=r"training diverged.* step \d"):
        train(tiny(optimizer=optimizer, lr=1e30, warmup="0", log_every="1"), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "gpt"}, "model gpt does not fit the data: digits is pictures"),
        (
            {"model_option": {"dept": 3}},
            "model vit has no option dept: expected patch, width, depth, heads, positions",
        ),
        ({"model_option": {"patch": 3}}, "patch must divide"),
        ({"optimizer": "adamw", "option": {"bets": 3}}, "optimizer adamw with options .*bets"),
        ({"optimizer": "soap", "option": {"bets": 3}}, "optimizer soap with options .*bets"),
        ({"option": {"root": -1}}, "root must be"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
        ({"warmup": "1 epoch"}, "train_for must be longer than warmup: 12 steps against 179"),
        ({"checkpoint_every": "0.001 epochs"}, "checkpoint_every must be at least one step"),
    ],
)
def test_impossible_settings_are_explained(tiny, options, message):
    with pytest.raises(ValueError, match=message):
        Run(tiny(**options))


def test_lines_from_beyond_the_checkpoint_are_removed_from_the_log(tmp_path):
    one = RunLog(tmp_path, 0)
    for step in (10, 20, 30):
        one.write(step, loss=1.0, lr=0.1, seconds=step)
    one.close()
    with (tmp_path / "log.csv").open("a") as file:
        file.write("1")  # a line that was cut off
    two = RunLog(tmp_path, 20)
    two.write(30, loss=2.0, lr=0.1, seconds=30)
    two.close()
    kept = [(line["step"], line["loss"]) for line in read(tmp_path / "log.csv")]
    assert kept == [("10", "1.0"), ("20", "1.0"), ("30", "2.0")]


def test_a_run_goes_on_after_a_picture_was_repaired(tiny, pictures, tmp_path):
    settings = tiny(data=str(pictures), size=8, batch=4, checkpoint_every="1")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(settings, whole)
    victim = next(pictures.glob("train/dark/*"))
    content = victim.read_bytes()
    victim.write_bytes(content[:200])
    with pytest.raises(ValueError, match="is damaged or incomplete"):
        train(settings, parts)
    victim.write_bytes(content)
    train(settings, parts)
    assert equal(weights(whole), weights(parts))


def test_chance_is_its_own_for_each_use_and_step():
    keys = [(seed, use, step) for seed in range(3) for use in range(4) for step in range(5)]
    assert len({tuple(chance(*key).random(2)) for key in keys}) == len(keys)
