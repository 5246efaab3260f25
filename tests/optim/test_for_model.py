"""``Spectral.for_model``: what it recognizes, and that it steps as separate parameters do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from eigenstep import Spectral
from eigenstep.optim import Fused

from .language_models import language_model


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.experts = nn.Parameter(torch.randn(3, 24, 16) / 4)
        self.head = nn.Linear(16, 500, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(x + self.qkv(x).view(*x.shape, 3).sum(-1) + self.frozen(x))
        x = x + torch.einsum("btd,eod,eop->btp", x, self.experts, self.experts)
        return self.head(x)


def groups_of(optimizer: Spectral) -> dict[str, list[str]]:
    return {group["name"]: list(group["param_names"]) for group in optimizer.param_groups}


def test_groups() -> None:
    optimizer = Spectral.for_model(Network(), lr=1e-2, weight_decay=0.1, interval=3)
    found = groups_of(optimizer)
    assert found["embeddings"] == ["embedding.weight"]
    assert found["fused 16+16+16 0"] == ["attention.in_proj_weight", "qkv.weight"]
    assert found["matrices"] == ["attention.out_proj.weight"]
    assert found["experts"] == ["experts"]
    assert "norm.weight" in found["vectors"]
    assert not any("frozen" in name for own in found.values() for name in own)
    for group in optimizer.param_groups:
        assert group["weight_decay"] == (0.0 if group["name"] == "vectors" else 0.1)
        assert group["interval"] == 3
        assert group["lr"] == 1e-2
    assert "3 times" in str(optimizer.summary())


def test_convolutions_are_no_experts() -> None:
    """Also where shapes alone would say so."""
    model = nn.Sequential(nn.Conv1d(64, 4, 32), nn.ConvTranspose1d(18, 20, 24), nn.Conv3d(2, 4, 3))
    assert Spectral(model.parameters()).summary()[0].structure == "4 times (64 x 32)"
    optimizer = Spectral.for_model(model)
    assert groups_of(optimizer)["convolutions"] == ["0.weight", "1.weight", "2.weight"]
    assert not any("times" in report.structure for report in optimizer.summary())


def test_experts_by_name() -> None:
    """Also where shapes alone would not say so; experts that are modules of their own
    are matrices.
    """
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.up, model.experts.up_bias = (
        nn.Parameter(torch.ones(16, 12, 24)),
        nn.Parameter(torch.ones(16, 12)),
    )
    model.expert = nn.Linear(12, 24)
    shapes = {report.name: report.structure for report in Spectral.for_model(model).summary()}
    assert shapes["experts.up"] == "16 times (24 x 12)"
    assert shapes["experts.up_bias"] == "diag 192"
    assert shapes["expert.weight"] == "24 x 12"


def test_gains_of_norms_are_vectors() -> None:
    optimizer = Spectral.for_model(nn.LayerNorm((6, 4)), weight_decay=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0]


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.wpe, self.many = (
            nn.Embedding(50, 16),
            nn.Embedding(2000, 16),
            nn.Embedding(1024, 16),
        )
        self.tied, self.head = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False)
        self.head.weight = self.tied.weight
        self.pos_embed, self.positions = (
            nn.Parameter(torch.zeros(1, 20, 16)),
            nn.Parameter(torch.zeros(9, 16)),
        )
        self.position_proj, self.pos_conv = nn.Linear(16, 16), nn.Conv1d(16, 16, 3)
        self.rel_pos_h, self.pos_bias_u = (
            nn.Parameter(torch.zeros(9, 16)),
            nn.Parameter(torch.zeros(2, 8)),
        )
        self.compose = nn.Parameter(torch.zeros(16, 16))


class TestTables:
    def test_what_steps_farther(self) -> None:
        """Positions by their names, embeddings of few rows unless a layer multiplies by them, and
        nothing else.
        """
        optimizer = Spectral.for_model(Tables(), lr=1e-2)
        rates = {
            name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]
        }
        farther = {name for name, lr in rates.items() if lr == 4e-2}
        assert farther == {"words.weight", "wpe.weight", "pos_embed", "positions"}
        assert {rates[name] for name in rates if name not in farther} == {1e-2}

    def test_schedules_keep_the_ratio(self) -> None:
        optimizer = Spectral.for_model(Tables(), lr=torch.tensor(1e-2))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
        assert sorted({round(float(group["lr"]), 6) for group in optimizer.param_groups}) == [
            0.005,
            0.02,
        ]
        assert sorted({round(float(rate), 6) for rate in schedule.get_last_lr()}) == [0.005, 0.02]

    def test_a_row_of_positions_steps_as_a_matrix(self) -> None:
        """A stack of one, (1, n, m), moves as the matrix does alone, four times as far."""
        torch.manual_seed(0)
        model = nn.Module()
        model.pos_embed = nn.Parameter(torch.zeros(1, 20, 16))
        alone = nn.Parameter(torch.zeros(20, 16))
        ours, theirs = (
            Spectral.for_model(model, lr=1e-2, weight_decay=0.0),
            Spectral([alone], 1e-2, weight_decay=0.0),
        )
        for _ in range(5):
            alone.grad = torch.randn(20, 16)
            model.pos_embed.grad = alone.grad[None].clone()
            ours.step()
            theirs.step()
        torch.testing.assert_close(model.pos_embed[0], 4 * alone)


class TestPatterns:
    def test_options_by_name(self) -> None:
        patterns = {
            "*.weight": {"interval": 5},
            "qkv.*": {"fused": Fused(sizes=(16, 16, 16), heads=2), "lr": 0.5},
            "experts": {"lr": 0.25},
        }
        optimizer = Spectral.for_model(Network(), lr=1e-2, patterns=patterns)
        found = {name: group for group in optimizer.param_groups for name in group["param_names"]}
        rates = {"experts": 0.25, "qkv.weight": 0.5, "qkv.bias": 0.5, "norm.weight": 1e-2}
        assert {name: found[name]["lr"] for name in rates} == rates
        assert found["qkv.weight"]["interval"] == 5
        assert found["experts"]["interval"] == 2
        shapes = {report.name: report.structure for report in optimizer.summary()}
        assert shapes["qkv.weight"] == "6 times (16 x 8)"
        assert shapes["attention.in_proj_weight"] == "3 times (16 x 16)"

    def test_mistakes(self) -> None:
        with pytest.raises(
            ValueError, match=r"no parameter that is trained has a name like 'head\.\*'"
        ):
            # Tied: the embedding's is the first name
            Spectral.for_model(Network(), patterns={"head.*": {"lr": 0.1}})
        with pytest.raises(ValueError, match="unknown option 'num_heads'"):
            Spectral.for_model(Network(), patterns={"qkv.*": {"num_heads": 2}})


class TestModelsOfOthers:
    def test_gpt2_fuses_columns(self) -> None:
        optimizer = Spectral.for_model(language_model("GPT2"))
        shapes = {report.name: report.structure for report in optimizer.summary()}
        assert shapes["transformer.h.0.attn.c_attn.weight"] == "3 times (16 x 16)"
        fused = [group["fused"] for group in optimizer.param_groups if group["fused"]]
        assert fused == [Fused(sizes=(16, 16, 16), axis=1)]

    def test_queries_with_fewer_keys(self) -> None:
        """Four heads of queries and two of keys and of values, of length 4: 16 + 8 + 8 rows."""
        optimizer = Spectral.for_model(language_model("Phi3"))
        shapes = {report.name: report.structure for report in optimizer.summary()}
        assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == "16 x 16 and 2 times (16 x 8)"

    def test_experts(self) -> None:
        shapes = [
            report.structure for report in Spectral.for_model(language_model("Mixtral")).summary()
        ]
        assert "4 times (24 x 16)" in shapes

    def test_low_rank_adapters(self) -> None:
        """Only they are trained; each is a matrix, whose long side is cut into blocks."""
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(
            language_model("Llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
        )
        reports = Spectral.for_model(model).summary()
        assert len(reports) == 4
        assert all(
            "lora_" in report.name and "blocks of 8 x 4" in report.structure for report in reports
        )


def test_adapters_of_high_rank_are_no_embeddings() -> None:
    model = nn.Module()
    model.lora_B = nn.Linear(32, 1024, bias=False)
    assert Spectral(model.parameters()).summary()[0].structure.startswith("diag")
    assert Spectral.for_model(model).summary()[0].structure == "16 blocks of 64 x 32"


def test_steps_as_separate_matrices_do() -> None:
    """The fused weights as three parameters, all else the same."""
    torch.manual_seed(0)
    fused = nn.Linear(8, 24, bias=False, dtype=torch.float64)
    model = nn.Module()
    model.qkv = copy.deepcopy(fused)
    parts = [nn.Parameter(part.detach().clone()) for part in fused.weight.split(8)]
    ours, theirs = Spectral.for_model(model, lr=1e-2), Spectral(parts, lr=1e-2)
    for _ in range(20):
        gradient = torch.randn(24, 8, dtype=torch.float64)
        model.qkv.weight.grad = gradient
        for part, own in zip(parts, gradient.split(8), strict=True):
            part.grad = own.clone()
        ours.step()
        theirs.step()
    assert (model.qkv.weight - torch.cat([*parts])).abs().max() < 1e-12


def test_recipes_and_training() -> None:
    torch.manual_seed(0)
    model = Network()
    optimizer = Spectral.fast.for_model(model, lr=1e-2)
    assert isinstance(optimizer, Spectral.fast)
    tokens = torch.randint(500, (8, 6))
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="no parameters that require gradients"):
        Spectral.for_model(nn.Linear(2, 2).requires_grad_(False))
