"""`treespec`: its surface, `generate`, `doctor`, `env`, and what it says when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_treespec
from hf_treespec import TreeConfig, cli
from hf_treespec.cli import generate as generate_module
from hf_treespec.cli.options import sampling_arguments, to_json

Run = Callable[..., Any]
Check = Callable[..., None]
PROMPT = "w1 w2 w3 w1 w2 w3 w1 w2"


# The surface: whoever changes it changes this test, and CHANGELOG.md.

LOADING = {"--dtype", "--device", "--attn"}
SURFACE = {
    "generate": LOADING
    | {"--prompt", "--prompt-file", "--draft-model", "--config", "--max-nodes", "--max-depth", "--max-children"}
    | {
        "--growth",
        "--draft",
        "--corpus",
        "--seed",
        "--fallback",
        "--max-new-tokens",
        "--temperature",
        "--top-p",
        "--top-k",
    }
    | {"--chat", "--raw", "--json"},
    "bench": LOADING
    | {"--set", "--draft-model", "--config", "--limit", "--max-new-tokens", "--repeats", "--temperature"}
    | {"--warmup", "--seed", "--chat", "--raw", "--csv", "--plot", "--json"},
    "calibrate": LOADING
    | {"--out", "--draft-model", "--set", "--config", "--limit", "--max-nodes", "--context", "--batch", "--repeats"}
    | {"--max-new-tokens", "--temperature", "--chat", "--raw", "--json"},
    "index": {"--out", "--field", "--max-match", "--json"},
    "skips": LOADING
    | {"--set", "--out", "--limit", "--trials", "--max-new-tokens", "--max-nodes", "--max-depth", "--seed"}
    | {"--chat", "--raw", "--json"},
    "train": LOADING
    | {"--set", "--out", "--kind", "--limit", "--tokens", "--passes", "--new-tokens", "--temperatures", "--batch"}
    | {"--depths", "--vocabulary", "--layers", "--inner-size", "--held-out", "--epochs", "--minutes", "--patience"}
    | {
        "--init",
        "--batch-tokens",
        "--optimizer",
        "--learning-rate",
        "--precision",
        "--measured",
        "--data",
        "--fresh",
        "--seed",
    }
    | {"--chat", "--raw", "--json"},
    "doctor": LOADING | {"--json"},
    "env": {"--json"},
}
ARGUMENTS = {
    "generate": ["MODEL"],
    "bench": ["MODEL"],
    "calibrate": ["MODEL"],
    "index": ["MODEL", "FILES"],
    "skips": ["MODEL"],
    "train": ["MODEL"],
    "doctor": ["MODEL_OR_CONFIG"],
    "env": [],
}


def test_names_of_commands_and_options() -> None:
    import typer.main

    from hf_treespec.cli.app import app

    command: Any = typer.main.get_command(app)
    root = {name for parameter in command.params for name in parameter.opts}
    assert root == {"--version"}
    found, arguments = {}, {}
    for name, sub in command.commands.items():
        options = [parameter for parameter in sub.params if parameter.param_type_name == "option"]
        found[name] = {name for option in options for name in (*option.opts, *option.secondary_opts)}
        arguments[name] = [p.metavar for p in sub.params if p.param_type_name == "argument"]
        assert all(option.help for option in options)
    assert found == SURFACE
    assert arguments == ARGUMENTS


def test_help_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from hf_treespec.cli import main; sys.argv = ['treespec', 'bench', '--help']\n"
        "try: main()\nfinally: print(sorted({'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    root = Path(hf_treespec.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "--set" in done.stdout and done.stdout.splitlines()[-1] == "[]"


def test_version(treespec: Run) -> None:
    result = treespec("--version")
    assert (result.exit_code, result.stdout) == (0, f"{hf_treespec.__version__}\n")


def test_missing_typer_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.startswith("hf_treespec.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert "pip install -e '.[cli]'" in capsys.readouterr().err


def test_another_missing_module_is_not_blamed_on_typer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("hf_treespec.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hf_treespec.errors", None)
    with pytest.raises(ModuleNotFoundError, match=r"hf_treespec\.errors"):
        cli.main()


def test_json_refuses_what_json_has_not() -> None:
    with pytest.raises(ValueError):
        to_json({"seconds": float("nan")})


# generate


def stock_text(folder: str, text: str, **arguments: Any) -> str:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(**inputs, pad_token_id=0, **arguments)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_generate_streams_the_text_of_the_model(treespec: Run, llama_folder: str) -> None:
    result = treespec("generate", llama_folder, "--prompt", PROMPT, "--raw", "--max-new-tokens", 24)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip() == stock_text(llama_folder, PROMPT, max_new_tokens=24, do_sample=False)
    shown = dict(line.split(None, 1) for line in result.stderr.splitlines() if line.startswith(("tokens ", "draft")))
    assert shown["tokens"].startswith("24 new after 8") or "24 new after 8 of the prompt" in result.stderr
    assert shown["draft"].strip() == "ngram"
    assert "seed" not in result.stderr


def test_generate_reads_a_file_or_stdin_and_uses_the_chat_template(
    treespec: Run, llama_folder: str, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    common = ("--max-new-tokens", 8)
    from_file = treespec("generate", llama_folder, "--prompt-file", tmp_path / "prompt.txt", *common)
    from_stdin = treespec("generate", llama_folder, *common, stdin=PROMPT)
    expected = stock_text(llama_folder, f"user {PROMPT} bot", max_new_tokens=8, do_sample=False)
    assert from_file.stdout.strip() == from_stdin.stdout.strip() == expected
    assert expected != stock_text(llama_folder, PROMPT, max_new_tokens=8, do_sample=False)


def test_generate_without_a_chat_template_takes_the_prompt_as_it_is(treespec: Run, chatless_folder: str) -> None:
    result = treespec("generate", chatless_folder, "--prompt", PROMPT, "--max-new-tokens", 8)
    assert result.stdout.strip() == stock_text(chatless_folder, PROMPT, max_new_tokens=8, do_sample=False)


def test_generate_json(treespec: Run, llama_folder: str, draft_folder: str, tmp_path: Path) -> None:
    TreeConfig(max_nodes=5, max_depth=3, growth="static").save_pretrained(tmp_path / "tree.yaml")
    result = treespec(
        *("generate", llama_folder, "--prompt", PROMPT, "--raw", "--json", "--max-new-tokens", 16),
        *("--config", tmp_path / "tree.yaml", "--max-depth", 2, "--max-children", 2, "--fallback", "off"),
        *("--draft-model", draft_folder, "--draft", "model", "--dtype", "float64", "--attn", "eager"),
    )
    assert (result.exit_code, result.stderr) == (0, "")
    facts = json.loads(result.stdout)
    assert list(facts) == ["model", "draft_model", "tree_config", "text", "stats"]
    wanted = TreeConfig(max_nodes=5, max_depth=2, max_children=2, growth="static", draft="model", fallback="off")
    assert facts["tree_config"] == wanted.to_dict()
    assert facts["stats"]["draft"] == "model"
    assert (facts["stats"]["prompt_tokens"], facts["stats"]["new_tokens"]) == (8, 16)
    assert len(facts["stats"]["drafted_by_depth"]) <= 2
    assert facts["text"] == stock_text(llama_folder, PROMPT, max_new_tokens=16, do_sample=False)


def test_generate_samples_by_seed(treespec: Run, llama_folder: str) -> None:
    def text(*options: object) -> Any:
        common = ("--prompt", PROMPT, "--json", "--temperature", 1.0, "--top-k", 40, "--top-p", 0.95)
        result = treespec("generate", llama_folder, *common, "--max-new-tokens", 12, *options)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    drawn = text()
    seed = drawn["tree_config"]["seed"]
    # Whatever the tree, the seed alone gives the text back; and each run draws another.
    assert text("--seed", seed, "--max-nodes", 0)["text"] == drawn["text"]
    assert text()["tree_config"]["seed"] != seed
    assert text("--seed", seed + 1)["text"] != drawn["text"]


def test_generate_tells_the_drawn_seed(treespec: Run, llama_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_module.secrets, "randbelow", lambda limit: 4711)
    common = ("generate", llama_folder, "--prompt", PROMPT, "--max-new-tokens", 4)
    assert "4711" in treespec(*common, "--temperature", 0.5).stderr
    assert "4711" not in treespec(*common).stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--growth", "wild"], "--growth: TreeConfig(growth='wild'): expected one of"),
        (["--max-nodes", "-1"], "--max-nodes: TreeConfig(max_nodes=-1)"),
        (["--max-depth", "0"], "--max-depth: "),
        (["--max-children", "0"], "--max-children: "),
        (["--draft", "oracle"], "--draft: "),
        (["--fallback", "never"], "--fallback: "),
        (["--seed", "-5"], "--seed: "),
        (["--config", "none.json"], "--config none.json: none.json: no such file"),
        (["--dtype", "int4"], "--dtype: 'int4': expected one of auto, float32"),
        (["--device", "toaster"], "--device: 'toaster': "),
        (["--device", "cuda:99"], "--device: 'cuda:99': torch sees"),
        (["--top-p", "0.5"], "--top-p: 0.5 has no effect at temperature 0"),
        (["--top-k", "5"], "--top-k: 5 has no effect at temperature 0"),
        (["--prompt-file", "x.txt"], "--prompt-file: given together with --prompt"),
        (["--prompt", " \n"], "--prompt: the prompt is empty"),
        (["--draft-model", "/none"], "--draft-model: /none: no such file or folder"),
        (["--draft", "model"], "draft='model') without assistant_model"),
    ],
)
def test_generate_errors(treespec: Run, one_error: Check, llama_folder: str, options: list[str], message: str) -> None:
    one_error(treespec("generate", llama_folder, "--prompt", PROMPT, *options), message)


def test_generate_errors_about_files(treespec: Run, one_error: Check, llama_folder: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.yaml").write_text("max_nodes: many\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xff")
    common = ("generate", llama_folder, "--prompt", PROMPT, "--config")
    one_error(treespec(*common, tmp_path / "bad.json"), "--config", "cannot be parsed")
    one_error(treespec(*common, tmp_path / "bad.yaml"), "--config", "max_nodes='many'")
    one_error(treespec(*common, tmp_path), "--config", "no such file")
    prompts = ("generate", llama_folder, "--prompt-file")
    one_error(treespec(*prompts, tmp_path / "none.txt"), "--prompt-file: ", "cannot be read")
    one_error(treespec(*prompts, tmp_path / "binary.txt"), "--prompt-file: ", "cannot be read")
    one_error(treespec("generate", llama_folder, stdin=""), "stdin: the prompt is empty")


def test_generate_errors_about_models(
    treespec: Run, one_error: Check, chatless_folder: str, cacheless_folder: str, llama_folder: str, tmp_path: Path
) -> None:
    common = ("--prompt", PROMPT)
    one_error(treespec("generate", "/none", *common), "MODEL: /none: no such file or folder")
    one_error(treespec("generate", tmp_path, *common), "MODEL: the tokenizer of ", "cannot be loaded")
    one_error(treespec("generate", chatless_folder, "--chat", *common), "--chat: ", "no chat template; pass --raw")
    one_error(
        treespec("generate", llama_folder, "--attn", "psychic", *common), "MODEL: ", "cannot be loaded", "psychic"
    )
    refused = treespec("generate", cacheless_folder, *common)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "(OpenAIGPTLMHeadModel) cannot take a tree: " in refused.stderr
    assert "Traceback" not in refused.stderr


def test_sampling_arguments() -> None:
    assert sampling_arguments(0.0) == {"do_sample": False}
    assert sampling_arguments(0.5) == {"do_sample": True, "temperature": 0.5}
    assert sampling_arguments(1.0, 0.9, 3) == {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "top_k": 3}


def head_folder(folder: str, target: Path) -> Path:
    """A random Medusa head for the model of a folder."""
    from transformers import AutoConfig

    from hf_treespec import save_draft
    from hf_treespec.draft import MedusaHead

    config = AutoConfig.from_pretrained(folder)
    return save_draft(MedusaHead(config.hidden_size, config.vocab_size, heads=2), target / "head")


def test_generate_and_bench_with_a_head(treespec: Run, llama_folder: str, sets: list[str], tmp_path: Path) -> None:
    head = head_folder(llama_folder, tmp_path)
    result = treespec(
        *("generate", llama_folder, "--prompt", PROMPT, "--raw", "--json", "--max-new-tokens", 8),
        *("--draft-model", head, "--fallback", "off"),
    )
    assert (result.exit_code, result.stderr) == (0, "")
    facts = json.loads(result.stdout)
    assert facts["stats"]["draft"] == "medusa" and facts["stats"]["drafted_nodes"] > 0
    assert facts["text"] == stock_text(llama_folder, PROMPT, max_new_tokens=8, do_sample=False)
    result = treespec(
        *("bench", llama_folder, *sets, "--max-new-tokens", 4, "--warmup", 0, "--limit", 1, "--json"),
        *("--csv", tmp_path / "bench.csv", "--draft-model", head),
    )
    assert result.exit_code == 0, (result.stderr, result.exception)
    methods = {row["method"] for row in json.loads(result.stdout)["results"]}
    # Assisted decoding of transformers knows no draft heads.
    assert methods == {"plain", "prompt_lookup", "treespec"}
