"""What is expected of hf_treespec row by row: as plain decoding, but for these."""

from __future__ import annotations

# Rows that stay refused although plain decoding serves them, and why.
OUT_OF_SCOPE: dict[str, str] = {
    "num_beams=3": "beams keep several sequences a row",
    "num_beams=3, do_sample=True": "beams keep several sequences a row",
    "cache_implementation='paged'": "continuous batching has a loop of its own",
    "custom_generate=callable": "the callable is the decoding loop",
    "a class with a decoding loop of its own": "the tree would bypass that loop",
    "TreeConfig(on_stateful_processor='error')": "as asked",
    "prompt_lookup_num_tokens beside it": "one speculation at a time",
    "use_mtp beside it": "one speculation at a time",
    "assistant_ensemble_weight, which changes the law": "lossy by design",
    "an encoder-decoder as assistant (T5)": "a draft must take a tree mask",
    "use_cache=False": "a tree needs the cache",
    "cache_implementation='static', sliding windows": "a static window overwrites what a rejected node needs",
}

# Items of the contract that need what this machine lacks, or that have no observable of their own.
NOT_RUN: dict[str, str] = {
    "FlashAttention and flex attention": "need a CUDA device; a tree is refused or switched by TreeConfig(attention=)",
    "inputs, target and draft on different devices": "need a second device",
    "offloaded caches": "need an accelerator; a tree is refused, since layers move during the forward",
    "MPS DeferredStopCheck": "needs an MPS device",
    "ZeRO-3 and FSDP": "need several processes",
    "compilation of static caches": "automatic on CUDA only",
}
