"""The plugin as a user meets it: registration, the three ways to switch a model over, refusals, and the adapter's own parts."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_families import BY_NAME, VOCAB, assert_same
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    CompileConfig,
    Kosmos2ForConditionalGeneration,
    LlamaConfig,
    StaticCache,
    masking_utils,
)
from transformers.integrations.executorch import convert_and_export_with_cache

import fa_serve
from fa_serve import hf
from fa_serve.backends.reference import attention_reference, visible_keys
from fa_serve.hf import attention, masks, models, ops
from fa_serve.hf.masks import Implicit, classify
from fa_serve.spec import UnsupportedModelError
from fa_serve.testing import make_qkv


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(0))


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


REGISTERED = """
from transformers import AttentionInterface, AttentionMaskInterface
assert 'fa_serve' in AttentionInterface() and 'fa_serve' in AttentionMaskInterface()
"""


@pytest.mark.parametrize(
    "first",
    ["import fa_serve, transformers.modeling_utils", "import fa_serve.hf", "import transformers.modeling_utils, fa_serve"],
)
def test_any_order_of_imports_registers(first: str) -> None:
    done = python(first + REGISTERED)
    assert done.returncode == 0, done.stderr


def test_without_transformers_only_patch_is_missing() -> None:
    code = "import sys; sys.modules['transformers'] = None; import fa_serve; fa_serve.attention; fa_serve.patch"
    done = python(code)
    assert done.returncode == 1
    assert "fa_serve's adapter needs transformers >= 5.17 (pip install 'transformers>=5.17')" in done.stderr


def test_an_old_transformers_is_named() -> None:
    done = python("import transformers; transformers.__version__ = '5.16.2'; import fa_serve.hf")
    assert done.returncode == 1
    assert "needs transformers >= 5.17 (pip install 'transformers>=5.17'): found 5.16.2" in done.stderr


@torch.no_grad()
def test_three_ways_to_the_same_tokens(tmp_path: Path) -> None:
    eager = BY_NAME["llama"].build()
    eager.save_pretrained(tmp_path)
    ids = tokens(2, 9)
    expected = eager.generate(ids, do_sample=False, max_new_tokens=8)

    named = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="fa_serve")
    switched = AutoModelForCausalLM.from_pretrained(tmp_path)
    switched.set_attn_implementation("fa_serve")
    patched = fa_serve.patch(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"))
    for model in (named, switched, patched):
        assert model.config._attn_implementation == "fa_serve"
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=8), expected)


def test_patch_reaches_parts_with_a_config_of_their_own() -> None:
    model = fa_serve.patch(BY_NAME["t5"].build())
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"fa_serve"}


def test_only_some_parts() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", "vocab_size": 32, "num_key_value_heads": 2, **sizes},
        vision_config={"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **sizes},
    )
    model = AutoModel.from_config(config, attn_implementation={"text_config": "fa_serve", "vision_config": "eager"})
    assert model.language_model.config._attn_implementation == "fa_serve"
    assert model.vision_tower.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon", "gptj", "gpt_neo", "codegen", "xlnet", "reformer"])
def test_a_model_that_computes_its_own_attention_is_refused_at_load(name: str) -> None:
    config = AutoConfig.for_model(name)
    with torch.device("meta"), pytest.raises(UnsupportedModelError, match=r"computes its attention by itself.*eager"):
        AutoModel.from_config(config, attn_implementation="fa_serve")


def test_patch_refuses_before_it_changes_anything() -> None:
    config = AutoConfig.for_model("bloom", n_layer=1, hidden_size=32, n_head=2, vocab_size=32)
    model = AutoModel.from_config(config, attn_implementation="eager")
    with pytest.raises(UnsupportedModelError, match="BloomModel computes its attention by itself"):
        fa_serve.patch(model)
    assert model.config._attn_implementation == "eager"


def test_what_is_told_by_an_unknown_name_is_refused() -> None:
    """DeepSeek-V3.2 leaves the choice of keys to an implementation that it does not know, and tells it in `indices`."""
    with torch.device("meta"), pytest.raises(UnsupportedModelError, match=r"tells its attention \['indices'\], which fa_serve"):
        AutoModel.from_config(AutoConfig.for_model("deepseek_v32", num_hidden_layers=1), attn_implementation="fa_serve")


def test_a_models_source_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
def my_eager_attention_forward(module, query, key, value, attention_mask, alibi=None, **kwargs): ...
class Attention:
    def forward(self, attention_mask, **kwargs):
        return attention_interface(self, q, k, v, attention_mask, temperature=2.0, **kwargs)
class Other:
    def forward(self, attention_mask):
        return attention_mask[:, None]
"""
    monkeypatch.setitem(sys.modules, "plain", types.ModuleType("plain"))
    monkeypatch.setitem(sys.modules, "handling", types.ModuleType("handling"))
    monkeypatch.setattr(
        inspect, "getsource", lambda module: {"plain": source, "handling": source.replace("class Other:", "")}[module.__name__]
    )
    assert models._read("plain").told - models._KNOWN == {"alibi", "temperature"}
    assert not models._read("plain").works_on_masks
    assert models._read("handling").works_on_masks


