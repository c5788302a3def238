"""Fields of config.json of published models, and parameter counts of these models without poolers and output layers."""

_ENCODER = {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_BASE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
_ROBERTA = _ENCODER | {"max_position_embeddings": 514, "pad_token_id": 1, "layer_norm_eps": 1e-5}
_DEBERTA = _ENCODER | {
    "model_type": "deberta-v2",
    "max_position_embeddings": 512,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "layer_norm_eps": 1e-7,
    "max_relative_positions": -1,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "vocab_size": 128_100,
}
_MODERNBERT = {
    "model_type": "modernbert",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160_000.0,
    "hidden_activation": "gelu",
    "local_attention": 128,
    "local_rope_theta": 10_000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "norm_bias": False,
    "norm_eps": 1e-5,
    "position_embedding_type": "absolute",
    "vocab_size": 50_368,
}
_LLAMA = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "pretraining_tp": 1}

PUBLISHED = {
    "roberta-base": (
        {"model_type": "roberta", "type_vocab_size": 1, "vocab_size": 50_265, **_ROBERTA, **_BASE},
        124_055_040,
    ),
    "xlm-roberta-large": (
        {
            "model_type": "xlm-roberta",
            "type_vocab_size": 1,
            "vocab_size": 250_002,
            **_ROBERTA,
            **_LARGE,
        },
        558_840_832,
    ),
    "distilbert-base-uncased": (
        {
            "model_type": "distilbert",
            "activation": "gelu",
            "attention_dropout": 0.1,
            "dim": 768,
            "dropout": 0.1,
            "hidden_dim": 3072,
            "max_position_embeddings": 512,
            "n_heads": 12,
            "n_layers": 6,
            "sinusoidal_pos_embds": False,
            "tie_weights_": True,
            "vocab_size": 30_522,
        },
        66_362_880,
    ),
    "all-mpnet-base-v2": (
        {
            "model_type": "mpnet",
            "relative_attention_num_buckets": 32,
            "vocab_size": 30_527,
            **_ROBERTA,
            **_BASE,
        },
        108_895_872,
    ),
    "deberta-v3-base": (_DEBERTA | _BASE, 183_831_552),
    "deberta-v3-small": (_DEBERTA | _BASE | {"num_hidden_layers": 6}, 141_304_320),
    "ModernBERT-base": (
        _MODERNBERT | _BASE | {"num_hidden_layers": 22, "intermediate_size": 1152},
        149_014_272,
    ),
    "ModernBERT-large": (
        _MODERNBERT | _LARGE | {"num_hidden_layers": 28, "intermediate_size": 2624},
        394_781_696,
    ),
    "Llama-2-7b": (
        {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "intermediate_size": 11_008,
            "max_position_embeddings": 4096,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "vocab_size": 32_000,
            **_LLAMA,
        },
        6_607_343_616,
    ),
    "Llama-3.2-1B": (
        {
            "attention_bias": False,
            "head_dim": 64,
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "max_position_embeddings": 131_072,
            "mlp_bias": False,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128_256,
            **_LLAMA,
        },
        1_235_814_400,
    ),
    "gemma-2b": (
        {
            "model_type": "gemma",
            "attention_bias": False,
            "head_dim": 256,
            "hidden_act": "gelu",
            "hidden_activation": None,
            "hidden_size": 2048,
            "intermediate_size": 16_384,
            "max_position_embeddings": 8192,
            "num_attention_heads": 8,
            "num_hidden_layers": 18,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 10_000.0,
            "vocab_size": 256_000,
        },
        2_506_172_416,
    ),
}
