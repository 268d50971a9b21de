"""Tiny models of many families with random weights, for the tests of the transformers adapter on the CPU and on the GPU.

Weights are drawn wide enough that attention is far from uniform. A lost window, sink or padded key then moves the logits by far
more than rounding does. Windows and chunks are shorter than the sequences.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from sampled_cases import ALL
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

import fa_serve
from fa_serve import hf
from fa_serve.hf.adapter.releases import cache_argument

ENCODERS_READ_POSITIONS = "position_ids" in inspect.signature(create_bidirectional_mask).parameters
"""Whether positions that restart make packed sequences for encoders that pass them to their masks, as in 5.25 and later."""
ROUNDING = 4e-6  # allowed error relative to the largest value, in float32
VOCAB = 96
WINDOW = 5
LENGTH = 24


@dataclass(frozen=True, eq=False)
class Family:
    """A model class of transformers and what its config needs beyond the common small sizes.

    kind:  "decoder" (input_ids -> logits, has a KV cache), "encoder", "seq2seq" or "vision" (pixel_values)
    paged: True if it runs on the engine's paged cache, else a part of the error that says why not
    packs: whether restarting position_ids alone, without a cache, make sequences packed; else they are refused
    tells_packs: whether cu_seq_lens may tell where packed sequences begin; else they are refused
    gain:  standard deviation of the weights, relative to 1 / sqrt(fan_in)
    """

    name: str
    model: str
    kind: str = "decoder"
    config: dict[str, Any] = field(default_factory=dict)
    paged: bool | str = True
    packs: bool = True
    tells_packs: bool = True
    gain: float = 1.5

    @property
    def model_class(self) -> type[PreTrainedModel]:
        found: type[PreTrainedModel] = getattr(importlib.import_module("transformers"), self.model)
        return found

    def make_config(self, **changes: Any) -> PreTrainedConfig:
        config = self.model_class.config_class(**{**_COMMON[self.kind], **self.config, **changes})
        config._experts_implementation = "eager"
        return config

    def build(self, seed: int = 0, **changes: Any) -> PreTrainedModel:
        config = self.make_config(**changes)
        config._attn_implementation = "eager"
        torch.manual_seed(seed)
        model = self.model_class(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(std=self.gain * parameter.shape[-1] ** -0.5)
                elif name.endswith(("sinks", "bias")):
                    parameter.normal_(std=0.5)
        return model


def in_this_release(*families: Family) -> list[Family]:
    """Those of families that the oldest supported release of transformers lacks which the installed one has."""
    names = set(dir(transformers))
    return [family for family in families if family.model in names]


_CHOOSING = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 8,
}
"""Token-sparse attention: each query chooses 6 keys by the scores of 8 heads, of which hardly two are equal."""

_TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_ENCODER = {
    **_TOKENS,
    **_SIZES,
    "max_position_embeddings": 128,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_SEQ2SEQ = {
    **_TOKENS,
    "d_model": 64,
    "max_position_embeddings": 128,
    "decoder_start_token_id": 1,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "dropout": 0.0,
    **{
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 96), ("layerdrop", 0.0))
    },
}
_T5 = {
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "dropout_rate": 0.0,
}
_COMMON: dict[str, dict[str, Any]] = {
    "decoder": {**_TOKENS, **_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 128},
    "encoder": _ENCODER,
    "seq2seq": _SEQ2SEQ,
    "vision": {**_SIZES, "image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
_QWEN_MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA4 = {
    **_ALTERNATING,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 0,
}
FAMILIES = [
    Family("llama", "LlamaForCausalLM"),
    Family("qwen2", "Qwen2ForCausalLM"),
    Family("qwen2-window", "Qwen2ForCausalLM", config={"use_sliding_window": True, **_ALTERNATING}),
    Family("qwen3", "Qwen3ForCausalLM", config={"head_dim": 32}),
    Family("qwen3-moe", "Qwen3MoeForCausalLM", config=_QWEN_MOE),
    Family(
        "qwen2-moe-window",
        "Qwen2MoeForCausalLM",
        config={
            **_QWEN_MOE,
            "shared_expert_intermediate_size": 32,
            "use_sliding_window": True,
            **_ALTERNATING,
        },
    ),
    Family("mixtral", "MixtralForCausalLM", config=_MOE),
    Family("mistral", "MistralForCausalLM", config={"sliding_window": WINDOW}),
    Family("phi3", "Phi3ForCausalLM", config={"sliding_window": WINDOW}),
    Family("phimoe", "PhimoeForCausalLM", config={**_MOE, "sliding_window": WINDOW}),
    Family("granite", "GraniteForCausalLM", config={"attention_multiplier": 0.3, "logits_scaling": 2.0}),
    Family("olmo2", "Olmo2ForCausalLM"),
    Family("olmo3", "Olmo3ForCausalLM", config=_ALTERNATING),
    Family("smollm3", "SmolLM3ForCausalLM", config={"no_rope_layers": [1, 0]}),
    Family("starcoder2", "Starcoder2ForCausalLM", config={"sliding_window": WINDOW}),
    Family("cohere2", "Cohere2ForCausalLM", config={**_ALTERNATING, "logit_scale": 1.0}),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        config={**_ALTERNATING, "head_dim": 32, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    ),
    Family("gemma3", "Gemma3ForCausalLM", config={**_ALTERNATING, "head_dim": 32, "query_pre_attn_scalar": 8}),
    Family("gemma4", "Gemma4ForCausalLM", config=_GEMMA4),
    Family(
        "gemma4-shared-cache",
        "Gemma4ForCausalLM",
        config={
            **_GEMMA4,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    Family("gpt-oss", "GptOssForCausalLM", config={**_MOE, **_ALTERNATING, "head_dim": 32}, packs=False),
    Family(
        "deepseek-v3",
        "DeepseekV3ForCausalLM",
        config={
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    *[
        Family(name, model, config={**_CHOOSING, **config})
        for name, model, config in (
            ("deepseek-v3.2", "DeepseekV32ForCausalLM", {"n_group": 2}),
            ("glm-moe-dsa", "GlmMoeDsaForCausalLM", {"n_group": 1, "indexer_types": ["full", "shared", "full"]}),
            ("a.x-k2", "AXK2ForCausalLM", {"n_group": 2, "gated_norm_rank": 8}),
            ("hy-v4", "HYV4ForCausalLM", {"index_n_heads": 16}),
        )
    ],
    *in_this_release(
        Family(
            "dots3-note",
            "Dots3NoteForCausalLM",
            config={
                **_CHOOSING,
                "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
                "n_group": 2,
                "head_dim": 24,
                "sliding_window": WINDOW,
                "shared_experts_intermediate_size": 32,
                "swa_num_attention_heads": 2,
                "swa_num_key_value_heads": 2,
                "swa_q_lora_rank": 16,
                "swa_kv_lora_rank": 32,
                "swa_head_dim": 32,
                "swa_qk_nope_head_dim": 24,
                "swa_v_head_dim": 16,
            },
            gain=1.2,
        ),
    ),
    Family(
        "llama4",
        "Llama4ForCausalLM",
        config={
            "head_dim": 16,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 7,
            "intermediate_size_mlp": 96,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "floor_scale": 4,
            "attn_scale": 0.5,
        },
        packs=False,
        tells_packs=False,
    ),
    Family("gpt2", "GPT2LMHeadModel", config={"n_inner": 96}),
    Family("opt", "OPTForCausalLM", config={"ffn_dim": 96, "word_embed_proj_dim": 64}, packs=False),
    Family("gpt-neox", "GPTNeoXForCausalLM"),
    Family("bert", "BertForMaskedLM", "encoder", packs=ENCODERS_READ_POSITIONS),
    Family("roberta", "RobertaForMaskedLM", "encoder", {"type_vocab_size": 1}, packs=ENCODERS_READ_POSITIONS),
    Family(
        "modernbert",
        "ModernBertForMaskedLM",
        "encoder",
        {
            "local_attention": 2 * WINDOW,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        packs=False,
    ),
    Family("bart", "BartForConditionalGeneration", "seq2seq"),
    Family("m2m100", "M2M100ForConditionalGeneration", "seq2seq"),
    Family("t5", "T5ForConditionalGeneration", "seq2seq", _T5, gain=0.7),
    Family("mt5", "MT5ForConditionalGeneration", "seq2seq", {**_T5, "feed_forward_proj": "gated-gelu"}, gain=0.7),
    Family("vit", "ViTForImageClassification", "vision"),
    Family("siglip", "SiglipVisionModel", "vision"),
    Family("clip", "CLIPVisionModel", "vision"),
]
_LIKE = {
    "qwen2": "llama",
    "qwen3": "llama",
    "qwen3-moe": "llama",
    "mixtral": "llama",
    "olmo2": "llama",
    "gpt-neox": "llama",
    "phi3": "mistral",
    "phimoe": "mistral",
    "starcoder2": "mistral",
    "olmo3": "qwen2-window",
    "cohere2": "qwen2-window",
    "a.x-k2": "deepseek-v3.2",
    "hy-v4": "deepseek-v3.2",
    "m2m100": "bart",
    "mt5": "t5",
}
"""Families that ask of attention, masks and caches what another family asks. What they compute beside it differs."""


def distinct(families: list[Family]) -> list[Family]:
    """Without the families that are like another one, which have fewer tests; all of them under FA_SERVE_CASES=all."""
    return families if ALL else [family for family in families if family.name not in _LIKE]


STABLELM = Family("stablelm", "StableLmForCausalLM")
"""Its layers hand no words to their attention. It is no family of the pages of models, which have its type."""
BY_NAME = {family.name: family for family in (*FAMILIES, STABLELM)}


def here() -> torch.device:
    """The device on which tensors are made; the GPU suite changes it."""
    return torch.get_default_device()


@functools.lru_cache(maxsize=64)  # tests come function by function, and each function takes all families
def _pair(family: Family, device: torch.device) -> tuple[PreTrainedModel, PreTrainedModel]:
    eager = family.build().to(device)
    return eager, fa_serve.patch(copy.deepcopy(eager))


def pair(family: Family) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Two models with the same weights, which tests must not change: one with eager attention, one with fa_serve."""
    return _pair(family, here())


