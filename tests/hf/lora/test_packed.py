"""An adapter on the host belongs to itself once it owns its matrices, and is laid out in pieces of any size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import make_model

from fa_serve.hf import patch
from fa_serve.hf.lora import memory as memory_module
from fa_serve.hf.lora.format import LoraAdapter, LowRank
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


def test_pieces_of_any_size_give_the_same_pages(monkeypatch) -> None:
    found = []
    for size in (4, 20_000, 1 << 22):
        monkeypatch.setattr(memory_module, "STAGED_BYTES", size)
        memory = make()
        memory._memory.fill_(-1e9)  # what an adapter before has left
        memory.write(memory.pack(adapter()), slot=0, pages=[5, 2])
        found.append((len(memory._pieces), memory._memory.clone()))
    assert [count for count, _ in found] == [len(memory.sites), 4, 1]
    assert all(torch.equal(pages, found[0][1]) for _, pages in found)
    assert found[0][1][[5, 2]].ne(-1e9).all()


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
