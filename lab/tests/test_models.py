import pytest
import torch

from eigenstep_lab.models.transformers import GPT, PLAIN_VIT, ViT, sincos_positions


def small_vit(**options):
    return ViT((3, 8, 12), 5, **{"patch": 4, "width": 16, "depth": 2, "heads": 2, **options})


def small_gpt(**options):
    return GPT(11, **{"length": 7, "width": 16, "depth": 2, "heads": 2, **options})


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def block_parameters(d):
    return 4 * (d * d + d) + (4 * d * d + 4 * d) + (4 * d * d + d) + 4 * d


def test_parameter_counts_match_the_formula():
    assert count(small_vit()) == (48 * 16 + 16) + 6 * 16 + 2 * block_parameters(16) + 2 * 16 + (
        16 * 5 + 5
    )
    assert count(small_gpt()) == 11 * 16 + 7 * 16 + 2 * block_parameters(16) + 2 * 16 + (
        16 * 11 + 11
    )


def test_full_plain_vit_has_85_6_million_parameters():
    with torch.device("meta"):  # counts without 343 MB of weights
        model = ViT((3, 224, 224), 10, **PLAIN_VIT)
    assert count(model) - count(model.head) == 85_646_592
    assert count(model) == 85_654_282


@pytest.mark.parametrize("build", [small_vit, small_gpt])
def test_weights_depend_on_the_seed_alone(build):
    torch.manual_seed(1)
    first = build(seed=3)
    torch.manual_seed(2)
    second, other = build(seed=3), build(seed=4)
    for name, weights in first.state_dict().items():
        assert torch.equal(weights, second.state_dict()[name])
    assert not torch.equal(first.head.weight, other.head.weight)


@pytest.mark.parametrize("build", [small_vit, small_gpt])
def test_every_weight_is_set_and_gets_a_gradient(build):
    model = build()
    torch.manual_seed(0)
    inputs = torch.randn(4, 3, 8, 12) if build is small_vit else torch.randint(11, (4, 7))
    model(inputs).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        assert parameter.grad is not None, name
        # A bias on all keys shifts every attention score alike: its gradient is zero by symmetry.
        assert name.endswith("key.bias") or parameter.grad.abs().max() > 0, name


def test_vit_tokens_are_the_patches():
    """Without blocks and positions the logits are the head of the normalized, averaged patch
    embeddings.
    """
    model = small_vit(depth=0)
    torch.nn.init.zeros_(model.positions)
    pictures = torch.randn(2, 3, 8, 12)
    patches = [pictures[:, :, y : y + 4, x : x + 4].flatten(1) for y in (0, 4) for x in (0, 4, 8)]
    tokens = model.embed(torch.stack(patches, dim=1))
    assert torch.allclose(model(pictures), model.head(model.norm(tokens).mean(1)), atol=1e-6)


@pytest.mark.parametrize("positions", ["learned", "sincos"])
def test_vit_sees_where_a_patch_is(positions):
    model = small_vit(positions=positions)
    pictures = torch.randn(2, 3, 8, 12)
    assert model(pictures).shape == (2, 5)
    assert not torch.allclose(model(pictures), model(pictures.flip(2)), atol=1e-6)


def test_sincos_positions_are_distinct_and_bounded():
    codes = sincos_positions(14, 14, 768)
    assert codes.shape == (196, 768)
    assert codes.abs().max() <= 1
    assert torch.unique(codes, dim=0).shape == codes.shape


def test_gpt_cannot_look_ahead():
    model = small_gpt()
    text = torch.randint(11, (1, 7))
    changed = text.clone()
    changed[0, 4] = (text[0, 4] + 1) % 11
    before, after = model(text), model(changed)
    assert before.shape == (1, 7, 11)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])
    assert torch.allclose(model(text[:, :3]), before[:, :3], atol=1e-6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: small_vit(patch=5), "patch 5 for 8 × 12"),
        (lambda: small_vit(heads=3), "3 heads"),
        (lambda: small_vit(positions="none"), "'learned' or 'sincos'"),
        (lambda: small_vit(width=6, heads=2, positions="sincos"), "multiple of 4"),
        (lambda: small_gpt()(torch.zeros(1, 8, dtype=torch.int64)), "8 are longer"),
    ],
)
def test_impossible_shapes_are_explained(build, message):
    with pytest.raises(ValueError, match=message):
        build()
