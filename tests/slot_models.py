"""Tiny random models that count positions, or a bias by distance, in slots of their cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    MarianConfig,
    MarianForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
    RoFormerConfig,
    RoFormerForCausalLM,
    TrOCRConfig,
    TrOCRForCausalLM,
    WhisperConfig,
    WhisperForCausalLM,
)

from tiny import shared

POSITIONS = ("bart", "marian", "trocr", "roformer", "whisper")
ALIBI = ("bloom", "mpt", "falcon")
VOCAB = 67
# The end of a learned table of positions, or of biases.
TABLE = 64

_BART: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.2,
    "max_position_embeddings": TABLE, "is_decoder": True, "is_encoder_decoder": False, "decoder_start_token_id": 1,
}  # fmt: skip
_KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bart": (BartConfig, BartForCausalLM, _BART),
    # A table of sines.
    "marian": (MarianConfig, MarianForCausalLM, {**_BART, "init_std": 0.1}),
    "trocr": (TrOCRConfig, TrOCRForCausalLM, _BART),
    # Takes position_ids that `generate` does not know of.
    "whisper": (WhisperConfig, WhisperForCausalLM,
                {**_BART, "max_target_positions": TABLE, "num_mel_bins": 8, "max_source_positions": 20}),
    # Rotary angles, of all rows in one.
    "roformer": (RoFormerConfig, RoFormerForCausalLM,
                 {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
                  "max_position_embeddings": TABLE, "is_decoder": True, "initializer_range": 0.3}),
    "bloom": (BloomConfig, BloomForCausalLM, {"hidden_size": 32, "initializer_range": 0.3, "n_layer": 2,
                                              "n_head": 4}),
    # A table of biases that is cut by the number of keys.
    "mpt": (MptConfig, MptForCausalLM, {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": TABLE,
                                        "initializer_range": 0.1, "use_cache": True}),
    # Builds its bias in a function beside the class.
    "falcon": (FalconConfig, FalconForCausalLM, {"hidden_size": 32, "initializer_range": 0.3, "num_hidden_layers": 2,
                                                 "num_attention_heads": 4, "alibi": True}),
}  # fmt: skip
# With these greedy text does not fall into a loop at once; see `tiny.assert_lively`.
_SEEDS: dict[str, int] = {"roformer": 3, "bloom": 2, "mpt": 2}


def build(family: str, *, seed: int | None = None, **changes: Any) -> PreTrainedModel:
    """A new random model, always the same, that never ends by itself; in float64 if its attention is right in it."""
    seed = _SEEDS.get(family, 0) if seed is None else seed
    config_class, model_class, fields = _KINDS[family]
    ids = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "forced_eos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = config_class(**{"vocab_size": VOCAB, **ids, "tie_word_embeddings": False, **fields, **changes})
        model = model_class(config).eval()
    if family not in ALIBI:
        # The softmax of the others is in float32, where the smallest float64 is an infinity.
        model = model.double()
    with torch.no_grad():
        # Positions that weigh little would let the text fall into a loop, and a wrong one pass unnoticed.
        for name, table in model.named_modules():
            if isinstance(table, nn.Embedding) and "position" in name and family not in ("roformer",):
                table.weight.mul_(3.0)
    return model


stock, treed = shared(build)


def prompt(batch: int, seed: int = 0, width: int = 11) -> tuple[Tensor, Tensor]:
    """Random ids and their mask `[batch, width]`; a batch of three is left-padded by 4, 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch, width), generator=generator)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :4] = 0
        mask[2, :1] = 0
    return ids.masked_fill(mask == 0, 0), mask
