"""Batches that mix decoding sequences with prompts: who computes which rows, and what both kernels are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from float8_cases import dequantized
from hopper_cases import Case, PagedCall
from hopper_emulator import emulated
from torch import Tensor

from fa_serve import api, dispatch
from fa_serve.backends import Backend, load_backend, select_backend
from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.float8_copies import copied_bytes
from fa_serve.backends.hopper import HopperBackend
from fa_serve.backends.mixed import find_decoder, plan_mixed
from fa_serve.backends.reference import ReferenceBackend, attention_reference
from fa_serve.launching.plans import PlanTable, Run
from fa_serve.spec import TREE_SPLITS, AttentionSpec

LENGTHS_Q = [1, 70, 16, 17, 3]
LENGTHS_K = [90, 70, 33, 40, 5]
SPEC = AttentionSpec("paged", "cpu", 0, torch.bfloat16, torch.bfloat16, 64, 64, 2, 1, page_size=16)


class RowsOfReference:
    """Computes with the reference the sequences that a kernel would compute, and writes no other row.

    planned: the spec and the options of each plan
    """

    name = "rows of the reference"
    differentiable = False

    def __init__(self, mixed_rows: int | None = None) -> None:
        self.mixed_rows = mixed_rows
        self.planned: list[tuple[AttentionSpec, AttentionOptions]] = []

    def supports(self, spec: AttentionSpec) -> str | None:
        return None

    def plan(self, spec: AttentionSpec, tensors: AttentionTensors, options: AttentionOptions) -> Run:
        self.planned.append((spec, options))

        def run(t: AttentionTensors) -> None:
            assert t.q.stride(2) == t.out.stride(2) == 1, "kernels read and write contiguous rows"
            whole, lse = ReferenceBackend().plan(spec, t, options)(t._replace(out=None, lse=None))
            for a, b in pairwise(t.cu_seqlens_q.tolist()):
                is_taken = b - a <= options.max_seqlen_q if spec.op in ("decode", "tree") else b - a > options.skip_q
                if is_taken:
                    t.out[a:b] = whole[a:b]
                    if t.lse is not None:
                        t.lse[:, a:b] = lse[:, a:b]

        return run


def run_mixed(call: PagedCall, change: dict[str, Any] | None = None) -> tuple[Tensor, Tensor | None, list[Any]]:
    """Plan and run the call with two backends; -> out, lse and the plans of the decoder and of the other backend."""
    decoder = RowsOfReference(mixed_rows=8)
    forward = RowsOfReference()
    tensors = call.tensors._replace(**(change or {}))
    out, lse = plan_mixed(decoder, forward, SPEC, tensors, call.options)(tensors)
    return out, lse, [decoder.planned, forward.planned]


def test_each_row_is_computed_once() -> None:
    """A group of 2 heads fills the 8 rows of a decoding tile with 4 queries."""
    call = PagedCall.of(Case(""), LENGTHS_Q, LENGTHS_K)
    out, lse, [[(decode_spec, decode)], [(spec, forward)]] = run_mixed(call)
    assert (decode_spec.op, decode.max_seqlen_q) == ("decode", 4)
    assert (spec.op, forward.skip_q, forward.max_seqlen_q) == ("attention", 4, 70)
    assert decode.max_seqlen_k == forward.max_seqlen_k == 90
    for sequence in range(len(LENGTHS_Q)):
        call.check(out, lse, sequence)


def test_a_decoding_tile_takes_at_least_one_query() -> None:
    """A group of 16 heads has more rows than a decoding tile prefers."""
    call = PagedCall.of(Case("", heads=(16, 1)), LENGTHS_Q, LENGTHS_K)
    _, _, [[(_, decode)], [(_, forward)]] = run_mixed(call)
    assert (decode.max_seqlen_q, forward.skip_q) == (1, 1)


def test_the_decoder_is_the_first_backend_that_can_leave_sequences_alone() -> None:
    """The kernel of Hopper for latent attention is faster, but is not made for mixed batches."""
    sixteen = torch.bfloat16
    heads = {"head_dim": 576, "head_dim_v": 512, "num_heads": 128, "num_kv_heads": 1}
    spec = AttentionSpec(
        "paged", "cuda", 90, sixteen, sixteen, **heads, window_size=(-1, 0), page_size=16, op="decode", values_in_keys=True
    )
    assert select_backend(spec).name == "hopper"
    assert find_decoder(spec, "auto") is load_backend("triton")
    assert find_decoder(spec, "triton") is load_backend("triton")
    assert find_decoder(spec, "hopper") is None
    assert find_decoder(replace(spec, device="cpu", arch=0), "auto") is None


def test_out_is_written_in_place() -> None:
    """Directly if its rows are contiguous, else through a copy."""
    call = PagedCall.of(Case(""), LENGTHS_Q, LENGTHS_K)
    expected, _, _ = run_mixed(call)
    for out in (torch.empty_like(expected), torch.empty(*expected.shape, 2, dtype=expected.dtype)[..., 0]):
        returned, _, _ = run_mixed(call, {"out": out})
        assert returned is out
        assert torch.equal(out, expected)


def test_queries_whose_rows_are_not_contiguous_are_copied() -> None:
    call = PagedCall.of(Case(""), LENGTHS_Q, LENGTHS_K)
    expected, _, _ = run_mixed(call)
    strided = call.tensors.q.transpose(0, 2).contiguous().transpose(0, 2)
    assert strided.stride(2) != 1
    out, _, _ = run_mixed(call, {"q": strided})
    assert torch.equal(out, expected)


def test_lse_is_returned_if_asked_for() -> None:
    call = PagedCall.of(Case(""), LENGTHS_Q, LENGTHS_K)
    call.options = AttentionOptions(0.125, (-1, 0), 0.0, 70, 90, return_lse=False)
    _, lse, _ = run_mixed(call)
    assert lse is None


Call = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> Call:
    """`attend(call, decoder, backend=...)`: the public function on a machine with the Hopper kernel, which is emulated."""

    def run(call: PagedCall, decoder: Backend, **options: Any) -> tuple[Tensor, Tensor]:
        hopper = HopperBackend()

        def select(spec: AttentionSpec, name: str) -> Backend:
            assert spec.op == ("tree" if options.get("num_splits") == TREE_SPLITS else "attention")
            return hopper

        def find(spec: AttentionSpec, name: str) -> Backend | None:
            assert spec.op == ("tree" if options.get("num_splits") == TREE_SPLITS else "decode")
            return decoder if name == "auto" else None

        monkeypatch.setattr(dispatch, "select_backend", select)
        monkeypatch.setattr(dispatch, "find_decoder", find)
        monkeypatch.setattr(dispatch, "PLANS", PlanTable())
        t = call.tensors
        with emulated():
            return api.attention_paged(
                t.q,
                t.k,
                t.v,
                block_table=t.block_table,
                seqused_k=t.keys,
                cu_seqlens_q=t.cu_seqlens_q,
                max_seqlen_q=call.options.max_seqlen_q,
                max_seqlen_k=call.options.max_seqlen_k,
                softmax_scale=0.125,
                return_lse=True,
                **options,
            )

    return run


def test_prompts_run_on_hopper_and_the_rest_on_the_decoder_of_auto(attend: Call) -> None:
    call = PagedCall.of(Case(""), LENGTHS_Q, LENGTHS_K)
    decoder = RowsOfReference(mixed_rows=8)
    out, lse = attend(call, decoder)
    assert [options.max_seqlen_q for _, options in decoder.planned] == [4]
    for sequence in range(len(LENGTHS_Q)):
        call.check(out, lse, sequence)


def test_rows_of_a_tree_are_divided_as_others_are(attend: Call) -> None:
    call = PagedCall.of(Case(""), LENGTHS_Q, LENGTHS_K)
    decoder = RowsOfReference(mixed_rows=8)
    out, lse = attend(call, decoder, num_splits=TREE_SPLITS)
    assert [(spec.op, options.max_seqlen_q) for spec, options in decoder.planned] == [("tree", 4)]
    for sequence in range(len(LENGTHS_Q)):
        call.check(out, lse, sequence)


def test_a_named_backend_computes_the_whole_batch(attend: Call) -> None:
    call = PagedCall.of(Case(""), LENGTHS_Q, LENGTHS_K)
    decoder = RowsOfReference(mixed_rows=8)
    out, lse = attend(call, decoder, backend="hopper")
    assert decoder.planned == []
    for sequence in range(len(LENGTHS_Q)):
        call.check(out, lse, sequence)


def test_prompts_of_one_length_need_no_decoder(attend: Call) -> None:
    call = PagedCall.of(Case(""), [20, 20], [20, 40])
    decoder = RowsOfReference(mixed_rows=8)
    out, lse = attend(call, decoder)
    assert decoder.planned == []
    for sequence in range(2):
        call.check(out, lse, sequence)


def float8_error(call: PagedCall, out: Tensor, sequence: int, precision: str = "fp8") -> float:
    """The norm of the error beside attention of the numbers that the float8 inputs stand for, relative to the result's."""
    rows, k, v = call.sequences[sequence]
    inputs = dequantized(call.tensors.q[None, rows], k[None], v[None], precision)
    exact, _ = attention_reference(*inputs, softmax_scale=0.125, window_size=(-1, 0))
    return float((out[None, rows].double() - exact).norm() / exact.norm())


