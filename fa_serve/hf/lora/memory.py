"""Finds the products of a model that adapters may add to, allocates memory for adapters on its device, and fills it.

    memory = LoraMemory(model, budget=1 << 30, max_rank=64, max_pages=4096)
    packed = memory.pack(read_adapter(folder))       # checks the adapter against the model, on the host
    memory.write(packed, slot=0, pages=[3, 1])       # copies it in pieces
    with memory.holder.serving(LoraStep(batch)): ...

A page holds PAGE_RANKS ranks of the matrices of every product of the model, so adapters of any ranks up to `max_rank` share the
memory without gaps. The addresses of all products are fixed when the memory is allocated, because CUDA graphs need that. Two
kinds of rows follow the ranks of an adapter and count as further ranks: the bias of B, and the factor of DoRA
(ops/lora/problem.py).

In a divided model, the memory of a rank holds this rank's part of each adapter (divided.py).

Left out: which adapter has which slot and pages (fa_serve.engine.lora.pool), and parts of adapters that are not kept in pages
(outer.py, parameters.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fa_serve import ops
from fa_serve.hf.adapter.latent_keys import LatentKeys
from fa_serve.hf.adapter.state_modules import PatchedMixer
from fa_serve.hf.lora.divided import part_of_low_rank, whole_sizes
from fa_serve.hf.lora.format import LoraAdapter, LowRank, is_finite
from fa_serve.hf.lora.outer import AdaptedEmbedding, AdaptedHead, OuterModules
from fa_serve.hf.lora.packed import PackedLora, PackedPart
from fa_serve.hf.lora.parameters import AdaptedExperts, AdaptedRouter
from fa_serve.hf.lora.product import AdaptedLinear, LoraSite, StepHolder, dense_weight, linear_sizes
from fa_serve.hf.lora.staging import Staging
from fa_serve.hf.surgery.divide.weights import PartOfSum
from fa_serve.hf.surgery.experts.mixtures import expert_modules
from fa_serve.hf.surgery.fuse.latent import LatentAttention
from fa_serve.hf.surgery.fuse.layer import FusedLayer, HeadsAttention
from fa_serve.hf.surgery.fuse.mixers import DeltaMixer, OwnMixer
from fa_serve.hf.surgery.fuse.unit import FusedUnit
from fa_serve.hf.surgery.quantised.linear import QuantizedLinear
from fa_serve.ops import PAGE_RANKS, LoraWeights
from fa_serve.ops.lora.problem import COUNTER_WORDS, LORA_COUNTERS
from fa_serve.spec import ParameterError, UnsupportedModelError

_STRIDE = 4
"""Elements per product in a row of `scales`, `ones` or `factors`: 16 bytes, so that the address for each product is aligned."""
MAX_SLOTS = 512
STAGED_BYTES = 4 << 20
"""The size of a piece that is copied, unless PAGE_RANKS rows of a product are larger. It fits in a CPU cache."""


class SiteLayout(NamedTuple):
    """Where a product is in a page.

    a, b, end: the first element of A, the first element of B, and the end of the product
    k:         columns of the product
    widths:    rows of each of its modules
    """

    a: int
    b: int
    end: int
    k: int
    widths: tuple[int, ...]


class LoraMemory:
    """Owner of the adapters' memory on the device. Creating it changes the forwards of the model's products.

    budget:    bytes for the pages
    max_rank:  the largest rank of an adapter, with one more rank each for a bias and for DoRA
    max_pages: the largest number of pages that can be in use

    Raises ParameterError if the budget is too small for one adapter of the largest rank, and UnsupportedModelError for a model
    without any product that adapters could add to.
    """

    def __init__(self, model: Any, *, budget: int, max_rank: int, max_pages: int) -> None:
        self.holder = StepHolder()
        self.sites = list(_attach(model, self.holder))
        if not self.sites:
            raise UnsupportedModelError(f"{type(model).__name__} has no linear layer that adapters could add to")
        self._outer = OuterModules(model, self.holder)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        self.pages_per_adapter = -(-max_rank // PAGE_RANKS)
        self._layouts = _layout(self.sites)
        self._elements = self._layouts[-1].end
        self.bytes_per_page = self._elements * self.dtype.itemsize
        self.num_pages = min(budget // self.bytes_per_page, max_pages)
        if self.num_pages < self.pages_per_adapter:
            least = self.pages_per_adapter * self.bytes_per_page
            raise ParameterError(
                "lora_bytes", f"be at least {least}, the size of one adapter of max_lora_rank {max_rank}", budget
            )
        self.num_slots = min(self.num_pages, MAX_SLOTS)
        self._memory = torch.zeros(self.num_pages, self._elements, dtype=self.dtype, device=self.device)
        self._numbers = torch.zeros(3, self.num_slots, _STRIDE * len(self.sites), dtype=torch.int32, device=self.device)
        self._counters = torch.zeros(len(self.sites), LORA_COUNTERS, COUNTER_WORDS, dtype=torch.int64, device=self.device)
        self.page_table = torch.zeros(self.num_slots, self.pages_per_adapter, dtype=torch.int32, device=self.device)
        self.page_counts = torch.zeros(self.num_slots, dtype=torch.int32, device=self.device)
        self._parts = {name: (site, part) for site in self.sites for part, name in enumerate(site.names)}
        self._uncalled = uncalled_layers(model)
        self._modules = frozenset(name for name, _ in model.named_modules())
        self._weights = [self._views(number) for number in range(len(self.sites))]
        for site, own in zip(self.sites, self._weights, strict=True):
            site.weights = own
        self.weight_version = 0
        """How often the weights of the model have changed. The owner of this memory counts it."""
        longest = max(max(site.k, *site.widths) for site in self.sites)
        largest = PAGE_RANKS * longest * self.dtype.itemsize
        self._staging = Staging(self.device, max(STAGED_BYTES, largest))

    def settle(self, model: Any) -> None:
        """Find the products again after the layers of the model have been fused anew, without adapters (`detach_adapters`).
        Keeps the adapters in memory."""
        known = {site.names: site.weights for site in self.sites}
        self.sites = list(_attach(model, self.holder))
        if [site.names for site in self.sites] != [*known]:
            raise RuntimeError("the set of fused layers has changed, so the adapters in memory cannot be used")
        for site in self.sites:
            site.weights = known[site.names]
        self._parts = {name: (site, part) for site in self.sites for part, name in enumerate(site.names)}
        self._outer.attach(model)

    def _views(self, number: int) -> LoraWeights:
        """Views of the memory that hold the adapters of one product."""
        layout = self._layouts[number]
        k = layout.k
        n = sum(layout.widths)
        parts = len(layout.widths)
        a = self._memory.as_strided((self.num_pages, parts, PAGE_RANKS, k), (self._elements, PAGE_RANKS * k, k, 1), layout.a)
        b = self._memory.as_strided((self.num_pages, PAGE_RANKS, n), (self._elements, n, 1), layout.b)
        scales, ones, factors = self._numbers[:, :, _STRIDE * number : _STRIDE * number + parts]
        return LoraWeights(a, b, scales.view(torch.float32), ones, factors, self._counters[number], layout.widths)

    def batch(self, rows: Tensor, tiles: Tensor, slots: Tensor, block_rows: int) -> ops.LoraBatch:
        """Describe which rows of a step use which slot: see `fa_serve.ops.LoraBatch`."""
        return ops.LoraBatch(rows, tiles, slots, self.page_table, self.page_counts, block_rows)

    @torch.no_grad()
    def pack(self, adapter: LoraAdapter) -> PackedLora:
        """Check an adapter against the model. May be called from any thread.

        The result may share tensors with the adapter until `PackedLora.own` copies them. Raises ParameterError, whose field is
        usually the name of a module, for an adapter that does not fit.
        """
        version = self.weight_version  # before weights are read, which may change meanwhile
        adapter = adapter.with_weights_as_modules(self._parts)
        outer = self._outer.pack(adapter)
        inner = {name: low for name, low in adapter.modules.items() if name not in self._outer.names}
        # peft adds adapters to uncalled layers too, but training does not change these, so they add nothing and are left out
        inner = {name: low for name, low in inner.items() if name not in self._uncalled or not adds_nothing(low)}
        inner = {name: self._part(name, low) for name, low in inner.items()}
        ranks = max((_num_rows(low) for low in inner.values()), default=1)
        num_pages = -(-ranks // PAGE_RANKS)
        if num_pages > self.pages_per_adapter:
            limit = self.pages_per_adapter * PAGE_RANKS
            rule = f"be at most {limit} (--max-lora-rank), where lora_bias and use_dora count as one more rank each"
            raise ParameterError("r", rule, ranks)
        numbers = torch.zeros(3, _STRIDE * len(self.sites), dtype=torch.int32)
        numbers[1:] = -1
        inner = {name: low if low.magnitude is None else low.cloned() for name, low in inner.items()}
        dora = {name: low for name, low in inner.items() if low.magnitude is not None}
        return PackedLora(num_pages, self._packed_parts({}, numbers, inner), numbers, outer, dora, version)

    @torch.no_grad()
    def rescale(self, packed: PackedLora) -> None:
        """Compute the factors of DoRA again if the weights of the model have changed. May be called from any thread.

        Factors that are not finite any more, because a row has only zeros, are kept as they are: the logits show them.
        """
        if not packed.dora:  # then the lock may be held by the thread that copies the matrices, and a load must not wait for it
            return
        version = self.weight_version
        with packed.lock:
            if packed.version != version:
                packed.parts = self._packed_parts(packed.parts, packed.numbers, packed.dora, checks=False)
                packed.version = version

    def write(self, packed: PackedLora, slot: int, pages: Sequence[int]) -> None:
        """Copy an adapter into these pages, which no step in flight may read. On a GPU, queues copies on the current stream.

        Only one thread may write at a time.
        """
        table = torch.zeros(self.pages_per_adapter, dtype=torch.int32)
        table[: len(pages)] = torch.tensor(list(pages), dtype=torch.int32)
        for page in pages:
            self._memory[page].zero_()
        self._staging.send(packed.copies(self._weights, pages, STAGED_BYTES))
        self._numbers[:, slot].copy_(packed.numbers, non_blocking=True)
        self.page_table[slot].copy_(table)
        self.page_counts[slot] = len(pages)
        self._outer.write(slot, packed.outer)

    def clear(self, slot: int) -> None:
        """Free the memory of the adapter in this slot that is not in pages."""
        self._outer.write(slot, None)

    def _part(self, name: str, low: LowRank) -> LowRank:
        """Check the matrices of a linear layer and return this rank's part of them."""
        if name in self._uncalled:
            rule = (
                "have no adapter, because the model's own code uses this layer's weight without calling the layer: leave it "
                "out of target_modules"
            )
            raise ParameterError(name, rule, f"rank {low.rank}")
        if name not in self._modules:
            rule = "be a layer of the model: the adapter may have been trained for another one"
            raise ParameterError(name[:128], rule, "no layer of this name")
        if name not in self._parts:
            rule = "be a linear layer that fa_serve computes itself; routers and image towers are not"
            raise ParameterError(name[:128], rule, f"rank {low.rank}")
        site, part = self._parts[name]
        expected = whole_sizes(site.modules[part], site.widths[part], site.k)
        if (len(low.b), low.a.shape[1]) != expected:
            sizes = f"{expected[1]} columns and {expected[0]} rows"
            rule = f"have matrices for a layer of {sizes}, as this model has: the adapter may have been trained for another one"
            raise ParameterError(name, rule, [list(low.a.shape), list(low.b.shape)])
        if low.magnitude is not None and dense_weight(site, part) is None:
            raise ParameterError(
                "use_dora", "be false for a model with quantised weights, whose rows have no exact norms", True
            )
        return part_of_low_rank(name, low, site.modules[part])

    def _packed_parts(
        self, parts: Mapping[int, tuple[PackedPart, ...]], numbers: Tensor, inner: Mapping[str, LowRank], *, checks: bool = True
    ) -> dict[int, tuple[PackedPart, ...]]:
        """`parts` with what an adapter adds to the modules of `inner`, which replaces what they have for these modules.

        numbers: of all products, written here; checks: whether to raise ParameterError for an infinity
        """
        order = {id(site): number for number, site in enumerate(self.sites)}
        table = numbers.numpy()  # NumPy writes single numbers faster
        found = dict(parts)
        for name, low in inner.items():
            site, part = self._parts[name]
            number = order[id(site)]
            others = [each for each in found.get(number, ()) if each.part != part]
            own = self._packed_part(table[:, _STRIDE * number + part], site, part, low, checks)
            found[number] = (*others, own)
        return found

    def _packed_part(self, numbers: NDArray[np.int32], site: LoraSite, part: int, low: LowRank, checks: bool) -> PackedPart:
        """What an adapter adds to one module. numbers: (3,) scale, one and factor of this module, written here"""
        a = low.a
        b = low.b
        bias = None if low.bias is None else low.bias.float()
        extra: list[Tensor] = []
        factor = None
        if low.magnitude is not None:
            base = dense_weight(site, part)
            assert base is not None
            device = base.device
            factor = torch.ones(len(b))  # while `sleep` has freed the weights, which come back as another version
            if base.numel():
                norms = torch.linalg.norm(base + low.scale * (b.to(device).float() @ a.to(device).float()), dim=1).cpu()
                factor = low.magnitude.float() / norms
            b = b.float() * factor[:, None]
            bias = None if bias is None else bias * factor
        if bias is not None:
            numbers[1] = low.rank + len(extra)
            extra.append(bias)
        if factor is not None:
            numbers[2] = low.rank + len(extra)
            extra.append(factor - 1.0)
        numbers[0] = np.float32(low.scale).view(np.int32)
        rows = torch.cat([b.float().t(), *(row[None] for row in extra)]) if extra else b.t()
        return PackedPart(part, self._converted(a, False, checks), self._converted(rows, bool(extra), checks))

    def _converted(self, x: Tensor, computed: bool, checks: bool) -> Tensor:
        """A matrix on the host in the model's dtype; x itself if nothing changes. Raises ParameterError for an infinity.

        computed: x was computed and may overflow. Tensors of the adapter itself are known to be finite
        """
        own = x.detach().to("cpu", self.dtype)
        if checks and (computed or x.dtype != self.dtype) and not is_finite(own):
            name = str(self.dtype)[6:]
            raise ParameterError("adapter", f"have values that fit the model's dtype, {name}", "infinities")
        return own


