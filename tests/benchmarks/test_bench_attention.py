"""Benches run to their end on a CPU, report nothing if results are wrong, and name what they left out."""

from __future__ import annotations

import json
import re
import signal
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import measure
from benchmarks.attention import (
    attention_cells,
    backward_problem,
    bench_attention,
    dense_problem,
    latent_problem,
    paged_problem,
    sparse_problem,
)

CASES = {
    "latent": {"h4_1_of_70x3", "h4_2_of_50x1", "h4_1_of_70x3_float8"},
    "sparse": {"d64_full_512_25%", "d64_causal_512_25%"},
    "backward": {f"d64_{mask}_{seqlen}" for mask in ("full", "causal") for seqlen in (64, 256)},
}
CELLS = {"latent": [], "sparse": ["--cells", "25%"], "backward": []}
PEERS = {"latent": set(), "sparse": {"flex", "dense"}, "backward": {"math"}}


@pytest.fixture(autouse=True)
def handler_of_interrupts() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def run(bench: str, out: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> list[dict]:
    monkeypatch.setattr(measure, "PAUSE", 0.0)
    # compiled, FlexAttention takes seconds for each cell
    monkeypatch.setattr(sparse_problem.SparseProblem, "flex", lambda problem: problem.ours("sdpa"))
    command = ["bench_attention.py", bench, "--tiny", "--head-dims", "64", "--out", str(out), *options]
    monkeypatch.setattr("sys.argv", command)
    bench_attention.main()
    return [json.loads(line) for line in (out / f"{bench}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("bench", CASES)
def test_every_cell_is_measured_after_the_gate(bench: str, tmp_path: Path, monkeypatch, capsys) -> None:
    lines = run(bench, tmp_path, monkeypatch, *CELLS[bench])
    assert {line["case"] for line in lines} == CASES[bench]
    assert all(line["ours"] > 0 and set(line["peers"]) == PEERS[bench] for line in lines)
    printed = capsys.readouterr().out
    assert printed.index("the gate holds") < printed.index(lines[0]["case"])
    assert "lack of time" not in printed


def test_no_cell_is_begun_after_the_budget(tmp_path: Path, monkeypatch, capsys) -> None:
    assert run("backward", tmp_path, monkeypatch, "--budget", "0", "--cells", "causal") == []
    assert "not measured for lack of time: d64_causal_256, d64_causal_64" in capsys.readouterr().out


def test_an_interrupt_ends_the_bench_with_what_was_measured(tmp_path: Path, monkeypatch, capsys) -> None:
    add = measure.Results.add

    def add_and_interrupt(*given: object) -> float:
        ratio = add(*given)
        signal.raise_signal(signal.SIGINT)
        return ratio

    monkeypatch.setattr(measure.Results, "add", add_and_interrupt)
    assert len(run("backward", tmp_path, monkeypatch)) == 1
    assert "not measured for lack of time" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("bench", CASES)
def test_a_wrong_result_ends_the_bench(bench: str, tmp_path: Path, monkeypatch) -> None:
    module = {"latent": latent_problem, "sparse": sparse_problem, "backward": backward_problem}[bench]
    name = "attention_paged" if bench == "latent" else "attention"
    compute = getattr(module.fa_serve, name)
    monkeypatch.setattr(module.fa_serve, name, lambda *args, **options: 1.01 * compute(*args, **options))
    with pytest.raises(AssertionError):
        run(bench, tmp_path, monkeypatch)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", attention_cells.DENSE_CLASSES)
def test_every_class_is_measured(name: str, tmp_path: Path, monkeypatch) -> None:
    """Also the call over lists that were kept, which has a line beside that of a mask that is new."""
    lines = run(name, tmp_path, monkeypatch)
    cells = attention_cells.DENSE_CLASSES[name]
    kept = {f"{cell.name}_kept" for cell in cells if cell.pattern and name != "train"}
    assert {line["case"] for line in lines} == {cell.name for cell in cells} | kept
    assert len({cell.name for cell in cells}) == len(cells)
    assert all(line["ours"] > 0 and set(line["peers"]) == {"math"} for line in lines)


@pytest.mark.parametrize("name", ["masks", "train"])
def test_a_wrong_result_ends_a_class(name: str, tmp_path: Path, monkeypatch) -> None:
    compute = dense_problem.fa_serve.attention
    monkeypatch.setattr(dense_problem.fa_serve, "attention", lambda *args, **options: 1.01 * compute(*args, **options))
    with pytest.raises(AssertionError):
        run(name, tmp_path, monkeypatch)
    assert not list(tmp_path.iterdir())


def test_a_peer_with_other_gradients_ends_the_class(tmp_path: Path, monkeypatch) -> None:
    compute = dense_problem._with_backward

    def wrong(call, problem, dout):  # type: ignore[no-untyped-def]
        scale = 1.0 if isinstance(call, partial) else 1.3  # ours is a partial call
        return tuple(scale * x for x in compute(call, problem, dout))

    monkeypatch.setattr(dense_problem, "_with_backward", wrong)
    with pytest.raises(AssertionError, match="gradients of math and ours differ"):
        run("train", tmp_path, monkeypatch, "--cells", "bert")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("pattern", ["prefix", "documents", "images", "padding", "blocks", "bias"])
def test_flex_attention_gets_the_same_mask(pattern: str, monkeypatch) -> None:
    """Not compiled, FlexAttention computes every element of its mask_mod or score_mod."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    cell = attention_cells.DenseCell("small", 2, 150, 4, 16, kv=2, pattern=pattern, extent=40)
    problem = dense_problem.DenseProblem.make(cell, torch.float32, "cpu")
    calls = problem.peers("flex")
    assert set(calls) == {"flex_scores"} | ({"flex"} if pattern != "bias" else set())
    for call in calls.values():
        torch.testing.assert_close(call(), problem.ours()(), rtol=1e-4, atol=1e-5)


def test_pytorch_gets_packed_sequences_in_the_words_of_its_release(monkeypatch) -> None:
    q = torch.randn(6, 4, 8)
    k = torch.randn(6, 2, 8)
    told: dict[str, object] = {}

    def newer(*given, window_size=(-1, -1), enable_gqa=False):  # type: ignore[no-untyped-def]
        told.update(lengths=(given[3].tolist(), given[6]), window_size=window_size, enable_gqa=enable_gqa)

    def older(*given, is_causal=False):  # type: ignore[no-untyped-def]
        told.update(is_causal=is_causal)

    module = types.SimpleNamespace(varlen_attn=newer)
    monkeypatch.setattr(measure, "import_module", lambda name: module)
    measure.pytorch_varlen(q, k, k, [2, 4], (-1, 0))["varlen"]()
    assert told == {"lengths": ([0, 2, 6], 4), "window_size": (-1, 0), "enable_gqa": True}
    module.varlen_attn = older
    measure.pytorch_varlen(q, q, q, [2, 4], (-1, 0))["varlen"]()
    assert told["is_causal"] is True


@pytest.mark.parametrize(
    ("bench", "cells"),
    [
        ("masks", 9),
        ("train", 8),
        ("prefill", 36),
        ("varlen", 2),
        ("window", 12),
        ("models", 80),
        ("chunk", 40),
        ("verify", 24),
        ("mixed", 20),
    ],
)
def test_the_last_line_names_each_cell_that_was_left_out(bench: str, cells: int, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["bench_attention.py", bench, "--budget", "0", "--out", str(tmp_path)])
    bench_attention.main()
    named = capsys.readouterr().out.splitlines()[-1].removeprefix("not measured for lack of time: ").split(", ")
    assert len(set(named)) == len(named) >= cells
    assert not (tmp_path / f"{bench}.jsonl").read_text()


def test_every_mixed_step_fits_the_pool() -> None:
    for decoding, chunks, tokens, before in attention_cells.MIXED_CELLS:
        assert 4096 * decoding + (before + tokens) * chunks <= 16 * paged_problem.POOL_PAGES
        assert 8 <= decoding <= 128
        assert 1 <= chunks <= 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["prefill", "--tiny"],
            "--tiny is for latent, sparse, backward, fp8, masks, train, encoder, cross, diffusion, wide, got prefill",
        ),
        (["tune", "--budget", "1"], "got tune"),
        (["decode", "--ways", "hopper"], "--ways is for latent, and takes hopper, portable, got decode and hopper"),
        (["latent", "--ways", "sdpa"], "got latent and sdpa"),
    ],
)
def test_options_of_other_benches_are_refused(options: list[str], message: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["bench_attention.py", *options])
    with pytest.raises(SystemExit):
        bench_attention.main()
    assert message in capsys.readouterr().err


def test_the_flash_peers_are_called_in_their_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(6, 2, 8) for _ in range(3))
    told: dict[str, dict] = {}

    def fake(name: str, *tensors: torch.Tensor, **options: object) -> object:
        told[name] = {"shape": tensors[0].shape, **options}
        return (tensors[0], None) if name == "fa4" else tensors[0]

    for name in ("fa3", "fa4"):
        monkeypatch.setattr(measure, name, lambda name=name: partial(fake, name))
    for lengths, shape in (([3, 3], (2, 3, 2, 8)), ([2, 4], (6, 2, 8))):
        calls = measure.flash_peers("fa4,fa3,cudnn", q, k, v, lengths, (-1, 0))
        assert set(calls) == {"fa3", "fa4"}
        assert all(torch.equal(call(), q) for call in calls.values())
        assert told["fa4"]["shape"] == shape  # equal lengths are a dense call
        assert ("cu_seqlens_q" in told["fa4"]) == (len(shape) == 3)
        assert told["fa4"]["window_size"] == (None, 0)
        assert told["fa3"]["shape"] == q.shape
        assert told["fa3"]["window_size"] == [-1, 0]
    assert not measure.flash_peers("cudnn", q, k, v, [3, 3], (-1, 0))


@pytest.mark.slow
def test_the_ideas_of_float8_inputs_lower_the_error(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["bench_attention.py", "fp8", "--tiny", "--head-dims", "128", "--out", str(tmp_path)])
    bench_attention.main()
    printed = capsys.readouterr().out
    errors = {name: float(value) for name, value in re.findall(r"([a-z0-9 ]+) (\d\.\d+e-\d+)", printed)}
    errors = {name.strip(): value for name, value in errors.items()}
    assert errors["bf16"] < 0.1 * errors["both ideas"]
    assert errors["both ideas"] < 0.9 * errors["no rotation"]
    assert errors["both ideas"] < 0.8 * errors["neither"]
    assert "needles found: bf16 100%" in printed


def test_a_peer_that_cannot_be_imported_is_named_once(capsys) -> None:
    for _ in range(2):
        assert measure._imported("fa9", "flash_attn_9.interface") is None
    assert capsys.readouterr().out == "fa9 is left out, because it cannot be imported: No module named 'flash_attn_9'\n"
