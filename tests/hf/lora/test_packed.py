"""An adapter on the host belongs to itself once it owns its matrices, and is laid out in pieces of any size."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from tiny_models import make_model

from fa_serve.hf import patch
from fa_serve.hf.lora.format import LoraAdapter, LowRank
from fa_serve.hf.lora.host_runs import is_dense
from fa_serve.hf.lora.memory import LoraMemory
from fa_serve.hf.surgery.fuse.fusion import fuse_model

Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.1.mlp.up_proj"
DOWN = "model.layers.1.mlp.down_proj"


def low(rank: int, rows: int, columns: int, **options: torch.Tensor) -> LowRank:
    draw = torch.Generator().manual_seed(rank)
    return LowRank(torch.randn(rank, columns, generator=draw), torch.randn(rows, rank, generator=draw), 0.5, **options)


def adapter() -> LoraAdapter:
    return LoraAdapter({Q: low(20, 64, 32, bias=torch.arange(64.0)), UP: low(5, 48, 32), DOWN: low(3, 32, 48)})


def make() -> LoraMemory:
    model = make_model("llama")
    patch(model)
    fuse_model(model)
    return LoraMemory(model, budget=1 << 24, max_rank=40, max_pages=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_any_size_give_the_same_pages(dtype) -> None:
    memory = make()
    first = low(20, 64, 32)
    given = {Q: replace(first, a=first.a.to(dtype), b=first.b.to(dtype), bias=torch.arange(64.0)), UP: low(5, 48, 32)}
    packed = memory.pack(LoraAdapter(given | {DOWN: low(3, 32, 48)}))
    found = []
    counts = []
    for size in (4, 400, 1 << 22):
        memory._memory.zero_()
        copies = [*packed.copies(memory._weights, [5, 2], size)]
        assert all(is_dense(each.source) for each in copies)
        memory._staging.send(copies)
        counts.append(len(copies))
        found.append(memory._memory.clone())
    assert counts[0] > counts[1] > counts[2] == 8  # two pages of A and of B with its bias, and two modules with one page
    assert all(torch.equal(pages, found[0]) for pages in found)


def test_pages_hold_the_matrices_and_zeros() -> None:
    memory = make()
    memory._memory.fill_(-1e9)  # what an adapter before has left
    given = adapter()
    memory.write(memory.pack(given), slot=0, pages=[5, 2])
    assert memory._memory[[0, 1, 3, 4]].eq(-1e9).all()
    pages = {name: [] for name in given.modules}
    for site in memory.sites:
        for part, name in enumerate(site.names):
            column = sum(site.widths[:part])
            a = site.weights.a[[5, 2], part].flatten(0, 1)
            b = site.weights.b[[5, 2], :, column : column + site.widths[part]].flatten(0, 1)
            low_rank = given.modules.get(name)
            rank = 0 if low_rank is None else low_rank.rank
            rows = rank + (name == Q)
            assert a[rank:].eq(0).all()
            assert b[rows:].eq(0).all()
            if low_rank is not None:
                pages[name] = [a[:rank], b[:rank].t()]
    assert all(
        torch.equal(x, y) for name, each in given.modules.items() for x, y in zip(pages[name], (each.a, each.b), strict=True)
    )


def test_an_adapter_that_owns_its_matrices_outlives_those_it_was_made_of() -> None:
    memory = make()
    given = adapter()
    kept = memory.pack(given)
    memory.write(kept, slot=0, pages=[0, 1])
    expected = memory._memory[:2].clone()
    assert kept.borrows
    kept.own()
    assert not kept.borrows
    for each in given.modules.values():  # as a file that is written over
        each.a.fill_(3.0)
        each.b.fill_(3.0)
    memory.write(kept, slot=1, pages=[3, 4])
    assert torch.equal(memory._memory[3:5], expected)


def test_a_load_does_not_wait_until_matrices_are_owned() -> None:
    memory = make()
    packed = memory.pack(adapter())
    with ThreadPoolExecutor(1) as thread, packed.lock:  # as in `own`, which takes longer than the copy to the device
        assert thread.submit(memory.rescale, packed).result(10) is None


def test_weights_beside_the_pages_are_owned_too() -> None:
    memory = make()
    saved = torch.ones(320, 32)
    kept = memory.pack(LoraAdapter(saved={memory._outer.names[1]: saved}))
    kept.own()
    saved.zero_()
    assert kept.outer is not None
    assert kept.outer.head.saved is not None
    assert kept.outer.head.saved.eq(1.0).all()


def test_bytes_are_those_of_the_matrices() -> None:
    memory = make()
    packed = memory.pack(LoraAdapter({DOWN: low(3, 32, 48)}))
    assert packed.num_bytes == 4 * 3 * (32 + 48) + packed.numbers.nbytes


def test_a_matrix_that_is_trained_stays_out_of_the_graph() -> None:
    memory = make()
    first = low(4, 64, 32)
    trained = replace(first, a=first.a.requires_grad_())
    packed = memory.pack(LoraAdapter({Q: trained}))
    packed.own()
    memory.write(packed, slot=0, pages=[0])
    assert not memory._memory.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_become_that_of_the_model(dtype) -> None:
    memory = make()
    first = low(4, 64, 32)
    packed = memory.pack(LoraAdapter({Q: replace(first, a=first.a.to(dtype), b=first.b.to(dtype))}))
    (part,) = packed.parts[next(number for number in packed.parts)]
    assert part.a.dtype == part.b.dtype == torch.float32
    assert torch.equal(part.a, first.a.to(dtype).float())
