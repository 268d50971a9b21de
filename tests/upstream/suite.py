"""transformers' own tests of a model, run on the tiny families of `hf_families`; only `run.py` collects this file.

`tests/test_modeling_common.py` in transformers' source distribution is one class of tests, to which the test file of each model
adds a configuration and inputs. The distribution lacks these files and the tests of generation. So configurations and inputs
come from `hf_families`, and what the class imports from the missing files is left empty.

With REDIRECT=1 the name "sdpa" means fa_serve: its attention function, its mask function, and its check of a model when it is
made. transformers uses sdpa when nothing else is asked for, so nearly every test then runs through fa_serve.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import torch
from hf_families import FAMILIES, LENGTH, Family, tokens
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.models.auto import modeling_auto

from fa_serve import hf
from fa_serve.hf.adapter import models

SOURCE = Path(os.environ["TRANSFORMERS_SOURCE"]) / "tests"
REDIRECT = os.environ.get("REDIRECT") == "1"
BATCH = 4
MISSING = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
# The heads that transformers' testers try on decoders and encoders, beside the main one. For other kinds, only the first.
HEADS = ("MODEL_MAPPING", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING")

calls = 0


def _counting(*args: Any, **kwargs: Any) -> Any:
    global calls
    calls += 1
    return hf.attention_forward(*args, **kwargs)


def redirect() -> None:
    AttentionInterface._global_mapping["sdpa"] = _counting
    AttentionMaskInterface._global_mapping["sdpa"] = hf.mask_forward
    original = PreTrainedModel.get_correct_attn_implementation

    def get_correct_attn_implementation(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        chosen = original(self, *args, **kwargs)
        if chosen == "sdpa":
            models.prepare_model(self)
        return chosen

    setattr(PreTrainedModel, original.__name__, get_correct_attn_implementation)


def common() -> Any:
    """The module test_modeling_common, in a package that is not called "tests"."""
    package = types.ModuleType("upstream_tests")
    package.__path__ = [str(SOURCE)]
    sys.modules["upstream_tests"] = package
    for name, mixin in MISSING.items():
        parent, _, _ = name.partition(".")
        for module in (parent, name):
            sys.modules[f"upstream_tests.{module}"] = types.ModuleType(f"upstream_tests.{module}")
        setattr(sys.modules[f"upstream_tests.{name}"], mixin, type(mixin, (), {}))
    return importlib.import_module("upstream_tests.test_modeling_common")


if REDIRECT:
    redirect()
ModelTesterMixin = common().ModelTesterMixin


class Tester:
    """What ModelTesterMixin asks about a model."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.batch_size = BATCH
        self.seq_length = LENGTH
        self.is_training = True
        config = self.get_config()
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "image_size", "patch_size"):
            if hasattr(config, name):
                setattr(self, name, getattr(config, name))
        self.encoder_seq_length = self.decoder_seq_length = self.key_length = LENGTH
        if family.kind == "vision":
            patches = (config.image_size // config.patch_size) ** 2
            self.mask_length = patches
            self.num_masks = patches // 2
            self.seq_length = self.encoder_seq_length = self.key_length = patches + (family.name != "siglip")

    def get_config(self) -> Any:
        return self.family.make_config()

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        config = self.get_config()
        if self.family.kind == "vision":
            return config, {"pixel_values": torch.randn(BATCH, 3, config.image_size, config.image_size)}
        inputs = {"input_ids": tokens(BATCH, LENGTH), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64)}
        if self.family.kind == "seq2seq":
            inputs |= {f"decoder_{name}": value.clone() for name, value in inputs.items()}
        return config, inputs

    prepare_config_and_inputs = prepare_config_and_inputs_for_common


def test_case(family: Family) -> type[unittest.TestCase]:
    config_class = family.model_class.config_class
    classes = {family.model_class}
    for name in HEADS if family.kind in ("decoder", "encoder") else HEADS[:1]:
        found = getattr(modeling_auto, name).get(config_class, ())
        classes |= {c for c in (found if isinstance(found, tuple) else (found,)) if c is not family.model_class}

    def set_up(self: Any) -> None:
        self.model_tester = Tester(family)
        self.all_model_classes = tuple(sorted(classes, key=lambda c: c.__name__))

    def flash_style(side: str) -> Any:
        """transformers' test of FlashAttention; its own tests of that name need the package flash_attn."""

        def test(self: Any) -> None:
            self.flash_attn_inference_equivalence("fa_serve" if REDIRECT else "sdpa", side)

        return test

    name = "".join(part.title() for part in family.name.split("-"))
    members = {
        "setUp": set_up,
        "all_model_classes": tuple(classes),
        "is_encoder_decoder": family.kind == "seq2seq",
        "test_resize_embeddings": False,
        "test_all_params_have_gradient": False,
        **{f"test_flash_attn_inference_equivalence_{side}": flash_style(side) for side in ("left", "right")},
    }
    return type(f"Test{name}", (ModelTesterMixin, unittest.TestCase), members)


for _family in FAMILIES:
    globals()[f"Test{_family.name}"] = test_case(_family)
