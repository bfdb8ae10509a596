"""`treespec generate`: one prompt, streamed."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_treespec.cli.faults import UsageFault, faults_reported, one_line
from hf_treespec.cli.options import (
    AttnOption,
    ChatOption,
    DeviceOption,
    DraftModelOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    TemperatureOption,
    config_with,
    read_config,
    sampling_arguments,
    to_json,
)

if TYPE_CHECKING:
    from hf_treespec.stats import TreeStats

__all__ = ["generate"]


def generate(
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Option("--prompt", help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="File with the prompt. Without either: stdin.")
    ] = None,
    draft_model: DraftModelOption = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="A TreeConfig as JSON or YAML; the options below overrule it."),
    ] = None,
    max_nodes: Annotated[int | None, typer.Option("--max-nodes", help="Drafted nodes a tree; 0: plain.")] = None,
    max_depth: Annotated[int | None, typer.Option("--max-depth", help="Depth of a tree.")] = None,
    max_children: Annotated[int | None, typer.Option("--max-children", help="Children of a node.")] = None,
    growth: Annotated[str | None, typer.Option("--growth", help="best_first, static or dynamic.")] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            help="auto, model, mtp, early_exit or layer_skip (name layers in --config), ngram, suffix, recycle or "
            "lookahead; or some of the last four, maybe with one of the four before them: model,ngram.",
        ),
    ] = None,
    corpus: Annotated[
        Path | None, typer.Option("--corpus", help="Index of texts for --draft suffix; see treespec index.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Fixes the text when sampling.")] = None,
    fallback: Annotated[
        str | None, typer.Option("--fallback", help="auto decodes plainly while trees do not pay; off never.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Length limit.")] = 256,
    temperature: TemperatureOption = 0.0,
    top_p: Annotated[float | None, typer.Option("--top-p", min=0.0, max=1.0, help="Nucleus.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Most likely tokens kept.")] = None,
    chat: ChatOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    attn: AttnOption = None,
    as_json: JsonOption = False,
) -> None:
    """Generate from one prompt with trees: text to stdout as it comes, statistics to stderr."""
    overrides = {
        "max_nodes": max_nodes,
        "max_depth": max_depth,
        "max_children": max_children,
        "growth": growth,
        "draft": [name.strip() for name in draft.split(",")] if draft and "," in draft else draft,
        "draft_options": None if corpus is None else {"suffix": {"index": str(corpus)}},
        "seed": seed,
        "fallback": fallback,
    }
    with faults_reported():
        text = _read_prompt(prompt, prompt_file)
        sampling = sampling_arguments(temperature, top_p, top_k)
        _generate(
            model,
            text,
            draft_name=draft_model,
            config_path=config,
            overrides=overrides,
            arguments={"max_new_tokens": max_new_tokens, **sampling},
            chat=chat,
            load={"dtype": dtype, "device": device, "attention": attn},
            as_json=as_json,
        )


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise UsageFault("--prompt-file", "given together with --prompt; leave one out")
    if prompt is not None:
        argument, text = "--prompt", prompt
    elif prompt_file is not None:
        argument = "--prompt-file"
        try:
            text = prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageFault(argument, f"{prompt_file} cannot be read: {one_line(error)}") from error
    elif sys.stdin.isatty():
        raise UsageFault("--prompt", "missing; give it, or --prompt-file, or pipe the prompt to stdin")
    else:
        argument, text = "stdin", sys.stdin.read()
    if not text.strip():
        raise UsageFault(argument, "the prompt is empty")
    return text


def _generate(
    name: str,
    text: str,
    *,
    draft_name: str | None,
    config_path: Path | None,
    overrides: dict[str, Any],
    arguments: dict[str, Any],
    chat: bool | None,
    load: dict[str, Any],
    as_json: bool,
) -> None:
    from transformers import TextStreamer

    from hf_treespec import TreeConfig, enable
    from hf_treespec.cli.models import LoadOptions, encode, load_drafter, load_model, load_tokenizer, pad_arguments

    tree_config = config_with(read_config(config_path) if config_path else TreeConfig(), overrides)
    if tree_config.seed is None and arguments["do_sample"]:
        # torch's generator starts every process alike; a drawn seed varies the text and can be given back with --seed.
        tree_config = tree_config.replace(seed=secrets.randbelow(1 << 31))
    indexed = "suffix" in tree_config.sources and tree_config.options_of("suffix")["index"] is not None
    if overrides["draft_options"] is not None and not indexed:
        raise UsageFault("--corpus", f"has no effect with draft {tree_config.draft!r}; pass --draft suffix as well")
    options = LoadOptions(**load)
    tokenizer = load_tokenizer(name, "MODEL")
    use_chat = bool(tokenizer.chat_template) if chat is None else chat
    inputs = encode(tokenizer, text, chat=use_chat, argument="--chat" if chat else "--prompt")
    target: Any = enable(load_model(name, "MODEL", options))
    drafter = load_drafter(draft_name, options) if draft_name else None
    streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    output = target.generate(
        **{key: value.to(target.device) for key, value in inputs.items()},
        assistant_model=drafter,
        tree_config=tree_config,
        streamer=streamer,
        # For the fingerprint of the corpus.
        **({"tokenizer": tokenizer} if indexed else {}),
        **pad_arguments(tokenizer),
        **arguments,
    )
    stats: TreeStats = target.treespec_stats
    if not as_json:
        typer.echo(_table(stats, tree_config.seed if arguments["do_sample"] else None), err=True)
        return
    new_tokens = output[0, inputs["input_ids"].shape[1] :]
    facts = {
        "model": name,
        "draft_model": draft_name,
        "tree_config": tree_config.to_dict(),
        "text": tokenizer.decode(new_tokens, skip_special_tokens=True),
        "stats": stats.to_dict(),
    }
    typer.echo(to_json(facts))


def _table(stats: TreeStats, seed: int | None) -> str:
    accepted = " ".join(
        f"{hits}/{offers}" for hits, offers in zip(stats.accepted_by_depth, stats.drafted_by_depth, strict=True)
    )
    lines = {
        "tokens": f"{stats.new_tokens} new after {stats.prompt_tokens} of the prompt",
        "draft": stats.draft,
        "rounds": f"{stats.rounds}, of them {stats.plain_rounds} without a tree",
        "tokens a round": f"{stats.tokens_per_round:.2f}",
        "accepted by depth": accepted or "none",
        "seconds": (
            f"{stats.total_seconds:.2f}: prefill {stats.prefill_seconds:.2f}, target {stats.target_seconds:.2f}, "
            f"draft {stats.draft_seconds:.2f}, verify {stats.verify_seconds:.2f}, commit {stats.commit_seconds:.2f}"
        ),
        "tokens a second": f"{stats.tokens_per_second:.1f}",
    }
    if seed is not None:
        lines["seed"] = str(seed)
    return "\n".join(f"{name:20}{value}" for name, value in lines.items())