@pytest.mark.parametrize("name", ["sam_vision_model", "deepseek_vl_hybrid"])
def test_a_table_of_classes_by_name_is_refused_with_a_sentence(name: str) -> None:
    config = AutoConfig.for_model(name)
    with torch.device("meta"), pytest.raises(UnsupportedModelError, match="computes its attention by itself"):
        AutoModel.from_config(config, attn_implementation="fa_serve")


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_attention_weights_are_refused_to_a_model_that_collects_them_without_a_word(family: str) -> None:
    model = fa_serve.patch(BY_NAME[family].build())
    with pytest.raises(UnsupportedModelError, match="never forms the attention weights"):
        model(tokens(1, 5), output_attentions=True)


@torch.no_grad()
@pytest.mark.parametrize("shared", [False, True])
def test_beits_bias_is_added_to_no_mask(shared: bool) -> None:
    config = AutoConfig.for_model(
        "beit",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        use_relative_position_bias=not shared,
        use_shared_relative_position_bias=shared,
    )
    torch.manual_seed(0)
    eager = AutoModel.from_config(config, attn_implementation="eager").eval()
    for name, parameter in eager.named_parameters():
        if "relative_position_bias_table" in name:
            parameter.normal_()
    ours = fa_serve.patch(copy.deepcopy(eager))
    pixels = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(pixels).last_hidden_state, eager(pixels).last_hidden_state, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_keys_of_something_else_are_seen_whatever_the_module_says() -> None:
    """Kosmos 2 reads an image by an attention that calls itself causal."""
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


def test_informers_other_attention_is_refused() -> None:
    config = AutoConfig.for_model("informer", prediction_length=4, context_length=8)
    with torch.device("meta"), pytest.raises(UnsupportedModelError, match="works on masks in the form that eager"):
        AutoModel.from_config(config, attn_implementation="fa_serve")


@torch.no_grad()
def test_a_mask_that_is_worked_on_outside_of_attention_is_a_tensor() -> None:
    """SigLIP 2 repeats its mask for the head that pools."""
    config = AutoConfig.for_model(
        "siglip2_vision_model",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_patches=16,
        patch_size=4,
    )
    torch.manual_seed(0)
    eager = AutoModel.from_config(config, attn_implementation="eager").eval()
    ours = fa_serve.patch(copy.deepcopy(eager))
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 9:] = 0
    given = {
        "pixel_values": torch.randn(2, 16, 48),
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[4, 4], [3, 3]]),
    }
    theirs = eager(**given)
    found = ours(**given)
    torch.testing.assert_close(found.pooler_output, theirs.pooler_output, rtol=1e-4, atol=1e-5)
    assert_same(found.last_hidden_state, theirs.last_hidden_state, mask)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_gpt2_generates_in_a_static_cache(padded: bool) -> None:
    eager = BY_NAME["gpt2"].build()
    ours = fa_serve.patch(copy.deepcopy(eager))
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[0, : 3 * padded] = 0
    given = {
        "attention_mask": mask,
        "max_new_tokens": 5,
        "do_sample": False,
        "cache_implementation": "static",
        "pad_token_id": 0,
    }
    ids = tokens(2, 7)
    assert ours.generate(ids, **given).tolist() == eager.generate(ids, **given).tolist()


