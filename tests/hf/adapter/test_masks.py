"""`mask_forward` says what transformers' own mask says, and an ImplicitMask behaves as the tensor that it stands for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hf_checks import attend
from recorded_graphs import record
from torch import Tensor
from transformers import AutoConfig, AutoModel, LlamaConfig, masking_utils

import fa_serve
from fa_serve import hf
from fa_serve.backends.reference import attention_reference, visible_keys
from fa_serve.hf.adapter import masks
from fa_serve.hf.adapter.masks import ImplicitMask
from fa_serve.spec import UnsupportedModelError
from fa_serve.testing import make_qkv

pytestmark = pytest.mark.every_case  # milliseconds each, and all that models see goes through them

CAUSAL = masking_utils.causal_mask_function


FULL = masking_utils.bidirectional_mask_function


SLIDING = masking_utils.sliding_window_causal_mask_function(3)


SLIDING_FULL = masking_utils.sliding_window_bidirectional_mask_function(3)


def seen(mask: Tensor | ImplicitMask, batch: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """A mask in either form as a bool tensor of 4 dimensions."""
    if isinstance(mask, Tensor):
        return mask.expand(batch, 1, seqlen_q, seqlen_k)
    keys = mask.num_keys or seqlen_k
    keep = visible_keys(seqlen_q, keys, mask.window_size, torch.device("cpu"), mask.attention_chunk).expand(batch, 1, -1, -1)
    if mask.key_mask is not None:
        keep = keep & mask.key_mask
    if mask.cu_seqlens is not None:
        number = torch.bucketize(torch.arange(keys), mask.cu_seqlens[1:], right=True)
        keep = keep & (number[:, None] == number[None, :])
    return torch.nn.functional.pad(keep, (0, seqlen_k - keys))


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


@pytest.mark.parametrize("captured", [False, True], ids=["", "captured"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("padding", ["none", "left", "right", "short"])
@pytest.mark.parametrize("function", [CAUSAL, SLIDING, FULL, SLIDING_FULL], ids=["causal", "sliding", "full", "sliding-full"])
def test_mask_says_what_transformers_says(
    function: Any,
    padding: str,
    layout: tuple[int, int, Any, int],
    captured: bool,
    kernels: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while a CUDA graph is captured, where the host must not read a value of the device."""
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
    theirs = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    made = []
    if captured:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            record(lambda: made.append(hf.mask_forward(**arguments)), None, torch.nn.Identity())
    else:
        made.append(hf.mask_forward(**arguments))
    ours = made[0]
    assert torch.equal(seen(ours, 2, q_length, kv_length), theirs.expand(2, 1, q_length, kv_length))
    if captured:
        assert isinstance(ours, ImplicitMask) or padding != "none" or isinstance(q_offset, Tensor) or function is SLIDING_FULL
    elif function is CAUSAL and (q_length > 1 or kernels or not isinstance(q_offset, Tensor)):
        assert isinstance(ours, ImplicitMask)


@pytest.mark.parametrize("sliding", [False, True])
def test_packed_sequences_stay_packed(sliding: bool) -> None:
    """In whichever way the installed transformers composes the function that describes them."""
    create = masking_utils.create_sliding_window_causal_mask if sliding else masking_utils.create_causal_mask
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    masks = []
    for implementation in ("fa_serve", "sdpa"):
        config = LlamaConfig(sliding_window=2, attn_implementation=implementation)
        masks.append(create(config, torch.empty(1, 6, 1), None, None, positions))
    ours, theirs = masks
    assert isinstance(ours, ImplicitMask)
    assert ours.cu_seqlens is not None
    assert ours.cu_seqlens.tolist() == [0, 3, 5, 6]
    assert torch.equal(seen(ours, 1, 6, 6), theirs)


