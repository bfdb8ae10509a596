"""Prompts to train the demo's draft on, none of them from an eval set.

    python evals/demo_prompts.py --out DIR --data EVAL_SETS

The target writes them itself: it is given the start of a user's message and goes on with it, at temperature 0.8 (as Xu
et al. 2024, Magpie, do with no start at all). Beside these stand starts of functions of Python's own library, to be
gone on with as they are. A prompt that shares eight words in a row with one of an eval set is dropped.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hf_treespec.train import TextSettings, count_units, read_texts, write_texts
from real_model import load_smollm2, progress_bars_on_terminals_only

# How a user's message may begin: code, numbers, questions, texts to write, texts to change.
STARTS = {
    "code": """Write a Python function that|Write a Python class for|Fix the bug in this code:
Explain this Python code:|How do I read a file in Python and|Write a JavaScript function to
Write a SQL query that|Implement|Refactor this function so that|Write unit tests for|Write a shell script that
Given a list of integers,|Write a function to check whether|What does this code print?|Add type hints to
Convert this code to Python:|Write a recursive function|Write a program that reads|Here is my code:
How can I sort""",
    "numbers": """A farmer has|A train leaves|Anna bought|If a shop sells|There are|Tom is|A recipe needs
Solve for x:|What is the sum of|A rectangle has|How many|A class of|Maria earns|At a bakery,|A tank holds
Every week, Ben|The price of a|A bus carries|In a garden there are|Calculate|A runner covers|Half of the
A library owns|Leo and Nora share""",
    "questions": """What is|Why do|How does|Explain how|What are the main differences between|Can you explain
Who was|When did|What causes|Tell me about|Is it true that|Describe the process of|What would happen if
Compare|Define|List five|Give me three reasons|What should I|Help me understand|Where can I""",
    "writing": """Write a short story about|Write an email to|Write a poem about|Draft a letter
Describe a product for|Compose a speech|Imagine that you are|Write a dialogue between|Create a recipe for
Plan a trip to|Suggest names for|Write a blog post about|Pretend to be|Write a review of
Create a weekly schedule for|Design a game|Give me ideas for|Write instructions for|Act as a
Write a summary of""",
    "changing": """Rewrite this sentence:|Translate to French:|Summarize the following text:
Make this email more polite:|Correct the grammar:|Classify the sentiment of|Extract all names from
Turn this into bullet points:|Shorten this paragraph:|Sort these words|Here is a paragraph:
Convert this table to JSON:|Continue this story:|Find the mistakes in|Rename the variables in this code:
Identify the topic of|Paraphrase:|Put these events in order:|Edit this text:|Expand on""",
}
_WORDS = 8


def starts() -> list[str]:
    """All starts, one after the other."""
    return [start.strip() for text in STARTS.values() for line in text.split("\n") for start in line.split("|")]


def messages(model: Any, tokenizer: Any, count: int, folder: Path, seed: int) -> list[str]:
    """Users' messages that the target wrote to their end; about half of `count` comes to one."""
    mark = "\x00"
    frame = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before = frame.partition(mark)[0]
    every = starts()
    prompts = [
        tokenizer(before + every[number % len(every)], add_special_tokens=False).input_ids for number in range(count)
    ]
    settings = TextSettings(new_tokens=56, temperatures=(0.8,), batch=96, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(model, prompts, folder, settings, report=lambda n: print(".", end="", file=sys.stderr, flush=True))
    skip = len(tokenizer(before, add_special_tokens=False).input_ids)
    found = []
    for text in read_texts(folder, count_units(prompts, settings)):
        whole = tokenizer.decode([*text.prompt[skip:], *text.new], skip_special_tokens=True).strip()
        # Messages that were cut are kept where they end in a sentence.
        if text.new[-1] != tokenizer.eos_token_id:
            whole = whole[: max(whole.rfind(end) for end in ".?!") + 1]
        if 15 <= len(whole) <= 400:
            found.append(whole)
    return found


def functions(count: int, seed: int) -> list[str]:
    """Signatures and docstrings of functions of Python's library, to be gone on with as they are."""
    found = sorted(set(_functions()))
    random.Random(seed).shuffle(found)
    return found[:count]


def _functions() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"test", "tests", "idlelib", "site-packages", "dist-packages"} & set(path.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = source.splitlines()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and (told := ast.get_docstring(node)) and len(told) > 30:
                text = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]) + "\n"
                if len(text) < 900:
                    yield text


def _grams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + _WORDS]) for i in range(max(1, len(words) - _WORDS + 1))}


def eval_grams(data: Path) -> set[tuple[str, ...]]:
    """Runs of words of the eval sets: prompts, questions and turns."""
    found: set[tuple[str, ...]] = set()
    for path in sorted([*data.glob("*.jsonl"), *data.glob("*.jsonl.gz")]):
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
            for row in map(json.loads, file):
                turns = row.get("turns", [])
                for text in [row.get("prompt", ""), row.get("question", ""), row.get("answer", ""), *turns]:
                    found |= _grams(text)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of chat.jsonl and code.jsonl")
    parser.add_argument("--data", type=Path, required=True, help="folder of the eval sets, to keep out")
    parser.add_argument("--messages", type=int, default=2400, help="messages to begin")
    parser.add_argument("--functions", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    progress_bars_on_terminals_only()
    model, tokenizer = load_smollm2(dtype=torch.bfloat16)
    kept_out = eval_grams(arguments.data)
    arguments.out.mkdir(parents=True, exist_ok=True)
    made = {
        "chat": (
            "question",
            messages(model, tokenizer, arguments.messages, arguments.out / "messages", arguments.seed),
        ),
        "code": ("prompt", functions(arguments.functions, arguments.seed)),
    }
    for name, (field, texts) in made.items():
        clean = [text for text in dict.fromkeys(texts) if not _grams(text) & kept_out]
        with open(arguments.out / f"{name}.jsonl", "w") as file:
            file.writelines(json.dumps({field: text}) + "\n" for text in clean)
        print(f"{name}: {len(clean)} of {len(texts)} texts, none with {_WORDS} words in a row of an eval set")
    return 0


if __name__ == "__main__":
    sys.exit(main())
