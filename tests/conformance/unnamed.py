"""Models that nobody has named: classes of a user's own, as a repository with its own modeling code would bring them.

One small decoder with switches. Nothing in hf_treespec knows its name, its config fields or where it keeps its state.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

WIDTH, HEADS, KERNEL = 32, 4, 3
_CACHE = "cache" if "cache" in {f.name for f in dataclasses.fields(CausalLMOutputWithPast)} else "past_key_values"


class UnnamedConfig(PreTrainedConfig):
    """Config of `UnnamedForCausalLM`.

    Args:
        masks: "registry" asks transformers for its mask, "own" makes one of its own.
        conv: "none", or where the state of a short causal convolution lives: in a "layer" of the cache, on the "cache"
            object, or on the "module".
        told: whether position ids are taken; else they are counted by the cache.
    """

    model_type = "unnamed"

    def __init__(self, masks: str = "registry", conv: str = "none", told: bool = True, **kwargs: Any) -> None:
        self.masks, self.conv, self.told = masks, conv, told
        self.vocab_size, self.hidden_size, self.num_attention_heads, self.num_hidden_layers = 96, WIDTH, HEADS, 2
        # The attention of this model is layer 1; layer 0 is the convolution, or attention too.
        self.layer_types = ["conv" if conv == "layer" else "full_attention", "full_attention"]
        super().__init__(**kwargs)


class Attention(nn.Module):
    """Attention with rotary positions."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        batch, count, _ = x.shape
        q, k, v = self.qkv(x).view(batch, count, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = (_turned(part, positions) for part in (q, k))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        if mask is None:
            # As transformers leaves it out: nothing is padded, and queries are the end of the keys.
            mask = torch.ones(count, k.shape[2], dtype=torch.bool).tril(k.shape[2] - count)[None, None]
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, count, -1))


def _turned(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * (0.6 ** torch.arange(half, dtype=x.dtype))
    one, two = x[..., :half], x[..., half:]
    return torch.cat([one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()], -1)


class ShortConv(nn.Module):
    """A causal convolution over the last `KERNEL` tokens, whose state is where the config says."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.conv = nn.Conv1d(WIDTH, WIDTH, KERNEL, groups=WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.state: Tensor | None = None

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        new = (x * self.gate(x)).transpose(1, 2)
        count = new.shape[-1]
        if cache is not None and self.place == "layer":
            seen = cache.update_conv_state(new, 0, conv_kernel_size=KERNEL)
        elif cache is not None and self.place == "cache":
            old = getattr(cache, "conv_state", None)
            seen = new if old is None else torch.cat([old, new], -1)
            cache.conv_state = nn.functional.pad(seen, (KERNEL, 0))[..., -KERNEL:]
        elif cache is not None:
            fresh = self.state is None or not cache.get_seq_length(1)
            seen = new if fresh else torch.cat([self.state, new], -1)
            self.state = nn.functional.pad(seen, (KERNEL, 0))[..., -KERNEL:]
        else:
            seen = new
        mixed = self.conv(nn.functional.pad(seen, (KERNEL - 1, 0)))[..., -count:]
        return mixed.transpose(1, 2)


class UnnamedPreTrainedModel(PreTrainedModel):
    config_class = UnnamedConfig
    _supports_sdpa = True
    _no_split_modules: list[str] = []

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d):
            nn.init.normal_(module.weight, std=1.0 if isinstance(module, nn.Embedding) else 0.4)


class _Unnamed(UnnamedPreTrainedModel, GenerationMixin):
    def __init__(self, config: UnnamedConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, WIDTH)
        self.first = Attention(0) if config.conv == "none" else ShortConv(config.conv)
        self.second = Attention(1)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(3)])
        self.lm_head = nn.Linear(WIDTH, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def run(
        self, ids: Tensor, attention_mask: Tensor | None, positions: Tensor | None, cache: Any, use_cache: bool | None
    ) -> CausalLMOutputWithPast:
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        past = 0 if cache is None else int(cache.get_seq_length(1))
        count = ids.shape[1]
        if positions is None or not self.config.told:
            positions = torch.arange(past, past + count)[None].expand(len(ids), -1)
        x = self.embed(ids)
        mask = self._own_mask(attention_mask, past, count)
        if self.config.masks == "registry":
            given = {_CACHE: cache, "position_ids": positions}
            mask = create_causal_mask(config=self.config, inputs_embeds=x, attention_mask=attention_mask, **given)  # type: ignore[arg-type]
            if mask is not None and mask.is_floating_point():
                mask = mask.to(x.dtype)
        if isinstance(self.first, Attention):
            x = x + self.first(self.norms[0](x), positions, mask, cache)
        else:
            x = x + self.first(self.norms[0](x), cache)
        x = x + self.second(self.norms[1](x), positions, mask, cache)
        return CausalLMOutputWithPast(logits=self.lm_head(self.norms[2](x)), **{_CACHE: cache})

    def _own_mask(self, flags: Tensor | None, past: int, count: int) -> Tensor:
        mask = torch.ones(count, past + count, dtype=torch.bool).tril(past)[None, None]
        if flags is not None and flags.dim() == 2:
            # A token sees itself even in the padding, which would be no number else.
            mask = mask & flags[:, None, None, : past + count].bool() | torch.eye(count, past + count).bool().roll(
                past, 1
            )
        return mask


if _CACHE == "cache":

    class UnnamedForCausalLM(_Unnamed):
        def forward(
            self,
            input_ids: Tensor,
            attention_mask: Tensor | None = None,
            position_ids: Tensor | None = None,
            cache: Any = None,
            use_cache: bool | None = None,
            **_: Any,
        ) -> CausalLMOutputWithPast:
            return self.run(input_ids, attention_mask, position_ids, cache, use_cache)

else:

    class UnnamedForCausalLM(_Unnamed):  # type: ignore[no-redef]
        def forward(
            self,
            input_ids: Tensor,
            attention_mask: Tensor | None = None,
            position_ids: Tensor | None = None,
            past_key_values: Any = None,
            use_cache: bool | None = None,
            **_: Any,
        ) -> CausalLMOutputWithPast:
            return self.run(input_ids, attention_mask, position_ids, past_key_values, use_cache)


def unnamed(*, seed: int = 0, **switches: Any) -> PreTrainedModel:
    """A new model in float64, random by `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = UnnamedConfig(**switches, bos_token_id=1, eos_token_id=None, pad_token_id=0)
        return UnnamedForCausalLM._from_config(config, dtype=torch.float64).eval()
