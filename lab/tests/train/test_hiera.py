import pytest
import torch
from torch.nn import functional as F

from eigenstep_lab.models.hiera import HIERA_VIT, Hiera, UnitAttention, merge, merging_order
from eigenstep_lab.rivals import is_hidden_matrix


def small(**options):
    return Hiera(
        (3, 16, 24), 5, **{"patch": 2, "width": 8, "depths": (1, 2, 1), "heads": 1, **options}
    )


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_full_hiera_vit_has_50_7_million_parameters():
    with torch.device("meta"):  # counts without 203 MB of weights
        model = Hiera((3, 224, 224), 1000, **HIERA_VIT)
    without_head = count(model) - count(model.head)
    assert without_head == 50_755_968
    assert abs(without_head - 50.7e6) < 0.1e6
    assert count(model) == 51_524_968  # published for Hiera-B on ImageNet-1k: 51.52 million
    assert [block.attention.units for block in model.blocks] == [49] * 6 + [1] * 18
    assert [block.attention.heads for block in model.blocks] == [1] * 2 + [2] * 3 + [4] * 16 + [
        8
    ] * 3


def test_order_puts_together_what_merges():
    order = merging_order(4, 8, 2)
    # The left 4 × 4 unit
    assert order[:16].tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 16, 17, 24, 25, 18, 19, 26, 27]
    assert sorted(order.tolist()) == list(range(32))


def test_merging_is_max_pooling_on_the_grid():
    grid = torch.randn(2, 5, 8, 16)  # batch × width × rows × columns
    sorted_tokens = grid.flatten(2).transpose(1, 2)[:, merging_order(8, 16, 3)]
    pooled = F.max_pool2d(grid, 2)
    expected = pooled.flatten(2).transpose(1, 2)[:, merging_order(4, 8, 2)]
    assert torch.equal(merge(sorted_tokens), expected)


def test_units_are_attended_one_by_one():
    torch.manual_seed(0)
    whole = UnitAttention(8, 16, heads=2, units=3)
    alone = UnitAttention(8, 16, heads=2, units=1)
    alone.load_state_dict(whole.state_dict())
    x = torch.randn(2, 3 * 16, 8)
    expected = torch.cat([alone(unit) for unit in x.chunk(3, dim=1)], dim=1)
    assert expected.shape == (2, 3 * 4, 16)
    assert torch.allclose(whole(x), expected, atol=1e-6)


def test_attention_with_pooled_queries_matches_its_definition():
    torch.manual_seed(0)
    attention = UnitAttention(4, 8, heads=2, units=1).double()
    x = torch.randn(1, 8, 4, dtype=torch.float64)
    q, k, v = (layer(x)[0] for layer in (attention.query, attention.key, attention.value))
    pooled = torch.stack([q[:4].amax(0), q[4:].amax(0)])
    heads = []
    for part in (slice(0, 4), slice(4, 8)):
        scores = pooled[:, part] @ k[:, part].T / 4**0.5
        heads.append(scores.softmax(-1) @ v[:, part])
    assert torch.allclose(attention(x)[0], attention.out(torch.cat(heads, dim=-1)))


def test_tokens_of_the_first_stages_see_only_their_unit():
    model = small().eval()
    tokens = torch.randn(1, 8 * 12, 8)
    changed = tokens.clone()
    changed[:, :16] += 1  # the first of six units
    # Up to the end of the second stage: four tokens are left of each unit
    stages = model.blocks[:3]
    difference = (stages(tokens) - stages(changed)).abs().amax(-1)[0]
    assert (difference[:4] > 0).all()
    assert (difference[4:] == 0).all()


def test_every_weight_gets_a_gradient_and_depends_on_the_seed_alone():
    torch.manual_seed(0)
    model = small(seed=1)
    pictures = torch.randn(2, 3, 16, 24)
    logits = model(pictures)
    assert logits.shape == (2, 5)
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        # A bias on all keys shifts every attention score alike: its gradient is zero by symmetry.
        assert parameter.grad is not None, name
        assert name.endswith("key.bias") or parameter.grad.abs().max() > 0, name
    assert torch.equal(logits, small(seed=1)(pictures))
    assert not torch.equal(logits, small(seed=2)(pictures))


def test_positions_matter():
    model, pictures = small(), torch.randn(2, 3, 16, 24)
    assert not torch.allclose(model(pictures), model(pictures.flip(3)), atol=1e-6)


def test_muon_gets_the_matrices_of_the_blocks():
    hidden = {
        name for name, parameter in small().named_parameters() if is_hidden_matrix(name, parameter)
    }
    assert "blocks.1.skip.weight" in hidden
    assert "blocks.0.attention.query.weight" in hidden
    assert not hidden & {"embed.weight", "positions", "head.weight"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch": 3}, "multiples of patch"),
        ({"heads": 3}, "3 heads"),
        ({"depths": (1, 0)}, "at least one block"),
    ],
)
def test_impossible_shapes_are_explained(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)
