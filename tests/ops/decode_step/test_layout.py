"""How the work of a decoding step is divided between the programs of its kernel."""

from __future__ import annotations

import pytest

from fa_serve.ops.decode_step.layout import StepLayout, StepShape, StepTile, layout_of, row_share, splits_of, unsupported_shape

QWEN = StepShape(1024, 3072, 16, 8, 128, 128, True, False, 2)
LLAMA = StepShape(4096, 14336, 32, 8, 128, 128, False, False, 2)


def layout(shape: StepShape = LLAMA, tokens: int = 1, **options: object) -> StepLayout:
    given = {"programs": 132, "arch": 90, "max_seqlen_q": 1, "page_size": 16, "kind": 0} | options
    return layout_of(shape, tokens=tokens, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 7, 131, 132, 1024, 14336])
def test_every_row_belongs_to_one_program_and_shares_differ_by_one(rows: int) -> None:
    shares = [row_share(program, rows, 132) for program in range(132)]
    assert [begin for begin, _ in shares] == [0, *(end for _, end in shares[:-1])]
    assert shares[-1][1] == rows
    lengths = {end - begin for begin, end in shares}
    assert max(lengths) - min(lengths) <= 1


def test_tiles_have_the_bytes_that_are_asked_for_unless_a_share_is_smaller() -> None:
    wide = layout()
    assert (wide.qkv.block_rows, wide.qkv.block_k) == (8, 2048)
    assert (wide.gate_up.block_rows, wide.gate_up.outputs_of_tile) == (8, 4)
    assert wide.down.blocks_of_row == 7
    small = layout(QWEN)
    assert (small.o.block_rows, small.o.block_k) == (8, 2048)  # 1024 rows are 7 or 8 for each program
    assert (small.qkv.block_rows, small.qkv.block_k) == (16, 1024)
    assert layout(QWEN, tile=StepTile(tile_bytes=16384)).qkv.block_rows == 8


def test_several_tokens_fill_a_tile_of_tensor_cores() -> None:
    several = layout(QWEN, tokens=5)
    assert several.block_t == 8
    for product in (several.qkv, several.o, several.gate_up, several.down):
        assert product.block_rows >= 16
        assert product.block_k == 512
        assert product.k_groups == 8


def test_splits_fill_the_programs_and_are_one_at_least() -> None:
    one = layout()
    assert one.max_splits == 16
    assert [splits_of(one, batch) for batch in (1, 2, 4, 8)] == [16, 8, 4, 2]
    assert splits_of(layout(programs=3), 8) == 1
    assert one.parts_of_unit == 16 * 4 * 130
    assert one.merged_splits == 16


def test_requests_ahead_are_those_of_hopper() -> None:
    assert layout().ahead_bytes == 65536
    assert layout(arch=80).ahead_bytes == 0


def test_other_sizes_are_refused_with_a_reason() -> None:
    assert unsupported_shape(LLAMA, 8) is None
    assert "at most 8 tokens, got 9" in str(unsupported_shape(LLAMA, 9))
    assert "head_dim" in str(unsupported_shape(LLAMA._replace(head_dim=96), 1))
    assert "multiple of num_kv_heads" in str(unsupported_shape(LLAMA._replace(num_kv_heads=5), 1))
    assert "hidden must be a multiple of 8" in str(unsupported_shape(LLAMA._replace(hidden=4100), 1))
    assert "intermediate" in str(unsupported_shape(LLAMA._replace(intermediate=14337), 1))


def test_weights_of_a_layer() -> None:
    assert LLAMA.weights == 4096 * (6144 + 4096 + 3 * 14336)
