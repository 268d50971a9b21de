"""What the engine does beyond serving a type's text: fused layers, division between two ranks, quantised weights, adapters.

    rows(["llama", "bamba"])        # {"llama": {"fused": "yes", "parallel": "yes", "quantised": "yes", "lora": "yes"}, ...}

Each answer comes from the code that decides when a model is loaded: the proofs of fusion on a tiny random model, the plan of a
division (for models with states its proof as well, on two ranks that are threads), the layers that a float8 checkpoint would
replace, and the products that take adapters. "some" stands where a part of
the layers is fused, or where experts keep their floats. A reason is the sentence of the refusal.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable

import torch
from every_type import tiny_config, tiny_model
from hf_families import Family
from hybrids import HYBRIDS
from image_inputs import CHANGES
from rank_threads import run_ranks
from report_hybrids import COMPOSITES
from transformers import PreTrainedModel

from fa_serve.engine import EngineConfig
from fa_serve.engine.runner.attention_kinds import prepare_attention
from fa_serve.hf import auto_class, model_layers, patch_parts, plan_division, take_experts, text_model
from fa_serve.hf.lora.memory import LoraMemory
from fa_serve.hf.surgery.divide.weights import divide_model
from fa_serve.hf.surgery.experts.mixtures import expert_modules
from fa_serve.hf.surgery.fuse.fusion import fuse_layers
from fa_serve.hf.surgery.quantised.experts import QuantizedExperts
from fa_serve.hf.surgery.quantised.linear import quantize_layers
from fa_serve.spec import ParameterError, UnsupportedModelError

COLUMNS = ("fused", "parallel", "quantised", "lora")
YES = "yes"
SOME = "some"
_FLOAT8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
    },
}
FROM_TESTS = ("lfm2", "lfm2_moe", "mamba2", "recurrent_gemma", "zamba", "zamba2")
"""Types whose default config has no sense in tiny sizes. Their config is that of the tests of hybrids."""


def rows(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """A row for each type whose text the engine serves."""
    logging.disable(logging.WARNING)
    try:
        return {name: row_of(name) for name in names}
    finally:
        logging.disable(logging.NOTSET)


def row_of(name: str) -> dict[str, str]:
    return {
        "fused": _answer(lambda: _fused(name)),
        "parallel": divided(name),
        "quantised": _answer(lambda: _quantised(name)),
        "lora": _answer(lambda: _adapted(name)),
    }


def _answer(work: Callable[[], str]) -> str:
    try:
        return work()
    except (UnsupportedModelError, ParameterError) as error:
        return " ".join(str(error).replace("|", "/").replace("`", "").split())[:200]
    except Exception as error:  # what the code of a type raises for a tiny config
        return f"not tried: {type(error).__name__}: {' '.join(str(error).split())[:120]}"


@functools.cache
def _hybrids() -> dict[str, Family]:
    """The families with states by type. Default configs of these types make models of hundreds of millions of weights."""
    return {family.make_config().model_type: family for family in HYBRIDS}


def _text(name: str) -> PreTrainedModel:
    """The language model of a type as the engine has it before it fuses layers."""
    kind = COMPOSITES.get(name, name)
    model = _hybrids()[kind].build() if kind in _hybrids() else tiny_model(name, CHANGES.get(name))
    patch_parts(model)
    return text_model(model)


def _meta(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """The same without memory."""
    config = _hybrids()[name].make_config() if name in FROM_TESTS else tiny_config(name, CHANGES.get(name))
    with torch.device("meta"):
        return text_model(auto_class(config).from_config(config, attn_implementation="eager", dtype=dtype))


def _fused(name: str) -> str:
    model = _text(name)
    layers = model_layers(model)
    prepare_attention(model, EngineConfig(), layers.indexers)
    take_experts(model)
    count = fuse_layers(model)
    total = len({*layers.attention, *(key[0] if isinstance(key, tuple) else key for key in layers.states)})
    return "no" if not count else YES if count >= total else SOME


def divided(name: str) -> str:
    """Whether the text of a type is divided between two ranks."""
    return _answer(lambda: _divided(name))


def _divided(name: str) -> str:
    meta = _meta(name, torch.float32)
    plan_division(meta, 2)
    if model_layers(meta.config).states:
        model = _text(name)
        division = plan_division(model, 2)
        cpu = torch.device("cpu")
        run_ranks(2, lambda rank, all_reduce: divide_model(copy.deepcopy(model), division, rank, all_reduce, cpu))
    return YES


def _quantised(name: str) -> str:
    model = _meta(name, torch.bfloat16)
    model.config.quantization_config = _FLOAT8
    experts = len(list(expert_modules(model)))
    quantize_layers(model, model.config)
    taken = sum(isinstance(module, QuantizedExperts) for module in model.modules())
    return YES if taken >= experts else SOME


def _adapted(name: str) -> str:
    model = _text(name)
    LoraMemory(model, budget=1 << 26, max_rank=16, max_pages=1)
    return YES
