"""The backend as vLLM calls it, on a CPU: cache update and forward against the reference, for both layouts of vLLM's cache."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_serve
from fa_serve import UnsupportedError
from fa_serve.backends.reference import attention_reference

HEADS = 4
KV_HEADS = 2
DIM = 16
PAGE = 16
QUERIES = [1, 4, 9, 3]
KEYS = [20, 4, 33, 17]
PAGES = [3, 0, 5, 6, 1, 9, 2, 8]


@pytest.fixture
def backend(vllm: ModuleType) -> Any:
    return import_module("fa_serve.vllm.paged_backend").PagedBackend


def make_cache(layout: str, dtype: torch.dtype) -> Tensor:
    """vLLM's cache of 10 pages, as older releases ask for it, or as later ones hand it over."""
    if layout == "asked":
        return torch.zeros(10, 2, PAGE, KV_HEADS, DIM, dtype=dtype)
    if layout == "heads first":
        return torch.zeros(10, KV_HEADS, PAGE, 2 * DIM, dtype=dtype)
    return torch.zeros(10, PAGE, KV_HEADS, 2 * DIM, dtype=dtype).transpose(1, 2)


def step(vllm: ModuleType) -> tuple[Any, list[list[int]]]:
    """Metadata of one step as vLLM describes it, with two padded tokens, and the slots of all keys of each sequence."""
    pages = iter(PAGES)
    table = torch.zeros(len(KEYS), 4, dtype=torch.int32)
    slots = []
    for row, count in enumerate(KEYS):
        used = [next(pages) for _ in range(-(-count // PAGE))]
        table[row, : len(used)] = torch.tensor(used, dtype=torch.int32)
        slots.append([used[i // PAGE] * PAGE + i % PAGE for i in range(count)])
    new = [slot for each, count in zip(slots, QUERIES, strict=True) for slot in each[-count:]]
    starts = torch.tensor([0, *QUERIES]).cumsum(0, dtype=torch.int32)
    metadata = vllm.backend.CommonAttentionMetadata(
        query_start_loc=starts,
        seq_lens=torch.tensor(KEYS, dtype=torch.int32),
        num_actual_tokens=sum(QUERIES),
        max_query_len=max(QUERIES),
        max_seq_len=max(KEYS),
        block_table_tensor=table,
        slot_mapping=torch.tensor(new),
    )
    return metadata, slots


@pytest.mark.parametrize("layout", ["asked", "heads first", "tokens first"])
@pytest.mark.parametrize(
    "words",
    [{}, {"sliding_window": 7}, {"logits_soft_cap": 2.0}, {"sinks": True}, {"kv_cache_dtype": "fp8"}],
    ids=["plain", "window", "softcap", "sinks", "fp8"],
)
def test_matches_the_reference(backend: Any, vllm: ModuleType, layout: str, words: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    common, slots = step(vllm)
    is_float8 = words.get("kv_cache_dtype") == "fp8"
    cache = make_cache(layout, torch.uint8 if is_float8 else torch.float32)
    sinks = torch.randn(HEADS, generator=generator) if words.get("sinks") else None
    impl = backend.get_impl_cls()(
        HEADS, DIM, 0.3, num_kv_heads=KV_HEADS, **{**words, "sinks": sinks}, use_alibi_sqrt=False, chunk_lookback=-1
    )
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor([0.25]))
    keys = [torch.randn(count, 2, KV_HEADS, DIM, generator=generator) for count in KEYS]
    for each, places in zip(keys, slots, strict=True):  # earlier steps
        impl.do_kv_cache_update(layer, each[:, 0], each[:, 1], cache, torch.tensor(places))
    new = torch.cat([each[-count:] for each, count in zip(keys, QUERIES, strict=True)])
    padded = torch.cat([new, torch.full((2, *new.shape[1:]), float("nan"))])
    impl.do_kv_cache_update(layer, padded[:, 0], padded[:, 1], cache, common.slot_mapping)
    query = torch.randn(sum(QUERIES) + 2, HEADS, DIM, generator=generator)
    output = torch.full_like(query, 7.0)
    metadata = backend.get_builder_cls()(None, [], None, torch.device("cpu")).build(0, common)
    assert impl.forward(layer, query, padded[:, 0], padded[:, 1], cache, metadata, output) is output
    assert (output[sum(QUERIES) :] == 7.0).all()
    start = 0
    for each, count in zip(keys, QUERIES, strict=True):
        k, v = each.unbind(1)
        if is_float8:
            k = (k / 0.5).to(torch.float8_e4m3fn).float() * 0.5
            v = (v / 0.25).to(torch.float8_e4m3fn).float() * 0.25
        window = words.get("sliding_window", 0) - 1 if "sliding_window" in words else -1
        exact, _ = attention_reference(
            query[None, start : start + count],
            k[None],
            v[None],
            softmax_scale=0.3,
            window_size=(window, 0),
            softcap=words.get("logits_soft_cap", 0.0),
            sinks=sinks,
        )
        torch.testing.assert_close(output[start : start + count], exact[0], rtol=1e-5, atol=2e-6)
        start += count


def test_what_vllm_asks(backend: Any, vllm: ModuleType) -> None:
    assert backend.get_name() == "CUSTOM"
    assert backend.get_kv_cache_shape(10, PAGE, KV_HEADS, DIM) == (10, 2, PAGE, KV_HEADS, DIM)
    assert [size.base for size in backend.get_supported_kernel_block_sizes()] == [16]
    assert backend.supports_head_size(128)
    assert not backend.supports_head_size(512)
    assert not backend.supports_head_size(100)
    assert backend.supports_sink()
    assert backend.supports_batch_invariance()
    assert backend.supports_compute_capability(SimpleNamespace(major=9))
    assert not backend.supports_compute_capability(SimpleNamespace(major=7))
    assert not backend.forward_includes_kv_cache_update
    builder = backend.get_builder_cls()
    assert builder._cudagraph_support is vllm.backend.AttentionCGSupport.ALWAYS
    impl = backend.get_impl_cls()(HEADS, DIM, 0.3)
    assert not impl.forward(None, None, None, None, None, None, torch.ones(2, HEADS, DIM)).any()


def test_steps_share_plans_and_a_capture_is_short(backend: Any, vllm: ModuleType) -> None:
    common, _ = step(vllm)
    builder = backend.get_builder_cls()(None, [], None, torch.device("cpu"))
    metadata = builder.build(0, common)
    assert (metadata.max_query_len, metadata.max_seq_len) == (16, 64)
    assert metadata.seq_lens is common.seq_lens
    other = builder.update_block_table(metadata, common.block_table_tensor + 1, common.slot_mapping + 1)
    assert torch.equal(other.block_table, common.block_table_tensor + 1)
    assert other.seq_lens is metadata.seq_lens
    assert builder.build_for_cudagraph_capture(common).seq_lens.tolist() == [1] * len(KEYS)


def test_layers_that_share_a_cache_do_not_write_it(backend: Any, vllm: ModuleType) -> None:
    impl = backend.get_impl_cls()(HEADS, DIM, 0.3, num_kv_heads=KV_HEADS, kv_sharing_target_layer_name="layer.0")
    cache = make_cache("asked", torch.float32)
    new = torch.ones(1, KV_HEADS, DIM)
    impl.do_kv_cache_update(None, new, new, cache, torch.tensor([0]))
    assert not cache.any()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ({"alibi_slopes": [0.5]}, "alibi_slopes"),
        ({"attn_type": "encoder_only"}, "attn_type"),
        ({"chunk_lookback": 3}, "chunk_lookback"),
        ({"new_option": torch.ones(1)}, "new_option"),
    ],
)
def test_what_the_kernels_lack_is_refused_by_name(backend: Any, words: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"does not support {name};"):
        backend.get_impl_cls()(HEADS, DIM, 0.3, **words)


def test_quantised_outputs_and_masks_for_each_sequence_are_refused(backend: Any, vllm: ModuleType) -> None:
    impl = backend.get_impl_cls()(HEADS, DIM, 0.3)
    with pytest.raises(UnsupportedError, match="does not quantise its output"):
        impl.forward(None, None, None, None, None, None, torch.ones(1, HEADS, DIM), output_scale=torch.ones(1))
    common, _ = step(vllm)
    common.causal = torch.ones(4, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match="a whole step either causally or not"):
        backend.get_builder_cls()(None, [], None, torch.device("cpu")).build(0, common)


@pytest.mark.parametrize("invariant", [False, True])
def test_batch_invariance_divides_each_sequence_by_its_own_length(
    backend: Any, vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, invariant: bool
) -> None:
    """With VLLM_BATCH_INVARIANT a sequence has the same bits alone and in a batch."""
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", invariant)
    given = []
    unwatched = fa_serve.attention_paged

    def attention_paged(*args: Any, num_splits: int, **words: Any) -> Any:
        given.append(num_splits)
        return unwatched(*args, num_splits=num_splits, **words)

    monkeypatch.setattr(import_module("fa_serve.vllm.paged_backend").api, "attention_paged", attention_paged)
    common, slots = step(vllm)
    cache = torch.randn(10, 2, PAGE, KV_HEADS, DIM, generator=torch.Generator().manual_seed(0))
    query = torch.randn(sum(QUERIES), HEADS, DIM, generator=torch.Generator().manual_seed(1))
    impl = backend.get_impl_cls()(HEADS, DIM, 0.3, num_kv_heads=KV_HEADS)
    builder = backend.get_builder_cls()(None, [], None, torch.device("cpu"))

    def forward(rows: Tensor, metadata: Any) -> Tensor:
        return impl.forward(None, rows, None, None, cache, builder.build(0, metadata), torch.empty_like(rows))

    together = forward(query, common).split(QUERIES)
    for row, (rows, expected) in enumerate(zip(query.split(QUERIES), together, strict=True)):
        alone = vllm.backend.CommonAttentionMetadata(
            query_start_loc=torch.tensor([0, len(rows)], dtype=torch.int32),
            seq_lens=common.seq_lens[row : row + 1],
            num_actual_tokens=len(rows),
            max_query_len=len(rows),
            max_seq_len=KEYS[row],
            block_table_tensor=common.block_table_tensor[row : row + 1],
            slot_mapping=torch.tensor(slots[row][-len(rows) :]),
        )
        found = forward(rows, alone)
        if invariant:
            assert torch.equal(found, expected)
        else:
            torch.testing.assert_close(found, expected)
    assert given == [4 if invariant else 0] * (1 + len(KEYS)), "a fixed number"
