"""`attention_forward`: values of its kinds of calls against the reference, refusals, gradients, and plans that are reused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from every_type import tiny_model
from hf_checks import attend
from hf_families import BY_NAME, cached, tokens
from opaque_backend import opaque_backend
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache, Kosmos2ForConditionalGeneration

import fa_serve
from fa_serve import hf
from fa_serve.backends.reference import attention_reference, visible_keys
from fa_serve.hf.adapter import attention, masks
from fa_serve.hf.adapter.masks import ImplicitMask
from fa_serve.launching.plans import PLANS
from fa_serve.spec import UnsupportedModelError
from fa_serve.testing import make_qkv


def test_dropout_is_refused() -> None:
    model = fa_serve.patch(BY_NAME["llama"].build(attention_dropout=0.1))
    model(tokens(1, 4))
    with pytest.raises(UnsupportedModelError, match=r"dropout must be 0 with fa_serve, got 0\.1 from LlamaAttention"):
        model.train()(tokens(1, 4))


@pytest.mark.parametrize(
    ("family", "field"),
    [("llama", "attention_dropout"), ("gpt2", "attn_pdrop"), ("bert", "attention_probs_dropout_prob"), ("t5", "dropout_rate")],
)
def test_the_remedy_for_dropout_names_the_field_of_the_config_and_works(family: str, field: str) -> None:
    given = {"decoder_input_ids": tokens(1, 4)} if family == "t5" else {}
    model = fa_serve.patch(BY_NAME[family].build(**{field: 0.1})).train()
    with pytest.raises(UnsupportedModelError, match=rf"load the model with from_pretrained\(\.\.\., {field}=0\.0\)"):
        model(tokens(1, 4), **given)
    setattr(model.config, field, 0.0)  # which the layers, as the message says, do not follow
    with pytest.raises(UnsupportedModelError, match="dropout must be 0"):
        model(tokens(1, 4), **given)
    fa_serve.patch(BY_NAME[family].build(**{field: 0.0})).train()(tokens(1, 4), **given)


def test_a_model_of_several_parts_takes_the_remedy_for_dropout_in_the_part(tmp_path: Path) -> None:
    """As the page on troubleshooting says."""
    saved = tiny_model("llava")
    saved.config.text_config.attention_dropout = 0.1
    saved.save_pretrained(tmp_path)
    load = AutoModelForImageTextToText.from_pretrained
    with pytest.raises(UnsupportedModelError, match=r"from_pretrained\(\.\.\., attention_dropout=0\.0\)"):
        load(tmp_path, attn_implementation="fa_serve").train()(input_ids=tokens(1, 4))
    model = load(tmp_path, attn_implementation="fa_serve", text_config={"attention_dropout": 0.0}).train()
    assert model(input_ids=tokens(1, 4)).logits.isfinite().all()


def test_attention_weights_are_refused() -> None:
    model = fa_serve.patch(BY_NAME["llama"].build())
    with pytest.raises(UnsupportedModelError, match="never forms the attention weights"):
        model(tokens(1, 4), output_attentions=True)
    with pytest.raises(UnsupportedModelError, match="never forms the attention weights"):
        # as transformers' continuous batching calls it
        attend(*make_qkv(1, 4, 4, 2, 2, 16), None, output_attentions=True, cache=object())
    with pytest.raises(ValueError, match=r"output_attentions.*eager"):
        model.config.output_attentions = True


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_attention_weights_that_a_model_collects_by_hooks_are_refused(family: str) -> None:
    model = fa_serve.patch(BY_NAME[family].build())
    with pytest.raises(UnsupportedModelError, match="never forms the attention weights"):
        model(tokens(1, 5), output_attentions=True)


@torch.no_grad()
def test_causality_of_a_module_does_not_hide_keys_from_elsewhere() -> None:
    """Kosmos 2 reads an image with an attention module that says it is causal: keys from elsewhere are all seen."""
    sizes = {"vocab_size": 96, "embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 2, "max_position_embeddings": 64}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32}
    config = AutoConfig.for_model("kosmos-2", latent_query_num=4, text_config=sizes, vision_config=vision | {"patch_size": 8})
    torch.manual_seed(0)
    eager = Kosmos2ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    for parameter in eager.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=1.2 * parameter[0].numel() ** -0.5)
    ours = fa_serve.patch(copy.deepcopy(eager))
    places = torch.zeros(1, 24, dtype=torch.int64)
    places[:, 4:8] = 1
    given = {"pixel_values": torch.randn(1, 3, 32, 32), "image_embeds_position_mask": places}
    given["input_ids"] = torch.randint(3, 90, (1, 24))
    torch.testing.assert_close(ours(**given).logits, eager(**given).logits, rtol=1e-4, atol=1e-4)


def test_a_row_that_sees_only_padding_is_zero() -> None:
    q, k, v = make_qkv(2, 6, 6, 4, 2, 16)
    padding = torch.ones(2, 6, dtype=torch.bool)
    padding[0, :3] = False
    out = attend(q, k, v, ImplicitMask((-1, 0), key_mask=padding[:, None, None]))
    assert torch.equal(out[0, :3], torch.zeros(3, 4, 16))
    assert (out[0, 3:].abs().amax(-1) > 0).all()
    assert (out[1].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("mask", ["none", "padding", "bool", "float"])
@pytest.mark.parametrize("room", [0, 5])
def test_position_bias_is_added_to_any_mask(mask: str, room: int) -> None:
    q, k, v = make_qkv(2, 7, 9 + room, 4, 4, 16)
    bias = torch.randn(1, 4, 7, 9 + room, generator=torch.Generator().manual_seed(1))
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[0, :2] = False
    keep = torch.nn.functional.pad(torch.rand(2, 1, 7, 9, generator=torch.Generator().manual_seed(2)) < 0.7, (0, room))
    keep[..., 0] = True
    causal = torch.nn.functional.pad(visible_keys(7, 9, (-1, 0), q.device), (0, room))
    given, truth = {
        "none": (ImplicitMask((-1, 0), num_keys=9), causal),
        "padding": (
            ImplicitMask((-1, 0), num_keys=9, key_mask=padding[:, None, None]),
            causal & torch.nn.functional.pad(padding, (0, room))[:, None, None],
        ),
        "bool": (keep, keep),
        "float": (torch.where(keep, 0.0, float("-inf")), keep),
    }[mask]
    expected, _ = attention_reference(q, k, v, softmax_scale=1.0, mask=torch.where(truth, bias, float("-inf")))
    torch.testing.assert_close(attend(q, k, v, given, scaling=1.0, position_bias=bias), expected)


def _prefix(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return (i >= j) | (j < 30)


@pytest.mark.parametrize(
    "extra", [{}, {"softcap": 5.0}, {"position_bias": torch.randn(1, 4, 150, 150)}, {"cu_seq_lens_q": True}]
)
def test_a_block_mask_of_flex_attention_is_a_mask(extra: dict[str, Any]) -> None:
    """It says what is seen in the place of the module's window, alone and with what needs a mask of elements."""
    q, k, v = make_qkv(1, 150, 150, 4, 2, 16)
    given = create_block_mask(_prefix, None, None, 150, 150, device="cpu")
    seen = create_mask(_prefix, 1, 1, 150, 150, device="cpu")
    words = dict(extra)
    if "cu_seq_lens_q" in extra:
        words["cu_seq_lens_q"] = torch.tensor([0, 90, 150])
        packed = torch.arange(150) >= 90
        seen = seen & (packed[:, None] == packed)
    bias = torch.where(seen, words.get("position_bias", torch.zeros(1, 1, 150, 150)), float("-inf"))
    expected, _ = attention_reference(q, k, v, softmax_scale=0.25, mask=bias, softcap=extra.get("softcap", 0.0))
    torch.testing.assert_close(attend(q, k, v, given, sliding_window=7, **words), expected)


