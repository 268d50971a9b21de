"""The backend as SGLang calls it, on a CPU: prompts, chunks and decoding steps against the reference, and captured ones."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_serve.sglang
from fa_serve import UnsupportedError
from fa_serve.backends.reference import attention_reference

HEADS = 4
KV_HEADS = 2
DIM = 16
DIM_V = 8
PAGE = 16
REQUESTS = [3, 0, 5]
KEYS = [20, 4, 33]
PAGES = [[3, 1], [2], [6, 4, 5]]


def make_runner(sglang: ModuleType, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A runner whose requests have their tokens in the slots of PAGES."""
    table = torch.full((8, 64), 9999, dtype=torch.int32)
    for request, pages, count in zip(REQUESTS, PAGES, KEYS, strict=True):
        slots = [page * PAGE + i for page in pages for i in range(PAGE)]
        table[request, : count + 1] = torch.tensor(slots[: count + 1], dtype=torch.int32)
    pool = sglang.pools.MHATokenToKVPool(7 * PAGE, PAGE, dtype, KV_HEADS, DIM, DIM_V)
    values = {
        "token_to_kv_pool": pool,
        "page_size": PAGE,
        "use_mla_backend": False,
        "req_to_token_pool": SimpleNamespace(req_to_token=table),
        "model_config": SimpleNamespace(context_len=64),
    }
    return SimpleNamespace(**values | changes)


def make_backend(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch, runner: Any) -> Any:
    monkeypatch.setenv("FA_SERVE_SGLANG", "1")
    fa_serve.sglang.register()
    return sglang.registered["fa_serve"](runner)


def make_batch(runner: Any, mode: str, begin: list[int], end: list[int], on_host: bool = True) -> Any:
    """The step that computes tokens begin..end of each request."""
    info = sys.modules["sglang.srt.model_executor.forward_batch_info"]
    table = runner.req_to_token_pool.req_to_token
    counts = [last - first for first, last in zip(begin, end, strict=True)]
    slots = [table[request, first:last] for request, first, last in zip(REQUESTS, begin, end, strict=True)]
    lengths = torch.tensor(end)
    return info.ForwardBatch(
        forward_mode=info.ForwardMode[mode],
        batch_size=len(end),
        req_pool_indices=torch.tensor(REQUESTS),
        seq_lens=lengths,
        out_cache_loc=torch.cat(slots).long(),
        seq_lens_cpu=lengths if on_host else None,
        extend_seq_lens=torch.tensor(counts, dtype=torch.int32),
        extend_seq_lens_cpu=counts,
    )


def parts_of(begin: list[int], end: list[int], given: list[Tensor]) -> Tensor:
    """(tokens, width): what SGLang hands over of (keys, heads, dim) of each request."""
    return torch.cat([x[first:last] for x, first, last in zip(given, begin, end, strict=True)]).flatten(1)


def expected(q: list[Tensor], k: list[Tensor], v: list[Tensor], begin: list[int], end: list[int], **options: Any) -> Tensor:
    rows = []
    options = {"window_size": (-1, 0)} | options
    for x, y, z, first, last in zip(q, k, v, begin, end, strict=True):
        exact, _ = attention_reference(x[None, first:last], y[None, :last], z[None, :last], softmax_scale=0.3, **options)
        rows.append(exact[0])
    return torch.cat(rows).flatten(1)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ({}, {}),
        ({"sliding_window_size": 6}, {"window_size": (6, 0)}),
        ({"logit_cap": 2.0}, {"softcap": 2.0}),
        ({"sinks": True}, {}),
        ({"fp8": True}, {}),
    ],
    ids=["plain", "window", "softcap", "sinks", "fp8"],
)
@pytest.mark.parametrize("on_host", [True, False], ids=["lengths known", "lengths unknown"])
def test_prompts_chunks_and_steps_match_the_reference(
    sglang: ModuleType, monkeypatch: pytest.MonkeyPatch, words: dict[str, Any], options: dict[str, Any], on_host: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    words = dict(words)
    float8 = words.pop("fp8", False)
    sinks = torch.randn(HEADS, generator=generator) if words.pop("sinks", False) else None
    runner = make_runner(sglang, torch.float8_e4m3fn if float8 else torch.float32)
    backend = make_backend(sglang, monkeypatch, runner)
    radix = sys.modules["sglang.srt.layers.radix_attention"].RadixAttention
    layer = radix(HEADS, DIM, 0.3, KV_HEADS, 1, v_head_dim=DIM_V, **words)
    layer.k_scale, layer.v_scale = (torch.tensor(0.5), 0.25) if float8 else (None, None)
    q, k, v = (
        [torch.randn(count + 1, heads, dim, generator=generator) for count in KEYS]
        for heads, dim in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM_V))
    )
    stored_k = k
    stored_v = v
    if float8:
        stored_k = [(x / 0.5).to(torch.float8_e4m3fn).float() * 0.5 for x in k]
        stored_v = [(x / 0.25).to(torch.float8_e4m3fn).float() * 0.25 for x in v]
    others = {} if sinks is None else {"sinks": sinks}
    steps = [
        ("EXTEND", [0, 0, 0], [7, 1, 30]),
        ("EXTEND", [7, 1, 30], KEYS),
        ("DECODE", KEYS, [count + 1 for count in KEYS]),
    ]
    for mode, begin, end in steps:
        batch = make_batch(runner, mode, begin, end, on_host)
        backend.init_forward_metadata(batch)
        given_k = parts_of(begin, end, k).unflatten(1, (KV_HEADS, DIM))
        given_v = parts_of(begin, end, v).unflatten(1, (KV_HEADS, DIM_V))
        out = backend.forward(parts_of(begin, end, q), given_k, given_v, layer, batch, **others)
        exact = expected(q, stored_k, stored_v, begin, end, **options | others)
        torch.testing.assert_close(out, exact, rtol=1e-5, atol=2e-6)
    again = backend.forward(parts_of(begin, end, q), None, None, layer, batch, save_kv_cache=False, **others)
    assert torch.equal(again, out)


