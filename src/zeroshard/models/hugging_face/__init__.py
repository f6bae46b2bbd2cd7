"""Causal language models that Hugging Face's `transformers` builds, as models of ours: ``--model hf:FOLDER_OR_NAME``."""
