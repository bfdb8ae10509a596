"""Tiny random models that read pictures, and prompts for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MllamaConfig,
    MllamaForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionConfig,
)

from hf_treespec import enable

VOCAB = 97
PICTURE = 96
# Each picture takes so many tokens.
TOKENS = 4
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.6,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_TOWER: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
_PLANES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
_QWEN_TOWER: dict[str, Any] = {"depth": 1, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
_QWEN_IDS = {"image_token_id": PICTURE, "video_token_id": 95, "vision_start_token_id": 94, "vision_end_token_id": 93}


def _llava() -> PreTrainedModel:
    tower = CLIPVisionConfig(**_TOWER)
    config = LlavaConfig(
        vision_config=tower,
        text_config=LlamaConfig(**_TEXT),
        image_token_index=PICTURE,
        image_seq_length=TOKENS,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


def _gemma3() -> PreTrainedModel:
    # Pictures are read in both directions; the window of its sliding layer is shorter than the prompts.
    text = Gemma3TextConfig(**_TEXT, sliding_window=7, query_pre_attn_scalar=8)
    text.layer_types = ["sliding_attention", "full_attention"]
    config = Gemma3Config(
        vision_config=SiglipVisionConfig(**_TOWER),
        text_config=text,
        image_token_id=PICTURE,
        mm_tokens_per_image=TOKENS,
        boi_token_id=95,
        tie_word_embeddings=False,
        eoi_token_id=94,
    )
    return Gemma3ForConditionalGeneration(config)


def _paligemma() -> PreTrainedModel:
    # Reads its prompt in both directions, and counts positions from 1.
    config = PaliGemmaConfig(
        vision_config={**_TOWER, "model_type": "siglip_vision_model", "projection_dim": 32},
        text_config={**_TEXT, "model_type": "gemma"},
        image_token_index=PICTURE,
        projection_dim=32,
        tie_word_embeddings=False,
    )
    return PaliGemmaForConditionalGeneration(config)


def build_cross_reader() -> PreTrainedModel:
    """Its second layer attends to the picture instead of the text."""
    tower = {
        **_TOWER, "num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 32,
        "intermediate_layers_indices": [0],
    }  # fmt: skip
    config = MllamaConfig(vision_config=tower, text_config={**_TEXT, "cross_attention_layers": [1]})
    return MllamaForConditionalGeneration(config).eval()


def _qwen2_vl() -> PreTrainedModel:
    tower = {**_QWEN_TOWER, "embed_dim": 16, "hidden_size": 32, "temporal_patch_size": 2, "mlp_ratio": 2}
    config = Qwen2VLConfig(vision_config=tower, text_config={**_TEXT, **_PLANES}, **_QWEN_IDS)
    return Qwen2VLForConditionalGeneration(config)


def _qwen2_5_vl() -> PreTrainedModel:
    tower = {
        **_QWEN_TOWER, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "window_size": 8,
        "fullatt_block_indexes": [0],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(vision_config=tower, text_config={**_TEXT, **_PLANES}, **_QWEN_IDS)
    return Qwen2_5_VLForConditionalGeneration(config)


_MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llava": _llava,
    "gemma3": _gemma3,
    "paligemma": _paligemma,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
}
READERS = tuple(_MAKERS)
# With three planes of positions.
PLANES = ("qwen2_vl", "qwen2_5_vl")


def build_reader(name: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = _MAKERS[name]().eval()
        if name == "gemma3":
            # Made of zeros, which would hide the picture.
            torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    return model


@functools.cache
def readers(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model that was never enabled and an enabled one of the same weights."""
    return build_reader(name), enable(build_reader(name))


def pictures(name: str, count: int, seed: int = 0) -> dict[str, Tensor]:
    """The pixels of so many pictures, as the model wants them."""
    generator = torch.Generator().manual_seed(seed)
    if name in PLANES:
        # 4 x 4 patches of 4 x 4 pixels, three colours, two frames; four patches are one token.
        pixels = torch.randn(count * 16, 3 * 2 * 4 * 4, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]] * count)}
    return {"pixel_values": torch.randn(count, 3, 8, 8, generator=generator)}


def picture_prompt(name: str, batch: int, seed: int = 0) -> dict[str, Tensor]:
    """A prompt of 13 tokens with a picture in each row; of three rows the first has padding of 3, the last of 1."""
    generator = torch.Generator().manual_seed(seed + 40)
    ids = torch.randint(3, 90, (batch, 13), generator=generator)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :3] = 0
        mask[2, :1] = 0
    ids[mask == 0] = 0
    for row in range(batch):
        ids[row, 4 + row : 4 + row + TOKENS] = PICTURE
    kinds = (ids == PICTURE).long()
    call = {"input_ids": ids, "attention_mask": mask, **pictures(name, batch, seed)}
    if name in PLANES:
        call["mm_token_type_ids"] = kinds.int()
    if name in ("gemma3", "paligemma"):
        call["token_type_ids"] = kinds
    return call