def test_a_captured_step_reads_its_buffers(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would replay the launch with the tensors of the capture. Here the call is made again with them."""
    generator = torch.Generator().manual_seed(1)
    runner = make_runner(sglang)
    backend = make_backend(sglang, monkeypatch, runner)
    layer = sys.modules["sglang.srt.layers.radix_attention"].RadixAttention(HEADS, DIM, 0.3, KV_HEADS, 0, v_head_dim=DIM_V)
    q, k, v = (
        [torch.randn(count, heads, dim, generator=generator) for count in KEYS]
        for heads, dim in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM_V))
    )
    first = make_batch(runner, "EXTEND", [0, 0, 0], KEYS)
    backend.init_forward_metadata(first)
    given = [parts_of([0, 0, 0], KEYS, x) for x in (q, k, v)]
    backend.forward(given[0], given[1].unflatten(1, (KV_HEADS, DIM)), given[2].unflatten(1, (KV_HEADS, DIM_V)), layer, first)
    backend.init_cuda_graph_state(8, 8)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    begin = [count - 1 for count in KEYS]
    padded = make_batch(runner, "DECODE", begin, KEYS)
    padded.seq_lens = torch.ones(3, dtype=torch.int64)
    backend.init_forward_metadata_out_graph(padded, in_capture=True)
    captured = backend.forward_metadata
    backend.init_forward_metadata_out_graph(make_batch(runner, "DECODE", begin, KEYS))
    replayed = backend.forward_metadata
    assert (captured.block_table.data_ptr(), captured.seqused_k.data_ptr()) == (
        replayed.block_table.data_ptr(),
        replayed.seqused_k.data_ptr(),
    )
    assert captured.max_seqlen_k == replayed.max_seqlen_k == 64
    backend.forward_metadata = captured
    out = backend.forward(parts_of(begin, KEYS, q), None, None, layer, padded, save_kv_cache=False)
    torch.testing.assert_close(out, expected(q, k, v, begin, KEYS), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"use_mla_backend": True}, "does not support MLA"),
        ({"page_size": 1}, "needs --page-size 16 or a multiple of it, got 1"),
        ({"token_to_kv_pool": SimpleNamespace()}, "got SimpleNamespace; .* --disable-hybrid-swa-memory"),
    ],
)
def test_what_the_kernels_cannot_read_is_refused_at_the_start(
    sglang: ModuleType, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        make_backend(sglang, monkeypatch, make_runner(sglang, **changes))


def test_caches_of_other_dtypes_and_layouts_are_refused(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"float8_e4m3fn, got torch\.float8_e5m2"):
        make_backend(sglang, monkeypatch, make_runner(sglang, torch.float8_e5m2))
    runner = make_runner(sglang)
    runner.token_to_kv_pool.k_buffer = [x[None] for x in runner.token_to_kv_pool.k_buffer]
    with pytest.raises(UnsupportedError, match="unset SGLANG_USE_HND_KVCACHE"):
        make_backend(sglang, monkeypatch, runner)


def test_what_a_step_cannot_have_is_refused_by_name(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(sglang)
    backend = make_backend(sglang, monkeypatch, runner)
    batch = make_batch(runner, "DECODE", [0, 0, 0], [1, 1, 1])
    backend.init_forward_metadata(batch)
    radix = sys.modules["sglang.srt.layers.radix_attention"]
    q = torch.zeros(3, HEADS * DIM)
    plain = radix.RadixAttention(HEADS, DIM, 0.3, KV_HEADS, 0)
    with pytest.raises(UnsupportedError, match="does not support score_mod"):
        backend.forward(q, None, None, plain, batch, score_mod=abs, rel_bias=None)
    grok = radix.RadixAttention(HEADS, DIM, 0.3, KV_HEADS, 0)
    grok.xai_temperature_len = 8
    with pytest.raises(UnsupportedError, match="a temperature that depends on the position"):
        backend.forward(q, None, None, grok, batch)
    chunked = make_backend(sglang, monkeypatch, make_runner(sglang, attention_chunk_size=8))
    plain.use_irope = True
    with pytest.raises(UnsupportedError, match="chunked attention"):
        chunked.forward(q, None, None, plain, batch)
    for words in ({"is_cross_attention": True}, {"attn_type": radix.AttentionType.ENCODER_ONLY}):
        with pytest.raises(UnsupportedError, match="encoder attention"):
            backend.forward(q, None, None, radix.RadixAttention(HEADS, DIM, 0.3, KV_HEADS, 0, **words), batch)
    batch.attn_cp_metadata = object()
    with pytest.raises(UnsupportedError, match=r"does not support context parallelism \(attn_cp_metadata\)"):
        backend.init_forward_metadata(batch)
    batch.spec_info = object()
    with pytest.raises(UnsupportedError, match="does not support speculative decoding"):
        backend.init_forward_metadata(batch)
    backend.init_cuda_graph_state(4, 4)
    with pytest.raises(UnsupportedError, match=r"captures decoding steps only, got a prompt; .* --disable-prefill-cuda-graph"):
        backend.init_forward_metadata_out_graph(make_batch(runner, "EXTEND", [0, 0, 0], [1, 1, 1]))
