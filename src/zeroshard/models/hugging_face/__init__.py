"""Causal language models of `transformers` as `LanguageModel`s: ``--model hf:FOLDER_OR_NAME``."""
