"""Where the hidden states of a decoder can be read off without asking the model for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

__all__ = [
    "decoder_layers",
    "embedding_size",
    "final_norm",
    "hidden_size",
    "lm_head_size",
    "tap_last",
    "tap_layer",
    "target_parts",
]

# What a tap does with a hidden state [B, Q, H].
Take = Callable[[Tensor], None]


def _decoder(model: PreTrainedModel) -> nn.Module:
    decoder: nn.Module = model.get_decoder()
    # Some call their LM head a decoder (ModernBERT).
    has_layers = any(isinstance(module, nn.ModuleList) for module in decoder.modules())
    return decoder if has_layers and decoder is not model else model.base_model


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of the part that reads the generated tokens, in order; empty if there is no list of them.

    They are the list of modules that holds most of its parameters, since configs count layers under many names. Models
    inside of that part with a config of another kind read another sense (Git): theirs count where there are no others.
    """
    decoder, text = _decoder(model), type(model.config.get_text_config(decoder=True))
    best: list[nn.Module] = []
    most = (False, 0)
    inner: list[str] = []
    for name, module in decoder.named_modules():
        if name and isinstance(module, PreTrainedModel) and not isinstance(module.config, text):
            inner.append(f"{name}.")
        if isinstance(module, nn.ModuleList):
            own = not any(name.startswith(prefix) for prefix in inner)
            size = own, sum(parameter.numel() for parameter in module.parameters())
            # Lists inside of the list have fewer; a list around it that has no more is no better.
            if size[1] and size > most:
                best, most = list(module), size
    return best


def hidden_size(model: PreTrainedModel) -> int:
    """Width of the hidden states of the text part."""
    config = model.config.get_text_config(decoder=True)
    return int(getattr(config, "hidden_size", None) or config.d_model)


def embedding_size(model: PreTrainedModel) -> int:
    """Width of the embeddings of tokens; some models project it to that of their layers."""
    table: Any = model.get_input_embeddings()
    return int(getattr(table, "embedding_dim", None) or table.weight.shape[-1])


def lm_head_size(model: PreTrainedModel) -> int:
    """Width of what the LM head reads, as far as it says so, else of the hidden states."""
    return int(getattr(model.get_output_embeddings(), "in_features", None) or hidden_size(model))


def final_norm(model: PreTrainedModel) -> Tensor | None:
    """Weight of the norm behind the last layer, where the decoder calls it `norm`; float32 on the CPU."""
    weight = getattr(getattr(_decoder(model), "norm", None), "weight", None)
    return weight.detach().float().cpu() if isinstance(weight, Tensor) else None


def tap_layer(model: PreTrainedModel, index: int, take: Take) -> RemovableHandle:
    """Show `take` every hidden state `index` of the model, as `output_hidden_states` counts them.

    Args:
        model: the model.
        index: 0 for what the first layer is given, else what layer `index - 1` gives.
        take: called in each forward.
    """
    layers = decoder_layers(model)
    if not index:

        def before(module: Any, args: Any, kwargs: Any) -> None:
            take(args[0] if args else kwargs["hidden_states"])

        return layers[0].register_forward_pre_hook(before, with_kwargs=True)
    return layers[index - 1].register_forward_hook(lambda module, args, output: take(_first(output)))


def tap_last(model: PreTrainedModel, take: Take) -> RemovableHandle:
    """Show `take` the last hidden state of every forward: behind the final norm, as the LM head reads it."""
    return _decoder(model).register_forward_hook(lambda module, args, output: take(_last(output)))


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _last(output: Any) -> Tensor:
    state = getattr(output, "last_hidden_state", None)
    return _first(output) if state is None else state


def target_parts(model: PreTrainedModel) -> tuple[nn.Module, nn.Module | None]:
    """The embeddings of the tokens and the LM head; the latter None if the model names none."""
    return model.get_input_embeddings(), model.get_output_embeddings()
