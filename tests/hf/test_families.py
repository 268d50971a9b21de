"""Every family in `hf_families` computes with fa_serve what it computes with transformers' eager attention.

The checks are functions of `hf_checks`. `test_mutant_is_caught` shows that each of them fails for an adapter that drops the
padding, a window, a sink and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hf_checks import (
    check_chunked_prefill,
    check_custom_mask,
    check_decode,
    check_forward,
    check_generate,
    check_packed,
    check_paged,
    check_seq2seq,
)
from hf_families import BY_NAME, FAMILIES, LENGTH, Family, assert_same, distinct, here, pair, tokens
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache

from fa_serve import hf, ops
from fa_serve.hf.adapter import attention, masks
from fa_serve.hf.adapter.masks import ImplicitMask
from fa_serve.hf.adapter.releases import CHOOSING_LAYERS
from fa_serve.hf.adapter.translate import translate
from fa_serve.spec import UnsupportedModelError

DECODERS = [f for f in FAMILIES if f.kind == "decoder"]
ENCODERS = [f for f in FAMILIES if f.kind == "encoder"]
SEQ2SEQ = [f for f in FAMILIES if f.kind == "seq2seq"]
VISION = [f for f in FAMILIES if f.kind == "vision"]


def each(families: list[Family]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", families, ids=lambda f: f.name)


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def through_fa_serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A test in which no attention reached fa_serve would have compared eager attention with itself."""
    calls = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return hf.attention_forward(*args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "fa_serve", counting)
    yield
    assert calls


@each(DECODERS + ENCODERS)
@pytest.mark.parametrize("kind", ["none", "left", "right", "hole"])
def test_forward(family: Family, kind: str) -> None:
    check_forward(family, kind)


@each(distinct(DECODERS))
def test_packed(family: Family) -> None:
    check_packed(family)


@each(distinct(DECODERS))
def test_decode(family: Family) -> None:
    check_decode(family)


@each(distinct(DECODERS))
def test_chunked_prefill(family: Family) -> None:
    check_chunked_prefill(family)


@each(distinct(DECODERS))
@pytest.mark.parametrize("room", [LENGTH, 40], ids=["full", "room"])
def test_static_cache(family: Family, room: int) -> None:
    def make_cache(config: Any) -> StaticCache:
        return StaticCache(config=config, max_cache_len=room)

    check_decode(family, make_cache)
    check_chunked_prefill(family, make_cache)


@each(distinct(DECODERS))
def test_custom_mask(family: Family) -> None:
    check_custom_mask(family)


@each(distinct(DECODERS + SEQ2SEQ))
@pytest.mark.parametrize("kind", ["left", "right"])
def test_generate(family: Family, kind: str) -> None:
    check_generate(family, kind)


@each([f for f in DECODERS if f.paged is True])
def test_paged(family: Family) -> None:
    check_paged(family)