def cached(model: PreTrainedModel, cache: object) -> dict[str, Any]:
    """The argument of a forward that is its cache, whose name depends on the release of transformers."""
    return {cache_argument(type(model).forward): cache}


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(here())


def padding_mask(kind: str, length: int = LENGTH) -> Tensor:
    """(3, length) int64: rows with different amounts of padding, the last with none."""
    mask = torch.ones(3, length, dtype=torch.int64)
    if kind == "left":
        mask[0, :9] = 0
        mask[1, :1] = 0
    elif kind == "right":
        mask[0, -9:] = 0
        mask[1, -1:] = 0
    elif kind == "hole":
        mask[0, 4:9] = 0
        mask[1, 0:2] = 0
        mask[1, 11:20] = 0
    return mask


def positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def assert_same(actual: Tensor, expected: Tensor, valid: Tensor | None = None) -> None:
    """Compare float32 results: rounding moves them by a few 1e-7 of the largest value, a fault of an adapter by percents."""
    if valid is not None:
        actual = actual[valid.bool()]
        expected = expected[valid.bool()]
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    error = (actual - expected).abs().max().item()
    allowed = ROUNDING * expected.abs().max().item()
    assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


class Pages:
    """Sequences in a paged cache that grow by any number of tokens in each step, as in the engine. Unwritten slots are NaN."""

    def __init__(self, model: PreTrainedModel, count: int, page_size: int = 4) -> None:
        self.model = model
        self.page_size = page_size
        self.used = [0] * count
        pages = -(-LENGTH // page_size)
        order = torch.randperm(count * pages, generator=torch.Generator().manual_seed(0), device="cpu").to(here())
        self.table = order.view(count, pages).to(torch.int32)
        hf.patch_indexers(model)
        layers = hf.model_layers(model)
        self.caches = {
            i: (torch.full((*shape, s.head_dim), float("nan")), torch.full((*shape, s.head_dim_v), float("nan")))
            for i, s in (layers.attention | layers.indexers).items()
            for shape in [(count * pages, page_size, s.num_kv_heads)]
        }

    def step(self, new: list[Tensor]) -> Tensor:
        """The new tokens of each sequence -> their logits, (total, vocab), packed."""
        at = [torch.arange(n, n + len(ids)) for n, ids in zip(self.used, new, strict=True)]
        slots = [self.table[b, p // self.page_size].long() * self.page_size + p % self.page_size for b, p in enumerate(at)]
        self.used = [n + len(ids) for n, ids in zip(self.used, new, strict=True)]
        lengths = [len(ids) for ids in new]
        batch = hf.PagedBatch(
            kv_caches=self.caches,
            slot_mapping=torch.cat(slots),
            block_table=self.table,
            seqused_k=torch.tensor(self.used, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            max_seqlen_q=max(lengths),
            max_seqlen_k=max(self.used),
        )
        rows = torch.arange(sum(lengths)).flip(0)
        return hf.paged_forward(self.model, torch.cat(new), torch.cat(at), batch, rows).flip(0)


def check_pages(ours: PreTrainedModel, eager: PreTrainedModel) -> None:
    """Prompts, chunks of prompts and single tokens in one batch give the logits of whole sequences."""
    ids = tokens(3, LENGTH)
    expected = eager(input_ids=ids).logits
    pages = Pages(ours, 3)
    done = [0, 0, 0]
    for lengths in ([12, 3, 1], [1, 7, 1], [1, 1, 9], [5, 4, 1], [1, 1, 1]):
        spans = [slice(n, n + more) for n, more in zip(done, lengths, strict=True)]
        actual = pages.step([ids[b, span] for b, span in enumerate(spans)])
        assert_same(actual, torch.cat([expected[b, span] for b, span in enumerate(spans)]))
        done = [span.stop for span in spans]


FUSED = (
    "llama",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "qwen3-moe",
    "mixtral",
    "mistral",
    "phi3",
    "granite",
    "olmo2",
    "olmo3",
    "smollm3",
    "gemma2",
    "gemma3",
    "deepseek-v3",
    "gpt-oss",
)
"""Families whose decoder layers are fused (docs/models.md)."""


def family(name: str) -> Family:
    return next(f for f in FAMILIES if f.name == name)