def uncalled_layers(model: nn.Module) -> frozenset[str]:
    """The names of linear layers that mixers do not call, because they multiply with the weights themselves."""
    return frozenset(
        f"{name}.{layer}"
        for name, module in model.named_modules()
        if isinstance(mixer := vars(module).get("forward"), PatchedMixer)
        for layer in mixer.uncalled
    )


def adds_nothing(low: LowRank) -> bool:
    """Whether an adapter does not change its layer, like an adapter before training."""
    return low.bias is None and low.magnitude is None and not bool(low.b.any())


def detach_adapters(model: nn.Module) -> None:
    """Give modules that an earlier `LoraMemory` has changed their own forward again, except fused layers (`unfuse_model`)."""
    adapted = AdaptedLinear | AdaptedEmbedding | AdaptedHead | AdaptedExperts | AdaptedRouter
    for module in model.modules():
        if isinstance(vars(module).get("forward"), adapted):
            del module.forward


def _is_linear(module: nn.Module) -> bool:
    """Whether a module returns the product with its weights. Routers of Llama 4 and PhiMoE derive from Linear, but do not."""
    if isinstance(module, QuantizedLinear) or type(module).__name__ == "Conv1D":
        return True
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _num_rows(low: LowRank) -> int:
    return low.rank + (low.bias is not None) + (low.magnitude is not None)


