import numpy as np
import pytest
import torch

from eigenstep_lab.train.augment import cut, middle_square, mix, random_box


def test_the_whole_picture_stays_and_mirrors_exactly():
    pictures = torch.randn(2, 3, 6, 8)
    whole = cut(pictures, [(0, 0, 1, 1)] * 2, [False, True])
    assert torch.allclose(whole[0], pictures[0], atol=1e-5)
    assert torch.allclose(whole[1], pictures[1].flip(2), atol=1e-5)


def test_a_part_is_stretched_over_the_picture():
    picture = torch.zeros(1, 1, 8, 8)
    picture[..., 4:, :4] = 1  # the lower left quarter
    assert cut(picture, [(0, 0.5, 0.5, 0.5)], [False])[..., 1:, :-1].min() == 1
    # The lower half, mirrored: dark on the left, bright on the right
    half = cut(picture, [(0, 0.5, 1, 0.5)], [True])
    assert half[..., 1:, :3].max() == 0
    assert half[..., 1:, 5:].min() == 1


@pytest.mark.parametrize("aspect", [0.5, 1.0, 2.0])
def test_random_boxes_keep_their_promises(aspect):
    random = np.random.default_rng(0)
    boxes = np.array([random_box(random.random(4), aspect, 0.3) for _ in range(2000)])
    left, top, width, height = boxes.T
    assert boxes.min() >= 0
    assert max((left + width).max(), (top + height).max()) <= 1 + 1e-12
    inside = (width < 1) & (height < 1)
    assert (width * height)[inside].min() >= 0.3
    shapes = (width / height * aspect)[inside]
    assert 0.74 < shapes.min() < 0.8
    assert 1.25 < shapes.max() < 1.34
    assert random_box(np.array([1.0, 0.5, 0.7, 0.2]), 1.0, 0.3) == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("aspect", "box"), [(1.0, (0, 0, 1, 1)), (2.0, (0.25, 0, 0.5, 1)), (0.5, (0, 0.25, 1, 0.5))]
)
def test_middle_square(aspect, box):
    assert middle_square(aspect) == box


def mixed(seed, **options):
    """Mix pictures that are constant, with the class's number plus one as value."""
    labels = torch.tensor([0, 1, 2, 1])
    pictures = (labels + 1.0)[:, None, None, None].expand(4, 2, 10, 10)
    return mix(pictures, labels, 3, np.random.default_rng(seed), **options)


def is_pasted(pictures):
    """Tell whether the third picture has parts of two, not their blend."""
    return set(pictures[2].unique().tolist()) <= {2.0, 3.0}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ["mixup", "cutmix"])
def test_labels_are_mixed_as_the_pictures_are(seed, method):
    """The mean of a mixed picture is the mean of the values that its label stands for."""
    pictures, labels = mixed(seed, **{method: 1.0})
    assert torch.allclose(labels.sum(1), torch.ones(4))
    values = labels @ torch.tensor([1.0, 2.0, 3.0])
    assert torch.allclose(pictures.mean((1, 2, 3)), values, atol=1e-5)
    assert is_pasted(pictures) is (method == "cutmix")


def test_shares_follow_the_beta_distribution():
    shares = [mixed(seed, mixup=0.4)[1][0, 0].item() for seed in range(3000)]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.03)
    assert np.var(shares) == pytest.approx(1 / (4 * (2 * 0.4 + 1)), rel=0.1)


def test_a_coin_decides_if_both_are_on_and_nothing_happens_if_none_is():
    pasted = sum(is_pasted(mixed(seed, mixup=1.0, cutmix=1.0)[0]) for seed in range(200))
    assert 70 < pasted < 130
    pictures, labels = mixed(0)
    assert torch.equal(pictures[:, 0, 0, 0], labels + 1.0)
