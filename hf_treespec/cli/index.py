"""`treespec index`: a corpus index for the source "suffix" out of text files."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_treespec.cli.faults import UsageFault, faults_reported, one_line
from hf_treespec.cli.options import JsonOption, ModelArgument, to_json
from hf_treespec.errors import TreeConfigError

__all__ = ["index"]


def index(
    model: ModelArgument,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILES", help="Texts: one each, or one a line in .jsonl and .jsonl.gz."),
    ],
    out: Annotated[Path, typer.Option("--out", help="The file to write.")],
    field: Annotated[str, typer.Option("--field", help="Field of the text in lines of JSON.")] = "text",
    max_match: Annotated[int, typer.Option("--max-match", min=1, max=1024, help="Longest context, in tokens.")] = 16,
    as_json: JsonOption = False,
) -> None:
    """Index texts, so that drafts of the source "suffix" can continue them (draft_options, suffix, index)."""
    with faults_reported():
        facts = _index(model, files, out, field, max_match)
        if as_json:
            typer.echo(to_json(facts))
        else:
            typer.echo(f"{out}: {facts['tokens']} tokens of {facts['texts']} texts, {facts['bytes']} bytes")


def _index(model: str, files: list[Path], out: Path, field: str, max_match: int) -> dict[str, Any]:
    from transformers import AutoConfig

    from hf_treespec.cli.models import check_path, load_tokenizer, loading
    from hf_treespec.draft import build_corpus_index, open_corpus_index, tokenizer_fingerprint

    for path in files:
        if not path.is_file():
            raise UsageFault("FILES", f"{path}: no such file")
    tokenizer: Any = load_tokenizer(model, "MODEL")
    check_path(model, "MODEL")
    with loading("MODEL", f"the config of {model} cannot be loaded"):
        vocab_size = int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)
    encoded = (
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for path in files
        for text in _texts(path, field)
    )
    try:
        build_corpus_index(
            encoded,
            out,
            vocab_size=vocab_size,
            fingerprint=tokenizer_fingerprint(tokenizer),
            max_match=max_match,
        )
    except TreeConfigError as error:
        raise UsageFault("FILES", str(error)) from error
    except OSError as error:
        raise UsageFault("--out", f"{out} cannot be written: {one_line(error)}") from error
    made = open_corpus_index(out)
    return {"index": str(out), "tokens": len(made), "texts": made.texts, "bytes": out.stat().st_size}


def _texts(path: Path, field: str) -> Iterator[str]:
    """The texts of a file."""
    lines = path.name.endswith((".jsonl", ".jsonl.gz"))
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            if not lines:
                yield file.read()
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict) or not isinstance(row.get(field), str):
                        raise UsageFault(
                            "FILES", f"{path}, line {number}: expected an object with a text in {field!r}; see --field"
                        )
                    yield row[field]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageFault("FILES", f"{path} cannot be read: {one_line(error)}") from error
