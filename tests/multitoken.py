"""Tiny models with modules for multi-token prediction: random ones, and ones that are right by construction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

import heads
from special import _BASE, _EXPERTS, VOCAB
from tiny import shared

_MOE = {**_BASE, **_EXPERTS, "first_k_dense_replace": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
# Per model type the fields of its config.
FIELDS: dict[str, dict[str, Any]] = {
    "glm4_moe": {**_MOE, "num_nextn_predict_layers": 3},
    "deepseek_v3": {**_MOE, **_LATENT, "num_nextn_predict_layers": 2},
    # One module, with a window that is shorter than the prompts.
    "mellum": {
        **_MOE,
        "num_local_experts": 4,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 7,
        "num_mtp_layers": 1,
    },
}
# Mellum says so since 5.18.
KINDS = [kind for kind in FIELDS if kind != "mellum" or hasattr(CONFIG_MAPPING[kind], "num_mtp_layers")]


def build(kind: str, *, attention: str = "sdpa", **changes: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = CONFIG_MAPPING[kind](**{**FIELDS[kind], **changes})
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        # The other one takes no float64.
        model.set_experts_implementation("eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    # A flat law: under sampling the noise that a draft shares makes up for what it does not know.
                    parameter.normal_(std=0.2 if "lm_head" in name else 0.5)
    return model


stock, treed = shared(build)


def random_modules(model: PreTrainedModel, count: int | None = None, seed: int = 5) -> MtpModel:
    """Modules that guess at random, in the type of their model."""
    if count is not None:
        model.config.num_mtp_layers = count
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules = MtpModel(model, int(model.config.get_text_config().num_mtp_layers))
        with torch.no_grad():
            for name, parameter in modules.layers.named_parameters():
                parameter.normal_(std=0.3, mean=1.0 if "norm" in name else 0.0)
    modules.layers.to(model.dtype).eval()
    return modules


def save(model: PreTrainedModel, modules: MtpModel, folder: Path) -> None:
    """A checkpoint of both, as such models are published: a module is one more layer."""
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    first = int(model.config.num_hidden_layers)
    for name, tensor in modules.layers.state_dict().items():
        number, _, rest = name.partition(".")
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        tensors[f"model.layers.{first + int(number)}.{rest}"] = tensor.clone()
    save_file(tensors, file, metadata={"format": "pt"})


def periodic(modules: int) -> tuple[PreTrainedModel, MtpModel]:
    """`heads.periodic`, and modules that are never wrong about it."""
    model = heads.periodic()
    made = random_modules(model, modules)
    size = model.config.hidden_size
    with torch.no_grad():
        for layer in made.layers:
            for norm in (layer.enorm, layer.hnorm, layer.post_norm):
                norm.weight.fill_(1.0)
            # The embedding alone; nothing of the block comes through.
            layer.eh_proj.weight.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1))
            layer.mtp_block.self_attn.o_proj.weight.zero_()
            layer.mtp_block.mlp.down_proj.weight.zero_()
    return model, made


__all__ = ["FIELDS", "KINDS", "VOCAB", "build", "periodic", "random_modules", "save", "stock", "treed"]
