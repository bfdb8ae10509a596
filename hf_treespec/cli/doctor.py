"""`treespec doctor`: whether a model takes a tree, by which route, and what that rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_treespec.cli.faults import EXIT_REFUSED, faults_reported
from hf_treespec.cli.options import AttnOption, DeviceOption, DtypeOption, JsonOption, to_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from hf_treespec.cli.models import LoadOptions

__all__ = ["doctor"]

_ARGUMENT = "MODEL_OR_CONFIG"
# In this order, and all of them in every answer: whoever reads the JSON need not ask which are there.
_FACTS = (
    "class",
    "ok",
    "route",
    "reason",
    "cache_layers",
    "attention",
    "attention_takes_trees",
    "attention_takes_kernel",
    "vocabulary",
    "learned_positions",
    "dtype",
    "weights",
)
# Text by itself first; models of several senses and encoder-decoders after them.
_FAMILIES = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
}
# What `from_pretrained` reads; checkpoints of other programs and states of an optimizer are none.
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def doctor(
    model: Annotated[
        str,
        typer.Argument(
            metavar=_ARGUMENT,
            help="Folder of a model or its name on the hub; or a config.json, or a folder with nothing else.",
        ),
    ],
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    attn: AttnOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether a model takes a tree, and why. Exit code 0: yes, 1: no, 2: it cannot be looked at.

    A small tree is run and compared with its paths: on the model, or without weights on a tiny random one of the same
    class and config.
    """
    with faults_reported():
        from hf_treespec.cli.models import LoadOptions

        facts = _examine(model, LoadOptions(dtype=dtype, device=device, attention=attn))
    if as_json:
        typer.echo(to_json(facts))
    else:
        for name, value in facts.items():
            typer.echo(f"{name:23}{_shown(value)}")
    if not facts["ok"]:
        raise typer.Exit(EXIT_REFUSED)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} x {name}" for name, count in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _examine(name: str, options: LoadOptions) -> dict[str, Any]:
    from transformers import AutoConfig

    from hf_treespec.cli.models import check_path, load_model, loading

    check_path(name, _ARGUMENT)
    _refuse_adapter(name)
    with loading(_ARGUMENT, f"{name}: no config of a model can be read"):
        config = AutoConfig.from_pretrained(name)
    facts: dict[str, Any] = {"model": name, "model_type": config.model_type, **dict.fromkeys(_FACTS)}
    family = _family(config)
    if family is None:
        # Not a usage error: the question was understood, and the answer is no.
        reason = f"transformers has no language model for {type(config).__name__}"
        return {**facts, "cache_layers": {}, "ok": False, "route": "refuse", "reason": reason}
    with_weights = _has_weights(name)
    make = partial(load_model, name, _ARGUMENT) if with_weights else partial(_skeleton, config, name)
    model: PreTrainedModel = make(options, family)
    with nullcontext() if with_weights else _one_thread():
        return {**facts, **_facts(model), "weights": "loaded" if with_weights else "none"}


def _refuse_adapter(name: str) -> None:
    """Name the base model of a folder that holds an adapter alone: the config of a model is there."""
    import json

    from hf_treespec.cli.faults import UsageFault
    from hf_treespec.cli.models import loading

    folder = Path(name).expanduser()
    adapter = folder / "adapter_config.json"
    if not adapter.is_file() or (folder / "config.json").exists():
        return
    with loading(_ARGUMENT, f"{adapter} cannot be read"):
        base = json.loads(adapter.read_text())["base_model_name_or_path"]
    raise UsageFault(
        _ARGUMENT, f"{name}: holds a PEFT adapter, which takes a tree as its base model does; pass that: {base}"
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Of a tiny model the threads of torch cost more time than they save."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _family(config: PreTrainedConfig) -> Any:
    """The auto class of models that generate text with this config: the one that the config names, or the first."""
    import transformers
    from transformers.models.auto import modeling_auto

    found = None
    for kind, mapping in _FAMILIES.items():
        names = getattr(modeling_auto, mapping, {}).get(config.model_type, ())
        auto = getattr(transformers, kind, None)
        if auto is None or not names:
            continue
        if set(config.architectures or ()) & {names, *(names if isinstance(names, tuple) else ())}:
            return auto
        found = found or auto
    return found


def _has_weights(name: str) -> bool:
    path = Path(name)
    if path.is_file():
        return False
    # A name on the hub is taken to have weights.
    return not path.is_dir() or any(next(path.glob(pattern), None) for pattern in _WEIGHTS)


def _skeleton(config: PreTrainedConfig, name: str, options: LoadOptions, family: Any) -> PreTrainedModel:
    """The model without memory for its weights."""
    import torch

    from hf_treespec.cli.models import loading

    keywords = options.keywords()
    if keywords["dtype"] == "auto":
        # Only `from_pretrained` knows "auto"; a skeleton has the type that its config names.
        del keywords["dtype"]
    with loading(_ARGUMENT, f"{name}: no model can be made of this config"), torch.device("meta"):
        model: PreTrainedModel = family.from_config(config, **keywords)
    return model


def _facts(model: PreTrainedModel) -> dict[str, Any]:
    from hf_treespec import _compat, is_supported
    from hf_treespec.attention import learned_position_limit

    support = is_supported(model)
    attention = _compat.attention_implementation(model)
    return {
        "class": type(model).__name__,
        "ok": support.ok,
        "route": str(support.route),
        "reason": support.reason,
        "cache_layers": _cache_layers(model),
        "attention": attention,
        "attention_takes_trees": attention in _compat.MASK_IMPLEMENTATIONS,
        "attention_takes_kernel": _takes_kernel(model),
        "vocabulary": _compat.vocabulary_size(model),
        "learned_positions": learned_position_limit(_compat.decoder_of(model), _compat.max_positions(model)),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _takes_kernel(model: PreTrainedModel) -> bool | None:
    """Whether an attention function of one's own may stand in for the model's; None if there is nothing to try."""
    from hf_treespec import _compat
    from hf_treespec.api.kernel_probe import takes_custom_attention
    from hf_treespec.twin import TwinError, tiny_twin

    if _compat.weights_place(model) != "nowhere":
        return takes_custom_attention(model) is None
    try:
        with tiny_twin(model) as twin:
            return takes_custom_attention(twin) is None
    except TwinError:
        return None


def _cache_layers(model: PreTrainedModel) -> dict[str, int]:
    """How many cache layers there are of each class."""
    from hf_treespec import _compat

    try:
        layers = getattr(_compat.make_cache(model.config), "layers", [])
    except (AttributeError, KeyError, TypeError, ValueError):
        # A refused model need not have such a cache at all.
        return {}
    return dict(Counter(type(layer).__name__ for layer in layers))
