"""A model with another LM head, without a change to the model."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["lm_head_fault", "lm_head_tensors", "with_lm_head"]


def lm_head_fault(model: PreTrainedModel) -> str | None:
    """Why `with_lm_head` and `lm_head_tensors` cannot serve a model, or None."""
    head = model.get_output_embeddings()
    if head is None or not any(module is head for module in model.modules()):
        return "it names no LM head by get_output_embeddings()"
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    # Of 8 bits a value there are scales somewhere else.
    if (
        not isinstance(weight, Tensor)
        or weight.dim() != 2
        or not weight.is_floating_point()
        or weight.element_size() < 2
        or not (bias is None or isinstance(bias, Tensor))
    ):
        kind = type(head)
        return f"its LM head is a {kind.__module__}.{kind.__qualname__}, whose weights are no plain matrix of ids"
    if weight.device.type == "meta" or not weight.numel():
        return "the weights of its LM head lie elsewhere between forwards"
    if any(module._compiled_call_impl is not None for module in _way(model, head)):
        return "it is compiled, and its LM head with it"
    return None


def lm_head_tensors(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Weight `[V, H]` and bias `[V]` of the LM head."""
    head: Any = model.get_output_embeddings()
    return head.weight, head.bias if isinstance(getattr(head, "bias", None), Tensor) else None


def with_lm_head(model: PreTrainedModel, head: nn.Module) -> PreTrainedModel:
    """A view of a model with another LM head.

    The model and the modules around its head are new shells; all else, the config and the weights too, is shared. So
    whatever the forward does with logits it does with those of the other head, and neither the model nor a call of it
    in another thread sees any of it.

    Args:
        model: has an LM head, see `lm_head_fault`.
        head: takes hidden states, gives logits.
    """
    old = model.get_output_embeddings()
    shells = [_shell(module) for module in _way(model, old)[:-1]]
    names = _name(model, old).split(".")
    for outer, name, inner in zip(shells, names, [*shells[1:], head], strict=True):
        outer._modules[name] = inner
    return shells[0]


def _name(model: nn.Module, part: Any) -> str:
    return next(name for name, module in model.named_modules() if module is part)


def _way(model: nn.Module, part: Any) -> list[nn.Module]:
    """The modules around a part of a model, from the model on, and the part."""
    names = _name(model, part).split(".")
    return [model, *(model.get_submodule(".".join(names[: place + 1])) for place in range(len(names)))]


def _shell(module: Any) -> Any:
    shell = object.__new__(type(module))
    shell.__dict__.update(vars(module), _modules=module._modules.copy())
    for name, value in vars(module).items():
        # Hooks of accelerate replace methods on the instance.
        if isinstance(value, MethodType) and value.__self__ is module:
            shell.__dict__[name] = MethodType(value.__func__, shell)
        elif isinstance(value, partial) and value.args and value.args[0] is module:
            bound = partial(value.func, shell, *value.args[1:], **value.keywords)
            vars(bound).update(vars(value))
            shell.__dict__[name] = bound
    return shell