@torch.no_grad()
def test_a_model_takes_a_block_mask() -> None:
    """Every layer reads the lists that the first one has made."""
    model = BY_NAME["llama"].build()
    ids = tokens(1, 150)
    given = create_block_mask(_prefix, None, None, 150, 150, device="cpu")
    hidden = ~create_mask(_prefix, 1, 1, 150, 150, device="cpu")
    expected = model(ids, attention_mask=torch.zeros(hidden.shape).masked_fill(hidden, float("-inf")), use_cache=False).logits
    fa_serve.patch(model)
    torch.testing.assert_close(model(ids, attention_mask=given, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


def test_without_a_mask_the_module_decides() -> None:
    q, k, v = make_qkv(1, 6, 6, 2, 2, 16)
    for options, window in (
        ({}, (-1, 0)),
        ({"is_causal": False}, (-1, -1)),
        ({"sliding_window": 3}, (2, 0)),
        ({"sliding_window": 3, "is_causal": False}, (2, 2)),
    ):
        expected, _ = attention_reference(q, k, v, softmax_scale=0.25, window_size=window)
        torch.testing.assert_close(attend(q, k, v, None, **options), expected)


def test_a_mask_overrides_the_module() -> None:
    q, k, v = make_qkv(1, 6, 6, 2, 2, 16)
    for window in ((-1, 0), (-1, -1), (1, 0), (2, 2)):
        expected, _ = attention_reference(q, k, v, softmax_scale=0.25, window_size=window)
        torch.testing.assert_close(attend(q, k, v, ImplicitMask(window), is_causal=False, sliding_window=4), expected)


def test_gradients_of_one_token_behind_a_cache(kernels: bool) -> None:
    results = []
    for model in (BY_NAME["llama"].build(), fa_serve.patch(BY_NAME["llama"].build())):
        ids = tokens(2, 6)
        cache = DynamicCache(config=model.config)
        model(ids[:, :5], use_cache=True, **cached(model, cache))
        model(ids[:, 5:], attention_mask=torch.ones_like(ids), **cached(model, cache)).logits.sum().backward()
        results.append([p.grad for p in model.parameters()])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_that_repeat(packed: bool) -> None:
    """ModernBERT asks for them by its setting `deterministic_flash_attn`."""
    torch.use_deterministic_algorithms(False)
    words = {"cu_seq_lens_q": torch.tensor([0, 2, 6]), "max_length_q": 4, "max_length_k": 4} if packed else {}
    for deterministic in (False, True):
        q, k, v = (x.requires_grad_() for x in make_qkv(1, 6, 6, 4, 2, 16))
        with opaque_backend() as backend:
            attend(q, k, v, None, deterministic=deterministic, **words).sum().backward()
        assert [spec.deterministic for spec, _ in backend.planned if spec.op == "backward"] == [deterministic]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_gradients(family: str) -> None:
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, -4:] = 0
    ids = tokens(*mask.shape)
    models = [BY_NAME[family].build(), fa_serve.patch(BY_NAME[family].build())]
    for model in models:
        model.train()(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    for (name, expected), actual in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert actual.grad is not None, name
        torch.testing.assert_close(
            actual.grad, expected.grad, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", ["dense", "packed", "packed keys", "with gradients"])
def test_the_result_is_contiguous(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models view it as they like."""
    monkeypatch.setattr(masks, "KERNELS_ON", {"cpu"})
    q, k, v = make_qkv(1 if kind == "packed" else 2, 20, 20, 4, 2, 16)
    mask: Any = ImplicitMask((-1, 0))
    words: dict[str, Any] = {"softcap": 5.0}
    if kind == "packed":
        words["cu_seq_lens_q"] = torch.tensor([0, 5, 20])
    elif kind == "packed keys":
        keep = torch.ones(2, 20, dtype=torch.bool)
        keep[0, :3] = False
        mask = hf.mask_forward(2, 20, 20, attention_mask=keep)
        assert mask.packed_keys is not None
    elif kind == "with gradients":
        q.requires_grad_()
    assert attend(q, k, v, mask, **words).is_contiguous()


@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("gemma3", 2), ("gpt-oss", 2)])
@torch.no_grad()
def test_layers_and_forwards_that_look_alike_share_a_plan(family: str, kinds: int) -> None:
    """One plan for each kind of layer, however many layers and forwards there are."""
    model = fa_serve.patch(BY_NAME[family].build())
    PLANS.clear()
    for _ in range(3):
        model(tokens(2, 20))
        assert len(PLANS) == kinds
    model(tokens(2, 21))
    assert len(PLANS) == 2 * kinds, "another length is another plan"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_tokens_behind_a_cache_share_a_plan(cache: str, padded: bool, kernels: bool) -> None:
    """One plan for the prompt and one for all tokens, although a dynamic cache is longer with each token."""
    model = fa_serve.patch(BY_NAME["llama"].build())
    ids = tokens(2, 18)
    mask = torch.ones_like(ids)
    mask[0, : 4 * padded] = 0
    options: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "disable_compile": True}
    sizes = []
    for count in (3, 12):
        PLANS.clear()
        model.generate(ids, min_new_tokens=count, max_new_tokens=count, cache_implementation=cache, **options)
        sizes.append(len(PLANS))
    assert sizes == [2, 2]


@pytest.mark.parametrize("with_sinks", [False, True], ids=["no-sinks", "sinks"])
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["no-softcap", "softcap"])
@pytest.mark.parametrize("window_size", [(-1, 0), (3, 0), (30, 0), (4, 4), (-1, -1)], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 24])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_a_call_without_translation_gives_what_the_translated_call_gives(
    padded: bool, seqlen_q: int, window_size: tuple[int, int], softcap: float | None, with_sinks: bool
) -> None:
    """Calls under `torch.no_grad` take the direct path, calls with gradients enabled the translated one: bitwise equal."""
    q, k, v = (x.transpose(1, 2) for x in make_qkv(2, seqlen_q, 24, 4, 2, 16))
    key_mask = None
    if padded:
        key_mask = torch.arange(24)[None, None, None, :] >= torch.tensor([0, 5])[:, None, None, None]
    mask = ImplicitMask(window_size, key_mask=key_mask)
    words = {"softcap": softcap, "s_aux": torch.randn(4) if with_sinks else None, "sliding_window": 7}
    module = torch.nn.Module()
    with torch.no_grad():
        assert attention._needs_no_translation(mask, words)
        direct, _ = attention.attention_forward(module, q, k, v, mask, 0.3, **words)
    assert not attention._needs_no_translation(mask, words)
    translated, _ = attention.attention_forward(module, q, k, v, mask, 0.3, **words)
    assert direct.is_contiguous()
    torch.testing.assert_close(direct, translated, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("word", ["position_bias", "cu_seq_lens_q"])
def test_words_that_change_the_call_are_translated(word: str) -> None:
    assert not attention._needs_no_translation(ImplicitMask((-1, 0)), {word: torch.zeros(1)})
    assert not attention._needs_no_translation(ImplicitMask((-1, 0), num_keys=3), {})
    assert not attention._needs_no_translation(ImplicitMask((-1, 0), cu_seqlens=torch.zeros(2)), {})
    assert not attention._needs_no_translation(None, {})
