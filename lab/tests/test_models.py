"""The networks: their sizes, what decides their weights, and what a token can see."""

import pytest
import torch
from torch.nn import functional as F

from eigenstep_lab.models.hiera import HIERA_VIT, Hiera, UnitAttention, merge, merging_order
from eigenstep_lab.models.transformers import GPT, PLAIN_VIT, ViT, sincos_positions
from eigenstep_lab.rivals import is_hidden_matrix


def small_vit(**options):
    return ViT((3, 16, 24), 5, **{"patch": 8, "width": 16, "depth": 2, "heads": 2, **options})


def small_gpt(**options):
    return GPT(11, **{"length": 7, "width": 16, "depth": 2, "heads": 2, **options})


def small_hiera(**options):
    sizes = {"patch": 2, "width": 8, "depths": (1, 2, 1), "heads": 1}
    return Hiera((3, 16, 24), 5, **{**sizes, **options})


EVERY = pytest.mark.parametrize("build", [small_vit, small_gpt, small_hiera])


def inputs_of(build):
    torch.manual_seed(0)
    return torch.randint(11, (2, 7)) if build is small_gpt else torch.randn(2, 3, 16, 24)


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_papers_networks_have_the_papers_sizes():
    with torch.device("meta"):  # counts without hundreds of MB of weights
        vit = ViT((3, 224, 224), 10, **PLAIN_VIT)
        hiera = Hiera((3, 224, 224), 1000, **HIERA_VIT)
    assert count(vit) - count(vit.head) == 85_646_592
    assert count(hiera) - count(hiera.head) == 50_755_968
    assert count(hiera) == 51_524_968  # published for Hiera-B on ImageNet-1k: 51.52 million
    assert [block.attention.units for block in hiera.blocks] == [49] * 6 + [1] * 18
    heads = [block.attention.heads for block in hiera.blocks]
    assert heads == [1] * 2 + [2] * 3 + [4] * 16 + [8] * 3


@EVERY
def test_weights_depend_on_the_seed_alone_and_all_get_gradients(build):
    inputs = inputs_of(build)
    model, again, other = build(seed=3), build(seed=3), build(seed=4)
    logits = model(inputs)
    assert torch.equal(logits, again(inputs))
    assert not torch.equal(logits, other(inputs))
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        assert parameter.grad is not None, name
        # A bias on all keys shifts every attention score alike: its gradient is zero by symmetry.
        assert name.endswith("key.bias") or parameter.grad.abs().max() > 0, name


def test_vit_tokens_are_the_patches():
    """Without blocks and positions the logits are the head of the averaged patch embeddings."""
    model = small_vit(depth=0)
    torch.nn.init.zeros_(model.positions)
    pictures = inputs_of(small_vit)
    corners = [(y, x) for y in (0, 8) for x in (0, 8, 16)]
    patches = [pictures[:, :, y : y + 8, x : x + 8].flatten(1) for y, x in corners]
    tokens = model.embed(torch.stack(patches, dim=1))
    assert torch.allclose(model(pictures), model.head(model.norm(tokens).mean(1)), atol=1e-6)


@pytest.mark.parametrize(
    "model",
    [small_vit(), small_vit(positions="sincos"), small_hiera()],
    ids=["vit", "cos", "hiera"],
)
def test_pictures_are_seen_with_their_places(model):
    pictures = inputs_of(small_vit)
    assert model(pictures).shape == (2, 5)
    assert not torch.allclose(model(pictures), model(pictures.flip(2)), atol=1e-6)


def test_sincos_positions_are_distinct_and_bounded():
    codes = sincos_positions(14, 14, 768)
    assert codes.shape == (196, 768)
    assert codes.abs().max() <= 1
    assert torch.unique(codes, dim=0).shape == codes.shape


def test_gpt_cannot_look_ahead():
    model, text = small_gpt(), inputs_of(small_gpt)
    changed = text.clone()
    changed[:, 4] = (text[:, 4] + 1) % 11
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])
    assert torch.allclose(model(text[:, :3]), before[:, :3], atol=1e-6)


def test_order_puts_together_what_merges():
    order = merging_order(4, 8, 2)
    # The left 4 × 4 unit
    assert order[:16].tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 16, 17, 24, 25, 18, 19, 26, 27]
    assert sorted(order.tolist()) == list(range(32))


def test_merging_is_max_pooling_on_the_grid():
    grid = torch.randn(2, 5, 8, 16)  # batch × width × rows × columns
    tokens = grid.flatten(2).transpose(1, 2)[:, merging_order(8, 16, 3)]
    pooled = F.max_pool2d(grid, 2).flatten(2).transpose(1, 2)
    assert torch.equal(merge(tokens), pooled[:, merging_order(4, 8, 2)])


def test_units_are_attended_one_by_one():
    torch.manual_seed(0)
    whole, alone = (UnitAttention(8, 16, heads=2, units=units) for units in (3, 1))
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
    model = small_hiera()
    tokens = torch.randn(1, 8 * 12, 8)
    changed = tokens.clone()
    changed[:, :16] += 1  # the first of six units
    # Up to the end of the second stage: four tokens are left of each unit
    stages = model.blocks[:3]
    difference = (stages(tokens) - stages(changed)).abs().amax(-1)[0]
    assert (difference[:4] > 0).all()
    assert (difference[4:] == 0).all()


def test_muon_gets_the_matrices_of_the_blocks():
    named = small_hiera().named_parameters()
    hidden = {name for name, parameter in named if is_hidden_matrix(name, parameter)}
    assert {"blocks.1.skip.weight", "blocks.0.attention.query.weight"} < hidden
    assert not hidden & {"embed.weight", "positions", "head.weight"}


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (small_vit, {"patch": 5}, "patch 5 for 16 × 24"),
        (small_vit, {"heads": 3}, "3 heads"),
        (small_vit, {"positions": "none"}, "'learned' or 'sincos'"),
        (small_vit, {"width": 6, "heads": 2, "positions": "sincos"}, "multiple of 4"),
        (small_hiera, {"patch": 3}, "multiples of patch"),
        (small_hiera, {"heads": 3}, "3 heads"),
        (small_hiera, {"depths": (1, 0)}, "at least one block"),
    ],
)
def test_impossible_shapes_are_explained(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_passages_that_are_too_long_are_explained():
    with pytest.raises(ValueError, match="8 are longer"):
        small_gpt()(torch.zeros(1, 8, dtype=torch.int64))
