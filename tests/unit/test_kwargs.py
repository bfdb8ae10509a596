"""What forwards pass on of a call's arguments, on every route."""

from __future__ import annotations

from typing import Any

from hf_treespec.engine.kwargs import passed_on

CALL: dict[str, Any] = {
    "cache": 1, "past_key_values": 2, "logits_to_keep": 3, "inputs_embeds": 4, "attention_mask": 5, "position_ids": 6,
    "decoder_attention_mask": 7, "decoder_position_ids": 8, "encoder_outputs": 9, "use_cache": True, "state": 10,
}  # fmt: skip


def test_what_is_made_anew_is_left_out() -> None:
    assert passed_on(CALL) == {name: CALL[name] for name in [*CALL][6:]}
    assert passed_on(CALL, made=["state"]) == {name: CALL[name] for name in [*CALL][6:-1]}


def test_plain_names_speak_of_an_encoder() -> None:
    kept = ["attention_mask", "position_ids", "encoder_outputs", "use_cache", "state"]
    assert passed_on(CALL, prefix="decoder_") == {name: CALL[name] for name in kept}