def test_attention_beside_the_interface_is_refused() -> None:
    with (
        torch.device("meta"),
        pytest.raises(UnsupportedModelError, match=r"BigBirdPegasus\w+ works on masks in the form that eager"),
    ):
        AutoModel.from_config(AutoConfig.for_model("bigbird_pegasus", encoder_layers=1), attn_implementation="fa_serve")


@torch.no_grad()
def test_a_model_that_works_on_its_mask_gets_a_tensor() -> None:
    config = AutoConfig.for_model(
        "doge",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        keep_window_size=8,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ours = fa_serve.patch(copy.deepcopy(eager))
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[0, :5] = 0
    ids = tokens(2, 24)
    assert_same(ours(ids, attention_mask=mask).logits, eager(ids, attention_mask=mask).logits, mask)


def test_dropout_is_refused() -> None:
    model = fa_serve.patch(BY_NAME["llama"].build(attention_dropout=0.1))
    model(tokens(1, 4))
    with pytest.raises(UnsupportedModelError, match=r"LlamaAttention asks for attention dropout 0\.1"):
        model.train()(tokens(1, 4))


def test_attention_weights_are_refused() -> None:
    model = fa_serve.patch(BY_NAME["llama"].build())
    with pytest.raises(UnsupportedModelError, match="never forms the attention weights"):
        model(tokens(1, 4), output_attentions=True)
    with pytest.raises(UnsupportedModelError, match="never forms the attention weights"):
        model(tokens(1, 4), output_attentions=True, cache=object())  # as transformers' continuous batching calls it
    with pytest.raises(ValueError, match=r"output_attentions.*eager"):
        model.config.output_attentions = True


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("mamba", {}, "it keeps more than keys and values"),
        ("jamba", {}, "it keeps more than keys and values"),
        ("bart", {}, "takes no"),
        ("t5", {}, "not the config of a causal language model"),
        ("bert", {}, "needs a mask of its own"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "depends on the longest"),
        ("bloom", {}, "computes its attention by itself"),
        ("diffllama", {"num_key_value_heads": 4}, "attends more than once"),
        ("roberta", {"is_decoder": True}, "numbers its positions from its padding token"),
    ],
)
def test_configs_that_no_paged_cache_can_serve(model_type: str, changes: dict[str, Any], reason: str) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4}
    with pytest.raises(UnsupportedModelError, match=reason):
        hf.check_model(AutoConfig.for_model(model_type, **small, **changes))


def test_layers_are_told_from_a_config_alone() -> None:
    family = BY_NAME["gpt-oss"]
    layers = hf.attention_layers(family.build().config)
    assert [(s.window_size, s.sinks, s.head_dim, s.num_heads, s.num_kv_heads) for s in layers] == [
        ((4, 0), True, 32, 4, 2),
        ((-1, 0), True, 32, 4, 2),
    ]
    large = LlamaConfig(hidden_size=8192, num_attention_heads=64, num_key_value_heads=8, num_hidden_layers=3)
    assert [s.head_dim for s in hf.attention_layers(large)] == [128] * 3


CAUSAL = masking_utils.causal_mask_function
FULL = masking_utils.bidirectional_mask_function
NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 2]])
SEQUENCES = masking_utils.packed_sequence_mask_function(NUMBERS)
SLIDING = masking_utils.sliding_window_causal_mask_function(3)
SLIDING_FULL = masking_utils.sliding_window_bidirectional_mask_function(3)


def test_plain_patterns_are_recognised() -> None:
    assert classify(CAUSAL) == ((-1, 0), None)
    assert classify(FULL) == ((-1, -1), None)
    assert classify(SLIDING) == ((2, 0), None)
    assert classify(SLIDING_FULL) == ((3, 3), None)
    assert classify(masking_utils.and_masks(CAUSAL, SEQUENCES)) == ((-1, 0), NUMBERS)
    assert classify(masking_utils.and_masks(SLIDING, SEQUENCES)) == ((2, 0), NUMBERS)


@pytest.mark.parametrize(
    "function",
    [
        masking_utils.or_masks(CAUSAL, SLIDING),
        masking_utils.and_masks(CAUSAL, lambda b, h, q, k: q != k),
        masking_utils.and_masks(CAUSAL, SLIDING, SEQUENCES),
        masking_utils.and_masks(SLIDING, masking_utils.sliding_window_overlay(2)),
        masking_utils.and_masks(masking_utils.and_masks(CAUSAL, SEQUENCES), SEQUENCES),
        masking_utils.and_masks(masking_utils.sliding_window_overlay(3), FULL),
        masking_utils.sliding_window_causal_mask_function(0),
        masking_utils.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int64)),
        masking_utils.or_masks(CAUSAL, masking_utils.blockwise_overlay(NUMBERS)),
        lambda b, h, q, k: k <= q,
    ],
)
def test_everything_else_is_not(function: Any) -> None:
    assert classify(function) is None


