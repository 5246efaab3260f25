"""What has no basis, in flat tensors that many share and that are stepped in chunks: against the
transcription.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from eigenstep import Spectral
from eigenstep.optim import Fused, batches, vector

from .comparison import assert_same, gradients_of, stream

SHAPES = [(40,), (3,), (), (7, 5), (16,), (5,), (13,), (20,)]
"""With chunks of 16 entries: some that are cut into two or three, some that share one, one that
fills one.
"""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.3},
    {"clip": 0.2},
    {"maximize": True, "weight_decay": 0.1},
    {"betas": (0.0, 0.9), "eps": 0.1},
    {"root": 3.5, "clip": 1.0},
    {"weight_decay": 0.3, "cautious_weight_decay": True},
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "CHUNK", 16)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_chunks(options: dict[str, Any]) -> None:
    assert_same(SHAPES, steps=8, structure="diagonal", **options)


def test_what_is_stepped_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of what is long, and together what fits into one; weights move as steps
    are computed.
    """
    sizes: list[int] = []
    learn = vector.learn_

    def noting(state: Any, weights: Any, options: Any, gradient: Tensor, *rest: Any) -> Any:
        sizes.append(len(gradient))
        return learn(state, weights, options, gradient, *rest)

    monkeypatch.setattr(vector, "learn_", noting)
    monkeypatch.delattr(batches.VectorBatch, "steps")
    assert_same([(40,), (3,), (13,), (), (16,), (20,)], steps=1, weight_decay=0.1)
    assert sizes == [16, 16, 8, 3 + 13, 1, 16, 16, 4]


def test_some_have_taken_fewer_steps() -> None:
    gradients = gradients_of(SHAPES, 8)
    for at, step in enumerate(gradients[:6]):
        for number in range(len(SHAPES)):
            if (number + at) % 3 == 0:
                step[number] = None
    assert_same(SHAPES, gradients=gradients, steps=8, structure="diagonal", weight_decay=0.1)


@pytest.mark.parametrize("numbers", [(0,), (1, 3), (4, 5, 6)], ids=str)
def test_given_curvature(numbers: tuple[int, ...]) -> None:
    vectors = [
        {number: stream((1 + number % 3, *SHAPES[number]), 8, 9 + number)[at] for number in numbers}
        for at in range(8)
    ]
    assert_same(SHAPES, steps=8, structure="diagonal", curvature=vectors)


