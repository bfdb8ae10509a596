"""Tiny random models of every causal-LM model type of the installed transformers."""

from conformance.zoo.models import attentions, base_type, build, config, precision, types, unbuilt

__all__ = ["attentions", "base_type", "build", "config", "precision", "types", "unbuilt"]
