"""Causal language models that `transformers` builds, as models of ours: ``--model hf:FOLDER_OR_NAME``."""
