"""Tiny models with random weights of every model type of transformers that writes text, made from its default config.

    config = tiny_config("qwen2_5_vl")
    model = tiny_model("qwen2_5_vl")         # with its towers, in float32

Sizes are set by the names that configs have for them. What a type needs beside these is in OVERRIDES.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nVisionConfig
from transformers.models.timm_wrapper.configuration_timm_wrapper import TimmWrapperConfig
from transformers.models.timm_wrapper.modeling_timm_wrapper import TimmWrapperModel
from transformers.utils import is_timm_available

from fa_serve.hf.adapter.composites import auto_class

IMAGE_TEXT = tuple(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
CAUSAL = tuple(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB = 160
_TEXT: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 64),
    **dict.fromkeys(
        ("intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "ffn_dim", "d_ff"), 96
    ),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp", "dense_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "prefix_dense_intermediate_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "encoder_attention_heads", "decoder_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("ffn_hidden_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), 0),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), 2),
    "sliding_window": 9,
    "projection_dim": 64,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
_VISION: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "width", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "mlp_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers", "layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "heads", "encoder_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("out_hidden_size", "projection_dim", "vision_output_dim"), 64),
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
    "num_position_embeddings": 16,
}
_OTHER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_THREE_AXES = ("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_vl")
_HYBRID = {"num_hidden_layers": 4}
_INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["dense", "sparse"],
    "sliding_window_size": 9,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "d_rel": 4,
    "rel_extent": 6,
    "log_scaling_n_floor": 8,
    "logits_mup_width_multiplier": 1.0,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "aria": {"text_config": {"moe_num_shared_experts": 1}, "projector_patch_to_query_dict": {"4": 2}},
    "chameleon": {
        "vocabulary_map": {"<image>": 150},
    },
    "cosmos3_edge": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}}},
    "cohere_compass": {
        "text_config": {
            "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE | {"mrope_section": [2, 3, 3]})
        }
    },
    "emu3": {
        "text_config": {"bos_token_id": 1, "eos_token_id": 2},
        "vocabulary_map": {"<image>": 150},
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "codebook_size": 64},
    },
    **{name: {"bos_token_id": 1, "eos_token_id": 2} for name in ("cwm", "modernbert-decoder")},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE | {"mrope_section": [2, 3, 3]}}},
    **{name: {"eos_token_id": [2]} for name in ("glm", "glm4", "phi4_multimodal")},
    **{name: {"rotary_dim": 16} for name in ("codegen", "gptj")},
    "dots1": {"n_shared_experts": 1},
    "zaya": {"num_experts_per_tok": 1},
    "janus": {
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "projection_dim": 64, "image_token_embed_dim": 64}
    },
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [32, 16], "rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]}}
    },
    **{
        name: {
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "output_dim": 64,
            },
            "vision_start_token_id": 151,
            "vision_end_token_id": 152,
            "text_config": {"rope_parameters": _ROPE | rope, "sliding_window": None},
        }
        for name, rope in (
            ("qwen2_5_omni_thinker", {"mrope_section": [2, 3, 3]}),
            ("qwen3_omni_moe_thinker", {"mrope_section": [4, 2, 2], "mrope_interleaved": True}),
        )
    },
    **{name: {"mm_tokens_per_image": 4} for name in ("gemma3", "shieldgemma2")},
    "idefics2": {"perceiver_config": {"resampler_n_latents": 4, "resampler_n_heads": 2, "resampler_head_dim": 16}},
    **{
        name: {"text_config": {"layers": 2, "embed_dim": 64, "ffn_dim": 96, "attention_heads": 4}}
        for name in ("kosmos-2", "kosmos-2.5")
    },
    "fast_vlm": {"vision_config": {"model_type": "siglip_vision_model", **_VISION}},
    "perception_lm": {"vision_config": {"model_args": {"embed_dim": 32}}},
    "idefics": {"alpha_initializer": "ones"},
    "minimax_m3_vl": {
        "text_config": {
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 16,
            "rotary_dim": 16,
        },
    },
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 2},
        "vision_config": {
            "sam_config": {
                "hidden_size": 32,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 64,
                "window_size": 2,
                "global_attn_indexes": [1],
                "downsample_channels": [16, 32],
            },
            "encoder_config": {"vocab_size": 8, **_OTHER},
        },
    },
    **{
        name: {
            "vision_config": {"model_type": kind, **_VISION, "pooling_kernel_size": 3, "position_embedding_size": 64},
        }
        for name, kind in (("gemma4", "gemma4_vision"), ("gemma4_unified", "gemma4_unified_vision"))
    },
    "inkling_text": _INKLING,
    "inkling_mm_model": {"text_config": _INKLING, "vision_config": {"num_hidden_layers": 5, "patch_size": 40}},
    # the last two layers take the keys of those before them
    "gemma3n": {
        "text_config": {
            "num_hidden_layers": 4,
            "intermediate_size": [96] * 4,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
        },
        "audio_config": {"conf_num_hidden_layers": 1, "conf_num_attention_heads": 2, "sscp_conv_channel_size": [8, 4]},
    },
    **{name: {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}}} for name in _THREE_AXES},
    "glm4v_moe": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}},
    "glm5_next": {
        "text_config": {
            "num_key_value_heads": 4,
            "qk_rope_head_dim": 0,
            "layer_types": ["linear_attention", "deepseek_sparse_attention"],
            "indexer_types": ["full", "full"],
            "mlp_layer_types": ["dense", "sparse"],
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 192,
            "index_kpool": 4,
        }
    },
    "qwen2_vl": {
        "text_config": {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}},
        "vision_config": {"hidden_size": 64},
    },
    **{
        name: {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}
        for name in ("llava_next", "llava_next_video", "llava_onevision")
    },
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "llama4": {"vision_config": {"intermediate_size": 128, "projector_input_dim": 64, "projector_output_dim": 64}},
    "kimi_k25": {"text_config": {"qk_rope_head_dim": 16, "num_key_value_heads": 4}},
    "granite4_vision": {
        "text_config": {"model_type": "granite4_vision_text"},
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [0, 0, 1, 1],
    },
    "qwen3_vl": {
        "text_config": {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}},
        "vision_config": {"deepstack_visual_indexes": [0, 1]},
    },
    # its layers have no window, and the cache of transformers would have one
    "qwen3_vl_moe": {
        "text_config": {
            "rope_parameters": _ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
            "sliding_window": None,
        },
        "vision_config": {"deepstack_visual_indexes": [0, 1]},
    },
    **{
        name: {"text_config": _HYBRID}
        for name in ("qwen3_5", "qwen3_5_moe", "minicpmv4_6", "minicpmv4_7", "minicpm_ocr", "qwen4_exp")
    },
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"], "n_group": 2},
    "hy_v4_vl": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}}},
    **{name: {"vision_config": {"text_hidden_size": 64}} for name in ("inkling2", "inkling2_loop")},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "hunyuan_vl": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [2, 2, 2, 2]}}},
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention"]}},
    "mistral4": {"num_key_value_heads": 4, "head_dim": 32, "qk_head_dim": 32},
    "mllama": {"text_config": {"bos_token_id": 1, "eos_token_id": 2, "cross_attention_layers": [1], "num_hidden_layers": 3}},
}


def _sizes(config: PreTrainedConfig, table: dict[str, Any]) -> dict[str, Any]:
    """Those sizes of a table that a config has. A list keeps its length."""
    known = config.to_dict()
    given = {name: value for name, value in table.items() if name in known}
    if "kv_lora_rank" in known and "num_key_value_heads" in given:
        given["num_key_value_heads"] = given["num_attention_heads"]  # heads of latent keys
    return {n: [v] * len(known[n]) if isinstance(known[n], list | tuple) else v for n, v in given.items()}


def _table(part: str) -> dict[str, Any]:
    if "text" in part or part in ("decoder", "language_config"):
        return _TEXT
    return _VISION if "vision" in part or part == "encoder" else _OTHER


def tiny_config(model_type: str, changes: dict[str, Any] | None = None) -> PreTrainedConfig:
    """A config in tiny sizes, with some changes. Raises what the config's class raises if it has no sense in these."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    sizes = _sizes(default, _TEXT)
    for part in config_class.sub_configs:
        config = getattr(default, part, None)
        if isinstance(config, PreTrainedConfig):
            sizes.pop("sliding_window", None)
            sizes[part] = {"model_type": config.model_type, **_sizes(config, _table(part))}
    for given in (OVERRIDES.get(model_type, {}), changes or {}):
        for name, value in copy.deepcopy(given).items():
            sizes[name] = {**sizes.get(name, {}), **value} if isinstance(value, dict) else value
    return config_class(**sizes)


class StandInTower(TimmWrapperModel):
    """In the place of a tower of timm, where timm is not installed. It sees nothing: texts alone are tried with it."""

    __module__ = TimmWrapperModel.__module__  # whose source says how its attention is chosen

    def __init__(self, config: TimmWrapperConfig | Gemma3nVisionConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.timm_model = torch.nn.Identity()
        self.post_init()


class StandInTowerOfGemma3n(StandInTower):
    __module__ = TimmWrapperModel.__module__
    config_class = Gemma3nVisionConfig


if not is_timm_available():
    classes: dict[Any, Any] = {TimmWrapperConfig: StandInTower, Gemma3nVisionConfig: StandInTowerOfGemma3n}
    AutoModel._model_mapping._extra_content |= classes


def tiny_model(model_type: str, changes: dict[str, Any] | None = None) -> PreTrainedModel:
    """A float32 model with eager attention, whose logits are far enough apart for argmax to be stable."""
    config = tiny_config(model_type, changes)
    config._experts_implementation = "batched_mm"
    torch.manual_seed(0)
    model: PreTrainedModel = auto_class(config).from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.2 * parameter[0].numel() ** -0.5)
    return model.eval()
