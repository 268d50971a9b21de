"""Bad tensors and options are refused before a launch: the message names the argument, the rule and the value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from api_calls import CU, DENSE, K_CACHE, PAGED, ROWS, STORE, TABLE, USED, V_CACHE, VARLEN, K, Q, V

import fa_serve
from fa_serve import BlockLists
from fa_serve.spec import ParameterError
from fa_serve.testing import cu_seqlens


def _blocks(*shape: int) -> dict[str, Any]:
    return {"block_mask": BlockLists.from_blocks(torch.ones(shape, dtype=torch.bool))}


LISTS = _blocks(2, 1, 1, 1)["block_mask"]
BITS = torch.zeros(2, 1, 1, 1, 128, 4, dtype=torch.int32)

# function, its right arguments, what is changed, the error, what its message must say
BAD: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "rank": (*DENSE, {"q": Q[0]}, ValueError, r"q must have 4 dimensions, got float32 \(5, 4, 16\)"),
    "dtype-of-q": (*DENSE, {"q": Q.int()}, TypeError, r"q must be float16.*got torch.int32"),
    "dtype-of-k": (*DENSE, {"k": K.half()}, TypeError, r"k must have q's dtype torch.float32, got torch.float16"),
    "dtype-of-v": (*DENSE, {"v": V.half()}, TypeError, r"v must have k's dtype torch.float32, got torch.float16"),
    "lengths": (*DENSE, {"v": V[:, :6]}, ValueError, r"v must match k .*\(2, 6, 2, 16\)"),
    "head_dim": (*DENSE, {"k": K[..., :8], "v": V}, ValueError, "k must have q's head_dim 16, got 8"),
    "no-head_dim": (*DENSE, {"v": V[..., :0]}, ValueError, "head_dim_v 0"),
    "groups": (*DENSE, {"q": Q[:, :, :3]}, ValueError, "num_heads must be a multiple of num_kv_heads, got 3 and 2"),
    "window": (*DENSE, {"window_size": (-2, 0)}, ValueError, r"window_size .* got \(-2, 0\)"),
    "window-float": (*DENSE, {"window_size": (1.5, 0)}, ValueError, r"window_size must be integers .* got \(1.5, 0\)"),
    "window-three": (*DENSE, {"window_size": (1, 0, 0)}, ValueError, r"window_size .* got \(1, 0, 0\)"),
    "softcap-nan": (*DENSE, {"softcap": float("nan")}, ValueError, "softcap must be finite .* got nan"),
    "softcap": (*DENSE, {"softcap": -1.0}, ValueError, "softcap must be .* >= 0 .*got -1.0"),
    "scale": (*DENSE, {"softmax_scale": 0.0}, ValueError, "softmax_scale must be finite and > 0, got 0.0"),
    "sinks": (*DENSE, {"sinks": torch.zeros(3)}, ValueError, r"sinks must be \(4,\).*got float32 \(3,\)"),
    "mask-shape": (*DENSE, {"mask": torch.ones(2, 1, 1, 6) > 0}, ValueError, r"each 1 or that of .*got bool \(2, 1, 1, 6\)$"),
    "mask-dtype": (
        *DENSE,
        {"mask": torch.ones(2, 1, 1, 7).int()},
        TypeError,
        r"bool, where True .*int32: pass mask\.bool\(\)",
    ),
    "chunk": (*DENSE, {"attention_chunk": -1, "causal": True}, ParameterError, "attention_chunk must be 0 .*got -1"),
    "chunk-float": (*VARLEN, {"attention_chunk": 2.0, "causal": True}, ParameterError, "attention_chunk must be 0 .*got 2.0"),
    "chunk-full": (*PAGED, {"attention_chunk": 4, "causal": False}, ParameterError, r"unless the call is causal .*\(-1, -1\)"),
    "chunk-window": (
        *DENSE,
        {"attention_chunk": 4, "window_size": (3, 0)},
        ParameterError,
        r"causal and has no window \(effective window_size \(-1, 0\), here \(3, 0\)\)",
    ),
    "alibi-dtype": (*DENSE, {"alibi_slopes": torch.zeros(4).half()}, ParameterError, "alibi_slopes must be float32 .*float16"),
    "alibi-shape": (*VARLEN, {"alibi_slopes": torch.zeros(3, 4)}, ParameterError, r"or \(2, 4\), got .*\(3, 4\)"),
    "alibi-device": (*PAGED, {"alibi_slopes": torch.zeros(4, device="meta")}, ParameterError, "alibi_slopes must be on q's"),
    "blocks-size": (*DENSE, {"block_mask": LISTS._replace(block_size=(128, 32))}, ParameterError, r"64 or 128 keys.*32\)"),
    "blocks-none": (*DENSE, {"block_mask": LISTS._replace(kv_indices=None)}, ParameterError, "have kv_num_blocks and kv_ind"),
    "blocks-half": (*VARLEN, {"block_mask": LISTS._replace(full_kv_indices=LISTS[1])}, ParameterError, "both full_kv_num_bl"),
    "blocks-int64": (*PAGED, {"block_mask": LISTS._replace(kv_indices=LISTS[1].long())}, ParameterError, "kv_indices as int32"),
    "blocks-rank": (*DENSE, {"block_mask": (LISTS[0], LISTS[0], None, None)}, ParameterError, "int32 with 4 dimensions"),
    "blocks-device": (*DENSE, {"block_mask": LISTS._replace(partial_bits=BITS.to("meta"))}, ParameterError, "6 .* on cpu"),
    "blocks-bits": (
        *DENSE,
        {"block_mask": LISTS._replace(partial_bits=BITS[..., :2])},
        ParameterError,
        r"whose last sizes are \(128, 4\)",
    ),
    "blocks-heads": (*DENSE, _blocks(2, 3, 1, 1), ParameterError, r"a number of heads in \[1, 2, 4\]"),
    "blocks-queries": (*VARLEN, _blocks(2, 2, 0, 1), ParameterError, "at least 1 blocks of 128 queries"),
    "blocks-batch": (*PAGED, _blocks(3, 1, 1, 1), ParameterError, r"a number of sequences in \[1, 2\], .*got \(3, 1, 1\)$"),
    "blocks-and-mask": (*DENSE, {"block_mask": LISTS, "mask": torch.ones(2, 1, 1, 7) > 0}, ParameterError, "mask must be None"),
    "out": (*DENSE, {"out": torch.empty(2, 5, 4, 8)}, ValueError, r"out must be float32 \(2, 5, 4, 16\)"),
    "out-expanded": (
        *DENSE,
        {"out": torch.empty(2, 1, 1, 16).expand(2, 5, 4, 16)},
        ValueError,
        r"out must have separate memory for each element.*strides \(16, 0, 0, 1\): do not expand it",
    ),
    "store-expanded": (
        *STORE,
        {"v_cache": V_CACHE[:, :1].expand(V_CACHE.shape)},
        ValueError,
        "v_cache must have separate memory for each element, because the call writes to it, got float32",
    ),
    "scale-many": (*DENSE, {"softmax_scale": torch.ones(2)}, TypeError, r"softmax_scale must be a number.*got float32 \(2,\)"),
    "softcap-many": (*PAGED, {"softcap": torch.ones(0)}, TypeError, r"softcap must be a number.*got float32 \(0,\)"),
    "cu-dtype": (*VARLEN, {"cu_seqlens_q": CU["cu_seqlens_q"].long()}, ValueError, "cu_seqlens_q must be int32.*int64"),
    "cu-empty": (*VARLEN, {"cu_seqlens_q": cu_seqlens([])[:0]}, ValueError, "cu_seqlens_q must have at least 1"),
    "cu-length": (*VARLEN, {"cu_seqlens_k": cu_seqlens([7])}, ValueError, "cu_seqlens_k must have 3 entries, got 2"),
    "max-length": (*VARLEN, {"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be a non-negative int"),
    "max-on-device": (*VARLEN, {"max_seqlen_q": torch.tensor(5)}, ValueError, "max_seqlen_q .* on the host"),
    "table": (*PAGED, {"block_table": TABLE.long()}, ValueError, "block_table must be int32"),
    "table-rows": (*PAGED, {"block_table": TABLE[:1]}, ValueError, "block_table must have 2 rows.*got 1"),
    "descale": (*PAGED, {"k_descale": torch.ones(2)}, ValueError, "k_descale must be None for a cache of"),
    "no-descale": (
        *PAGED,
        {"k_cache": K_CACHE.to(torch.float8_e4m3fn), "v_cache": V_CACHE.to(torch.float8_e4m3fn)},
        ValueError,
        r"k_descale must be float32 \(2,\)",
    ),
    "store-heads": (*STORE, {"k": ROWS["k"][:, :1]}, ValueError, "k must be .* with the same heads and dim"),
    "store-tokens": (*STORE, {"v": ROWS["v"][:2]}, ValueError, "k and v must agree in tokens"),
    "store-slots": (*STORE, {"slot_mapping": torch.tensor([0, 1, 2]).int()}, ValueError, r"slot_mapping must be int64 \(3,\)"),
    "cache-last-dim": (*PAGED, {"k_cache": K_CACHE.mT.contiguous().mT}, ValueError, "k_cache must have a contiguous last"),
    "store-last-dim": (*STORE, {"v_cache": V_CACHE.mT.contiguous().mT}, ValueError, "v_cache must have a contiguous last"),
    "store-device": (*STORE, {"k_cache": K_CACHE.to("meta")}, ValueError, "k_cache .* on k's device cpu, got cpu, meta"),
    "store-v-dtype": (*STORE, {"v": ROWS["v"].half()}, TypeError, "v and v_cache must have the dtypes of k and k_cache"),
    "store-v-cache-dtype": (*STORE, {"v_cache": V_CACHE.half()}, TypeError, "v and v_cache must have the dtypes"),
    "store-dtype": (*STORE, {n: x.half() for n, x in ROWS.items()}, TypeError, "k_cache must have k's dtype"),
    "device-of-k": (*DENSE, {"k": K.to("meta")}, ValueError, "k must be on q's device cpu, got meta"),
    "no-heads": (*DENSE, {"q": Q[:, :, :0]}, ValueError, "num_heads must be a multiple of num_kv_heads, got 0 and 2"),
    "window-bool": (*DENSE, {"window_size": (True, 0)}, ValueError, r"window_size must be integers .* got \(True, 0\)"),
    "softcap-infinite": (*DENSE, {"softcap": math.inf}, ValueError, "softcap must be finite .* got inf"),
    "scale-nan": (*DENSE, {"softmax_scale": math.nan}, ValueError, "softmax_scale must be finite and > 0, got nan"),
    "sinks-device": (*DENSE, {"sinks": torch.zeros(4, device="meta")}, ValueError, "sinks must be .* on cpu.* on meta"),
    "mask-rank": (
        *DENSE,
        {"mask": torch.ones(5, 7) > 0},
        ValueError,
        r"mask must have four dimensions, .*\(2, 4, 5, 7\), got bool \(5, 7\): pass mask\[None, None\]$",
    ),
    "mask-per-sequence": (*DENSE, {"mask": torch.ones(2, 5, 7) > 0}, ValueError, r"four dimensions, .*got bool \(2, 5, 7\)$"),
    "mask-device": (*DENSE, {"mask": torch.ones(2, 1, 1, 7, device="meta") > 0}, ValueError, "mask must be on q's device cpu"),
    "out-dtype": (*DENSE, {"out": torch.empty(2, 5, 4, 16).half()}, ValueError, "out must be float32 .*, got float16"),
    "cu-device": (*VARLEN, {"cu_seqlens_k": CU["cu_seqlens_k"].to("meta")}, ValueError, "cu_seqlens_k .* on cpu.* on meta"),
    "used-length": (*PAGED, {"seqused_k": USED[:1]}, ValueError, "seqused_k must have 2 entries, got 1"),
    "dtype-of-cache": (*PAGED, {"k_cache": K_CACHE.half()}, TypeError, "k_cache must have q's dtype torch.float32"),
    "window-int": (*DENSE, {"window_size": 128}, TypeError, r"window_size must be \(left, right\), two ints.*, got 128"),
    "window-none": (*VARLEN, {"window_size": None}, TypeError, r"window_size must be \(left, right\), .* got None"),
    "q-none": (*DENSE, {"q": None}, TypeError, "q must be a torch.Tensor, got None"),
    "q-array": (
        *DENSE,
        {"q": Q.numpy()},
        TypeError,
        r"q must be a torch.Tensor, got a numpy.ndarray \(torch.as_tensor converts",
    ),
    "k-array": (*VARLEN, {"k": ROWS["k"].numpy()}, TypeError, "k must be a torch.Tensor, got a numpy.ndarray"),
    "v-list": (*DENSE, {"v": V.tolist()}, TypeError, r"v must be a torch.Tensor, got a list \(torch.as_tensor converts it"),
    "cache-none": (*PAGED, {"v_cache": None}, TypeError, "v_cache must be a torch.Tensor, got None"),
    "cu-list": (*VARLEN, {"cu_seqlens_k": [0, 7, 14]}, TypeError, "cu_seqlens_k must be a torch.Tensor, got a list"),
    "cu-none": (*PAGED, {"cu_seqlens_q": None}, TypeError, "cu_seqlens_q must be a torch.Tensor, got None"),
    "table-list": (*PAGED, {"block_table": [[0]]}, TypeError, "block_table must be a torch.Tensor, got a list"),
    "used-int": (*PAGED, {"seqused_k": 7}, TypeError, "seqused_k must be a torch.Tensor, got 7"),
    "slots-list": (*STORE, {"slot_mapping": [0, 1, 2]}, TypeError, "slot_mapping must be a torch.Tensor, got a list"),
    "store-none": (*STORE, {"v": None}, TypeError, "v must be a torch.Tensor, got None"),
    "sinks-list": (*DENSE, {"sinks": [0.0] * 4}, TypeError, "sinks must be a torch.Tensor or None, got a list"),
    "alibi-float": (*VARLEN, {"alibi_slopes": 0.5}, TypeError, "alibi_slopes must be a torch.Tensor or None, got 0.5"),
    "mask-array": (
        *DENSE,
        {"mask": torch.ones(2, 1, 1, 7).numpy()},
        TypeError,
        "mask must be a torch.Tensor or None, got a nu",
    ),
    "out-array": (*PAGED, {"out": torch.ones(2).numpy()}, TypeError, "out must be a torch.Tensor or None, got a numpy"),
    "descale-float": (*PAGED, {"k_descale": 1.0}, TypeError, "k_descale must be a torch.Tensor or None, got 1.0"),
    "blocks-lists": (*DENSE, {"block_mask": ([1], [0], None, None)}, TypeError, "block_mask must have torch.Tensors .* a list"),
    "scale-text": (*DENSE, {"softmax_scale": "1/8"}, TypeError, "softmax_scale must be a number or None, got '1/8'"),
    "softcap-none": (*PAGED, {"softcap": None}, TypeError, "softcap must be a number, got None"),
    "causal-text": (*DENSE, {"causal": "no"}, TypeError, "causal must be a bool, got 'no'"),
    "causal-number": (*VARLEN, {"causal": 2}, ValueError, "causal must be a bool, got 2"),
    "chunk-list": (*DENSE, {"attention_chunk": [4]}, TypeError, "attention_chunk must be an int, got a list"),
    "max-list": (*VARLEN, {"max_seqlen_q": [5]}, TypeError, "max_seqlen_q must be a non-negative int on the host, got a list"),
    "splits-float": (*PAGED, {"num_splits": 1.5}, ValueError, r"num_splits must be 0 .* positive int, got 1.5"),
    "heads-first": (
        *DENSE,
        {"q": torch.zeros(2, 4, 5, 16), "k": torch.zeros(2, 2, 7, 16), "v": torch.zeros(2, 2, 7, 16)},
        ValueError,
        r"got 5 and 7: fa_serve takes \(..., seqlen, num_heads, head_dim\), .* Pass q.transpose\(1, 2\)",
    ),
    "heads-first-packed": (
        *VARLEN,
        {"q": torch.zeros(4, 10, 16), "k": torch.zeros(2, 14, 16), "v": torch.zeros(2, 14, 16)},
        ValueError,
        r"got 10 and 14: .* Pass q.transpose\(0, 1\)",
    ),
    "heads-first-cache": (
        *PAGED,
        {"k_cache": torch.zeros(4, 2, 8, 16), "v_cache": torch.zeros(4, 2, 8, 16)},
        ValueError,
        r"got 4 and 8: .* Pass k_cache.transpose\(1, 2\)",
    ),
    "heads-first-store": (
        *STORE,
        {"k_cache": torch.zeros(4, 2, 8, 16), "v_cache": torch.zeros(4, 2, 8, 16)},
        ValueError,
        r"with the same heads and dim, .* Pass k_cache.transpose\(1, 2\)",
    ),
    "descale-of-v": (*PAGED, {"v_descale": torch.ones(2)}, ValueError, "v_descale must be None for a cache of"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    function, arguments, change, error, text = BAD[name]
    # the right call writes nothing, because the other tests read the cache
    function(**(arguments | {"slot_mapping": torch.tensor([-1, -1, -1])} if function is fa_serve.store_kv else arguments))
    with pytest.raises(error, match=text):
        function(**(arguments | change))


def test_no_backend_is_asked_for_before_the_arguments_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa_serve.dispatch.select_backend", lambda *_: pytest.fail("a backend was asked for"))
    for function, arguments, change, error, _ in BAD.values():
        with pytest.raises(error):
            function(**(arguments | change))


def test_heads_that_divide_in_no_order_are_no_sign_of_another_layout() -> None:
    with pytest.raises(ValueError, match=r"num_heads must be a multiple of num_kv_heads, got 3 and 2$"):
        fa_serve.attention(Q[:, :, :3], K, V)


def test_a_backend_is_a_name() -> None:
    with pytest.raises(TypeError, match="backend must be a string, got None"):
        fa_serve.attention(Q, K, V, backend=None)  # type: ignore[call-overload]


def test_an_error_of_right_types_is_the_one_that_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types are looked at only after a failure, so a fault of fa_serve is not called one of the caller."""

    def fail(*given: object) -> None:
        raise TypeError("inside")

    monkeypatch.setattr("fa_serve.api.run_dense", fail)
    with pytest.raises(TypeError, match=r"^inside$"):
        fa_serve.attention(Q, K, V)
