"""What the ranks tell each other of images: shapes through the link, numbers by sums, and nothing of pixels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from image_cases import Case
from torch import Tensor

from fa_serve.engine.images.rank_features import Made, share_features
from fa_serve.engine.parallel.ranks import Alone
from fa_serve.hf.images import ImageFeatures, ImageReader


class Rank:
    """One of two ranks, rank 0 of which has its turn first. told, sums: what it has sent"""

    size = 2

    def __init__(self, rank: int, told: list[Any], sums: list[Tensor]) -> None:
        self.rank = rank
        self._told = told
        self._sums = sums

    def broadcast(self, what: str, make: Any) -> Any:
        assert what == "images"
        if self.rank == 0:
            self._told.append(make())
            return self._told[-1]
        return self._told.pop(0)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.rank == 0:
            self._sums.append(x.clone())
            return x
        assert not x.any()
        return x + self._sums.pop(0)


@pytest.fixture(scope="module")
def llava() -> Case:
    return Case("llava")


def shared(case: Case, made: Made | None) -> tuple[Made | None, Made | None, list[Any]]:
    """What both ranks have, and what was told."""
    told: list[Any] = []
    sums: list[Tensor] = []
    reader = ImageReader(case.model)
    first = share_features(Rank(0, told, sums), reader, case.images, lambda: made)  # type: ignore[arg-type]
    sent = [*told]
    second = share_features(Rank(1, told, sums), reader, case.images, lambda: pytest.fail("only rank 0 encodes"))  # type: ignore[arg-type]
    assert (told, sums) == ([], [])
    return first, second, sent


def test_one_rank_shares_with_nobody(llava: Case) -> None:
    made: Made = {}
    reader = ImageReader(llava.model)
    assert share_features(Alone(torch.device("cpu")), reader, llava.images, lambda: made) is made
    assert share_features(Alone(torch.device("cpu")), reader, llava.images, lambda: None) is None


def test_the_others_get_the_same_numbers(llava: Case) -> None:
    """Also numbers that are not finite, features for inner layers, and a tensor that is a part of another one."""
    first, second = llava.images
    wide = torch.randn(5, 8)
    wide[0, 0] = float("nan")
    made = {
        first.key: ImageFeatures(wide[:, :4], (torch.randn(5, 4), torch.randn(5, 4)), "images"),
        second.key: ImageFeatures(torch.randn(3, 4, dtype=torch.bfloat16), (), "none"),
    }
    own, others, told = shared(llava, made)
    assert own is not None
    assert others is not None
    assert [*own] == [*others] == [first.key, second.key]
    for key, each in made.items():
        for found in (own[key], others[key]):
            for x, y in zip((found.embeds, *found.deep), (each.embeds, *each.deep), strict=True):
                assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
                assert x.dtype == y.dtype
            assert (found.two_way, found.failed) == (each.two_way, False)
        assert own[key].num_bytes == others[key].num_bytes, "or the caches of the ranks would differ"
    assert not any(isinstance(value, Tensor) for image in told[0] for value in image)


def test_failures_and_what_is_on_its_way_are_told(llava: Case) -> None:
    assert shared(llava, None) == (None, None, [None])
    first, second = llava.images
    reader = ImageReader(llava.model)
    made = {first.key: reader.failed(first.inputs), second.key: reader.encode(second.inputs)}
    own, others, _ = shared(llava, made)
    assert own is not None
    assert others is not None
    for found in (own, others):
        assert [found[key].failed for key in made] == [True, False]
        assert bool(found[first.key].embeds.isnan().all())
        assert torch.equal(found[second.key].embeds, made[second.key].embeds)
    assert own[first.key].num_bytes == others[first.key].num_bytes
