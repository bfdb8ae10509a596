"""Checkpoints of draft heads in each public layout: written by hand, read, run, and written back as they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import heads
from hf_treespec import TreeConfigError, _compat, load_draft, save_draft
from hf_treespec.draft import DFlashHead, EagleHead, Features, MedusaHead, MLPHead
from hf_treespec.draft.heads import Borrowed, is_head

H, V, D = 16, 29, 11


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


def layer(prefix: str, width: int, inputs: int | None = None, *, bias: bool = False) -> dict[str, Tensor]:
    """A decoder layer of 4 heads of 4, of which 2 are keys' and values'."""
    inputs = inputs or width
    out = {
        "self_attn.q_proj.weight": rand(16, inputs), "self_attn.k_proj.weight": rand(8, inputs),
        "self_attn.v_proj.weight": rand(8, inputs), "self_attn.o_proj.weight": rand(width, 16),
        "mlp.gate_proj.weight": rand(20, width), "mlp.up_proj.weight": rand(20, width),
        "mlp.down_proj.weight": rand(width, 20), "post_attention_layernorm.weight": rand(width),
    }  # fmt: skip
    if bias:
        out |= {f"self_attn.{name}_proj.bias": rand(size) for name, size in (("q", 16), ("k", 8), ("v", 8))}
    return {f"{prefix}.{name}": tensor for name, tensor in out.items()}


LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": 20, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "num_hidden_layers": 1, "vocab_size": V, "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0, "hidden_act": "silu", "max_position_embeddings": 128, "torch_dtype": "float32",
    "pretraining_tp": 1, "bos_token_id": 1,
}  # fmt: skip


def maps(count: int = D) -> dict[str, Tensor]:
    ids = torch.randperm(V)[:count].sort().values
    return {"d2t": ids - torch.arange(count), "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)}


def third(first: str, width: int = H, features: int = 3, vocab: int = D) -> dict[str, Tensor]:
    return {
        **layer(first, width, 2 * width), f"{first}.hidden_norm.weight": rand(width),
        f"{first}.input_layernorm.weight": rand(width), "norm.weight": rand(width),
        "fc.weight": rand(width, features * H), "lm_head.weight": rand(vocab, width),
    }  # fmt: skip


def medusa() -> tuple[dict[str, Any], dict[str, Tensor], str]:
    config = {"base_model_name_or_path": "some/model", "medusa_num_heads": 3, "medusa_num_layers": 2}
    tensors = {}
    for head in range(3):
        for block in range(2):
            tensors |= {f"{head}.{block}.linear.weight": rand(H, H), f"{head}.{block}.linear.bias": rand(H)}
        tensors[f"{head}.2.weight"] = rand(V, H)
    return config, tensors, "medusa_lm_head.pt"


def medusa_vllm() -> tuple[dict[str, Any], dict[str, Tensor], str]:
    config = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": H, "vocab_size": V, "num_heads": 2,
        "num_hidden_layers": 1, "truncated_vocab_size": D, "medusa_fc_bias": False, "logit_scale": 2.0,
    }  # fmt: skip
    tensors = {"token_map": torch.randperm(V)[:D]}
    for head in range(2):
        tensors |= {f"blocks.{head}.layers.0.weight": rand(H, H), f"lm_heads.{head}.weight": rand(D, H)}
    return config, tensors, "model.safetensors"


def medusa_one() -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """A single head, whose map is stored as one that all share."""
    config, _, file = medusa_vllm()
    config |= {"num_heads": 1, "num_hidden_layers": 2, "original_lm_head": True}
    tensors = {f"blocks.0.layers.{block}.weight": rand(H, H) for block in range(2)}
    return config, {**tensors, "lm_head.weight": rand(D, H), "token_map": torch.randperm(V)[:D]}, file


def mlp() -> tuple[dict[str, Any], dict[str, Tensor], str]:
    config = {
        "model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], "vocab_size": V,
        "emb_dim": H, "inner_dim": 12, "n_predict": 3, "n_candidates": 5, "top_k_tokens_per_head": [4, 3, 2],
        "tie_weights": False, "scale_input": True,
    }  # fmt: skip
    tensors = {}
    for stage in range(3):
        tensors |= {
            f"speculator.emb.{stage}.weight": rand(V, 12), f"speculator.head.{stage}.weight": rand(V, 12),
            f"speculator.proj.{stage}.weight": rand(12, 12 if stage else H),
            f"speculator.ln.{stage}.weight": rand(12), f"speculator.ln.{stage}.bias": rand(12),
        }  # fmt: skip
    return config, tensors, "model.safetensors"


def mlp_tied() -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """One set of weights for all stages, once in the file."""
    config, tensors, file = mlp()
    kept = {name.removeprefix("speculator."): t for name, t in tensors.items() if ".0." in name or "proj.1" in name}
    return {**config, "tie_weights": True, "scale_input": False, "inner_dim": 12}, kept, file


def eagle() -> tuple[dict[str, Any], dict[str, Tensor], str]:
    tensors = {"embed_tokens.weight": rand(V, H), "fc.weight": rand(H, 2 * H), "fc.bias": rand(H),
               "layers.0.self_attn.rotary_emb.inv_freq": rand(2)}  # fmt: skip
    return {**LLAMA, "architectures": ["LlamaForCausalLM"]}, {**layer("layers.0", H), **tensors}, "pytorch_model.bin"


def eagle_qwen() -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """Biases that only the tensors tell of."""
    tensors = {**layer("layers.0", H, bias=True), "fc.weight": rand(H, 2 * H)}
    return {**LLAMA, "qkv_bias": True}, tensors, "model.safetensors"


def eagle3() -> tuple[dict[str, Any], dict[str, Tensor], str]:
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True}
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": D, "eagle_config": nested}
    return config, {**third("midlayer"), **maps()}, "model.safetensors"


def eagle3_wide() -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """Another width than the target's, all ids, own embeddings, layers that nobody names, and `norm_output`."""
    config = {**LLAMA, "hidden_size": 12, "draft_vocab_size": V, "target_hidden_size": H, "norm_output": True}
    tensors = {**third("midlayer", 12, vocab=V), "embed_tokens.weight": rand(V, 12), "d2t": torch.zeros(V).long(),
               "t2d": torch.ones(V, dtype=torch.bool)}  # fmt: skip
    return config, tensors, "model.safetensors"


