"""`from_pretrained` and `enable` in one."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_treespec.api.enable import enable

__all__ = ["AutoTreeSpecModelForCausalLM"]


class AutoTreeSpecModelForCausalLM:
    """`AutoModelForCausalLM` whose models take `tree_config=` in `generate`. Not to be instantiated."""

    def __init__(self) -> None:
        raise OSError(
            f"{type(self).__name__} is used through `from_pretrained(...)` or `from_config(...)`, as "
            "AutoModelForCausalLM is"
        )

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> PreTrainedModel:
        """`AutoModelForCausalLM.from_pretrained` with the same arguments, then `enable`.

        Raises:
            UnsupportedModelError: if the model cannot take a tree.
        """
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(*args, **kwargs)
        return enable(model)

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> PreTrainedModel:
        """`AutoModelForCausalLM.from_config` with the same arguments, then `enable`.

        Raises:
            UnsupportedModelError: if the model cannot take a tree.
        """
        model: PreTrainedModel = AutoModelForCausalLM.from_config(*args, **kwargs)  # type: ignore[no-untyped-call]
        return enable(model)