def test_the_mask_of_a_rolled_window_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that gets an address other than a multiple of 16 is launched through the JIT, in every layer."""
    monkeypatch.setattr(masks, "KERNELS_ON", {"cpu"})
    mask = torch.rand(1, 10) < 0.5
    ours = hf.mask_forward(1, 1, 3, q_offset=9, kv_offset=7, mask_function=SLIDING, attention_mask=mask)
    assert isinstance(ours, ImplicitMask)
    assert ours.key_mask is not None
    assert torch.equal(ours.key_mask, mask[:, None, None, 7:])
    assert ours.key_mask.data_ptr() % 16 == 0


def test_a_mask_moves_as_a_tensor_does() -> None:
    mask = ImplicitMask((3, 0), 5, torch.ones(1, 1, 1, 5, dtype=torch.bool)).to("meta", non_blocking=True).contiguous()
    assert (mask.window_size, mask.num_keys, mask.cu_seqlens) == ((3, 0), 5, None)
    assert mask.key_mask is not None
    assert mask.key_mask.is_meta


@pytest.mark.parametrize("length", [4, 20], ids=["crossed", "one chunk"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_chunks_begin_behind_the_padding(
    padding: str, layout: tuple[int, int, Any, int], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bool tensor of all scores is made only where a kernel would count chunks from another key."""
    q_length, kv_length, q_offset, kv_offset = layout
    pads = torch.tensor([3, 0]) if padding == "left" else torch.zeros(2, dtype=torch.int64)
    mask = None
    if padding != "none":
        mask = torch.ones(2, kv_length + kv_offset, dtype=torch.bool)
        mask[0, slice(0, 3) if padding == "left" else slice(-2, None)] = False
    arguments = {
        "batch_size": 2,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": masking_utils.chunked_causal_mask_function(length, pads),
        "attention_mask": mask,
    }
    theirs = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False).expand(2, 1, q_length, kv_length)
    for device in ("cuda", "cpu"):
        monkeypatch.setattr(masks, "KERNELS_ON", {device})
        ours = hf.mask_forward(**arguments)
        if isinstance(ours, ImplicitMask) and ours.packed_keys is not None:
            continue  # see test_keys_are_packed_where_kernels_can_count_from_their_end
        # the row of a query in the padding may hold anything
        real = slice(3, None) if padding == "left" and q_length + q_offset == kv_length else slice(None)
        assert torch.equal(seen(ours, 2, q_length, kv_length)[:, :, real], theirs[:, :, real])
    crossed = kv_offset + kv_length > length
    can_count = not crossed or (padding != "left" and kv_offset % length == 0)
    if q_length > 1 and can_count:
        assert isinstance(ours, ImplicitMask)


