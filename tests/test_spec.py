"""Specs and errors: what programs read of them, and what people read."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from fa_serve.spec import AttentionSpec, OpSpec, ParameterError, UnsupportedError, arch_of, dims, dtype_name


def test_a_parameter_error_is_data_and_a_sentence() -> None:
    error = ParameterError("top_p", "be above 0 and at most 1", 1.5)
    assert (error.field, error.rule, error.value, error.code) == ("top_p", "be above 0 and at most 1", 1.5, "invalid_value")
    assert str(error) == "top_p must be above 0 and at most 1, got 1.5"
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("value", [None, 3, "text", ["a"] * 5, lambda: None], ids=["None", "int", "str", "list", "unpicklable"])
def test_a_parameter_error_survives_pickling(value: object) -> None:
    error = ParameterError("prompt", "hold token ids", value, "context_length_exceeded")
    restored = pickle.loads(pickle.dumps(error))
    assert type(restored) is ParameterError
    assert (restored.field, restored.rule, restored.code) == ("prompt", "hold token ids", "context_length_exceeded")
    assert str(restored) == str(error)


def test_a_long_value_is_shortened_before_it_is_shown() -> None:
    assert len(str(ParameterError("stop", "be a text", "x" * 1_000_000))) < 200


def test_a_spec_names_only_what_is_unusual() -> None:
    plain = AttentionSpec("varlen", "cuda", 90, torch.bfloat16, torch.bfloat16, 128, 128, 32, 8, (-1, 0))
    assert str(plain) == "varlen, cuda sm90, bfloat16, heads 32/8, head_dim 128, causal"
    full = AttentionSpec(
        "paged", "cpu", 0, torch.float16, torch.float8_e4m3fn, 192, 128, 8, 8, (9, 0), True, True, "bool", 16, True, "decode"
    )
    assert str(full) == (
        "decode, paged, cpu, float16, heads 8/8, head_dim 192/128, kv float8_e4m3fn, window (9, 0), softcap, sinks, "
        "needs_grad, bool mask, page_size 16"
    )
    assert str(replace(plain, block_mask=True)) == f"{plain}, block_mask"
    assert str(OpSpec("cuda", 90)) == "cuda sm90"
    assert (dims(64, 64), dims(192, 128), dtype_name(torch.float8_e4m3fn)) == ("64", "192/128", "float8_e4m3fn")


def test_arch_of_a_cpu_is_0() -> None:
    assert arch_of(torch.device("cpu")) == 0


def test_unsupported_calls_can_be_caught_as_not_implemented() -> None:
    assert issubclass(UnsupportedError, NotImplementedError)
