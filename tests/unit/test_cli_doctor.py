"""`treespec doctor` and `treespec env`: what they say of models and of this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_treespec

Run = Callable[..., Any]
Check = Callable[..., None]

# doctor

FACTS = ["model", "model_type", "class", "ok", "route", "reason", "cache_layers", "attention"]
FACTS += ["attention_takes_trees", "vocabulary", "learned_positions", "dtype", "weights"]


def doctor(treespec: Run, *arguments: object) -> tuple[int, dict[str, Any]]:
    result = treespec("doctor", *arguments, "--json")
    facts = json.loads(result.stdout)
    assert list(facts) == FACTS
    return result.exit_code, facts


def test_doctor_probes_a_model_with_weights(treespec: Run, llama_folder: str) -> None:
    code, facts = doctor(treespec, llama_folder)
    assert code == 0
    assert facts == {
        "model": llama_folder,
        "model_type": "llama",
        "class": "LlamaForCausalLM",
        "ok": True,
        "route": "mask",
        "reason": "a probe tree equals its paths",
        "cache_layers": {"DynamicLayer": 2},
        "attention": "sdpa",
        "attention_takes_trees": True,
        "vocabulary": 64,
        "learned_positions": None,
        "dtype": "float32",
        "weights": "loaded",
    }
    facts = doctor(treespec, llama_folder, "--attn", "eager", "--dtype", "bfloat16")[1]
    assert (facts["ok"], facts["attention"], facts["dtype"]) == (True, "eager", "bfloat16")


def test_doctor_reads_a_config_without_weights(treespec: Run, tmp_path: Path) -> None:
    from transformers import GPT2Config, MistralConfig

    GPT2Config().save_pretrained(tmp_path)
    code, facts = doctor(treespec, tmp_path)
    assert (code, facts["class"], facts["ok"], facts["weights"]) == (0, "GPT2LMHeadModel", True, "none")
    assert (facts["learned_positions"], facts["vocabulary"]) == (1024, 50257)
    assert "not probed" in facts["reason"]
    MistralConfig(num_hidden_layers=3, sliding_window=16).save_pretrained(tmp_path / "m")
    code, facts = doctor(treespec, tmp_path / "m" / "config.json")
    assert (code, facts["cache_layers"]) == (0, {"DynamicSlidingWindowLayer": 3})


def test_doctor_refuses_recurrent_models(treespec: Run, mamba_folder: str) -> None:
    code, facts = doctor(treespec, mamba_folder)
    assert (code, facts["ok"], facts["route"]) == (1, False, "refuse")
    assert "its state is recurrent" in facts["reason"]


def test_doctor_refuses_what_is_no_causal_model(treespec: Run, tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config(d_model=16, num_layers=1, d_ff=16, num_heads=2).save_pretrained(tmp_path)
    code, facts = doctor(treespec, tmp_path)
    assert (code, facts["ok"], facts["route"], facts["class"]) == (1, False, "refuse", None)
    assert facts["reason"] == "transformers has no causal language model for T5Config"


def test_doctor_table(treespec: Run, llama_folder: str, mamba_folder: str) -> None:
    good, bad = treespec("doctor", llama_folder), treespec("doctor", mamba_folder)
    lines = dict(line.split(None, 1) for line in good.stdout.splitlines())
    assert (lines["ok"], lines["cache_layers"], lines["learned_positions"]) == ("yes", "2 x DynamicLayer", "none")
    assert (good.exit_code, bad.exit_code) == (0, 1)
    assert dict(line.split(None, 1) for line in bad.stdout.splitlines())["ok"] == "no"


def test_doctor_errors(treespec: Run, one_error: Check, llama_folder: str, tmp_path: Path) -> None:
    one_error(treespec("doctor", "/none"), "MODEL_OR_CONFIG: /none: no such file or folder")
    one_error(treespec("doctor", tmp_path), "MODEL_OR_CONFIG: ", "no config of a model can be read")
    (tmp_path / "config.json").write_text("{")
    one_error(treespec("doctor", tmp_path), "MODEL_OR_CONFIG: ")
    one_error(treespec("doctor", llama_folder, "--dtype", "int4"), "--dtype: ")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 10, "num_attention_heads": 0}')
    one_error(treespec("doctor", tmp_path), "MODEL_OR_CONFIG: ")


# env


def test_env(treespec: Run) -> None:
    facts = json.loads(treespec("env", "--json").stdout)
    names = ["hf_treespec", "python", "torch", "transformers", "accelerate", "tokenizers", "triton", "platform"]
    assert list(facts) == [*names, "cpu", "threads", "cuda", "cuda_devices"]
    assert facts["hf_treespec"] == hf_treespec.__version__
    assert facts["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert facts["threads"] == torch.get_num_threads()
    assert len(facts["cuda_devices"]) == torch.cuda.device_count()
    lines = dict(line.split(None, 1) for line in treespec("env").stdout.splitlines())
    assert list(lines) == list(facts)
    assert lines["transformers"] == facts["transformers"]


def test_env_of_a_package_that_is_not_there(treespec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_treespec.cli import environment

    monkeypatch.setattr(environment, "_PACKAGES", ("torch", "no-such-package-here"))
    assert json.loads(treespec("env", "--json").stdout)["no-such-package-here"] is None
