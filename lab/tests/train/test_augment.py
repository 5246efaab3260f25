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
    assert cut(picture, [(0.5, 0, 0.5, 0.5)], [False])[..., :-1, 1:].max() == 0
    # The lower half, mirrored: dark on the left, bright on the right
    half = cut(picture, [(0, 0.5, 1, 0.5)], [True])
    assert half[..., 1:, :3].max() == 0
    assert half[..., 1:, 5:].min() == 1


def test_random_boxes_keep_their_promises():
    random = np.random.default_rng(0)
    for aspect in (0.5, 1.0, 2.0):
        boxes = np.array([random_box(random.random(4), aspect, 0.3) for _ in range(2000)])
        left, top, width, height = boxes.T
        assert boxes.min() >= 0
        assert (left + width).max() <= 1 + 1e-12
        assert (top + height).max() <= 1 + 1e-12
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


def batch():
    """Pictures that are constant, with the class's number plus one as value."""
    labels = torch.tensor([0, 1, 2, 1])
    return (labels + 1.0)[:, None, None, None].expand(4, 2, 10, 10), labels


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("method", ["mixup", "cutmix"])
def test_labels_are_mixed_as_the_pictures_are(seed, method):
    """The mean of a mixed picture is the mean of the values that its label stands for."""
    pictures, labels = batch()
    mixed, soft = mix(pictures, labels, 3, np.random.default_rng(seed), **{method: 1.0})
    assert torch.allclose(soft.sum(1), torch.ones(4))
    assert torch.allclose(mixed.mean((1, 2, 3)), soft @ torch.tensor([1.0, 2.0, 3.0]), atol=1e-5)
    values = mixed[2].unique().tolist()
    assert (set(values) <= {2.0, 3.0}) is (method == "cutmix")  # cutmix pastes, mixup blends
    assert torch.equal(pictures[:, 0, 0, 0], labels + 1.0)  # the batch itself is left alone


def test_shares_follow_the_beta_distribution():
    pictures, labels = batch()
    shares = [
        mix(pictures, labels, 3, np.random.default_rng(k), mixup=0.4)[1][0, 0].item()
        for k in range(3000)
    ]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.03)
    assert np.var(shares) == pytest.approx(1 / (4 * (2 * 0.4 + 1)), rel=0.1)


def test_a_coin_decides_if_both_are_on_and_nothing_happens_if_none_is():
    pictures, labels = batch()
    kinds = [
        mix(pictures, labels, 3, np.random.default_rng(k), mixup=1.0, cutmix=1.0)[0][2]
        for k in range(200)
    ]
    pasted = sum(set(mixed.unique().tolist()) <= {2.0, 3.0} for mixed in kinds)
    assert 70 < pasted < 130
    assert mix(pictures, labels, 3, np.random.default_rng(0)) == (pictures, labels)