def test_float8_products_are_for_prompts(attend: Call) -> None:
    call = PagedCall.of(Case(""), LENGTHS_Q, LENGTHS_K)
    decoder = RowsOfReference(mixed_rows=8)
    out, lse = attend(call, decoder, precision="fp8")
    assert [(spec.precision, options.precision) for spec, options in decoder.planned] == [("bf16", "bf16")]
    for sequence, queries in enumerate(LENGTHS_Q):
        if queries <= 4:
            call.check(out, lse, sequence)
        else:
            assert 1e-3 < float8_error(call, out, sequence) < 0.03


def test_prompts_behind_a_float8_cache_have_float8_products(attend: Call) -> None:
    call = PagedCall.of(Case(""), LENGTHS_Q, LENGTHS_K)
    k_cache, v_cache = (x.to(torch.float8_e4m3fn) for x in call.tensors[1:3])
    ones = torch.ones(1)
    call.tensors = call.tensors._replace(k=k_cache, v=v_cache)
    decoder = RowsOfReference(mixed_rows=8)
    out, _ = attend(call, decoder, precision="fp8", k_descale=ones, v_descale=ones)
    assert [(spec.op, spec.kv_dtype, spec.precision) for spec, _ in decoder.planned] == [
        ("decode", torch.float8_e4m3fn, "bf16")
    ]
    call.sequences = [(rows, *(x.to(torch.float8_e4m3fn).double() for x in kv)) for rows, *kv in call.sequences]
    for sequence in (1, 2, 3):
        assert float8_error(call, out, sequence, "qk8") < 0.03, "the values of the cache are not rounded again"


def test_copies_that_take_too_much_memory_are_not_made(attend: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for each of the 5 sequences to have as many keys as the longest one."""
    call = PagedCall.of(Case(""), LENGTHS_Q, LENGTHS_K)
    assert copied_bytes(*call.tensors[1:3], 5, 90, "fp8") == 5 * 90 * 128
    monkeypatch.setattr(dispatch, "MAX_COPY_BYTES", 5 * 90 * 128 - 1)
    out, lse = attend(call, RowsOfReference(mixed_rows=8), precision="fp8")
    for sequence in range(len(LENGTHS_Q)):
        call.check(out, lse, sequence)
    monkeypatch.setattr(dispatch, "MAX_COPY_BYTES", 5 * 90 * 128)
    out, _ = attend(call, RowsOfReference(mixed_rows=8), precision="fp8")
    assert float8_error(call, out, 1) > 1e-3
