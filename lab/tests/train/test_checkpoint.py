import pytest
import torch
from torch.nn import functional as F

from eigenstep_lab.models.transformers import ViT
from eigenstep_lab.rivals import TRAINERS, build
from eigenstep_lab.train import checkpoint


def test_only_the_newest_are_kept_and_each_says_what_was_saved(tmp_path):
    for step in (5, 10, 15):
        checkpoint.save(
            tmp_path, step, {"step": step, "weights": torch.full((3,), float(step)), "text": "ä"}
        )
    found = checkpoint.list_checkpoints(tmp_path)
    assert [path.name for path in found] == ["step-000000010.pt", "step-000000015.pt"]
    assert torch.equal(checkpoint.load(found[-1])["weights"], torch.full((3,), 15.0))
    assert checkpoint.load(found[0])["text"] == "ä"


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    checkpoint.save(tmp_path, 5, {"step": 5})
    (tmp_path / ".step-000000010.pt.4711").write_bytes(b"half")
    (tmp_path / "step-000000010.pt.sha256").touch()
    assert len(checkpoint.list_checkpoints(tmp_path)) == 1
    checkpoint.clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000000005.pt",
        "step-000000005.pt.sha256",
    ]
    checkpoint.delete(tmp_path / "step-000000005.pt")
    assert list(tmp_path.iterdir()) == []


def flip_a_bit(raw):
    place = raw.index(torch.arange(1000.0).numpy().tobytes()[400:480]) + 7
    return raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]


def cut_in_half(raw):
    return raw[: len(raw) // 2]


@pytest.mark.parametrize(
    "damage", [cut_in_half, lambda raw: raw[:-100], lambda raw: b"", flip_a_bit]
)
def test_damage_is_noticed_and_the_way_out_is_told(tmp_path, damage):
    first, second = (
        checkpoint.save(tmp_path, step, {"weights": torch.arange(1000.0)}) for step in (5, 10)
    )
    second.write_bytes(damage(second.read_bytes()))
    with pytest.raises(
        ValueError, match=r"step-000000010.pt is damaged .* to go on from step-000000005.pt$"
    ):
        checkpoint.load(second)
    first.write_bytes(damage(first.read_bytes()))
    with pytest.raises(ValueError, match=r"delete it and repeat the command to begin anew$"):
        checkpoint.load(first)


def test_a_checkpoint_cannot_run_code(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"evil": pytest.approx})
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.load(path)


# In bfloat16 too, where an optimizer keeps its state in another format: torch would cast it to the
# weights' format.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in TRAINERS),
        *((name, torch.bfloat16) for name in ("spectral_paper", "soap", "muon")),
    ],
)
def test_every_optimizer_goes_on_exactly(name, dtype, tmp_path):
    generator = torch.Generator().manual_seed(0)
    inputs, labels = (
        torch.randn(8, 1, 8, 8, generator=generator),
        torch.randint(4, (8,), generator=generator),
    )

    def begin(lr):
        model = ViT((1, 8, 8), 4, patch=4, width=8, depth=1, heads=2).to(dtype)
        return model, build(name, model.named_parameters(), lr, 0.01, interval=3)

    def go_on(model, optimizer, steps):
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.to(dtype)).float(), labels).backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    model, optimizer = begin(1e-3)
    go_on(model, optimizer, range(5))
    path = checkpoint.save(
        tmp_path, 5, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    )
    expected = go_on(model, optimizer, range(5, 9))

    saved = checkpoint.load(path)
    model, optimizer = begin(9.0)
    model.load_state_dict(saved["model"])
    checkpoint.restore(optimizer, saved["optimizer"])
    assert torch.equal(go_on(model, optimizer, range(5, 9)), expected)
