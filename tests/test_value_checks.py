"""Values in index tensors by which a kernel would read other memory are refused: on a CPU, and on a GPU if asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from api_calls import FLAT, K_CACHE, PAGED, ROWS, STORE, TABLE, V_CACHE, VARLEN, Q
from torch import Tensor

import fa_serve
from fa_serve import BlockLists, ParameterError
from fa_serve.backends.calls import AttentionTensors
from fa_serve.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache, interface
from fa_serve.testing import make_paged, make_qkv
from fa_serve.value_checks import check_paged_values, with_value_checks


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


LISTS = BlockLists.from_blocks(torch.ones(1, 1, 1, 1, dtype=torch.bool))
NUM_PAGES = K_CACHE.shape[0]
SLOTS = NUM_PAGES * 4

# function, its right arguments, what is changed, the field, what the message must say
BAD: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any], str, str]] = {
    "beyond-q": (
        *VARLEN,
        {"cu_seqlens_q": ints(0, 5, 11), "max_seqlen_q": 6},
        "cu_seqlens_q",
        "end with at most q's number of rows, 10, got 11",
    ),
    "beyond-k": (
        *VARLEN,
        {"cu_seqlens_k": ints(0, 7, 15), "max_seqlen_k": 8},
        "cu_seqlens_k",
        "end with at most k's number of rows, 14, got 15",
    ),
    "start": (*VARLEN, {"cu_seqlens_q": ints(1, 5, 10)}, "cu_seqlens_q", "begin with 0, got 1"),
    "negative": (*VARLEN, {"cu_seqlens_k": ints(-1, 5, 10)}, "cu_seqlens_k", "begin with 0, got -1"),
    "decreasing": (
        *VARLEN,
        {"cu_seqlens_q": ints(0, 5, 4)},
        "cu_seqlens_q",
        r"not decrease, as it does at index 2, got \[5, 4\]",
    ),
    "max-q": (*VARLEN, {"max_seqlen_q": 4}, "max_seqlen_q", "be at least the longest length in cu_seqlens_q, 5, got 4"),
    "max-k": (*VARLEN, {"max_seqlen_k": 6}, "max_seqlen_k", "be at least the longest length in cu_seqlens_k, 7, got 6"),
    "paged-beyond-q": (*PAGED, {"cu_seqlens_q": ints(0, 5, 11), "max_seqlen_q": 6}, "cu_seqlens_q", "10, got 11"),
    "paged-max-q": (*PAGED, {"max_seqlen_q": 4}, "max_seqlen_q", "longest length in cu_seqlens_q, 5, got 4"),
    "paged-max-k": (*PAGED, {"max_seqlen_k": 6}, "max_seqlen_k", "longest length in seqused_k, 7, got 6"),
    "used-negative": (*PAGED, {"seqused_k": ints(7, -1)}, "seqused_k", "no negative length, got -1"),
    "used-beyond": (*PAGED, {"seqused_k": ints(7, 99)}, "seqused_k", r"at most max_pages \* page_size = \d+, got 99"),
    "page": (
        *PAGED,
        {"block_table": TABLE + NUM_PAGES},
        "block_table",
        f"have pages from 0 to {NUM_PAGES - 1} for all keys up to seqused_k",
    ),
    "page-negative": (*PAGED, {"block_table": TABLE * 0 - 1}, "block_table", "row 0, column 0 does not, got -1"),
    "slot": (*STORE, {"slot_mapping": torch.tensor([0, -1, SLOTS])}, "slot_mapping", f"= {SLOTS - 1}, .* got {SLOTS}"),
    "slot-negative": (*STORE, {"slot_mapping": torch.tensor([0, -2, 1])}, "slot_mapping", "or -1 to skip a token, got -2"),
    "blocks-starts": (*VARLEN, {"cu_seqlens_q": ints(0, 5, 4), "block_mask": LISTS}, "cu_seqlens_q", "not decrease"),
    "blocks-paged": (*PAGED, {"cu_seqlens_q": ints(0, 5, 4), "block_mask": LISTS}, "cu_seqlens_q", "not decrease"),
    "blocks-number": (
        fa_serve.attention,
        {"q": Q, "k": Q, "v": Q, "block_mask": LISTS},
        {"block_mask": LISTS._replace(kv_num_blocks=LISTS.kv_num_blocks + 1)},
        "block_mask",
        "have kv_num_blocks from 0 to 1, the width of kv_indices, got 2",
    ),
    "blocks-negative": (
        *VARLEN,
        {"block_mask": LISTS._replace(kv_indices=LISTS.kv_indices - 1)},
        "block_mask",
        "no negative block in kv_indices, got -1",
    ),
    "flash-attn": (
        flash_attn_varlen_func,
        VARLEN[1],
        {"cu_seqlens_k": ints(0, 7, 6)},
        "cu_seqlens_k",
        "not decrease",
    ),
    "flash-attn-3": (
        interface.flash_attn_varlen_func,
        VARLEN[1],
        {"max_seqlen_q": 4},
        "max_seqlen_q",
        "be at least the longest",
    ),
    "flash-attn-cache": (
        flash_attn_with_kvcache,
        {"q": Q, "k_cache": K_CACHE, "v_cache": V_CACHE, "block_table": TABLE, "cache_seqlens": ints(7, 7)},
        {"block_table": TABLE + NUM_PAGES},
        "block_table",
        "have pages from 0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_named(name: str) -> None:
    function, arguments, change, field, text = BAD[name]
    function(**arguments)
    for _ in range(2):  # the second call has a plan
        with pytest.raises(ParameterError, match=text) as refused:
            function(**(arguments | change))
        assert refused.value.field == field
    function(**arguments)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_packed_sequences_may_stop_short(backend: str) -> None:
    out, lse = fa_serve.attention_varlen(**(VARLEN[1] | {"cu_seqlens_q": ints(0, 5, 7)}), backend=backend, return_lse=True)
    assert (out[7:] == 0).all()
    assert (lse[:, 7:] == float("-inf")).all()
    assert (out[:7] != 0).all()


def test_entries_of_the_table_that_no_query_sees_are_not_looked_at() -> None:
    """An engine may free the pages before a window or a chunk, and has pages only for the keys that are used."""
    q, k, v = make_qkv(1, 2, 16, 4, 2, 16)
    k_cache, v_cache, table, used = make_paged(list(k), list(v), 4)
    table = torch.cat([table, ints([-7])], dim=1)
    table[:, :2] = -1  # keys 0 to 7; the queries are at 14 and 15
    tensors = AttentionTensors(q[0], k_cache, v_cache, None, None, ints(0, 2), used, table)
    check_paged_values(tensors, 2, None, 6, 0)
    check_paged_values(tensors, 2, None, -1, 8)
    for left, chunk, column in ((-1, 0, 0), (7, 0, 1), (-1, 15, 0)):
        with pytest.raises(ParameterError, match=f"row 0, column {column} does not, got -1"):
            check_paged_values(tensors, 2, None, left, chunk)


def test_a_graph_is_traced_without_values_and_runs_with_checks() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Any:
        return fa_serve.attention_varlen(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=14, max_seqlen_k=14)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    q = k = v = FLAT["k"]
    torch.testing.assert_close(compiled(q, k, v, ints(0, 7, 14)), call(q, k, v, ints(0, 7, 14)))
    with pytest.raises(ParameterError, match="cu_seqlens_q must not decrease"):
        compiled(q, k, v, ints(0, 7, 6))


@pytest.mark.parametrize(("value", "checks"), [(None, False), ("0", False), ("1", True)])
def test_a_gpu_is_asked_only_under_the_variable(monkeypatch: pytest.MonkeyPatch, value: str | None, checks: bool) -> None:
    """A call without checks has the plan itself, so it costs the host nothing."""
    if value is None:
        monkeypatch.delenv("FA_SERVE_CHECK", raising=False)
    else:
        monkeypatch.setenv("FA_SERVE_CHECK", value)
    on_device = torch.empty(2, device="meta")

    def plan(tensors: object) -> None: ...

    assert (with_value_checks(plan, on_device, print) is not plan) == checks
    assert with_value_checks(plan, torch.empty(2), print) is not plan


def test_nothing_is_read_while_a_gpu_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = fa_serve.api.StoreTensors(ROWS["k"], ROWS["v"], K_CACHE, V_CACHE, torch.tensor([0, 1, 99]), None, None)
    read: list[object] = []
    run = with_value_checks(lambda given: "ran", ROWS["k"], read.append)
    assert run(tensors) == "ran"
    assert len(read) == 1
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert run(tensors) == "ran"
    assert len(read) == 1
