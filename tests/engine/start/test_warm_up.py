"""The warm-up plan meets every tile that a step within its limits can lead to, and every kind of sampling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import pytest
from product_cases import dense, of_experts
from sampled_cases import each_nth

from fa_serve.backends.hopper.forward import tiles as hopper_tiles
from fa_serve.backends.hopper.latent.tiles import MIN_ROWS, latent_hopper_tiles
from fa_serve.backends.triton import tiles as triton_tiles
from fa_serve.backends.triton.latent.plan import latent_tiles
from fa_serve.engine.scheduler.chunk_lengths import MAX_PROMPT_LOGITS
from fa_serve.engine.start.warm_up import (
    EmptyStep,
    empty_steps,
    largest_batch,
    most_logits,
    powers_of_two,
    sampling_variants,
)
from fa_serve.ops.products.problem import Product
from fa_serve.ops.products.table import select_kernel

LIMITS = {"max_num_seqs": 256, "max_tokens": 4096, "max_keys": 8192}


def decoding(batch: int, queries: int, keys: int, heads: tuple[int, int, int], itemsize: int) -> tuple[object, ...]:
    """What the decoding kernel and the merge of its splits are compiled for; see `decode._variant` and `combine_launch`."""
    num_heads, num_kv_heads, dim = heads
    tiles = triton_tiles.decode_tiles(90, 132, 2, itemsize, dim, dim, num_heads, num_kv_heads, batch, queries, keys, 0)
    rows = num_heads // num_kv_heads * queries
    units = num_kv_heads * -(-rows // tiles.block_m)
    combine: object = None
    if tiles.balanced or tiles.splits > 1:
        combine = triton_tiles.combine_tiles(tiles.balanced, tiles.splits, dim, batch * units * min(tiles.block_m, rows))
    width = triton_tiles.batch_block(batch) if tiles.balanced else 1
    shape = (tiles.block_m, tiles.block_n, tiles.num_warps, tiles.num_stages, tiles.registers)
    return (*shape, tiles.balanced, width, combine, queries > 1)


def batches_and_queries() -> list[tuple[int, int]]:
    """Each batch with a third of the few queries, and all of them each night."""
    return each_nth(3, [*product([*range(1, 41), *range(60, 257, 7), 255, 256], range(1, 17))])


HEADS = [(32, 8, 128), (64, 8, 128), (16, 8, 64), (40, 8, 128), (28, 4, 128), (8, 1, 256), (12, 12, 64)]
ONE_OF_EACH_DIM = [(32, 8, 128), (16, 8, 64), (8, 1, 256)]


@pytest.mark.parametrize(
    ("heads", "itemsize"), [*((heads, 2) for heads in each_nth(2, HEADS)), *((heads, 1) for heads in ONE_OF_EACH_DIM)], ids=str
)
def test_the_plan_meets_every_tile_of_decoding(heads, itemsize) -> None:
    steps = [s for s in empty_steps(**LIMITS) if not s.fresh and s.queries <= 16]
    met = {decoding(s.batch, s.queries, s.keys, heads, itemsize) for s in steps}
    around = [base + d for base in (64, 128, 256, 512, 1024, 2048, 4096) for d in (-1, 0, 1)]
    lengths = [*range(1, 34), *around, 8191, 8192]
    possible = {
        decoding(batch, queries, keys, heads, itemsize)
        for batch, queries in batches_and_queries()
        for keys in lengths
        if keys >= queries
    }
    assert possible <= met


def latent_decoding(batch: int, queries: int, keys: int, heads: int) -> tuple[object, ...]:
    """The same for latent attention with 512 + 64 numbers, which Hopper's kernel decodes from so many rows on."""
    on_hopper = heads * queries >= MIN_ROWS
    tiles: triton_tiles.DecodeTiles
    if on_hopper:
        tiles = latent_hopper_tiles(132, heads, 1, batch, queries, keys, 0)
    else:
        tiles = latent_tiles(90, 132, 2, 512, heads, 1, batch, queries, keys, 0)
    units = -(-heads * queries // tiles.block_m)
    combine: object = None
    if tiles.balanced or tiles.splits > 1:
        rows = batch * units * min(tiles.block_m, heads * queries)
        combine = triton_tiles.combine_tiles(tiles.balanced, tiles.splits, 512, rows)
    width = triton_tiles.batch_block(batch) if tiles.balanced else 1
    return (on_hopper, replace(tiles, splits=0), width, combine, queries > 1)


@pytest.mark.parametrize("heads", [16, 20, 40, 128])
def test_the_plan_meets_every_tile_of_latent_decoding(heads: int) -> None:
    steps = [s for s in empty_steps(**LIMITS) if not s.fresh and s.queries <= 16]
    met = {latent_decoding(s.batch, s.queries, s.keys, heads) for s in steps}
    lengths = [*range(1, 70), 127, 128, 129, 255, 257, 511, 513, 1023, 1025, 4095, 4097, 8192]
    possible = {
        latent_decoding(batch, queries, keys, heads)
        for batch, queries in batches_and_queries()
        for keys in lengths
        if keys >= queries
    }
    assert possible <= met


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("window", [(-1, 0), (511, 0)], ids=["causal", "window"])
def test_the_plan_meets_every_tile_of_prompts(dim, window) -> None:
    def tiles(queries: int, keys: int, paged: bool) -> tuple[object, ...]:
        hopper = hopper_tiles.hopper_forward_tiles(dim, dim, window, queries, keys, True, paged)
        return hopper, triton_tiles.forward_tiles(80, 2, dim, dim, queries, keys, causal=True, paged=paged, masked=False)

    steps = empty_steps(**LIMITS)
    met = {(tiles(s.queries, s.queries if s.fresh else s.keys, not s.fresh), s.fresh) for s in steps}
    lengths = [*range(1, 1100, 9), *(base + d for base in (64, 256, 512, 1024, 2048, 4096) for d in (-1, 0, 1)), 4096, 8192]
    possible = {(tiles(q, q, False), True) for q in lengths if q <= 4096}
    possible |= {(tiles(q, k, True), False) for q in lengths if q <= 4096 for k in lengths if q <= k}
    assert possible <= met


@pytest.mark.parametrize("heads", [(32, 8, 128), (64, 8, 128), (32, 32, 128), (64, 1, 128), (16, 8, 64), (32, 2, 96)], ids=str)
def test_the_plan_meets_every_tile_that_heads_share(heads: tuple[int, int, int]) -> None:
    """Few queries of many sequences: the Hopper kernel is compiled for its tiles, and for how many heads share them."""
    num_heads, num_kv_heads, dim = heads
    group = num_heads // num_kv_heads

    def tiles(batch: int, queries: int, keys: int) -> object:
        if not hopper_tiles.packs_queries(dim, dim, group, num_kv_heads, batch, queries, keys):
            return None
        return hopper_tiles.hopper_forward_tiles(dim, dim, (-1, 0), queries * group, keys, True, True)

    steps = [s for s in empty_steps(**LIMITS) if not s.fresh and s.queries <= 16]
    met = {tiles(s.batch, s.queries, s.keys) for s in steps}
    assert {tiles(b, q, k) for b in range(1, 257) for q in range(1, 17) for k in (16, 64, 300, 1024, 2048, 8192)} <= met
    # a step of which one sequence alone has several queries is divided, and does not launch this kernel for all rows
    together = {tiles(s.batch, s.queries, s.keys) for s in steps if s.num_long == s.batch}
    assert {tiles(b, q, 8192) for b in range(1, 257) for q in range(2, 17)} <= together


def test_the_plan_meets_prompts_beside_every_class_of_batches() -> None:
    """The decoding part of a mixed step has the tiles of its batch, and the forward part of the portable kernels as well."""
    steps = [s for s in empty_steps(**LIMITS) if s.queries > 16 and not s.fresh]
    for keys in (64, 1024, 8192):
        widths = {triton_tiles.batch_block(s.batch) for s in steps if s.keys == keys and s.batch > 1}
        assert widths == {32, 256}


def test_steps_are_within_the_limits_and_named_once() -> None:
    for limits in (
        LIMITS,
        {"max_num_seqs": 1, "max_tokens": 1, "max_keys": 1},
        {"max_num_seqs": 5, "max_tokens": 48, "max_keys": 100},
    ):
        steps = empty_steps(**limits)
        assert len(steps) == len(set(steps)) < 500
        assert all(s.batch <= limits["max_num_seqs"] and s.num_tokens <= limits["max_tokens"] for s in steps)
        assert all(1 <= s.queries <= s.keys <= limits["max_keys"] for s in steps)
    assert empty_steps(max_num_seqs=1, max_tokens=1, max_keys=1) == [EmptyStep(1, 1, 1, fresh=True), EmptyStep(1, 1, 1)]


def test_powers_of_two() -> None:
    assert powers_of_two(1) == [1]
    assert powers_of_two(6) == [1, 2, 4, 6]
    assert powers_of_two(64, least=16) == [16, 32, 64]


def test_sampling_variants_hold_every_combination_of_filters() -> None:
    """Kernels differ by which filters a row uses, and by whether penalties have made the logits float32."""
    params = [variant.params for variant in sampling_variants(8)]
    filters = {(p.penalised, p.greedy, p.top_k > 0, p.top_p < 1, p.min_p > 0) for p in params}
    expected = {(penalised, False, *flags) for penalised in (False, True) for flags in product((False, True), repeat=3)}
    assert filters == expected | {(False, True, False, False, False), (True, True, False, False, False)}
    assert any(variant.masked for variant in sampling_variants(8))
    assert any(p.logprobs for p in params)
    assert any(p.logit_bias for p in params)
    assert any(p.allowed_token_ids for p in params)


def test_sampling_is_warmed_up_for_one_row_and_for_the_most() -> None:
    """PyTorch loads each of its kernels when it is first launched, and has others for several rows."""
    variants = [*sampling_variants(8)]
    half = len(variants) // 2
    assert [variant._replace(rows=8) for variant in variants[:half]] == variants[half:]
    assert {variant.rows for variant in variants[:half]} == {1}
    assert {variant.rows for variant in sampling_variants(1)} == {1}


def test_the_largest_step_is_as_large_as_the_settings_allow(make_engine) -> None:
    engine = make_engine(max_num_batched_tokens=64)
    batch = largest_batch(engine.config, 100)
    assert (batch.num_tokens, len(batch.chunks)) == (64, 8)
    assert batch.num_prompt_logits == min(8 * 7, MAX_PROMPT_LOGITS)
    result = engine._runner.sample(engine._runner.launch(batch)).read()
    assert (len(result.tokens), len(result.logprobs), len(result.prompt_logprobs)) == (8, 8, 8)


SIZES = ((64, 64), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
WEIGHTS = {
    "int4": {},
    "float8-row": {"values": "float8", "group": 0},
    "float8-G128": {"values": "float8"},
    "mxfp4": {"values": "float4"},
}
MIXTURES = ((8, 2), (64, 6), (128, 8), (256, 8))
EXPERTS = {"matrices": {"values": "float"}, "columns": {"values": "float", "by_rows": False}, **WEIGHTS}


@pytest.mark.parametrize(("max_tokens", "max_keys"), [(4096, 8192), (8192, 2048), (3000, 100)])
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("values", EXPERTS)
def test_the_plan_meets_every_tile_of_products_and_experts(values: str, arch: int, max_tokens: int, max_keys: int) -> None:
    """Chunks of prompts of any size, as `target_itl` makes them, and drafts of all sequences choose by their tokens."""
    steps = empty_steps(max_num_seqs=256, max_tokens=max_tokens, max_keys=max_keys)
    planned = {step.num_tokens for step in steps}
    assert max(planned) > 0.9 * max_tokens

    def launched(product: Product, counts: Iterable[int]) -> set[object]:
        choices = [select_kernel(replace(product, tokens=tokens)) for tokens in counts]
        return {(choice.kernel.name, choice.tile) for choice in choices}

    products = [dense(n=n, k=k, arch=arch, **WEIGHTS[values]) for n, k in SIZES if values in WEIGHTS]
    products += [
        of_experts(n=1536, k=2048, num_experts=num_experts, top_k=top_k, gated=gated, arch=arch, **EXPERTS[values])
        for num_experts, top_k in MIXTURES
        for gated in (True, False)
    ]
    for each in products:
        # what decides has few values, so not every number of tokens needs to be asked about
        possible = [*range(1, min(max_tokens, 1100) + 1), *range(1100, max_tokens + 1, 7), max_tokens]
        assert launched(each, possible) == launched(each, planned)


@pytest.mark.parametrize("max_drafts", [0, 7])
@pytest.mark.parametrize("values", [*WEIGHTS, "float"])
def test_the_plan_meets_every_tile_of_the_head_with_the_log_probabilities_of_prompts(values: str, max_drafts: int) -> None:
    """The head multiplies a row for each sequence and draft, and those of prompts."""
    for max_num_seqs, max_tokens in ((8, 4096), (256, 8192), (64, 300)):
        most = min(most_logits(max_num_seqs, max_drafts), max_tokens)
        limits = {"max_num_seqs": max_num_seqs, "max_tokens": max_tokens, "max_keys": 8192}
        planned = {step.logits or step.batch for step in empty_steps(**limits, max_logits=most)}
        assert most in planned
        invariant = values == "float"
        head = dense(n=128256, k=4096, arch=90, invariant=invariant, **WEIGHTS.get(values, {"values": values}))

        def launched(counts: Iterable[int], head: Product = head) -> set[object]:
            choices = [select_kernel(replace(head, tokens=count)) for count in counts]
            return {(choice.kernel.name, choice.tile) for choice in choices}

        assert launched(range(1, most + 1)) == launched(planned)


def test_as_many_logits_as_a_step_may_have() -> None:
    assert most_logits(8, 0) == 8 + MAX_PROMPT_LOGITS
    assert most_logits(256, 0) == most_logits(256, 7) == 256 + MAX_PROMPT_LOGITS
    assert most_logits(8, 7) == 64 + MAX_PROMPT_LOGITS


def test_rows_of_logits_add_no_step() -> None:
    assert [step._replace(logits=0) for step in empty_steps(**LIMITS, max_logits=512)] == empty_steps(**LIMITS)


def test_a_draft_model_has_no_penalties_and_no_masks() -> None:
    variants = [*sampling_variants(8, drafting=True)]
    assert len(variants) == 2 * 11
    assert not any(v.masked or v.params.penalised or v.params.logprobs is not None for v in variants)
