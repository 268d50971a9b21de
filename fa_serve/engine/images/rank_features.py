"""Embeddings of images on several ranks: rank 0 runs the towers, and the other ranks get its results.

    made = share_features(ranks, reader, images, lambda: encode(images))     # on every rank, at the same point of a step

Only rank 0 needs pixels, and only rank 0 decides which images have failed and which are still on their way through the towers.
It sends the shapes to the other ranks through their links. The values travel as a sum on the devices, to which the other ranks
add zeros. So every rank has the same bits, however its GPU rounds, and an image that fails does so on all ranks in the same
step. Running the towers on every rank would save no time: all of them would take as long as one.

Left out: the cache of embeddings, which each rank has (encoder.py), and the sum (fa_serve.ops.collectives.all_reduce).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.parallel.ranks import Ranks
from fa_serve.hf.images import ImageFeatures, ImageReader, TwoWay

Made = dict[bytes, ImageFeatures]


class _Told(NamedTuple):
    """What rank 0 tells the others about one image: the fields of `ImageFeatures`, with shape and dtype instead of tensors."""

    key: bytes
    shape: torch.Size
    dtype: torch.dtype
    depth: int
    two_way: TwoWay
    failed: bool


def share_features(
    ranks: Ranks, reader: ImageReader, images: Sequence[ImageInput], make: Callable[[], Made | None]
) -> Made | None:
    """The result of `make` on rank 0, by image key; None while the images are on their way. Other ranks do not call `make`.

    Raises EngineDeadError if the ranks are out of step, and AllReduceError if another one has ended.
    """
    if ranks.size == 1:
        return make()
    made = make() if ranks.rank == 0 else None
    told = ranks.broadcast("images", lambda: None if made is None else [_describe(*each) for each in made.items()])
    if told is None:
        return None
    inputs = {image.key: image.inputs for image in images}
    shared: Made = {}
    for each in told:
        if each.failed:
            shared[each.key] = reader.failed(inputs[each.key])
            continue
        own = None if made is None else made[each.key]
        parts = [None] * (1 + each.depth) if own is None else [own.embeds, *own.deep]
        embeds, *deep = [_sum_of(ranks, part, each, reader.device) for part in parts]
        shared[each.key] = ImageFeatures(embeds, tuple(deep), each.two_way)
    return shared


def _describe(key: bytes, features: ImageFeatures) -> _Told:
    x = features.embeds
    return _Told(key, x.shape, x.dtype, len(features.deep), features.two_way, features.failed)


def _sum_of(ranks: Ranks, part: Tensor | None, told: _Told, device: torch.device) -> Tensor:
    """The sum over the ranks of a part that only rank 0 has. The others add zeros."""
    assert ranks.all_reduce is not None
    own = torch.zeros(told.shape, dtype=told.dtype, device=device) if part is None else part.contiguous()
    return ranks.all_reduce(own)
