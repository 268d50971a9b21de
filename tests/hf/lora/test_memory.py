"""Products are found in fused and other layers, and adapters are checked and laid out in pages."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_model

from fa_serve.hf import patch
from fa_serve.hf.lora.format import LoraAdapter, LowRank
from fa_serve.hf.lora.memory import LoraMemory, detach_adapters
from fa_serve.hf.lora.product import AdaptedLinear
from fa_serve.hf.surgery.fuse.fusion import fuse_model, unfuse_model
from fa_serve.spec import ParameterError

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


def make(family: str = "llama", *, fused: bool = True, **options: int) -> LoraMemory:
    model = make_model(family)
    patch(model)
    if fused:
        fuse_model(model)
    return LoraMemory(model, **{"budget": 1 << 24, "max_rank": 40, "max_pages": 8} | options)


def low(rank: int, columns: int = 32, rows: int = 64, **options: torch.Tensor) -> LowRank:
    draw = torch.Generator().manual_seed(rank)
    return LowRank(torch.randn(rank, columns, generator=draw), torch.randn(rows, rank, generator=draw), 0.5, **options)


@pytest.mark.parametrize("fused", [True, False])
def test_every_linear_layer_has_one_place(fused) -> None:
    memory = make(fused=fused)
    names = [name for site in memory.sites for name in site.names]
    expected = [f"model.layers.{i}.{part}" for i in (0, 1) for part in PARTS]
    assert sorted(names) == sorted(expected)
    merged = [site.names for site in memory.sites if len(site.names) > 1]
    assert len(merged) == (4 if fused else 0)
    assert all(site.weights.scales.data_ptr() % 16 == 0 for site in memory.sites)
    assert all(site.weights.a.data_ptr() % 32 == 0 and site.weights.b.data_ptr() % 32 == 0 for site in memory.sites)


PARTS = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]


def test_an_adapter_is_where_the_tables_say() -> None:
    memory = make()
    first = low(20, bias=torch.arange(64.0))
    packed = memory.pack(LoraAdapter({Q: first, DOWN: low(3, 48, 32)}))
    assert packed.num_pages == 2
    memory.write(packed, slot=1, pages=[5, 2])
    assert memory.page_table[1].tolist() == [5, 2, 0]
    assert memory.page_counts.tolist()[:3] == [0, 2, 0]
    site, part = memory._parts[Q]
    assert part == 0
    ranks = site.weights.a[[5, 2], 0].flatten(0, 1)
    assert torch.equal(ranks[:20], first.a)
    assert not ranks[20:].any()
    columns = site.weights.b[[5, 2]].flatten(0, 1)
    assert torch.equal(columns[:20, :64], first.b.t())
    assert torch.equal(columns[20, :64], torch.arange(64.0)), "the bias is a row"
    assert not columns[:, 64:].any(), "k and v stay as they are"
    assert site.weights.scales[1].tolist() == [0.5, 0.0, 0.0]
    assert site.weights.ones[1].tolist() == [20, -1, -1]
    down, _ = memory._parts[DOWN]
    assert down.weights.scales[1].tolist() == [0.5]
    other, _ = memory._parts["model.layers.1.self_attn.q_proj"]
    assert other.weights.scales[1].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("modules", "field"),
    [
        ({Q: low(4, columns=31)}, Q),
        ({Q: low(4, rows=63)}, Q),
        ({"model.layers.2.self_attn.q_proj": low(4)}, "model.layers.2.self_attn.q_proj"),
        ({"model.norm": low(4)}, "model.norm"),
        ({Q: low(49)}, "r"),
    ],
)
def test_what_does_not_fit_is_refused(modules, field) -> None:
    memory = make()
    with pytest.raises(ParameterError) as caught:
        memory.pack(LoraAdapter(modules))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        ({Q: low(4, rows=63)}, "32 columns and 64 rows, as this model has: the adapter may have been trained for another one"),
        (
            {"h.0.attn.c_attn": low(4)},
            "be a layer of the model: the adapter may have been trained for another one",
        ),
        ({"model.norm": low(4)}, "be a linear layer that fa_serve computes itself"),
    ],
)
def test_an_adapter_of_another_model_is_told_as_one(modules, told) -> None:
    with pytest.raises(ParameterError, match=told):
        make().pack(LoraAdapter(modules))


def test_a_router_that_is_a_linear_layer_with_another_forward_has_no_adapter() -> None:
    """It returns two tensors, so that a step with its adapter would fail, with every request in it."""
    memory = LoraMemory(make_model("llama4"), budget=1 << 24, max_rank=16, max_pages=4)
    router = "model.layers.1.feed_forward.router"
    assert "model.layers.1.feed_forward.shared_expert.up_proj" in memory._parts
    with pytest.raises(ParameterError) as caught:
        memory.pack(LoraAdapter({router: low(4, rows=3)}))
    assert caught.value.field == router


def test_numbers_that_the_dtype_of_the_model_does_not_hold_are_refused() -> None:
    model = make_model().half()
    memory = LoraMemory(model, budget=1 << 24, max_rank=16, max_pages=4)
    huge = LowRank(torch.full((4, 32), 1e6), torch.ones(64, 4), 1.0)
    with pytest.raises(ParameterError, match="float16"):
        memory.pack(LoraAdapter({Q: huge}))


def test_factors_of_dora_that_are_no_numbers_are_refused() -> None:
    """A row without weights has no direction: also in the dtype of the adapter."""
    memory = make()
    site, part = memory._parts[Q]
    with torch.no_grad():
        site.modules[part].weight[3] = 0.0
    first = low(4, magnitude=torch.ones(64))
    first.b[3] = 0.0
    with pytest.raises(ParameterError, match="have values that fit the model's dtype, float32"):
        memory.pack(LoraAdapter({Q: first}))


def test_dora_needs_the_norms_of_a_matrix() -> None:
    memory = make()
    magnitude = torch.rand(64) + 1
    packed = memory.pack(LoraAdapter({Q: low(4, magnitude=magnitude)}))
    assert packed.rescales
    assert packed.is_eager
    site, part = memory._parts[Q]
    weight = site.modules[part].weight
    site.modules[part].weight = torch.nn.Parameter(torch.zeros(64, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ParameterError, match="quantised"):
        memory.pack(LoraAdapter({Q: low(4, magnitude=magnitude)}))
    site.modules[part].weight = weight


def test_factors_of_dora_are_computed_again_for_other_weights() -> None:
    """Also those that are no numbers then: an update of the weights does not fail because of one adapter."""
    memory = make()
    adapter = LoraAdapter({Q: low(4, magnitude=torch.rand(64) + 1), DOWN: low(3, 48, 32)})
    packed = memory.pack(adapter)
    packed.own()
    before = packed.parts
    memory.rescale(packed)
    assert packed.parts is before
    site, part = memory._parts[Q]
    with torch.no_grad():
        site.modules[part].weight *= 1.5
    memory.weight_version += 1
    expected = memory.pack(adapter)
    memory.rescale(packed)
    assert packed.parts.keys() == expected.parts.keys()
    for number, parts in expected.parts.items():
        found = {each.part: each for each in packed.parts[number]}
        assert len(found) == len(packed.parts[number])
        for each in parts:
            assert torch.equal(found[each.part].a, each.a)
            assert torch.equal(found[each.part].b, each.b)
    assert not all(torch.equal(x.b, y.b) for n, old in before.items() for x, y in zip(old, packed.parts[n], strict=True))
    with torch.no_grad():
        site.modules[part].weight.zero_()
    packed.dora[Q].b.zero_()
    memory.weight_version += 1
    memory.rescale(packed)
    assert not all(each.b.isfinite().all() for parts in packed.parts.values() for each in parts)


def test_the_budget_bounds_the_pages() -> None:
    bytes_per_page = make().bytes_per_page
    memory = make(budget=4 * bytes_per_page + 1)
    assert (memory.num_pages, memory.num_slots, memory._memory.nbytes) == (4, 4, 4 * bytes_per_page)
    with pytest.raises(ParameterError, match=f"be at least {3 * bytes_per_page}"):
        make(budget=2 * bytes_per_page)


def test_a_later_engine_finds_the_model_as_it_was() -> None:
    model = make_model()
    patch(model)
    LoraMemory(model, budget=1 << 24, max_rank=16, max_pages=4)
    assert isinstance(model.model.layers[0].mlp.down_proj.forward, AdaptedLinear)
    detach_adapters(model)
    unfuse_model(model)
    assert not [module for module in model.modules() if "forward" in vars(module)]
