"""Cost curves on disk: written by `hf_treespec.calibrate`, read at the first call of a model.

One JSON file in the cache folder holds the curves of all models and machines that were calibrated. What does not fit
the model, the machine or the installed packages is not used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_treespec import _compat

__all__ = ["FILE_NAME", "Measured", "Setting", "cache_folder", "find_measured", "keep_measured"]

FILE_NAME = "costs.json"
_SCHEMA = 1


def cache_folder() -> Path:
    """`$HF_TREESPEC_CACHE`, or `hf_treespec` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("HF_TREESPEC_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_treespec"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a curve holds for.

    Args:
        model: class of the target.
        config: hash of its config.
        parameters: how many it has.
        dtype: of its weights.
        device: name of the chip.
        attention: its implementation.
        route: how trees enter it.
        threads: of the CPU; 0 elsewhere.
        torch: version.
        transformers: version.
    """

    model: str
    config: str
    parameters: int
    dtype: str
    device: str
    attention: str
    route: str
    threads: int
    torch: str
    transformers: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A curve.

    Args:
        setting: what it holds for.
        batch: rows.
        context: tokens of each row.
        target: seconds of a round without drafting, by what the target reads beside the roots.
        draft: what drafted, as `CostKey.draft`; "" where nothing did.
        drafting: seconds of a draft by its levels.
    """

    setting: Setting
    batch: int
    context: int
    target: Mapping[int, float]
    draft: str = ""
    drafting: Mapping[int, float] | None = None


def keep_measured(curves: Sequence[Measured], folder: Path | None = None) -> Path:
    """Add curves to the file; those of the same setting, batch, context and draft are replaced.

    Args:
        curves: what was measured.
        folder: of the file, made if needed; default `cache_folder()`.

    Returns:
        The path of the file.
    """
    path = (folder or cache_folder()) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {_place(curve): curve for curve in (*_read(path), *curves)}
    text = json.dumps({"schema_version": _SCHEMA, "curves": [_to_json(one) for one in kept.values()]}, indent=1)
    # Readers see the old file or the new one, and never half of one.
    part = path.with_name(f"{FILE_NAME}.{os.getpid()}")
    part.write_text(text + "\n")
    part.replace(path)
    return path


def find_measured(setting: Setting | Callable[[], Setting], folder: Path | None = None) -> list[Measured]:
    """The curves that hold for a setting.

    A file that cannot be read, a folder that cannot be found or looked into, and curves of the same model on other
    versions of torch or transformers, are worth one warning and are ignored.

    Args:
        setting: of the call, or what makes it, which may fail as the file may.
        folder: of the file; default `cache_folder()`.
    """
    try:
        path = (folder or cache_folder()) / FILE_NAME
        curves = _read(path)
        if not curves:
            return []
        setting = setting() if callable(setting) else setting
    except (OSError, RuntimeError) as error:
        # No home folder, or one that is closed to this user: a call needs none of it.
        _compat.warn_once(
            f"measured costs ({FILE_NAME}) cannot be looked up and are ignored ({type(error).__name__}: {error}). Set "
            "HF_TREESPEC_CACHE to a folder that can be read"
        )
        return []
    found = [one for one in curves if one.setting == setting]
    old = [one for one in curves if _unversioned(one.setting) == _unversioned(setting)]
    if old and not found:
        was = old[-1].setting
        _compat.warn_once(
            f"{path}: costs of {setting.model} were measured with torch {was.torch} and transformers "
            f"{was.transformers}, here are {setting.torch} and {setting.transformers}: they are ignored. Run "
            "`treespec calibrate` again"
        )
    return found


def _unversioned(setting: Setting) -> dict[str, Any]:
    return {name: value for name, value in asdict(setting).items() if name not in ("torch", "transformers")}


def _place(curve: Measured) -> tuple[Any, ...]:
    return curve.setting, curve.batch, curve.context, curve.draft


def _read(path: Path) -> list[Measured]:
    if not path.is_file():
        return []
    try:
        data = json.loads(path.read_text())
        if data["schema_version"] != _SCHEMA:
            raise ValueError(f"schema_version={data['schema_version']!r}, expected {_SCHEMA}")
        return [_from_json(one) for one in data["curves"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _compat.warn_once(
            f"{path}: measured costs cannot be read and are ignored ({type(error).__name__}: {error}). Delete the "
            "file, or run `treespec calibrate` again"
        )
        return []


def _to_json(curve: Measured) -> dict[str, Any]:
    return asdict(curve)


def _from_json(data: Mapping[str, Any]) -> Measured:
    setting = Setting(**data["setting"])
    drafting = data["drafting"]
    return Measured(
        setting=setting,
        batch=int(data["batch"]),
        context=int(data["context"]),
        target=_seconds(data["target"].items()),
        draft=str(data["draft"]),
        drafting=None if drafting is None else _seconds(drafting.items()),
    )


def _seconds(pairs: Iterable[tuple[str, Any]]) -> dict[int, float]:
    out = {int(size): float(value) for size, value in pairs}
    if not all(size >= 0 and 0.0 < value < float("inf") for size, value in out.items()):
        raise ValueError(f"seconds {out}: expected positive ones by size")
    return out
