"""Published configurations of Qwen2.5 and Qwen3, and a toy whose vocabulary is that of `rows.VOCAB` in a rehearsal."""

QWEN = {  # published configurations of Qwen2.5
    "qwen2.5-0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "qwen2.5-1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
                     "intermediate_size": 8960},
}  # fmt: skip
QWEN_ALIKE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
QWEN_TOY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
            "vocab_size": 97}  # fmt: skip
QWEN3 = {  # published configurations of Qwen3
    "qwen3-0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                   "head_dim": 128, "intermediate_size": 3072},
    "qwen3-8b": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "head_dim": 128, "intermediate_size": 12288, "tie_word_embeddings": False},
}  # fmt: skip
QWEN3_ALIKE = QWEN_ALIKE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
                            "max_position_embeddings": 40960}  # fmt: skip
QWEN3_TOY = QWEN_TOY | {"num_key_value_heads": 2, "head_dim": 8}
