"""Which masks are scanned, and how long the lists of a scanned mask are kept."""

from __future__ import annotations

import pytest
import torch

from fa_serve.backends.mask_blocks import MIN_SCANNED_LENGTH, ScannedMask, ScannedMasks, cannot_scan
from fa_serve.block_lists import BlockLists
from fa_serve.spec import AttentionSpec

LENGTH = MIN_SCANNED_LENGTH


def spec_of(**changed: object) -> AttentionSpec:
    given = {
        "layout": "dense",
        "device": "cuda",
        "arch": 90,
        "dtype": torch.bfloat16,
        "kv_dtype": torch.bfloat16,
        "head_dim": 64,
        "head_dim_v": 64,
        "num_heads": 2,
        "num_kv_heads": 2,
        "mask": "bool",
        "sizes": (1, LENGTH, LENGTH),
    }
    return AttentionSpec(**(given | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"mask": "float"}, None),
        ({"op": "decode"}, "dense prompts, got op 'decode'"),
        ({"op": "backward"}, "dense prompts, got op 'backward'"),
        ({"sizes": (1, LENGTH - 1, LENGTH)}, f"at least {LENGTH} queries and keys, got {LENGTH - 1} and {LENGTH}"),
        ({"sizes": (1, LENGTH, LENGTH - 1)}, f"at least {LENGTH} queries and keys"),
        ({"sizes": None}, f"at least {LENGTH} queries and keys"),
    ],
    ids=str,
)
def test_which_masks_are_scanned(changed: dict[str, object], reason: str | None) -> None:
    given = cannot_scan(spec_of(**changed))
    assert given is None if reason is None else reason in str(given)


def found() -> ScannedMask:
    lists = BlockLists(torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32))
    return ScannedMask(lists, torch.zeros(1, 1, 1, 1, dtype=torch.uint8))


def test_spans_reach_from_the_first_to_the_last_block_that_is_not_empty() -> None:
    kinds = torch.tensor([[0, 2, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.uint8)[None, None]
    spans = ScannedMask(found().lists, kinds).spans
    assert spans.keys[0, 0].tolist() == [[1, 3], [4, -1], [0, 0]]
    assert spans.queries[0, 0].tolist() == [[2, 2], [0, 0], [3, -1], [0, 0]]


def test_lists_are_found_by_every_layer() -> None:
    """The same tensor, and slices that each layer takes anew of one tensor."""
    kept = ScannedMasks(room=2)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    whole = kept.keep(mask, 0, found())
    part = kept.keep(mask[..., :4], 0, found())
    assert kept.find(mask, 0) is whole
    assert kept.find(mask[..., :4], 0) is part
    assert kept.find(mask[..., 4:], 0) is None
    assert kept.find(mask.clone(), 0) is None


def test_a_changed_mask_is_scanned_again() -> None:
    kept = ScannedMasks(room=2)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    kept.keep(mask, 0, found())
    mask[..., 3] = False
    assert kept.find(mask, 0) is None


def test_lists_belong_to_their_stream() -> None:
    kept = ScannedMasks(room=2)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    kept.keep(mask, 5, found())
    assert kept.find(mask, 6) is None


def test_lists_go_with_their_mask() -> None:
    kept = ScannedMasks(room=2)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    kept.keep(mask[..., :4], 0, found())
    assert len(kept) == 1
    del mask
    assert len(kept) == 0


def test_the_oldest_lists_make_room() -> None:
    kept = ScannedMasks(room=2)
    masks = [torch.ones(1, 1, 8, 8, dtype=torch.bool) for _ in range(3)]
    for mask in masks[:2]:
        kept.keep(mask, 0, found())
    assert kept.find(masks[0], 0) is not None
    kept.keep(masks[2], 0, found())
    assert [kept.find(mask, 0) is None for mask in masks] == [False, True, False]


def test_masks_of_inference_mode_are_not_kept() -> None:
    kept = ScannedMasks(room=2)
    with torch.inference_mode():
        mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
        kept.keep(mask, 0, found())
    assert len(kept) == 0
    assert kept.find(mask, 0) is None
