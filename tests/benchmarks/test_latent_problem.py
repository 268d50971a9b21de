"""The problem of the latent benchmark, on a CPU: its check, its bytes and its operations."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
import torch

from benchmarks.attention import latent_problem
from benchmarks.attention.latent_problem import LatentProblem


def test_the_check_tells_right_from_wrong() -> None:
    torch.manual_seed(0)
    for queries in (1, 20):
        problem = LatentProblem.make([33, 50], 4, queries, torch.float32, "cpu")
        out = problem.ours()()
        problem.check(out, "ours")
        problem.options["softmax_scale"] *= 1.01
        with pytest.raises(AssertionError, match="another scale"):
            problem.check(problem.ours()(), "another scale")


def test_bytes_and_operations() -> None:
    problem = LatentProblem.make([3, 5], 4, 2, torch.bfloat16, "cpu")
    assert problem.bytes_read == 8 * 576 * 2
    assert problem.operations == 2 * (2 + 3 + 4 + 5) * 4 * 1088


@pytest.mark.parametrize("float8", [False, True])
def test_the_check_copies_no_keys_for_heads(float8: bool, monkeypatch) -> None:
    """Every head of a query is a query of one call with one head, behind which no key is hidden that the query sees."""
    torch.manual_seed(0)
    problem = LatentProblem.make([33, 50], 4, 3, torch.float32, "cpu", float8=float8)
    reference = latent_problem.attention_reference
    calls = []
    monkeypatch.setattr(
        latent_problem, "attention_reference", lambda *qkv, **rest: calls.append(qkv) or reference(*qkv, **rest)
    )
    problem.check(problem.ours()(), "ours", rows=2)
    assert [(*q.shape[1:3], *k.shape[1:3]) for q, k, _ in calls] == [(4, 1, n, 1) for n in (33, 32, 50, 49)]


def test_ways_are_those_that_serve_a_cell() -> None:
    """On a CPU there is only the kernel of the portable backend; without ways the calls are those of `--backend`."""
    problem = LatentProblem.make([33], 4, 1, torch.float32, "cpu")
    ways = argparse.Namespace(ways=["hopper", "portable"], backend="auto")
    assert latent_problem._ways(ways, problem) == ["portable"]
    assert latent_problem._ways(argparse.Namespace(ways=[], backend="auto"), problem) == ["auto"]
    problem.q = SimpleNamespace(is_cuda=True, shape=(1, 32, 576))  # type: ignore[assignment]
    assert latent_problem._ways(ways, problem) == ["portable"]
    problem.queries = 2
    assert latent_problem._ways(ways, problem) == ["hopper", "portable"]
    problem.queries = 17
    assert latent_problem._ways(ways, problem) == ["portable"]