def test_chunks_need_no_mask_on_devices_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with padding on one side, and each token behind them, also with a static cache that is full."""
    monkeypatch.setattr(masks, "KERNELS_ON", {"cpu"})
    monkeypatch.setattr(masks, "sdpa_mask", None)
    llama4 = BY_NAME["llama4"]
    for kind in ("none", "left", "right"):
        check_forward(llama4, kind)
    check_decode(llama4)
    check_decode(llama4, lambda config: StaticCache(config=config, max_cache_len=LENGTH))


@each([f for f in DECODERS if "index_topk" in f.config])
def test_few_queries_gather_the_keys_they_choose_on_devices_with_kernels(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args[0].shape[0])
        return own(*args, **kwargs)

    own = ops.sparse_attention
    monkeypatch.setattr(masks, "KERNELS_ON", {"cpu"})
    monkeypatch.setattr(ops, "sparse_attention", counting)
    check_decode(family)
    check_chunked_prefill(family)
    assert max(calls) == 3 * 14  # a prompt of up to FEW_QUERIES tokens, in a batch of 3
    choosing = sum(kind in CHOOSING_LAYERS for kind in family.make_config().layer_types)
    assert calls.count(3) == choosing * 10  # 10 tokens of a batch of 3


@each([f for f in DECODERS if "index_topk" in f.config])
def test_gradients_with_chosen_keys(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "KERNELS_ON", {"cpu"})
    ids = tokens(2, 12)
    gradients = []
    with torch.enable_grad():
        for model in pair(family):
            model(ids).logits.square().mean().backward()
            gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
            model.zero_grad()
    assert gradients[0].keys() == gradients[1].keys()
    largest = max(float(each.abs().max()) for each in gradients[0].values())
    for name, expected in gradients[0].items():
        allowed = 1e-4 * float(expected.abs().max()) + 1e-6 * largest  # some gradients are sums that nearly cancel
        torch.testing.assert_close(gradients[1][name], expected, atol=allowed, rtol=1e-3)


@each(SEQ2SEQ)
@pytest.mark.parametrize("kind", ["none", "left", "right", "hole"])
def test_seq2seq(family: Family, kind: str) -> None:
    check_seq2seq(family, kind)


@each(VISION)
def test_vision(family: Family) -> None:
    eager, ours = pair(family)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0), device="cpu").to(here())
    expected, actual = (out.logits if "logits" in out else out.last_hidden_state for out in (eager(pixels), ours(pixels)))
    assert_same(actual, expected)


def without(**changes: Any) -> Callable[..., Any]:
    """The attention function without some of its words."""

    def mutant(*args: Any, **kwargs: Any) -> Any:
        return hf.attention_forward(*args, **{**kwargs, **changes})

    return mutant


def _blind_to_padding(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    return hf.attention_forward(
        module, q, k, v, replace(mask, key_mask=None) if isinstance(mask, ImplicitMask) else mask, **kwargs
    )


def _blind_to_masks(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    return hf.attention_forward(module, q, k, v, None, **kwargs)


def _blind_to_packs(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
    whole = replace(mask, cu_seqlens=None) if isinstance(mask, ImplicitMask) else mask
    call = translate(module, q, k, v, whole, **{**kwargs, "cu_seq_lens_q": None, "cu_seq_lens_k": None})
    return attention._attend(call), None


def _blind_to_windows(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
    if isinstance(mask, ImplicitMask):
        mask = replace(mask, window_size=(-1, mask.window_size[1]))
    return hf.attention_forward(module, q, k, v, mask, **{**kwargs, "sliding_window": None})


def _window_off_by_one(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
    if isinstance(mask, ImplicitMask) and mask.window_size[0] > 0:
        mask = replace(mask, window_size=(mask.window_size[0] + 1, mask.window_size[1]))
    return hf.attention_forward(module, q, k, v, mask, **kwargs)


def _causal_in_name_only(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
    if isinstance(mask, ImplicitMask):
        mask = replace(mask, window_size=(mask.window_size[0], -1))
    return hf.attention_forward(module, q, k, v, mask, **kwargs)


def _causal_from_the_top(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
    if 1 < q.shape[2] < k.shape[2]:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()[None, None]
    return hf.attention_forward(module, q, k, v, mask, **kwargs)


def _flash_style_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """The mask of an implementation that knows only causality and padding."""
    return ImplicitMask((-1, 0), key_mask=None if attention_mask is None else attention_mask[:, None, None])


def _blind_to_room(**kwargs: Any) -> Any:
    """Takes the free room of a static cache for keys."""
    mask = hf.mask_forward(**kwargs)
    return replace(mask, num_keys=None) if isinstance(mask, ImplicitMask) else mask


MUTANTS: list[tuple[str, str, Callable[[Family], None], dict[str, Callable[..., Any]]]] = [
    ("padding ignored", "llama", lambda f: check_forward(f, "left"), {"attention": _blind_to_padding}),
    ("padding ignored, decode", "llama", check_decode, {"attention": _blind_to_padding}),
    ("padding ignored, encoder", "bert", lambda f: check_forward(f, "right"), {"attention": _blind_to_padding}),
    ("causality ignored", "llama", lambda f: check_forward(f, "none"), {"attention": _causal_in_name_only}),
    ("window ignored", "mistral", lambda f: check_forward(f, "none"), {"attention": _blind_to_windows}),
    ("window ignored, encoder", "modernbert", lambda f: check_forward(f, "none"), {"attention": _blind_to_windows}),
    ("window ignored, paged", "gemma3", check_paged, {"attention": _blind_to_windows}),
    ("window off by one", "gpt-oss", lambda f: check_forward(f, "none"), {"attention": _window_off_by_one}),
    ("softcap dropped", "gemma2", lambda f: check_forward(f, "none"), {"attention": without(softcap=None)}),
    ("softcap dropped, paged", "gemma2", check_paged, {"attention": without(softcap=None)}),
    ("sinks dropped", "gpt-oss", lambda f: check_forward(f, "none"), {"attention": without(s_aux=None)}),
    ("sinks dropped, paged", "gpt-oss", check_paged, {"attention": without(s_aux=None)}),
    ("scaling dropped", "granite", lambda f: check_forward(f, "none"), {"attention": without(scaling=None)}),
    ("offset wrong", "llama", check_chunked_prefill, {"attention": _causal_from_the_top}),
    ("chunks ignored", "llama4", lambda f: check_forward(f, "none"), {"mask": _flash_style_mask}),
    ("packing ignored", "llama", check_packed, {"attention": _blind_to_packs}),
    ("own mask ignored", "llama", check_custom_mask, {"attention": _blind_to_masks}),
    ("window in the mask alone", "qwen2-moe-window", lambda f: check_forward(f, "none"), {"mask": _flash_style_mask}),
    (
        "room of a static cache",
        "llama",
        lambda f: check_chunked_prefill(f, lambda c: StaticCache(config=c, max_cache_len=40)),
        {"mask": _blind_to_room},
    ),
    ("position_bias dropped", "t5", lambda f: check_seq2seq(f, "none"), {"attention": without(position_bias=None)}),
    ("padding ignored, looking across", "bart", lambda f: check_seq2seq(f, "left"), {"attention": _blind_to_padding}),
    ("choice of keys ignored", "deepseek-v3.2", lambda f: check_forward(f, "none"), {"attention": without(indices=None)}),
    ("choice of keys ignored, decode", "glm-moe-dsa", check_decode, {"attention": without(indices=None)}),
    ("mask dropped beside position_bias", "mt5", lambda f: check_seq2seq(f, "left"), {"attention": _blind_to_padding}),
]


@pytest.mark.parametrize(("family", "check", "mutant"), [m[1:] for m in MUTANTS], ids=[m[0] for m in MUTANTS])
def test_mutant_is_caught(
    family: str, check: Callable[[Family], None], mutant: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = AttentionInterface._global_mapping["fa_serve"]
    check(BY_NAME[family])
    if "attention" in mutant:
        monkeypatch.setitem(AttentionInterface._global_mapping, "fa_serve", mutant["attention"])
    if "mask" in mutant:
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, "fa_serve", mutant["mask"])
    with pytest.raises(AssertionError, match=r"error .*, allowed"):
        check(BY_NAME[family])
    monkeypatch.setitem(AttentionInterface._global_mapping, "fa_serve", registered)


@each([f for f in DECODERS if f.paged is not True])
def test_not_paged(family: Family) -> None:
    eager, ours = pair(family)
    ours(tokens(1, 4))
    with pytest.raises(UnsupportedModelError, match=str(family.paged)):
        hf.check_model(ours)
    with pytest.raises(UnsupportedModelError, match=str(family.paged)):
        hf.check_model(eager.config)