def _layout(sites: Sequence[LoraSite]) -> list[SiteLayout]:
    """Where each product is in a page. Products follow each other without overlap."""
    layouts = []
    end = 0
    for site in sites:
        a = end
        b = a + _aligned(len(site.widths) * PAGE_RANKS * site.k)
        end = b + _aligned(PAGE_RANKS * sum(site.widths))
        layouts.append(SiteLayout(a, b, end, site.k, site.widths))
    return layouts


def _aligned(elements: int) -> int:
    return -(-elements // PAGE_RANKS) * PAGE_RANKS


def _attach(model: nn.Module, holder: StepHolder) -> Iterator[LoraSite]:
    """Give each product of the model a site, and yield the sites."""
    names = {module: name for name, module in model.named_modules()}
    uncalled = uncalled_layers(model)
    skipped: set[nn.Module] = {model.get_output_embeddings()}  # type: ignore[operator]
    skipped.update(module for module, name in names.items() if name in uncalled)
    found: list[LoraSite] = []

    def with_site(product: Any) -> Any:
        """The product with a new site; None for None."""
        if product is None:
            return None
        sizes = [linear_sizes(module) for module in product.modules]
        assert sizes[0] is not None
        site = LoraSite(
            tuple(names[module] for module in product.modules),
            sizes[0][0],
            tuple(size[1] for size in sizes if size is not None),
            holder,
            product.modules,
        )
        found.append(site)
        skipped.update(product.modules)
        return product._replace(site=site)

    modules: list[Any] = [*model.modules()]
    for module in modules:
        fused: Any = vars(module).get("forward")
        if isinstance(fused, FusedLayer):
            attention: Any = fused.attention
            changes = {name: with_site(getattr(fused, name)) for name in ("o", "gate_up", "down")}
            if isinstance(attention, HeadsAttention):
                attention = replace(attention, qkv=with_site(attention.qkv))
            elif isinstance(attention, LatentAttention):
                attention = replace(attention, down=with_site(attention.down), q_up=with_site(attention.q_up))
            elif isinstance(attention, DeltaMixer):
                attention = replace(attention, inputs=with_site(attention.inputs))
            if not isinstance(attention, DeltaMixer | OwnMixer):
                # other layers of the attention, such as the projection of latent vectors, are not computed by their own forward
                skipped.update(module.self_attn.modules())
            module.forward = replace(fused, attention=attention, **changes)
        elif isinstance(vars(module).get("expand_kv"), LatentKeys):
            skipped.add(module.kv_b_proj)  # its matrix is multiplied with queries, not by its forward
        elif isinstance(fused, FusedUnit):
            module.forward = replace(fused, gate_up=with_site(fused.gate_up), down=with_site(fused.down))
    for experts in expert_modules(model):
        skipped.update(experts.modules())
    modules = [*model.get_decoder().modules()]  # type: ignore[operator]
    for module in modules:
        replaced = vars(module).get("forward")
        if module in skipped or not isinstance(replaced, PartOfSum | None) or not names[module]:
            continue
        if _is_linear(module):
            sizes = linear_sizes(module)
            assert sizes is not None
            site = LoraSite((names[module],), sizes[0], (sizes[1],), holder, (module,))
            own = partial(type(module).forward, module) if replaced is None else replaced.partial
            adapted = AdaptedLinear(own, site, getattr(module, "bias", None))
            module.forward = adapted if replaced is None else replace(replaced, partial=adapted)
            found.append(site)
    yield from found