def eagle3_nvidia() -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """What it reads and how it computes is said inside; no layers are named."""
    config, tensors, file = eagle3()
    nested = {"eagle_aux_hidden_state_layer_ids": [], "norm_before_fc": True, "norm_output": True}
    return {**config, "eagle_config": nested}, {**tensors, "input_norm.weight": rand(3 * H)}, file


def speculators() -> tuple[dict[str, Any], dict[str, Tensor], str]:
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0",
        "draft_vocab_size": D, "norm_before_residual": True, "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 6], "transformer_layer_config": LLAMA,
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 3}], "verifier": {"name_or_path": "some/model"}},
    }  # fmt: skip
    return config, {**third("layers.0"), **maps(), "embed_tokens.weight": rand(V, H)}, "model.safetensors"


def speculators_qwen3() -> tuple[dict[str, Any], dict[str, Tensor], str]:
    config, tensors, file = speculators()
    config["transformer_layer_config"] = {**LLAMA, "model_type": "qwen3"}
    config |= {"norm_before_fc": True, "norm_output": True, "fc_norm": False}
    more = {"layers.0.self_attn.q_norm.weight": rand(4), "layers.0.self_attn.k_norm.weight": rand(4)}
    return config, {**tensors, **more, "input_norm.weight": rand(3 * H)}, file


def speculators_eagle() -> tuple[dict[str, Any], dict[str, Tensor], str]:
    config = {
        "architectures": ["EagleSpeculator"], "speculators_model_type": "eagle", "fusion_bias": True,
        "layernorms": False, "transformer_layer_architecture": "LlamaDecoderLayer", "transformer_layer_config": LLAMA,
        "speculators_config": {"algorithm": "eagle"},
    }  # fmt: skip
    tensors = {**layer("transformer", H), "fusion_fc.weight": rand(H, 2 * H), "fusion_fc.bias": rand(H)}
    return config, tensors, "model.safetensors"


def block_layers(count: int, *, bias: bool = False) -> dict[str, Tensor]:
    """Layers of Qwen3's kind, without embeddings."""
    out = {}
    for place in range(count):
        p = f"layers.{place}"
        out |= layer(p, H) | {f"{p}.input_layernorm.weight": rand(H)}
        out |= {f"{p}.self_attn.{name}_norm.weight": rand(4) for name in "qk"}
        if bias:
            sizes = (("q", 16), ("k", 8), ("v", 8), ("o", H))
            out |= {f"{p}.self_attn.{name}_proj.bias": rand(size) for name, size in sizes}
    return out