@pytest.mark.parametrize(
    "lr", [0.1, torch.tensor(0.1, dtype=torch.float64)], ids=["number", "tensor"]
)
def test_flat_tensors_are_where_every_parameter_finds_its_own_state(lr: Any) -> None:
    """Also after parameters that have taken different numbers of steps were copied, which loses the
    flat tensors.
    """
    params = [torch.tensor(stream(shape, 1, 5)[0], requires_grad=True) for shape in SHAPES]
    twins = [param.detach().clone().requires_grad_() for param in params]
    optimizer = Spectral(params, lr, structure="diagonal", weight_decay=0.1)
    adamw = torch.optim.AdamW(twins, 0.1, (0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for at in range(8):
        for number, (param, twin, shape) in enumerate(zip(params, twins, SHAPES, strict=True)):
            gradient = None if at < number else torch.tensor(stream(shape, 8, number)[at])
            param.grad, twin.grad = gradient, None if gradient is None else gradient.clone()
        optimizer.step()
        adamw.step()
        if at % 3 == 2:
            optimizer.load_state_dict(optimizer.state_dict())
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            optimizer.state[param]["momentum"].flatten()
            * (1 - 0.9 ** adamw.state[twin]["step"].double()),
            adamw.state[twin]["exp_avg"].flatten(),
            rtol=1e-12,
            atol=1e-12,
        )


@pytest.mark.parametrize("options", [{}, {"clip": 0.3, "grafting": False}], ids=str)
def test_parts_of_parameters(options: dict[str, Any]) -> None:
    """Of fused projections, single rows have no basis beside matrices that have."""
    vectors = stream((2, 6, 5), 8, 2)
    given = [{0: two} if at % 2 else {} for at, two in enumerate(vectors)]
    assert_same((6, 5), steps=8, sizes=[1, 4, 1], curvature=given, weight_decay=0.1, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_whose_squares_do_not_fit(dtype: torch.dtype) -> None:
    param = torch.zeros(4, dtype=dtype, requires_grad=True)
    optimizer = Spectral([param], 0.1, weight_decay=0.0)
    param.grad = torch.tensor([1.0, -1.0, 1e-3, -1e-3], dtype=dtype) * torch.finfo(dtype).max
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.tensor([-0.1, 0.1, -0.1, 0.1], dtype=dtype))
    most = torch.finfo(dtype).max ** 0.5 / 16
    assert optimizer.state[param]["momentum"].flatten().tolist() == pytest.approx([most, -most] * 2)


def step(optimizer: torch.optim.Optimizer, steps: int, digits: torch.dtype | None = None) -> None:
    """Take steps along the same streams with any optimizer; gradients may have fewer digits."""
    (group,) = optimizer.param_groups
    for gradients in gradients_of([tuple(param.shape) for param in group["params"]], steps):
        for param, gradient in zip(group["params"], gradients, strict=True):
            param.grad = torch.tensor(gradient).to(digits or param.dtype).to(param.dtype)
        optimizer.step()


def test_weights_of_few_digits() -> None:
    """Steps of bfloat16 weights are computed in float32, and rounded when they are taken."""
    param = torch.ones(5, dtype=torch.bfloat16, requires_grad=True)
    twin = torch.ones(5, requires_grad=True)
    optimizer, adamw = Spectral([param], 0.1), torch.optim.AdamW([twin], 0.1, (0.9, 0.95))
    step(optimizer, 3)
    step(adamw, 3, torch.bfloat16)
    average = adamw.state[twin]["exp_avg_sq"] / (1 - 0.95**3)
    torch.testing.assert_close(optimizer.state[param]["second_moment"].flatten(), average)
    torch.testing.assert_close(param.float(), twin, rtol=0.02, atol=0)


def test_what_is_not_finite_counts_as_zero_if_it_is_ignored() -> None:
    params = [torch.ones(5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    ignoring, plain = Spectral(params[:1], 0.1, nonfinite="ignore"), Spectral(params[1:], 0.1)
    for at, gradient in enumerate(torch.tensor(stream((5,), 5))):
        params[0].grad, params[1].grad = gradient.clone(), gradient.clone()
        if at % 2:
            params[0].grad[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
            params[1].grad[:3] = 0.0
        ignoring.step()
        plain.step()
    torch.testing.assert_close(params[0], params[1], rtol=1e-12, atol=0)


ADAMW: list[dict[str, Any]] = [
    {"capturable": True, "interval": 1, "nonfinite": "ignore"},
    {"cautious_weight_decay": True, "weight_decay": 0.0},
]


@pytest.mark.parametrize("options", ADAMW, ids=str)
def test_adamw(options: dict[str, Any]) -> None:
    """Also where state has a row for a tensor on the device only, and for parameters that are not
    contiguous.
    """
    starts = [torch.tensor(stream(shape, 1, 5)[0]) for shape in ((6,), (3,), (8,), (2, 3))]
    params = [starts[0].clone().requires_grad_(), starts[1].clone().requires_grad_()]
    params.append(torch.stack([starts[2]] * 2, -1)[:, 0].requires_grad_())
    params.append(starts[3].mT.contiguous().mT.requires_grad_())
    twins = [start.clone().requires_grad_() for start in starts]
    optimizer = Spectral(params, 0.1, **{"weight_decay": 0.1, "structure": "diagonal", **options})
    adamw = torch.optim.AdamW(
        twins, 0.1, (0.9, 0.95), weight_decay=options.get("weight_decay", 0.1)
    )
    step(optimizer, 6)
    step(adamw, 6)
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-9, atol=1e-9)


def test_steps_are_counted_where_graphs_are_replayed() -> None:
    """A replayed graph advances the count on the device alone: it is what decides the bias
    correction.
    """
    param = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    optimizer = Spectral(
        [param], 1.0, weight_decay=0.0, capturable=True, interval=1, nonfinite="ignore"
    )
    gradients = torch.tensor(stream((5,), 2, 0))
    param.grad = gradients[0].clone()
    optimizer.step()
    optimizer.state[param]["step"] += 9
    param.grad, before = gradients[1].clone(), param.detach().clone()
    optimizer.step()
    first, second = ((1 - beta) / (1 - beta**11) for beta in (0.9, 0.95))
    momentum = gradients[0].lerp(gradients[1], first)
    root = gradients[0].square().lerp(gradients[1].square(), second).sqrt()
    torch.testing.assert_close(
        before - param.detach(), momentum / (root + 1e-8), rtol=1e-12, atol=1e-12
    )


def test_state_in_another_format() -> None:
    """Averages are rounded when they are kept, and the step uses what is not yet rounded."""
    param = torch.zeros(7, requires_grad=True)
    optimizer = Spectral([param], 0.1, weight_decay=0.0, state_dtype=torch.bfloat16)
    weight, first, second = torch.zeros(7), torch.zeros(7), torch.zeros(7)
    for at in range(6):
        gradient = torch.tensor(stream((7,), 6, 0)[at]).float()
        param.grad = gradient.clone()
        optimizer.step()
        rates = [(1 - beta) / (1 - beta ** (at + 1)) for beta in (0.9, 0.95)]
        first, second = first.lerp(gradient, rates[0]), second.lerp(gradient.square(), rates[1])
        weight -= 0.1 * first / (second.sqrt() + 1e-8)
        first, second = first.bfloat16().float(), second.bfloat16().float()
    torch.testing.assert_close(param.detach(), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [16, 2**18])
def test_eight_bits(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are close to AdamW's, and those of small vectors beside are exact."""
    monkeypatch.setattr(batches, "CHUNK", chunk)
    shapes = [(1500,), (9,), (1100,), (2, 3000)]
    params = [torch.ones(shape, requires_grad=True) for shape in shapes]
    twins = [torch.ones(shape, requires_grad=True) for shape in shapes]
    optimizer = Spectral(params, 0.01, structure="diagonal", state_dtype=torch.int8)
    adamw = torch.optim.AdamW(twins, 0.01, (0.9, 0.95))
    for at in range(12):
        for number, (param, twin) in enumerate(zip(params, twins, strict=True)):
            generator = torch.Generator().manual_seed(100 * at + number)
            twin.grad = torch.randn(twin.shape, generator=generator) + 0.5
            param.grad = twin.grad.clone()
        optimizer.step()
        adamw.step()
    for param, twin in zip(params, twins, strict=True):
        exact = param.numel() < 1000
        apart = (param - twin).norm() / (twin - 1).norm()
        assert apart < (1e-5 if exact else 0.03)
        assert (optimizer.state[param]["second_moment"].dtype == torch.uint8) == (not exact)


@pytest.mark.parametrize("curvature", [False, True])
def test_rows_of_fused_weights_in_8_bits(curvature: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that have no basis are packed one by one, also those of several weights, and step as
    they would alone.
    """
    monkeypatch.setattr(batches, "CHUNK", 2**18)
    gradients = torch.tensor(stream((3, 3, 1100), 4))

    def trained(rows: list[slice], **options: Any) -> Tensor:
        params = [torch.ones_like(gradients[0, 0, some], requires_grad=True) for some in rows]
        optimizer = Spectral(params, 0.01, state_dtype=torch.int8, **options)
        for gradient, *vectors in gradients:
            given: dict[Tensor, Tensor] = {}
            for param, some in zip(params, rows, strict=True):
                param.grad = gradient[some].clone()
                given[param] = torch.stack([vector[some] for vector in vectors])
            optimizer.step(curvature=given if curvature else {})
        return torch.cat([param.detach() for param in params])

    fused = trained([slice(3), slice(3)], fused=Fused(sizes=[1, 2]))
    alone = trained([slice(1), slice(1, 3)])
    torch.testing.assert_close(fused, torch.cat([alone, alone]), rtol=1e-12, atol=1e-12)
