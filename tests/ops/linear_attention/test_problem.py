"""What layers keep: sizes at the shapes of models."""

from __future__ import annotations

import torch

from fa_serve import ops


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_gated_delta_rule_of_qwen3_next() -> None:
    """16 heads of keys and 32 of values: a state has 2 MiB. u and gates of a token are float32."""
    spec = ops.gated_delta_rule_state(on_meta(1, 16, 128), on_meta(1, 32, 128), on_meta(1, 32))
    assert (spec.kind, spec.page, spec.page_dtype) == ("delta", (32, 128, 128), torch.float32)
    assert spec.bytes_per_state == 2 << 20
    assert spec.bytes_per_row == 2 * 16 * 128 + 4 * 32 * 128 + 4 * 32
    by_channel = ops.gated_delta_rule_state(on_meta(1, 32, 128), on_meta(1, 32, 128), on_meta(1, 32, 128))
    assert by_channel.tail[2].shape == (32, 128)


def test_the_other_kinds() -> None:
    ssd = ops.ssd_state(on_meta(1, 128, 64), on_meta(1, 8, 128))
    assert (ssd.page, [row.shape for row in ssd.tail]) == ((128, 128, 64), [(8, 128), (128, 64), (128,)])
    assert ssd.bytes_per_state == 4 << 20
    lightning = ops.lightning_attention_state(on_meta(1, 64, 128), on_meta(1, 64, 96))
    assert (lightning.page, [row.name for row in lightning.tail]) == ((64, 128, 96), ["k", "v"])
    scan = ops.selective_scan_state(on_meta(1, 8192), on_meta(1, 16))
    assert (scan.page, scan.bytes_per_row) == ((8192, 16), 8192 * (2 + 4) + 2 * 16)
    assert ops.rg_lru_state(on_meta(1, 2560)).page == (2560,)
    conv = ops.causal_conv1d_state(on_meta(1, 8192), on_meta(8192, 4))
    assert (conv.page, conv.page_dtype, conv.bytes_per_row) == ((3, 8192), torch.bfloat16, 2 * 8192)


def test_allocation() -> None:
    """A ring has room for a page and for the rows of a step that begins at its end."""
    spec = ops.gated_delta_rule_state(on_meta(1, 2, 12), on_meta(1, 4, 10), on_meta(1, 4))
    states = spec.allocate(5, 3, 16, "cpu")
    assert states.pages.shape == (5, 4, 12, 10)
    assert [x.shape for x in states.tails] == [(3, 32, 2, 12), (3, 32, 4, 10), (3, 32, 4)]
    assert sum(x.nbytes for x in states.tails) == 3 * 32 * spec.bytes_per_row
    assert [ops.tail_rows(page_size) for page_size in (4, 16, 64)] == [20, 32, 128]


def test_states_of_float64() -> None:
    spec = ops.rg_lru_state(torch.empty(1, 8, dtype=torch.float64))
    assert spec.page_dtype == spec.tail[1].dtype == torch.float64