QWEN3: dict[str, Any] = {
    **{name: value for name, value in LLAMA.items() if name not in ("pretraining_tp", "num_hidden_layers")},
    "model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2,
}  # fmt: skip


def dflash(**changes: Any) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    nested = {"mask_token_id": 28, "target_layer_ids": [0, 2, 5]}
    config = {**QWEN3, "architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": nested, **changes}
    tensors = {**block_layers(2), "fc.weight": rand(H, 3 * H), "hidden_norm.weight": rand(H), "norm.weight": rand(H)}
    return config, tensors, "model.safetensors"


def dflash_windows() -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """Windows on one layer, biases, and what the target does to its embeddings and logits said inside."""
    nested = {"mask_token_id": 28, "target_layer_ids": [1, 2], "block_size": 3, "output_multiplier": 0.5,
              "final_logit_softcapping": 9.0, "input_embedding_scale": 4.0}  # fmt: skip
    config, tensors, file = dflash(dflash_config=nested, layer_types=["sliding_attention", "full_attention"],
                                   use_sliding_window=True, sliding_window=3, attention_bias=True)  # fmt: skip
    config.pop("block_size")
    return config, {**tensors, **block_layers(2, bias=True), "fc.weight": rand(H, 2 * H)}, file


def dflash_transformers() -> tuple[dict[str, Any], dict[str, Tensor], str]:
    config = {
        "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant", "block_size": 4,
        "mask_token_id": 28, "target_layer_ids": [0, 3], "hidden_size": H, "intermediate_size": 20,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "sliding_window": 5,
        "layer_types": ["sliding_attention"] * 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "dtype": "float32",
        "transformers_version": "5.15.0",
    }  # fmt: skip
    tensors = {**block_layers(2), "encoder.fc.weight": rand(H, 2 * H), "norm.weight": rand(H),
               "encoder.output_norm_enc.weight": rand(H)}  # fmt: skip
    return config, tensors, "model.safetensors"


def speculators_dflash() -> tuple[dict[str, Any], dict[str, Tensor], str]:
    _, tensors, file = dflash()
    config = {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "speculators_version": "0.6.0",
        "aux_hidden_state_layer_ids": [1, 3, 6], "block_size": 4, "draft_vocab_size": D, "mask_token_id": 28,
        "sample_from_anchor": False, "target_hidden_size": None, "sliding_window_non_causal": False,
        "projector_type": "dflash", "shift_label": False, "transformer_layer_config": QWEN3,
        "speculators_config": {"algorithm": "dflash"},
    }  # fmt: skip
    return config, {**tensors, **maps(), "lm_head.weight": rand(D, H)}, file


def speculators_dflash_whole() -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """As older ones were saved, with all that is the target's; of another width than it, from the anchor on."""
    config, tensors, file = speculators_dflash()
    inner = {**QWEN3, "model_type": "llama", "layer_types": ["sliding_attention"] * 2, "sliding_window": 3}
    config |= {"draft_vocab_size": V, "target_hidden_size": 2 * H, "sample_from_anchor": True,
               "sliding_window_non_causal": True, "aux_hidden_state_layer_ids": [1, 3],
               "transformer_layer_config": inner}  # fmt: skip
    more = {"embed_tokens.weight": rand(V, H), "lm_head.weight": rand(V, H), "verifier_lm_head.weight": rand(V, H),
            "verifier_norm.weight": rand(H), "fc.weight": rand(H, 4 * H)}  # fmt: skip
    return config, {**{name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}, **more}, file


BLOCKS = (dflash, dflash_windows, dflash_transformers, speculators_dflash, speculators_dflash_whole)
MAKERS = (medusa, medusa_vllm, medusa_one, mlp, mlp_tied, eagle, eagle_qwen, eagle3, eagle3_wide, eagle3_nvidia,
          speculators, speculators_qwen3, speculators_eagle, *BLOCKS)  # fmt: skip
every = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    (file,) = (path for path in folder.iterdir() if path.name != "config.json")
    return load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert set(one) == set(other)
    for name, tensor in one.items():
        assert other[name].dtype == tensor.dtype and torch.equal(other[name], tensor), name


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_round_trip(make: Callable[[], Any], dtype: torch.dtype, tmp_path: Path) -> None:
    config, tensors, file = make()
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    folder = write(tmp_path / "given", config, tensors, file)
    assert is_head(folder)
    head = load_draft(folder)
    assert head.dtype == dtype and not head.training
    wide, unnamed = make is speculators_dflash_whole, make is dflash_transformers
    assert (head.hidden_size, head.vocab_size) == (2 * H if wide else H, 0 if unnamed else V)
    out = save_draft(head, tmp_path / "back")
    assert json.loads((out / "config.json").read_text()) == config
    assert_same(tensors, read(out))


CASTS = [(medusa, "medusa-vllm"), (mlp_tied, None), (eagle, "speculators"),
         (speculators_eagle, "eagle"), (eagle3, "speculators"), (eagle3_nvidia, "speculators"),
         (eagle3_wide, "speculators"), (eagle3_wide, None), (speculators, "eagle3"),
         (dflash, "speculators"), (dflash_windows, None), (dflash_transformers, "dflash-transformers"),
         (speculators_dflash, "speculators"), (speculators_dflash_whole, "speculators")]  # fmt: skip


@pytest.mark.parametrize(("make", "layout"), CASTS, ids=lambda value: getattr(value, "__name__", value))
def test_from_one_layout_to_another(make: Callable[[], Any], layout: str | None, tmp_path: Path) -> None:
    """The head that is read from what we write is the same, as a new one would be written too."""
    head = load_draft(write(tmp_path / "given", *make()))
    kept = dict(head.state_dict())
    if layout is None or head.source.layout == layout:
        head.source = None
    out = save_draft(head, tmp_path / "out", layout=layout, target="some/model")
    again = load_draft(out)
    assert type(again) is type(head) and again.features(8) == head.features(8)
    assert_same(kept, dict(again.state_dict()))
    assert (again.ids is None and head.ids is None) or torch.equal(again.ids, head.ids)
    if isinstance(head, EagleHead):
        assert again.norm_output == head.norm_output
        assert again.config.rope_parameters == head.config.rope_parameters
        assert again.config.rms_norm_eps == head.config.rms_norm_eps == 1e-5
    if isinstance(head, DFlashHead):
        parts, features, tokens = lent(), rand(1, 6, head.feature_size), torch.randint(V, (1, 6))
        torch.testing.assert_close(again(features, tokens, parts, [5]), head(features, tokens, parts, [5]))
        assert again.decoder.config.rope_parameters == head.decoder.config.rope_parameters


def norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def attend(q: Tensor, k: Tensor, v: Tensor, theta: float, seen_QK: Tensor | None = None) -> Tensor:
    """Attention of 4 heads of 4 with rotary positions, written down from the formula; `[Q, 16]`.

    Queries are the last of the places; they see what is not behind them, or what they are said to see.
    """
    length, queries = len(k), len(q)
    angle = torch.arange(length)[:, None] * theta ** -(torch.arange(2) / 2)

    def turned(x: Tensor) -> Tensor:
        a, b = x.reshape(len(x), -1, 4).split(2, dim=-1)
        cos, sin = angle[-len(x) :].cos()[:, None], angle[-len(x) :].sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    if seen_QK is None:
        seen_QK = torch.ones(queries, length).tril().bool()
    q, k, v = turned(q), turned(k).repeat_interleave(2, 1), v.view(length, 2, 4).repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 2
    scores = scores.masked_fill(~seen_QK, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(queries, 16)


def decoded(tensors: dict[str, Tensor], prefix: str, inputs: Tensor, residual: Tensor) -> Tensor:
    """One layer behind its input norm."""
    t = {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items()}
    q, k, v = (inputs @ t[f"self_attn.{n}_proj.weight"].T + t.get(f"self_attn.{n}_proj.bias", 0) for n in "qkv")
    state = residual + attend(q, k, v, 5000.0) @ t["self_attn.o_proj.weight"].T
    x = norm(state, t["post_attention_layernorm.weight"])
    gate, up = x @ t["mlp.gate_proj.weight"].T, x @ t["mlp.up_proj.weight"].T
    return state + (torch.nn.functional.silu(gate) * up) @ t["mlp.down_proj.weight"].T


def lent() -> Borrowed:
    return Borrowed(torch.nn.Embedding(V, H), torch.nn.Linear(H, V, bias=False))


def test_what_medusa_and_mlp_heads_compute(tmp_path: Path) -> None:
    config, t, file = medusa()
    states = rand(2, H)
    got = load_draft(write(tmp_path / "medusa", config, t, file))(states)
    x = states
    for block in range(2):
        x = x + torch.nn.functional.silu(x @ t[f"1.{block}.linear.weight"].T + t[f"1.{block}.linear.bias"])
    torch.testing.assert_close(got[:, 1], x @ t["1.2.weight"].T)
    config, t, file = mlp()
    head = load_draft(write(tmp_path / "mlp", config, t, file))
    tokens = torch.randint(V, (1, 4))
    got = head(rand(1, 2, H) * 0 + states[None], tokens)
    state = norm(states, torch.ones(H), 1e-6) / 2**0.5
    weight = 0.5 ** (0.5 / 3)
    for stage in range(3):
        p = f"speculator.{{}}.{stage}.weight"
        token = t[p.format("emb")][tokens[0, stage : stage + 2]] * ((1 - weight**2) * 12 / 2) ** 0.5
        mixed = state @ t[p.format("proj")].T * weight + token
        mixed = norm(mixed, t[p.format("ln")], 1e-6) + t[f"speculator.ln.{stage}.bias"]
        state = torch.nn.functional.gelu(mixed)
        torch.testing.assert_close(got[0, :, stage], state @ t[p.format("head")].T)


@pytest.mark.parametrize("make", [eagle, eagle_qwen, eagle3, speculators], ids=lambda make: make.__name__)
def test_what_eagle_heads_compute(make: Callable[[], Any], tmp_path: Path) -> None:
    config, t, file = make()
    head = load_draft(write(tmp_path / "given", config, t, file))
    parts = lent()
    tokens = torch.randint(V, (1, 5))
    table = t.get("embed_tokens.weight", parts.embeddings.weight)
    token = table[tokens[0]]
    if head.kind == "eagle":
        features = rand(1, 5, H)
        x = torch.cat([token, features[0]], -1) @ t["fc.weight"].T + t.get("fc.bias", 0)
        expected = parts.lm_head(decoded(t, "layers.0", x, x))
    else:
        features = rand(1, 5, 3 * H)
        p = "midlayer" if make is eagle3 else "layers.0"
        state = features[0] @ t["fc.weight"].T
        normed = norm(state, t[f"{p}.hidden_norm.weight"])
        both = torch.cat([norm(token, t[f"{p}.input_layernorm.weight"]), normed], -1)
        out = decoded(t, p, both, normed if make is speculators else state)
        expected = norm(out, t["norm.weight"]) @ t["lm_head.weight"].T
    (got,) = head(features, tokens, parts)
    torch.testing.assert_close(got[0], expected, atol=1e-4, rtol=1e-4)


def denoised(t: dict[str, Tensor], block: Tensor, context: Tensor, seen: list[Tensor]) -> Tensor:
    """States `[S, H]` of a block behind the context, by two layers that see so much."""
    t = {
        name.replace("encoder.fc", "fc").replace("encoder.output_norm_enc", "hidden_norm"): x for name, x in t.items()
    }
    context, state = norm(context @ t["fc.weight"].T, t["hidden_norm.weight"]), block
    for place in range(2):
        own = {name.removeprefix(f"layers.{place}."): tensor for name, tensor in t.items()}
        x = norm(state, own["input_layernorm.weight"])
        both = torch.cat([context, x])

        def of(name: str, x: Tensor, own: dict[str, Tensor] = own) -> Tensor:
            return x @ own[f"self_attn.{name}_proj.weight"].T + own.get(f"self_attn.{name}_proj.bias", 0)

        q = norm(of("q", x).view(-1, 4, 4), own["self_attn.q_norm.weight"]).flatten(1)
        k = norm(of("k", both).view(-1, 2, 4), own["self_attn.k_norm.weight"]).flatten(1)
        state = state + of("o", attend(q, k, of("v", both), 5000.0, seen[place]))
        x = norm(state, own["post_attention_layernorm.weight"])
        gate, up = x @ own["mlp.gate_proj.weight"].T, x @ own["mlp.up_proj.weight"].T
        state = state + (torch.nn.functional.silu(gate) * up) @ own["mlp.down_proj.weight"].T
    return norm(state, t["norm.weight"])


@pytest.mark.parametrize("make", BLOCKS, ids=lambda make: make.__name__)
def test_what_dflash_heads_compute(make: Callable[..., Any], tmp_path: Path) -> None:
    config, t, file = make()
    head = load_draft(write(tmp_path / "given", config, t, file))
    assert isinstance(head, DFlashHead)
    parts = lent()
    length, size = 7, head.block_size
    tokens, features = torch.randint(V - 1, (1, length)), rand(1, length, head.feature_size)
    for anchor in (0, 6):
        # How far behind itself each place of the block finds each key.
        apart = torch.arange(anchor, anchor + size)[:, None] - torch.arange(anchor + size)
        everything = torch.ones_like(apart, dtype=torch.bool)
        seen = {
            "dflash_windows": [(apart < 3) & (apart >= 0), everything],
            "dflash_transformers": [apart.abs() <= 5] * 2,
            "speculators_dflash_whole": [apart.abs() < 3] * 2,
        }.get(make.__name__, [everything] * 2)
        block = torch.tensor([int(tokens[0, anchor]), *[28] * (size - 1)])
        table = t.get("embed_tokens.weight", parts.embeddings.weight)
        states = denoised(t, table[block] * (4.0 if make is dflash_windows else 1.0), features[0, :anchor], seen)
        if make is not speculators_dflash_whole:
            states = states[1:]
        logits = states @ t.get("lm_head.weight", parts.lm_head.weight).T
        if make is dflash_windows:
            logits = 9.0 * torch.tanh(logits * 0.5 / 9.0)
        got = head(features, tokens, parts, [2, anchor])[0, 1]
        torch.testing.assert_close(got, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", BLOCKS, ids=lambda make: make.__name__)
def test_what_a_target_does_to_its_embeddings_and_logits(make: Callable[..., Any], tmp_path: Path) -> None:
    """Published heads say it themselves; a model of transformers goes by the target, but for a norm on top."""

    class Scaled(torch.nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 7.0

    head = load_draft(write(tmp_path / "given", *make()))
    assert isinstance(head, DFlashHead)
    parts, ids, by_target = lent(), torch.arange(3), make is dflash_transformers
    table = Scaled(V, H)
    given = Borrowed(table, parts.lm_head, 0.5, 3.0)
    said = {"dflash_transformers": 7.0, "dflash_windows": 4.0}.get(make.__name__, 1.0)
    rows = head.embed_tokens or table
    torch.testing.assert_close(head.embed(ids, given), rows.weight[:3] * said)
    table.embed_norm = torch.nn.Identity()
    torch.testing.assert_close(head.embed(ids, given), rows.weight[:3] * (1.0 if by_target else said))
    state = rand(2, H)
    plain = head.logits(state, parts)
    capped = 3.0 * torch.tanh(plain * 0.5 / 3.0)
    torch.testing.assert_close(head.logits(state, given), capped if by_target else plain)


def test_what_is_read_again_behind_the_final_norm(tmp_path: Path) -> None:
    """`norm_output`: the next step starts from what the LM head reads."""
    heads = {}
    config, t, file = speculators()
    for said in (True, False):
        heads[said] = load_draft(write(tmp_path / str(said), {**config, "norm_output": said}, t, file))
    parts, tokens, states = lent(), torch.randint(V, (1, 3)), rand(1, 3, H)
    place = torch.arange(3)[None]
    outs = {}
    for said, head in heads.items():
        assert isinstance(head, EagleHead)
        read = head.read(head.embed(tokens, parts), states, positions=place, mask=None, cache=None)
        outs[said] = read, head.logits(read, parts)
    torch.testing.assert_close(outs[True][0], norm(outs[False][0], t["norm.weight"]))
    torch.testing.assert_close(outs[True][1], outs[False][1])
    steps = {said: head(rand(1, 3, 3 * H) * 0 + 1, tokens, parts, steps=2) for said, head in heads.items()}
    torch.testing.assert_close(steps[True][0], steps[False][0])
    assert not torch.allclose(steps[True][1], steps[False][1], atol=1e-2)


def test_what_is_read_of_the_target(tmp_path: Path) -> None:
    found = {make.__name__: load_draft(write(tmp_path / make.__name__, *make())) for make in MAKERS}
    assert found["medusa"].features(8) == found["mlp"].features(8) == found["eagle"].features(8) == Features(last=True)
    # Of layers from 0; the last one of a target is read behind its norm, or not at all.
    assert found["dflash"].features(8) == found["speculators_dflash"].features(8) == Features((1, 3, 6))
    assert found["dflash"].features(6) == Features((1, 3), last=True)
    assert found["speculators_dflash"].features(6) == Features((1, 3, 6))
    assert found["speculators_dflash_whole"].max_depth == 4 and found["speculators_dflash"].max_depth == 3
    # Named as outputs of layers from 0, and as hidden states.
    assert found["eagle3"].features(8) == found["speculators"].features(8) == Features((2, 4, 6))
    assert found["eagle3_wide"].features(32) == found["eagle3_nvidia"].features(32) == Features((2, 16, 29))
    assert found["eagle3_nvidia"].norm_output and found["speculators_qwen3"].norm_output
    d2t = eagle3()[1]["d2t"]
    assert d2t.shape == (D,)
    config, tensors, file = eagle3()
    ids = load_draft(write(tmp_path / "again", config, tensors, file)).ids
    assert ids is not None and ids.tolist() == (torch.arange(D) + tensors["d2t"]).tolist()
    assert found["eagle3_wide"].ids is None
    assert isinstance(found["medusa_vllm"], MedusaHead) and len(found["medusa_vllm"].ids) == D
    tied = found["mlp_tied"]
    assert isinstance(tied, MLPHead) and tied.emb[2] is tied.emb[0] and tied.proj[2] is tied.proj[1]


def test_shards_and_another_file(tmp_path: Path) -> None:
    config, tensors, _ = eagle3()
    names = sorted(tensors)
    folder = write(tmp_path / "shards", config, {n: tensors[n] for n in names[:5]}, "a.safetensors")
    save_file({n: tensors[n] for n in names[5:]}, folder / "b.safetensors")
    index = {"weight_map": {n: "a.safetensors" if n in names[:5] else "b.safetensors" for n in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(tensors, read(save_draft(load_draft(folder), tmp_path / "one")))
    config, tensors, _ = medusa()
    folder = write(tmp_path / "safe", config, tensors, "medusa_lm_head.safetensors")
    assert_same(tensors, read(save_draft(load_draft(folder), tmp_path / "two")))


def test_no_more_files_are_asked_for_than_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask the Hub for a file is to download it."""
    config, tensors, file = eagle3()
    folder = write(tmp_path / "given", config, tensors, file)
    torch.save(tensors, folder / "pytorch_model.bin")
    asked: list[str] = []
    find = _compat.find_file
    monkeypatch.setattr(_compat, "find_file", lambda path, name: asked.append(name) or find(path, name))
    load_draft(folder)
    assert asked == ["config.json", "model.safetensors"]


# -- refusals --


def refused(make: Callable[[], Any], tmp_path: Path, match: str, drop: tuple[str, ...] = (), **more: Any) -> None:
    config, tensors, file = make()
    changes = {name: value for name, value in more.items() if not isinstance(value, Tensor)}
    added = {name.replace("__", "."): value for name, value in more.items() if isinstance(value, Tensor)}
    config = {name: value for name, value in {**config, **changes}.items() if name not in drop}
    tensors = {name: t for name, t in {**tensors, **added}.items() if name not in drop}
    with pytest.raises(TreeConfigError, match=match):
        load_draft(write(tmp_path / "given", config, tensors, file))


@every
def test_tensors_that_are_missing_or_unknown(make: Callable[[], Any], tmp_path: Path) -> None:
    _, tensors, _ = make()
    name = next(name for name in tensors if name.endswith("weight") and "norm" not in name and "embed" not in name)
    refused(make, tmp_path, f"missing: .*{name.replace('.', '.')}", drop=(name,))
    refused(make, tmp_path, "unknown: what.is.this", what__is__this=rand(2))


def test_what_does_not_fit(tmp_path: Path) -> None:
    refused(eagle3, tmp_path, "missing: d2t", drop=("d2t",))
    refused(eagle3, tmp_path, r"'d2t' has shape \(4,\): expected \(11,\)", d2t=torch.zeros(4).long())
    refused(eagle3, tmp_path, "'d2t': expected 11 different ids", d2t=torch.full((D,), V))
    refused(eagle3, tmp_path, "'t2d' marks other ids", t2d=torch.ones(V, dtype=torch.bool))
    refused(eagle3, tmp_path, "lacks intermediate_size", drop=("intermediate_size",))
    refused(
        eagle3, tmp_path, r"lm_head.weight' .* has shape \(7, 16\): expected \(11, 16\)", lm_head__weight=rand(7, H)
    )
    refused(eagle3, tmp_path, "use_aux_hidden_state=False", eagle_config={"use_aux_hidden_state": False})
    refused(eagle3, tmp_path, "quantization_config is not read", quantization_config={"bits": 4})
    refused(eagle3, tmp_path, "model_type 'gemma2'", model_type="gemma2")
    refused(eagle3, tmp_path, "nobody_knows", model_type="nobody_knows")
    refused(speculators, tmp_path, "speculators_model_type='dspark'", speculators_model_type="dspark")
    refused(speculators_dflash, tmp_path, "projector_type='domino'", projector_type="domino")
    refused(speculators_dflash, tmp_path, "shift_label=True", shift_label=True)
    refused(speculators_dflash, tmp_path, "lacks mask_token_id", mask_token_id=None)
    refused(speculators_dflash, tmp_path, "missing: d2t", drop=("d2t",))
    refused(dflash, tmp_path, "lacks target_layer_ids", dflash_config={"mask_token_id": 28})
    nested = dflash()[0]["dflash_config"]
    refused(dflash, tmp_path, "dflash_config with selector_rank", dflash_config={**nested, "selector_rank": 8})
    refused(dflash, tmp_path, "attend to the left only", dflash_config={**nested, "causal": True})
    refused(dflash, tmp_path, "layer_types chunked_attention", layer_types=["chunked_attention"] * 2)
    refused(dflash, tmp_path, "block_size=1", block_size=1)
    refused(speculators_eagle, tmp_path, "layernorms=True", layernorms=True)
    refused(medusa, tmp_path, "lacks medusa_num_layers", drop=("medusa_num_layers",))
    refused(medusa_vllm, tmp_path, "no tensor token_map", drop=("token_map",))
    refused(medusa_vllm, tmp_path, "11 different ids of the 29", token_map=torch.zeros(D).long())
    refused(speculators, tmp_path, "fc_norm=True", fc_norm=True)
    refused(mlp, tmp_path, "method='sum_lstm'", method="sum_lstm")


def test_more_heads_than_the_config_names(tmp_path: Path) -> None:
    config, tensors, file = medusa()
    folder = write(tmp_path / "given", {**config, "medusa_num_heads": 2}, tensors, file)
    with pytest.warns(UserWarning, match="medusa_num_heads=2, and there are tensors of 3"):
        assert load_draft(folder).max_depth == 3


def test_unknown_keys_are_named(tmp_path: Path) -> None:
    config, tensors, file = eagle3()
    folder = write(tmp_path / "given", {**config, "a_new_thing": 1}, tensors, file)
    with pytest.warns(UserWarning, match="unknown keys: a_new_thing"):
        head = load_draft(folder)
    assert json.loads((save_draft(head, tmp_path / "out") / "config.json").read_text())["a_new_thing"] == 1


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        load_draft(tmp_path / "nowhere" / "at" / "all")
    folder = write(tmp_path / "llama", LLAMA, {"model.embed_tokens.weight": rand(V, H)}, "model.safetensors")
    assert not is_head(folder)
    with pytest.raises(TreeConfigError, match="model_type='llama'.*expected one of the layouts speculators, dflash"):
        load_draft(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no tensors"):
        load_draft(folder)


def test_layouts_that_cannot_hold_a_head(tmp_path: Path) -> None:
    head = load_draft(write(tmp_path / "given", *medusa_vllm()))
    for layout, match in (("medusa", "reduced vocabulary"), ("eagle3", "a medusa head"), ("gguf", "expected one of")):
        with pytest.raises(TreeConfigError, match=match):
            save_draft(head, tmp_path / "out", layout=layout)


def test_a_block_model_as_it_is_goes_into_the_layout_of_transformers(tmp_path: Path) -> None:
    """Nobody names its vocabulary, which the other layouts ask for."""
    model = heads.block_model(32)
    save_draft(DFlashHead.around(model), tmp_path)
    back = load_draft(tmp_path)
    assert back.source is not None and back.source.layout == "dflash-transformers"
    wanted = model.state_dict()
    found = back.drafter.state_dict()  # type: ignore[union-attr]
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
