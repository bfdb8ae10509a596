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
FACTS += ["attention_takes_trees", "attention_takes_kernel", "vocabulary", "learned_positions", "dtype", "weights"]


def doctor(treespec: Run, *arguments: object) -> tuple[int, dict[str, Any]]:
    result = treespec("doctor", *arguments, "--json")
    facts = json.loads(result.stdout)
    assert list(facts) == FACTS
    return result.exit_code, facts


def test_doctor_probes_a_model_with_weights(treespec: Run, llama_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # It needs no twin. The first line also imports who else would keep the name for good.
    monkeypatch.setattr("hf_treespec.api.support.tiny_twin", None)
    monkeypatch.setattr("hf_treespec.twin.tiny_twin", None)
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
        "attention_takes_kernel": True,
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
    for other in ("training_args.bin", "optimizer.pt", "consolidated.00.pth"):
        (tmp_path / other).write_bytes(b"")
    code, facts = doctor(treespec, tmp_path)
    assert (code, facts["class"], facts["ok"], facts["weights"]) == (0, "GPT2LMHeadModel", True, "none")
    assert (facts["learned_positions"], facts["vocabulary"]) == (1024, 50257)
    assert facts["reason"] == "a probe tree equals its paths, in a tiny twin of this config"
    assert facts["attention_takes_kernel"] is True
    MistralConfig(num_hidden_layers=3, sliding_window=16).save_pretrained(tmp_path / "m")
    code, facts = doctor(treespec, tmp_path / "m" / "config.json")
    assert (code, facts["cache_layers"]) == (0, {"DynamicSlidingWindowLayer": 3})


def test_doctor_leaves_the_threads_of_torch_as_they_were(
    treespec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GPT2Config

    seen: list[int] = []
    answer = hf_treespec.is_supported

    def counting(model: Any) -> Any:
        seen.append(torch.get_num_threads())
        return answer(model)

    monkeypatch.setattr(hf_treespec, "is_supported", counting)
    GPT2Config().save_pretrained(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        doctor(treespec, tmp_path)
        assert (seen, torch.get_num_threads()) == ([1], 3)
    finally:
        torch.set_num_threads(before)


def test_doctor_says_why_nothing_could_be_run(treespec: Run, tmp_path: Path) -> None:
    from transformers import DeepseekV2Config

    # No number of experts that a token goes to.
    DeepseekV2Config().save_pretrained(tmp_path)
    code, facts = doctor(treespec, tmp_path)
    assert (code, facts["ok"], facts["route"], facts["attention_takes_kernel"]) == (0, True, "mask", None)
    assert "not probed" in facts["reason"] and "no tiny twin of this config can be built: TypeErr" in facts["reason"]


def test_doctor_refuses_a_config_by_its_twin(treespec: Run, tmp_path: Path) -> None:
    from transformers import OpenAIGPTConfig

    OpenAIGPTConfig().save_pretrained(tmp_path)
    code, facts = doctor(treespec, tmp_path)
    assert (code, facts["ok"], facts["route"]) == (1, False, "refuse")
    assert "reads the whole text at every step" in facts["reason"]
    assert facts["reason"].endswith(", in a tiny twin of this config")


def test_doctor_refuses_models_without_a_cache(treespec: Run, cacheless_folder: str) -> None:
    code, facts = doctor(treespec, cacheless_folder)
    assert (code, facts["ok"], facts["route"]) == (1, False, "refuse")
    assert "reads the whole text at every step" in facts["reason"]


def test_doctor_answers_for_an_encoder_decoder(treespec: Run, tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=37, d_model=16, d_kv=4, num_layers=1, d_ff=16, num_heads=2))
    model.config.save_pretrained(tmp_path / "config")
    code, facts = doctor(treespec, tmp_path / "config")
    assert (code, facts["class"], facts["route"]) == (0, "T5ForConditionalGeneration", "paths")
    assert facts["reason"] == "a probe tree equals its paths when each is a batch row, in a tiny twin of this config"
    assert facts["attention_takes_kernel"] is False and facts["weights"] == "none"
    model.save_pretrained(tmp_path / "model")
    code, facts = doctor(treespec, tmp_path / "model")
    assert (code, facts["ok"], facts["route"], facts["weights"]) == (0, True, "paths", "loaded")
    assert facts["reason"] == hf_treespec.is_supported(model).reason and facts["attention_takes_kernel"] is False


def test_doctor_answers_for_a_model_of_several_senses(treespec: Run, tmp_path: Path) -> None:
    from vision import build_reader

    model = build_reader("llava")
    model.save_pretrained(tmp_path)
    code, facts = doctor(treespec, tmp_path)
    support = hf_treespec.is_supported(model)
    assert (code, facts["class"], facts["ok"]) == (0, type(model).__name__, True)
    assert (facts["route"], facts["reason"]) == (support.route, support.reason)


def test_doctor_goes_by_the_class_that_the_config_names(treespec: Run, tmp_path: Path) -> None:
    from transformers import BartConfig

    sizes = {"vocab_size": 41, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    for named in ("BartForCausalLM", "BartForConditionalGeneration"):
        BartConfig(**sizes, architectures=[named]).save_pretrained(tmp_path / named)
        assert doctor(treespec, tmp_path / named)[1]["class"] == named


def test_doctor_refuses_what_is_no_language_model(treespec: Run, tmp_path: Path) -> None:
    from transformers import ViTConfig

    ViTConfig().save_pretrained(tmp_path)
    code, facts = doctor(treespec, tmp_path)
    assert (code, facts["ok"], facts["route"], facts["class"]) == (1, False, "refuse", None)
    assert facts["reason"] == "transformers has no language model for ViTConfig"


def test_doctor_table(treespec: Run, llama_folder: str, cacheless_folder: str) -> None:
    good, bad = treespec("doctor", llama_folder), treespec("doctor", cacheless_folder)
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


def test_doctor_names_the_base_of_an_adapter(
    treespec: Run, one_error: Check, llama_folder: str, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter_config.json"
    adapter.write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": llama_folder}))
    one_error(treespec("doctor", tmp_path), "MODEL_OR_CONFIG: ", f"pass that: {llama_folder}")
    adapter.write_text("[]")
    one_error(treespec("doctor", tmp_path), "MODEL_OR_CONFIG: ", "adapter_config.json cannot be read")


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