PACKED = {
    "left": ([3, 0, 5], CAUSAL, True),
    "left, window": ([3, 0, 5], SLIDING, True),
    "left, both ways": ([3, 0, 5], FULL, True),
    "right": ([-3, 0, -5], CAUSAL, False),
    "right, both ways": ([-3, 0, -5], FULL, True),
    "right, window both ways": ([-3, 0, -5], SLIDING_FULL, False),
    "left, chunks": ([3, 0, 5], None, True),
    "right, chunks": ([-3, 0, -5], None, False),
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
    if function is None:
        function = masking_utils.chunked_causal_mask_function(3, torch.tensor([max(pad, 0) for pad in pads]))
    queries = 7 - offset
    given = {"batch_size": len(pads), "q_length": queries, "kv_length": 7, "q_offset": offset, "mask_function": function}
    mask = hf.mask_forward(**given, attention_mask=keep)
    assert isinstance(mask, ImplicitMask)
    assert (mask.packed_keys is not None) == packs
    q, k, v = make_qkv(len(pads), queries, 7, 4, 2, 16)
    truth = masking_utils.sdpa_mask(**given, attention_mask=keep, allow_is_causal_skip=False)
    expected, _ = attention_reference(q, k, v, softmax_scale=0.25, mask=truth)
    if packs:  # a key that was left out is never read
        k = k.masked_fill(~keep[..., None, None], torch.nan)
    torch.testing.assert_close(attend(q, k, v, mask), expected)


def test_a_mask_that_must_not_be_skipped_is_a_tensor() -> None:
    arguments = {"batch_size": 1, "q_length": 6, "kv_length": 6, "mask_function": CAUSAL, "allow_is_causal_skip": False}
    assert torch.equal(hf.mask_forward(**arguments), masking_utils.sdpa_mask(**arguments))


@pytest.mark.parametrize("kept", [1, 4, 20])
@pytest.mark.parametrize("kind", ["window", "static", "padded", "keys packed", "sequences packed", "cu_seq_lens"])
def test_the_last_queries_of_a_mask(kind: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4 (later than transformers 5.17) cuts a mask to its last queries: their rows stay what they were."""
    module = torch.nn.Module()
    options = {}
    batch = 2 if kind in ("padded", "keys packed") else 1
    q, k, v = (x.transpose(1, 2) for x in make_qkv(batch, 12, 16 if kind == "static" else 12, 4, 2, 8))
    keep = torch.ones(batch, 12, dtype=torch.bool)
    keep[-1, :5] = False
    starts = torch.tensor([0, 3, 10, 12], dtype=torch.int32)
    mask = {
        "window": ImplicitMask((4, 0)),
        "static": ImplicitMask((-1, 0), num_keys=12),
        "padded": ImplicitMask((-1, 0), key_mask=keep[:, None, None]),
        "sequences packed": ImplicitMask((4, 0), cu_seqlens=starts),
        "cu_seq_lens": ImplicitMask((-1, 0)),
    }.get(kind)
    if kind == "keys packed":
        monkeypatch.setattr(masks, "KERNELS_ON", {"cpu"})
        mask = hf.mask_forward(2, 12, 12, attention_mask=keep)
        assert isinstance(mask, ImplicitMask)
        assert mask.packed_keys is not None
    elif kind == "cu_seq_lens":
        options = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    assert isinstance(mask, ImplicitMask)
    whole = slice(None)
    last = mask[whole, whole, slice(-kept, None), whole]
    expected, _ = hf.attention_forward(module, q, k, v, mask, is_causal=True, **options)
    actual, _ = hf.attention_forward(module, q[:, :, -kept:], k, v, last, is_causal=True, **options)
    if kind in ("padded", "keys packed"):
        actual = actual[1:]
        expected = expected[1:, 5:]  # rows of padding may hold anything
        actual = actual[:, -7:]
    torch.testing.assert_close(actual, expected[:, -actual.shape[1] :])
    assert mask[whole, whole, slice(0, None), whole] is mask


@pytest.mark.parametrize("queries", [slice(2, None), slice(None, 3), 5])
def test_other_cuts_of_a_mask_are_refused(queries: Any) -> None:
    whole = slice(None)
    with pytest.raises(UnsupportedModelError, match=r"cut to their last queries only, .* got mask\[\(slice"):
        ImplicitMask((-1, 0))[whole, whole, queries, whole]


@torch.no_grad()
@pytest.mark.parametrize("shared", [False, True])
def test_a_bias_is_added_to_a_mask_that_hides_nothing(shared: bool) -> None:
    """BEiT adds its relative positions to its mask."""
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


@pytest.mark.parametrize(("shape", "shown"), [((2, 5, 5), r"\(2, 5, 5\)"), ((5,), r"\(5,\)")])
def test_a_mask_of_neither_two_nor_four_dimensions_is_refused(shape: tuple[int, ...], shown: str) -> None:
    config = LlamaConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=32)
    model = AutoModel.from_config(config, attn_implementation="fa_serve").eval()
    ids = torch.arange(10).view(2, 5)
    mask = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(
        UnsupportedModelError, match=rf"must have 2 dimensions, .* or 4, .* got shape {shown}: pass attention_mask"
    ):
        model(ids, attention_mask=mask)
    if mask.dim() == 3:  # what the message advises
        seen = mask.tril()[:, None]
        torch.testing.assert_close(model(ids, attention_mask=seen)[0], model(ids)[0])
