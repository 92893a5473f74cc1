"""The architectures of mlx-lm and what sets their small models apart.

Left out are bitnet and muse_spark (Metal only), olmo (needs a package), phi3small (its vocabulary
is large by construction), prism_hadamard_qwen35 (one checkpoint's own format).
"""

from architectures import Architecture

_SLIDING = ["sliding_attention", "full_attention"]
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_SCALED = {**_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8}
_MROPE = {
    "rope_theta": 10000.0,
    "type": "default",
    "partial_rotary_factor": 0.5,
    "mrope_section": [4, 2, 2],
}
_KDA = {
    "kda_layers": [1],
    "full_attn_layers": [2],
    "num_heads": 4,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
}
# Without quantized caches: sinks, shared keys, or products with the keys of the module's own.
_QUANTIZED = ("quantized",)
_NO_KV = ("rotating", "quantized")
_PADDED = ("padded left", "padded right")
# The embedding of the other modes gives bfloat16, which these models keep.
_AFFINE = (64, 4, "affine")

# fmt: off
_LFM2 = Architecture(
    1, {"conv_bias": True, "conv_L_cache": 3, "block_dim": 128, "block_multiple_of": 64,
    "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True, "block_ff_dim": 192,
    "full_attn_idxs": [1]}
)
_GEMMA4 = Architecture(
    4, {"num_hidden_layers": 4, "sliding_window_pattern": 2,
    "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 32,
    "global_head_dim": 64, "num_kv_shared_layers": 2, "rope_parameters": None,
    "tie_word_embeddings": True}, without=_QUANTIZED
)
_OTHERS: dict[str, Architecture] = {
    "afm7": Architecture(
        2, {"hidden_dim": 128, "num_layers": 2, "num_kv_reuse_layers": 1, "num_heads": 4,
        "num_kv_heads": 2}, without=_QUANTIZED
    ),
    "afmoe": Architecture(2, {"layer_types": _SLIDING, "num_dense_layers": 1}),
    "apertus": Architecture(2, {"post_norm": False, "qk_norm": True}),
    "baichuan_m1": Architecture(2, {"sliding_window_layers": [1], "conv_window": 2}),
    "bailing_hybrid": Architecture(
        2, {"num_hidden_layers": 4, "layer_group_size": 2, "group_norm_size": 2,
        "partial_rotary_factor": 0.5}, left=2, without=_QUANTIZED
    ),
    "bailing_moe_linear": Architecture(
        2, {"num_hidden_layers": 4, "layer_group_size": 2, "group_norm_size": 2}, left=2
    ),
    "bailing_moe_v3": Architecture(
        4, {"num_hidden_layers": 4, "layer_group_size": 2}, without=_QUANTIZED
    ),
    "cohere2": Architecture(4, {"num_hidden_layers": 4, "sliding_window_pattern": 2}),
    "dbrx": Architecture(
        2, {"d_model": 128, "n_layers": 2, "n_heads": 4, "ffn_config": {"ffn_hidden_size": 64,
        "moe_num_experts": 4, "moe_top_k": 2}, "attn_config": {"kv_n_heads": 2, "clip_qkv": 8,
        "rope_theta": 10000.0}}
    ),
    "deepseek_v2": Architecture(
        2, {"topk_method": "greedy", "rope_scaling": {"type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.7,
        "beta_fast": 32, "beta_slow": 1}}
    ),
    "deepseek_v3": Architecture(2, {}, without=_QUANTIZED),
    "deepseek_v32": Architecture(
        2, {"index_head_dim": 64, "index_n_heads": 2, "index_topk": 8}, without=_QUANTIZED
    ),
    "deepseek_v41": Architecture(0, {}, left=2, without=(*_NO_KV, *_PADDED)),
    "ernie4_5_moe": Architecture(
        2, {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1}
    ),
    "exaone": Architecture(2, {"num_layers": 2}),
    "exaone4": Architecture(2, {"rope_scaling": None, "sliding_window_pattern": "LG"}),
    "exaone_moe": Architecture(2, {"layer_types": _SLIDING, "is_moe_layer": [False, True]}),
    "gear": Architecture(
        2, {"layer_types": ["conv_mixer", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3}
    ),
    "gemma2": Architecture(0, {}, left=2, without=("quantized", *_PADDED)),
    "gemma3": Architecture(
        4, {"text_config": {"num_hidden_layers": 4, "sliding_window_pattern": 2}}
    ),
    "gemma3_text": Architecture(4, {"num_hidden_layers": 4, "sliding_window_pattern": 2}),
    "gemma3n": Architecture(
        4, {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 128,
        "rope_local_base_freq": 10000.0, "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention",
        "full_attention"], "activation_sparsity_pattern": [0.95, 0, 0, 0],
        "hidden_size_per_layer_input": 32, "altup_num_inputs": 2, "altup_coef_clip": 120.0,
        "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 32}
    ),
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "glm4_moe": Architecture(2, {"rope_scaling": None}),
    "glm4_moe_lite": Architecture(2, {}, without=_QUANTIZED),
    "glm_moe_dsa": Architecture(
        2, {"index_head_dim": 64, "index_n_heads": 2, "index_topk": 8}, without=_QUANTIZED
    ),
    "gpt2": Architecture(
        2, {"n_ctx": 64, "n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 64}
    ),
    "gpt_bigcode": Architecture(
        2, {"n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 64, "n_inner": 192},
        without=_PADDED
    ),
    "gpt_neox": Architecture(2, {"rotary_emb_base": 10000, "rotary_pct": 0.5}),
    "gpt_oss": Architecture(2, {}, without=_QUANTIZED),
    "gptj": Architecture(
        2, {"n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 64, "rotary_dim": 16}
    ),
    "granitemoehybrid": Architecture(
        1, {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 64,
        "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_proj_bias": False, "mamba_d_state": 16,
        "mamba_d_conv": 4, "mamba_n_groups": 1, "mamba_conv_bias": True}
    ),
    "hunyuan": Architecture(
        4, {"moe_topk": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_cla": True,
        "cla_share_factor": 2, "num_hidden_layers": 4, "rope_scaling": {"type": "dynamic",
        "factor": 1.0, "alpha": 1000.0}}
    ),
    "iquestloopcoder": Architecture(2, {}, without=_QUANTIZED),
    "jamba": Architecture(
        2, {"num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 2,
        "expert_layer_offset": 1, "expert_layer_period": 2, "mamba_d_conv": 4,
        "mamba_d_state": 16, "mamba_expand": 2}
    ),
    "kimi_k25": Architecture(2, {}, without=_QUANTIZED),
    "kimi_k3": Architecture(
        2, {"hidden_act": "situ", "activation_situ_beta": 1.0, "activation_situ_linear_beta": 1.0,
        "linear_attn_config": _KDA, "num_experts_per_token": 2, "attn_res_block_size": 2},
        without=_QUANTIZED
    ),
    "kimi_linear": Architecture(
        2, {"linear_attn_config": _KDA, "model_max_length": 512, "num_experts_per_token": 2},
        without=_QUANTIZED
    ),
    "kimi_vl": Architecture(2, {}, without=_QUANTIZED),
    "lfm2": _LFM2,
    "lfm2-vl": _LFM2,
    "lfm2_moe": Architecture(
        1, {"use_expert_bias": True, "num_dense_layers": 1, "conv_bias": True, "conv_L_cache": 3,
        "full_attn_idxs": [1]}
    ),
    "lille-130m": Architecture(
        2, {"block_size": 512, "n_embd": 128, "n_head": 4, "n_kv_heads": 2, "n_layer": 2}
    ),
    "llama": Architecture(2, {"layer_types": _SLIDING}),
    "llama4": Architecture(
        4, {"attention_chunk_size": 8, "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 192, "rope_scaling": None, "num_hidden_layers": 4,
        "num_experts_per_tok": 1}, without=_PADDED
    ),
    "llama4_text": Architecture(2, {"intermediate_size_mlp": 192, "no_rope_layers": [1, 0]}),
    "longcat_flash": Architecture(
        4, {"attention_method": "MLA", "zero_expert_type": "identity", "ffn_hidden_size": 192,
        "moe_topk": 2, "expert_ffn_hidden_size": 64, "zero_expert_num": 1, "num_layers": 2,
        "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_bias": False},
        without=_QUANTIZED
    ),
    "longcat_flash_ngram": Architecture(
        4, {"ffn_hidden_size": 192, "moe_topk": 2, "expert_ffn_hidden_size": 64,
        "zero_expert_num": 1, "num_layers": 2, "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True, "attention_bias": False, "ngram_vocab_size_ratio": 2,
        "emb_neighbor_num": 3, "emb_split_num": 2}, without=_QUANTIZED
    ),
    "mamba": Architecture(0, {"time_step_rank": 8, "intermediate_size": 256}, without=_NO_KV),
    "mamba2": Architecture(
        0, {"num_heads": 4, "head_dim": 64, "time_step_limit": (0.0, 1000000000.0),
        "time_step_rank": 8}, without=_NO_KV
    ),
    "mellum": Architecture(
        2, {"layer_types": _SLIDING, "rope_parameters": dict.fromkeys(_SLIDING, _ROPE)}
    ),
    "mimo_v2_flash": Architecture(
        2, {"hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
        "sliding_window_size": 8, "layernorm_epsilon": 1e-05, "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 32,
        "swa_v_head_dim": 32}
    ),
    "minicpm": Architecture(2, {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 2.0}),
    "minicpm3": Architecture(
        2, {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 2.0,
        "rope_scaling": {"short_factor": [1.0] * 16, "long_factor": [1.0] * 16,
        "original_max_position_embeddings": 512}}
    ),
    "minimax": Architecture(2, {"shared_intermediate_size": 64, "rotary_dim": 16}),
    "minimax_m3_vl": Architecture(
        2, {"moe_layer_freq": [0, 1], "dense_intermediate_size": 192,
        "shared_intermediate_size": 64, "intermediate_size": 64, "partial_rotary_factor": 0.5,
        "rope_parameters": None, "index_n_heads": 2, "index_head_dim": 32, "index_block_size": 4,
        "index_topk_blocks": 2, "sparse_attention_freq": [0, 1]}, without=_QUANTIZED
    ),
    "ministral3": Architecture(2, {"layer_types": _SLIDING, "rope_parameters": _SCALED}),
    "mistral3": Architecture(
        2, {"text_config": {"model_type": "ministral3", "layer_types": _SLIDING,
        "rope_parameters": _SCALED}}
    ),
    "mistral4": Architecture(2, {"rope_parameters": _SCALED}, without=_QUANTIZED),
    "muse_glimmer": Architecture(2, {"layer_types": _SLIDING}),
    "nanbeige": Architecture(2, {"num_loops": 2}),
    "nemotron": Architecture(2, {"hidden_act": "relu2"}),
    "nemotron-nas": Architecture(
        1, {"num_hidden_layers": 3, "block_configs": [{"attention": {"n_heads_in_group": 2},
        "ffn": {"ffn_mult": 1.0}}, {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}}]},
        without=("padded right",)
    ),
    "nemotron_h": Architecture(
        1, {"hybrid_override_pattern": ["M", "*", "-", "E"], "mamba_num_heads": 4,
        "mamba_head_dim": 64, "mamba_proj_bias": False, "ssm_state_size": 16,
        "moe_shared_expert_intermediate_size": 64}
    ),
    "olmo3": Architecture(2, {"layer_types": _SLIDING}),
    "olmo_hybrid": Architecture(
        2, {"linear_allow_neg_eigval": True, "layer_types": ["linear_attention",
        "full_attention"]}
    ),
    "openelm": Architecture(
        2, {"num_transformer_layers": 2, "model_dim": 128, "ffn_dim_divisor": 32,
        "num_query_heads": [4, 4], "num_kv_heads": [2, 2], "ffn_multipliers": [1.0, 1.5]}
    ),
    "phi": Architecture(2, {}, without=_QUANTIZED),
    "phixtral": Architecture(
        2, {"num_vocab": 128, "model_dim": 128, "num_heads": 4, "num_layers": 2,
        "rotary_dim": 16}, without=_QUANTIZED
    ),
    "plamo": Architecture(2, {"n_shared_head": 2}, without=_QUANTIZED),
    "plamo2": Architecture(
        0, {"num_hidden_layers": 4, "hidden_size_per_head": 32, "attention_window_size": 8,
        "mamba_d_state": 16, "mamba_num_heads": 4}, left=2, without=_QUANTIZED
    ),
    "plamo3": Architecture(2, {"window_size": 8, "sliding_window_pattern": 2}),
    "qwen": Architecture(2, {"kv_channels": 32}),
    "qwen3_5": Architecture(2, {"full_attention_interval": 2, "rope_parameters": _MROPE}),
    "qwen3_5_moe": Architecture(2, {"full_attention_interval": 2, "rope_parameters": _MROPE}),
    "qwen3_next": Architecture(2, {"full_attention_interval": 2, "partial_rotary_factor": 0.5}),
    "recurrent_gemma": Architecture(
        1, {"conv1d_width": 4, "logits_soft_cap": 30.0, "attention_window_size": 8,
        "block_types": ["recurrent", "attention"]}, without=_NO_KV
    ),
    "rwkv7": Architecture(
        0, {"a_low_rank_dim": 64, "v_low_rank_dim": 64, "gate_low_rank_dim": 64,
        "decay_low_rank_dim": 64}, without=_NO_KV
    ),
    "spark2_5": Architecture(
        2, {"layer_types": _SLIDING, "rope_parameters": dict.fromkeys(_SLIDING, _ROPE)}
    ),
    "stablelm": Architecture(
        2, {"use_qkv_bias": True, "partial_rotary_factor": 0.5}, without=_QUANTIZED
    ),
    "step3p5": Architecture(
        2, {"num_attention_groups": 2, "layer_types": _SLIDING, "moe_num_experts": 4,
        "moe_top_k": 2, "share_expert_dim": 64, "moe_layers_enum": "1"}
    ),
    "talkie": Architecture(2, {}, format=_AFFINE),
}
# fmt: on
_PLAIN = """
bailing_moe cohere deepseek dots1 ernie4_5 falcon_h1 gemma glm glm4 granite granitemoe helium
hunyuan_v1_dense internlm2 internlm3 Klear laguna mimo mixtral nanochat olmo2 olmoe phi3
phimoe pixtral qwen2 qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_vl qwen3_vl_moe seed_oss smollm3
solar_open starcoder2 telechat3 youtu_llm
"""
ARCHITECTURES = dict(
    sorted({**dict.fromkeys(_PLAIN.split(), Architecture(2, {})), **_OTHERS}.items())
)
