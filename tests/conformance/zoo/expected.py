"""What is expected of a model type: text and cache of plain decoding, but for these."""

from __future__ import annotations

# Model type: what stands in the way, beside what the library says when it refuses.
REFUSED: dict[str, str] = {
    "blt": "plain generate() fails as well: its config has no number of layers to make a cache for",
    "cpmant": "every step reads the whole text again and slices it by the length of the cache",
    "musicgen": "a token is several codebooks in rows of their own, shifted by a pattern of delays",
    "musicgen_melody": "a token is several codebooks in rows of their own, shifted by a pattern of delays",
    "openai-gpt": "it has no cache",
    "prophetnet": "plain generate() fails as well: with a cache it reads one token per call",
    "xlm": "plain generate() gives no text: its logits behind a cache are not numbers",
    "xlnet": "it predicts at a placeholder behind the text and reads what it predicted again",
}

# The same for single releases.
REFUSED_IN: dict[str, dict[str, str]] = {
    "5.17": {"git": "there a decoding step adds the length of the cache to positions that hold it already"},
}