def seen(mask: Tensor | Implicit, batch: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """A mask in either form, spelled out."""
    if isinstance(mask, Tensor):
        return mask.expand(batch, 1, seqlen_q, seqlen_k)
    keys = mask.keys or seqlen_k
    keep = visible_keys(seqlen_q, keys, mask.window_size, torch.device("cpu")).expand(batch, 1, -1, -1)
    if mask.padding is not None:
        keep = keep & mask.padding[:, None, None, :]
    if mask.starts is not None:
        number = torch.bucketize(torch.arange(keys), mask.starts[1:], right=True)
        keep = keep & (number[:, None] == number[None, :])
    return torch.nn.functional.pad(keep, (0, seqlen_k - keys))


@pytest.fixture(params=["kernels", "none"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Kernels take a mask over keys alone in a decoding step, and packed keys behind a padded prompt; others the whole mask."""
    if request.param == "kernels":
        monkeypatch.setattr(masks, "KERNELS_ON", {"cpu"})
    return bool(request.param == "kernels")


LAYOUTS = {
    "no cache": (6, 6, 0, 0),
    "continued": (3, 11, 8, 0),
    "decode": (1, 11, 10, 0),
    "static, empty": (6, 16, 0, 0),
    "static, sliding": (6, 16, 2, 0),
    "static, filled": (4, 16, torch.tensor(5), 0),
    "static, decode": (1, 16, torch.tensor(5), 0),
    "rolled": (4, 6, 9, 7),
    "rolled, decode": (1, 3, 9, 7),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("padding", ["none", "left", "right", "short"])
@pytest.mark.parametrize("function", [CAUSAL, SLIDING, FULL, SLIDING_FULL], ids=["causal", "sliding", "full", "sliding-full"])
def test_mask_says_what_transformers_says(
    function: Any, padding: str, layout: tuple[int, int, Any, int], kernels: bool
) -> None:
    q_length, kv_length, q_offset, kv_offset = layout
    mask = None
    if padding != "none":
        mask = torch.ones(2, kv_length + kv_offset - (padding == "short"), dtype=torch.bool)
        mask[0, slice(0, 3) if padding == "left" else slice(-2, None)] = False
    arguments = {
        "batch_size": 2,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": function,
        "attention_mask": mask,
    }
    ours = hf.mask_forward(**arguments)
    theirs = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert torch.equal(seen(ours, 2, q_length, kv_length), theirs.expand(2, 1, q_length, kv_length))
    if function is CAUSAL and (q_length > 1 or kernels or not isinstance(q_offset, Tensor)):
        assert isinstance(ours, Implicit)


@pytest.mark.parametrize("sliding", [False, True])
def test_packed_sequences_stay_packed(sliding: bool) -> None:
    """However the installed transformers composes the function that describes them."""
    create = masking_utils.create_sliding_window_causal_mask if sliding else masking_utils.create_causal_mask
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    masks = []
    for implementation in ("fa_serve", "sdpa"):
        config = LlamaConfig(sliding_window=2, attn_implementation=implementation)
        masks.append(create(config, torch.empty(1, 6, 1), None, None, positions))
    ours, theirs = masks
    assert isinstance(ours, Implicit)
    assert ours.starts is not None
    assert ours.starts.tolist() == [0, 3, 5, 6]
    assert torch.equal(seen(ours, 1, 6, 6), theirs)


def test_the_mask_of_a_rolled_window_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch with an address that is no multiple of 16 goes through the JIT, in every layer."""
    monkeypatch.setattr(masks, "KERNELS_ON", {"cpu"})
    mask = torch.rand(1, 10) < 0.5
    ours = hf.mask_forward(1, 1, 3, q_offset=9, kv_offset=7, mask_function=SLIDING, attention_mask=mask)
    assert isinstance(ours, Implicit)
    assert ours.padding is not None
    assert torch.equal(ours.padding, mask[:, 7:])
    assert ours.padding.data_ptr() % 16 == 0


def test_a_mask_moves_as_a_tensor_does() -> None:
    mask = Implicit((3, 0), 5, torch.ones(1, 5, dtype=torch.bool)).to("meta", non_blocking=True).contiguous()
    assert (mask.window_size, mask.keys, mask.starts) == ((3, 0), 5, None)
    assert mask.padding is not None
    assert mask.padding.is_meta


PACKED = {
    "left": ([3, 0, 5], CAUSAL, True),
    "left, window": ([3, 0, 5], SLIDING, True),
    "left, both ways": ([3, 0, 5], FULL, True),
    "right": ([-3, 0, -5], CAUSAL, False),
    "right, both ways": ([-3, 0, -5], FULL, True),
    "right, window both ways": ([-3, 0, -5], SLIDING_FULL, False),
    "nothing left": ([0, 7], CAUSAL, False),
}


@pytest.mark.parametrize("offset", [0, 2], ids=["prompt", "chunk"])
@pytest.mark.parametrize(("pads", "function", "packs"), PACKED.values(), ids=PACKED)
def test_keys_are_packed_where_kernels_can_count_from_their_end(
    pads: list[int], function: Any, packs: bool, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "KERNELS_ON", {"cpu"})
    keep = torch.ones(len(pads), 7, dtype=torch.bool)
    for row, pad in enumerate(pads):
        keep[row, slice(pad) if pad > 0 else slice(7 + pad, None)] = False
    queries = 7 - offset
    given = {"batch_size": len(pads), "q_length": queries, "kv_length": 7, "q_offset": offset, "mask_function": function}
    mask = hf.mask_forward(**given, attention_mask=keep)
    assert isinstance(mask, Implicit)
    assert (mask.packing is not None) == packs
    q, k, v = make_qkv(len(pads), queries, 7, 4, 2, 16)
    truth = masking_utils.sdpa_mask(**given, attention_mask=keep, allow_is_causal_skip=False)
    expected, _ = attention_reference(q, k, v, softmax_scale=0.25, mask=truth)
    if packs:  # nobody reads a key that was left out
        k = k.masked_fill(~keep[..., None, None], torch.nan)
    torch.testing.assert_close(attend(q, k, v, mask), expected)


def test_a_mask_that_must_not_be_skipped_is_spelled_out() -> None:
    arguments = {"batch_size": 1, "q_length": 6, "kv_length": 6, "mask_function": CAUSAL, "allow_is_causal_skip": False}
    assert torch.equal(hf.mask_forward(**arguments), masking_utils.sdpa_mask(**arguments))


class Module(torch.nn.Module):
    is_causal = True


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Implicit | None, **options: Any) -> Tensor:
    head_first = (x.transpose(1, 2) for x in (q, k, v))
    out, weights = hf.attention_forward(Module(), *head_first, mask, **options)
    assert weights is None
    return out


@pytest.mark.parametrize("kept", [1, 4, 20])
@pytest.mark.parametrize("kind", ["window", "static", "padded", "keys packed", "sequences packed", "cu_seq_lens"])
def test_the_last_queries_of_a_mask(kind: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4 later than 5.17 cuts a mask so: what it computes are the last rows of what it computed before."""
    module = torch.nn.Module()
    options = {}
    batch = 2 if kind in ("padded", "keys packed") else 1
    q, k, v = (x.transpose(1, 2) for x in make_qkv(batch, 12, 16 if kind == "static" else 12, 4, 2, 8))
    keep = torch.ones(batch, 12, dtype=torch.bool)
    keep[-1, :5] = False
    starts = torch.tensor([0, 3, 10, 12], dtype=torch.int32)
    mask = {
        "window": Implicit((4, 0)),
        "static": Implicit((-1, 0), keys=12),
        "padded": Implicit((-1, 0), padding=keep),
        "sequences packed": Implicit((4, 0), starts=starts),
        "cu_seq_lens": Implicit((-1, 0)),
    }.get(kind)
    if kind == "keys packed":
        monkeypatch.setattr(masks, "KERNELS_ON", {"cpu"})
        mask = hf.mask_forward(2, 12, 12, attention_mask=keep)
        assert isinstance(mask, Implicit)
        assert mask.packing is not None
    elif kind == "cu_seq_lens":
        options = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    assert isinstance(mask, Implicit)
    whole = slice(None)
    last = mask[whole, whole, slice(-kept, None), whole]
    expected, _ = hf.attention_forward(module, q, k, v, mask, is_causal=True, **options)
    actual, _ = hf.attention_forward(module, q[:, :, -kept:], k, v, last, is_causal=True, **options)
    if kind in ("padded", "keys packed"):
        actual = actual[1:]
        expected = expected[1:, 5:]  # rows of padding are nobody's
        actual = actual[:, -7:]
    torch.testing.assert_close(actual, expected[:, -actual.shape[1] :])
    assert mask[whole, whole, slice(0, None), whole] is mask


@pytest.mark.parametrize("queries", [slice(2, None), slice(None, 3), 5])
def test_other_cuts_of_a_mask_are_refused(queries: Any) -> None:
    whole = slice(None)
    with pytest.raises(UnsupportedModelError, match="last queries alone"):
        Implicit((-1, 0))[whole, whole, queries, whole]


def test_a_row_that_sees_only_padding_is_zero() -> None:
    q, k, v = make_qkv(2, 6, 6, 4, 2, 16)
    padding = torch.ones(2, 6, dtype=torch.bool)
    padding[0, :3] = False
    out = attend(q, k, v, Implicit((-1, 0), padding=padding))
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
        "none": (Implicit((-1, 0), keys=9), causal),
        "padding": (
            Implicit((-1, 0), keys=9, padding=padding),
            causal & torch.nn.functional.pad(padding, (0, room))[:, None, None],
        ),
        "bool": (keep, keep),
        "float": (torch.where(keep, 0.0, float("-inf")), keep),
    }[mask]
    expected, _ = attention_reference(q, k, v, softmax_scale=1.0, mask=torch.where(truth, bias, float("-inf")))
    torch.testing.assert_close(attend(q, k, v, given, scaling=1.0, position_bias=bias), expected)


def test_without_a_mask_the_module_has_the_word() -> None:
    q, k, v = make_qkv(1, 6, 6, 2, 2, 16)
    for options, window in (
        ({}, (-1, 0)),
        ({"is_causal": False}, (-1, -1)),
        ({"sliding_window": 3}, (2, 0)),
        ({"sliding_window": 3, "is_causal": False}, (2, 2)),
    ):
        expected, _ = attention_reference(q, k, v, softmax_scale=0.25, window_size=window)
        torch.testing.assert_close(attend(q, k, v, None, **options), expected)


def test_a_mask_is_believed_before_the_module() -> None:
    q, k, v = make_qkv(1, 6, 6, 2, 2, 16)
    for window in ((-1, 0), (-1, -1), (1, 0), (2, 2)):
        expected, _ = attention_reference(q, k, v, softmax_scale=0.25, window_size=window)
        torch.testing.assert_close(attend(q, k, v, Implicit(window), is_causal=False, sliding_window=4), expected)


@pytest.mark.parametrize("shape", [(1, 6), (1, 6, 6)])
def test_masks_of_other_dimensions_are_refused(shape: tuple[int, ...]) -> None:
    q, k, v = make_qkv(1, 6, 6, 2, 2, 16)
    with pytest.raises(UnsupportedModelError, match="not of 4 dimensions"):
        attend(q, k, v, torch.ones(shape, dtype=torch.bool))


def test_packed_sequences_need_a_batch_of_one() -> None:
    q, k, v = make_qkv(2, 6, 6, 2, 2, 16)
    with pytest.raises(UnsupportedModelError, match="a batch of 1, packed end to end, got a batch of 2"):
        attend(q, k, v, None, cu_seq_lens_q=torch.tensor([0, 6], dtype=torch.int32))


GENERATE = {
    "static": {"cache_implementation": "static", "disable_compile": True},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 10},
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "batch": 1},
    "prefill in chunks": {"prefill_chunk_size": 4},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("options", GENERATE.values(), ids=GENERATE)
def test_ways_to_generate(family: str, options: dict[str, Any], kernels: bool) -> None:
    options = dict(options)
    mask = torch.ones(options.pop("batch", 2), 12, dtype=torch.int64)
    mask[0, :4] = 0
    ids = tokens(*mask.shape).masked_fill(mask == 0, 0)
    results = []
    for model in (BY_NAME[family].build(), fa_serve.patch(BY_NAME[family].build())):
        torch.manual_seed(0)
        results.append(
            model.generate(ids, attention_mask=mask, min_new_tokens=8, max_new_tokens=8, **{"do_sample": False, **options})
        )
    assert torch.equal(*results)


@torch.no_grad()
def test_a_draft_model_may_assist() -> None:
    ids = tokens(1, 9)
    eager = BY_NAME["llama"].build()
    ours = fa_serve.patch(BY_NAME["llama"].build())
    draft = fa_serve.patch(BY_NAME["llama"].build(seed=1))
    expected = eager.generate(ids, do_sample=False, min_new_tokens=8, max_new_tokens=8)
    assert torch.equal(ours.generate(ids, do_sample=False, min_new_tokens=8, max_new_tokens=8, assistant_model=draft), expected)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@torch.no_grad()
def test_compiles_without_a_graph_break(family: str) -> None:
    eager = BY_NAME[family].build()
    ours = fa_serve.patch(BY_NAME[family].build())
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :4] = 0
    ids = tokens(*mask.shape)
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    actual = compiled(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(actual[mask.bool()], eager(ids, attention_mask=mask).logits[mask.bool()], atol=3e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "graphs"),
    [("llama", 1), ("gemma3", 2)],  # a sliding static cache takes another way once it is full
)
def test_compiled_decoding_does_not_recompile(family: str, graphs: int, kernels: bool) -> None:
    eager = BY_NAME[family].build()
    ours = fa_serve.patch(BY_NAME[family].build())
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :4] = 0
    ids = tokens(*mask.shape)
    options = {"attention_mask": mask, "do_sample": False, "min_new_tokens": 8, "max_new_tokens": 8}
    compile_config = CompileConfig(backend="eager", fullgraph=True)
    compile_config._compile_all_devices = True
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    actual = ours.generate(ids, **options, cache_implementation="static", compile_config=compile_config)
    assert torch.equal(actual, eager.generate(ids, **options))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
@pytest.mark.parametrize("batch", [1, 2])
def test_compiled_decoding_has_no_sizes_that_grow(family: str, batch: int, kernels: bool) -> None:
    """Beyond transformers' own count of tokens: CUDA graphs are recorded anew for each number that a graph is given."""
    numbers: dict[str, list[int]] = {}
    ids = tokens(batch, 12)
    for name in ("sdpa", "fa_serve"):
        model = BY_NAME[family].build()
        model.set_attn_implementation(name)
        seen = numbers[name] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Any], seen: list[int] = seen, **options: Any) -> Any:
            seen.append(sum(not isinstance(x, Tensor) for x in inputs))
            return graph.forward

        compile_config = CompileConfig(backend=backend, fullgraph=True, mode=None)  # type: ignore[arg-type]
        compile_config._compile_all_devices = True
        torch.compiler.reset()
        options: dict[str, Any] = {"do_sample": False, "min_new_tokens": 4, "max_new_tokens": 4}
        given = {"attention_mask": torch.ones_like(ids), "cache_implementation": "static", "compile_config": compile_config}
        model.generate(ids, **given, **options)
    assert numbers["fa_serve"] == numbers["sdpa"]
    assert numbers["sdpa"][0] == 0 < numbers["sdpa"][1]


@torch.no_grad()
def test_a_step_compiled_by_the_user_is_one_graph(kernels: bool) -> None:
    """model(...) with a static cache, without a mask and with one of the room's length: no break, no graph for each token."""
    eager = BY_NAME["llama"].build()
    ours = fa_serve.patch(BY_NAME["llama"].build())
    ids = tokens(2, 12)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    room = torch.ones(2, 20, dtype=torch.int64)
    room[0, :3] = 0
    for padding in (None, room):
        given: list[dict[str, Any]] = [{"position_ids": torch.arange(n)[None]} for n in range(13)]
        if padding is not None:
            positions = (padding.cumsum(1) - 1).clamp(min=0)
            given = [{"attention_mask": padding[:, :n], "position_ids": positions[:, :n]} for n in range(13)]
        cache = StaticCache(config=ours.config, max_cache_len=20)
        ours(ids[:, :6], **given[6], past_key_values=cache)
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        for n in range(7, 13):
            step = dict(given[n])
            step["position_ids"] = step["position_ids"][:, -1:].clone(memory_format=torch.contiguous_format)
            if padding is not None:
                step["attention_mask"] = torch.nn.functional.pad(step["attention_mask"], (0, 20 - n))
            actual = compiled(ids[:, n - 1 : n], **step, past_key_values=cache).logits
        expected = eager(ids, **given[12]).logits[:, -1:]
        torch.testing.assert_close(actual, expected, atol=3e-5, rtol=0)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# transformers collects outputs in a global while it is traced
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@torch.no_grad()
def test_exports_with_a_static_cache(kernels: bool) -> None:
    """Each attention is one node of the exported graph, which decodes as the model does."""
    eager = BY_NAME["llama"].build()
    ours = fa_serve.patch(BY_NAME["llama"].build())
    ours.generation_config.cache_implementation = "static"
    ours.generation_config.cache_config = {"batch_size": 1, "max_cache_len": 16}
    program = convert_and_export_with_cache(ours)
    name = "fa_serve.attention.default"
    assert [str(node.target) for node in program.graph.nodes].count(name) == ours.config.num_hidden_layers
    ids = tokens(1, 9)
    module = program.module()
    steps = [module(input_ids=ids[:, n : n + 1], cache_position=torch.tensor([n])) for n in range(9)]
    torch.testing.assert_close(torch.cat(steps, 1), eager(ids).logits, atol=3e-5, rtol=0)


def test_an_export_asks_nothing_of_the_number_of_queries() -> None:
    """That may be one or many, and not known."""

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, n: Tensor) -> Tensor:
            queries = n.item()
            torch._check(queries >= 0)
            torch._check(queries <= q.shape[2])
            return attention.attention_forward(self, q[:, :, :queries], k, k, None, is_causal=False)[0]

    q, k, _ = (x.transpose(1, 2) for x in make_qkv(2, 8, 40, 4, 2, 32))
    with torch.no_grad():
        program = torch.export.export(Layer(), (q, k, torch.tensor(5)), strict=False).module()
        for n in (1, 5, 8):
            torch.testing.assert_close(program(q, k, torch.tensor(n)), Layer()(q, k, torch.tensor(n)))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_holds_the_attention(packed: bool, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of ours, which is launched past PyTorch, would leave no trace, and its output be whatever the memory held. What
    PyTorch's own operators compute, on a CPU and with gradients, is traced as they are."""

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            starts = torch.tensor([0, 3, 8], dtype=torch.int32) if packed else None
            return attention.attention_forward(self, q, k, k, None, is_causal=False, cu_seq_lens_q=starts)[0]

    q, k, other = (x.transpose(1, 2) for x in make_qkv(1, 8, 8, 4, 4, 32))
    for needs_grad in (False, True):
        with monkeypatch.context() as patch:
            if gpu:
                patch.setattr(ops, "traced", lambda *inputs, traced=ops.traced: traced(*(_on_a_gpu(x) for x in inputs)))
            traced: Any = torch.jit.trace(Layer(), (q.clone().requires_grad_(needs_grad), k), check_trace=False)
        held = str(traced.inlined_graph).count("fa_serve::attention")
        assert held == (1 if gpu and not needs_grad else 0)
        torch.testing.assert_close(traced(other, k), Layer()(other, k))
        other = other.detach().requires_grad_()
    traced(other, k).sum().backward()
    assert other.grad is not None


def _on_a_gpu(x: Tensor) -> Any:
    return types.SimpleNamespace(is_cuda=True, requires_grad=x.requires_grad)


def test_a_step_that_needs_gradients_has_them(kernels: bool) -> None:
    results = []
    for model in (BY_NAME["llama"].build(), fa_serve.patch(BY_NAME["llama"].build())):
        ids = tokens(2, 6)
        cache = model(ids[:, :5], use_cache=True).past_key_values
        model(ids[:, 5:], attention_mask=torch.ones_like(ids), past_key_values=cache).logits.sum().backward()
        results.append([p.grad for p in model.parameters()])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_who_has_gradients_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    attention._say_who_has_gradients.cache_clear()
    for _ in range(2):
        attention._say_who_has_gradients()
    assert [record.message for record in caplog.records if "no backward pass" in record.message] == caplog.messages
    assert len(caplog.messages) == 1


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
