"""Tiny models of transformers, and what they learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

TEXTS = (
    torch.arange(64)[:, None] + 3 * torch.arange(12)
) % 32  # every character is three after the one before
EXAMPLES = [{"input_ids": text, "labels": text} for text in TEXTS]
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
OWN: dict[str, dict[str, int]] = {
    "GPT2": {},
    "Llama": {"intermediate_size": 32, "num_key_value_heads": 2},
    "Phi3": {
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    },
    "Mixtral": {"intermediate_size": 24, "num_key_value_heads": 1, "num_local_experts": 4},
}


def language_model(kind: str = "GPT2") -> Any:
    transformers = pytest.importorskip("transformers")
    transformers.set_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=32, **{**SIZES, **OWN[kind]})
    return getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(
        config
    )
