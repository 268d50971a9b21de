"""The adapter on a GPU: the CPU suite's checks in float32, bfloat16 by the 2x rule, CUDA graphs, no host synchronisation."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import hf_checks as checks
import hf_families
import hf_multimodal
import pytest
import torch
from hf_families import BY_NAME, FAMILIES, LENGTH, Family, cached, padding_mask, pair, positions, tokens
from packaging.version import Version
from torch import Tensor
from transformers import (
    Cache,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
)
from transformers import __version__ as transformers_version

import fa_serve
from fa_serve import api, hf
from fa_serve.hf.adapter.masks import ImplicitMask
from fa_serve.launching.plans import PLANS
from fa_serve.testing import assert_matches_reference, eager_attention, make_qkv

# one family for each trait: plain, windows, softcap, sinks, another head_dim_v, chunks in the mask, a window in the mask alone
DECODERS = [
    BY_NAME[name] for name in ("llama", "mistral", "gemma2", "gpt-oss", "deepseek-v3", "llama4", "qwen2-moe-window", "gpt2")
]
ENCODERS = [BY_NAME[name] for name in ("bert", "modernbert")]
SEQ2SEQ = [BY_NAME[name] for name in ("bart", "t5")]


def each(families: list[Family]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", families, ids=lambda f: f.name)


@pytest.fixture(autouse=True)
def on_the_gpu(full_float32: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hf_families, "ROUNDING", 2e-5)
    torch.set_default_device("cuda")
    with torch.no_grad():
        yield
    torch.set_default_device(None)


@each(DECODERS + ENCODERS)
@pytest.mark.parametrize("kind", ["none", "left", "right", "hole"])
def test_forward(family: Family, kind: str) -> None:
    checks.check_forward(family, kind)


@each(DECODERS)
def test_packed(family: Family) -> None:
    checks.check_packed(family)


@each(DECODERS)
def test_caches(family: Family) -> None:
    checks.check_decode(family)
    checks.check_chunked_prefill(family)


@each(DECODERS)
def test_static_cache(family: Family) -> None:
    def make_cache(config: Any) -> StaticCache:
        return StaticCache(config=config, max_cache_len=40)

    checks.check_decode(family, make_cache)
    checks.check_chunked_prefill(family, make_cache)


@each(DECODERS)
def test_custom_mask(family: Family) -> None:
    checks.check_custom_mask(family)


@each([f for f in DECODERS if f.paged is True])
def test_paged(family: Family) -> None:
    checks.check_paged(family)


@each(DECODERS + SEQ2SEQ)
@pytest.mark.parametrize("kind", ["left", "right"])
def test_generate(family: Family, kind: str) -> None:
    checks.check_generate(family, kind)


@each(SEQ2SEQ)
@pytest.mark.parametrize("kind", ["none", "left"])
def test_seq2seq(family: Family, kind: str) -> None:
    checks.check_seq2seq(family, kind)


def outputs(model: PreTrainedModel, family: Family, way: str) -> Tensor:
    """Logits of a model at the valid positions, (positions, vocab), from one way to call it."""
    if family.kind == "vision":
        pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0), device="cpu").to("cuda", model.dtype)
        out = model(pixels)
        return (out.logits if "logits" in out else out.last_hidden_state).flatten(0, -2)
    ids = tokens(3, LENGTH)
    at = torch.arange(LENGTH).expand(3, -1)
    if way in ("none", "left", "right"):
        mask = padding_mask(way)
        if family.kind == "seq2seq":
            decoder = {"decoder_input_ids": tokens(3, 13, seed=1), "decoder_attention_mask": padding_mask(way, 13)}
            return model(ids, attention_mask=mask, **decoder).logits[decoder["decoder_attention_mask"].bool()]
        more = {"position_ids": positions(mask)} if family.kind == "decoder" else {}
        return model(ids, attention_mask=mask, **more).logits[mask.bool()]
    if way == "packed":
        # eager attention lets the sequences of some families see each other
        if model.config._attn_implementation == "eager":
            return checks.separate_logits(model, ids[:1])[0]
        asked = checks.way_to_pack(family)
        assert asked is not None
        return model(ids[:1], **checks.ways_of_packing(checks.restarting_positions(model))[asked]).logits[0]
    if way == "own mask":
        keep = (torch.rand(3, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1), device="cpu") < 0.4).to("cuda")
        keep |= torch.eye(LENGTH, dtype=torch.bool)
        if model.config._attn_implementation == "eager":
            keep = torch.where(keep, 0.0, torch.finfo(model.dtype).min).to(model.dtype)
        return model(ids, attention_mask=keep, position_ids=at, use_cache=False).logits.flatten(0, 1)
    static = StaticCache(config=model.config, max_cache_len=40) if "static" in way else None
    cache = static or DynamicCache(config=model.config)
    mask = padding_mask("left" if "decode" in way else "none")
    ends = (14, *range(15, LENGTH + 1)) if "decode" in way else (3, 10, 11, LENGTH)
    parts = [
        model(
            ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions(mask)[:, start:end],
            **cached(model, cache),
            use_cache=True,
        ).logits
        for start, end in pairwise((0, *ends))
    ]
    return torch.cat(parts, dim=1)[mask.bool()]


WAYS = ("none", "left", "right", "packed", "decode", "static decode", "chunks", "static chunks", "own mask")
ASKED = [
    pytest.param(family, way, id=f"{family.name}-{way}")
    for family in FAMILIES
    if family.name != "phimoe"  # its router weighs the first of two experts differently from the second
    for way in (WAYS if family.kind == "decoder" else WAYS[:1] if family.kind == "vision" else WAYS[:3])
    if way != "packed" or checks.way_to_pack(family) is not None
]


@pytest.mark.parametrize(("family", "way"), ASKED)
def test_bfloat16_by_the_rule_of_two(family: Family, way: str) -> None:
    """The error is at most twice that of eager bfloat16; both are measured against eager float32 with the same weights."""
    exact = three(family)
    eager = copy.deepcopy(exact).to(torch.bfloat16)
    ours = fa_serve.patch(copy.deepcopy(eager))
    assert_matches_reference(*(outputs(model, family, way) for model in (ours, exact, eager)))


@functools.lru_cache(maxsize=1)
def three(family: Family) -> PreTrainedModel:
    """A float32 model with bfloat16 weights. A rounding makes a router flip between two experts, or an indexer between two
    keys, so all of them are taken."""
    return family.build(**{name: value for name, value in EVERY_CHOICE.items() if name in family.config}).bfloat16().float()


EVERY_CHOICE = {
    "num_local_experts": 2,
    "num_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": LENGTH,
}


@pytest.mark.parametrize("make", hf_multimodal.MODELS.values(), ids=hf_multimodal.MODELS)
def test_multimodal_models_in_bfloat16(make: Callable[[], Any]) -> None:
    name, config, inputs = make()
    exact = hf_multimodal.build(name, config).bfloat16().float()
    inputs = {k: v.bfloat16().float() if v.is_floating_point() else v for k, v in inputs.items()}
    rounded = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    eager = copy.deepcopy(exact).to(torch.bfloat16)
    ours = fa_serve.patch(copy.deepcopy(eager))
    valid = inputs["attention_mask"].bool() if "attention_mask" in inputs else slice(None)
    results = (model(**given).logits[valid] for model, given in ((ours, rounded), (exact, inputs), (eager, rounded)))
    assert_matches_reference(*results)


# inductor makes its pool for graphs by capturing nothing, and the suite turns the warning about that into an error
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@each([BY_NAME[name] for name in ("llama", "mistral", "gemma2")])
def test_compiled_generation_with_cuda_graphs(family: Family) -> None:
    """transformers compiles decoding with a static cache in mode reduce-overhead, with CUDA graphs."""
    eager, ours = pair(family)
    mask = padding_mask("left", 12)
    ids = tokens(*mask.shape).masked_fill(mask == 0, 0)
    options: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "min_new_tokens": 10, "max_new_tokens": 10}
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    actual = ours.generate(ids, **options, cache_implementation="static")
    assert torch.equal(actual, eager.generate(ids, **options))
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert not counters["inductor"]["cudagraph_skips"]
    # a sliding static cache runs other code once it is full
    assert counters["stats"]["unique_graphs"] <= 2


@each(DECODERS)
@pytest.mark.parametrize("static", [False, True])
def test_a_decoding_step_does_not_wait_for_the_gpu(
    family: Family, static: bool, no_synchronisation: Callable[[], AbstractContextManager[None]]
) -> None:
    """Neither do the masks of a padded batch."""
    eager, ours = pair(family)
    layers = getattr(ours.config, "layer_types", None) or ["sliding_attention"] * bool(
        getattr(ours.config, "sliding_window", 0)
    )
    if static and {"sliding_attention", "chunked_attention"} & set(layers):
        pytest.skip("a static cache that rolls copies an index to the device")
    ours.config._experts_implementation = "batched_mm"  # the eager implementation reads the router's choice
    mask = padding_mask("left")
    ids = tokens(*mask.shape).masked_fill(mask == 0, 0)
    expected = eager(ids, attention_mask=mask, position_ids=positions(mask)).logits[:, -1]
    cache = StaticCache(config=ours.config, max_cache_len=40) if static else DynamicCache(config=ours.config)
    prompt = {"input_ids": ids[:, :-2], "attention_mask": mask[:, :-2], "position_ids": positions(mask)[:, :-2]}
    ours(**prompt, **cached(ours, cache), use_cache=True)
    steps = [
        {"input_ids": ids[:, n : n + 1], "attention_mask": mask[:, : n + 1], "position_ids": positions(mask)[:, n : n + 1]}
        for n in (LENGTH - 2, LENGTH - 1)
    ]
    ours(**steps[0], **cached(ours, cache), use_cache=True)  # compiles the kernels
    with no_synchronisation():
        actual = ours(**steps[1], **cached(ours, cache), use_cache=True).logits[:, -1]
    hf_families.assert_same(actual, expected)


@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
@each([BY_NAME[name] for name in ("llama", "gemma2")])
def test_offloaded_caches(family: Family, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if Version(transformers_version) < Version("5.23"):
        # a layer is fetched on another stream before it has been put away: a GPU that lags behind the host loses keys, with any
        # attention
        original = Cache.prefetch

        def prefetch(self: Any, *args: Any, **kwargs: Any) -> None:
            self.prefetch_stream.wait_stream(torch.cuda.default_stream())
            original(self, *args, **kwargs)

        monkeypatch.setattr(Cache, "prefetch", prefetch)
    eager, ours = pair(family)
    ids = tokens(2, 12)
    options: dict[str, Any] = {"do_sample": False, "min_new_tokens": 8, "max_new_tokens": 8}
    actual = ours.generate(ids, **options, cache_implementation=implementation, disable_compile=True)
    assert torch.equal(actual, eager.generate(ids, **options))


@each([BY_NAME[name] for name in ("llama", "gemma2")])
def test_paged_forward_neither_waits_for_the_gpu_nor_resists_capture(
    family: Family, no_synchronisation: Callable[[], AbstractContextManager[None]]
) -> None:
    eager, ours = pair(family)
    ids = tokens(3, LENGTH)
    expected = eager(ids).logits
    pages = hf_families.Pages(ours, 3)
    pages.step([row[:10] for row in ids])

    batch = hf.PagedBatch(
        kv_caches=pages.caches,
        slot_mapping=pages.table[:, 10 // pages.page_size].long() * pages.page_size + 10 % pages.page_size,
        block_table=pages.table,
        seqused_k=torch.full((3,), 11, dtype=torch.int32),
        cu_seqlens_q=torch.arange(4, dtype=torch.int32),
        max_seqlen_q=1,
        max_seqlen_k=LENGTH,
    )
    arguments = (ids[:, 10].contiguous(), torch.full((3,), 10), batch, torch.arange(3))
    hf.paged_forward(ours, *arguments)  # compiles the kernels
    with no_synchronisation():
        actual = hf.paged_forward(ours, *arguments)
    hf_families.assert_same(actual, expected[:, 10])

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = hf.paged_forward(ours, *arguments)
    graph.replay()
    hf_families.assert_same(captured, expected[:, 10])


def as_layers_hold_them(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads before tokens; keys and values contiguous so, as transformers' cache keeps them."""
    return q.transpose(1, 2), k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("batch", "dims"), [(1, (128, 128)), (16, (64, 64)), (3, (192, 128)), (2, (256, 256))])
def test_tokens_behind_a_cache_share_plans(batch: int, dims: tuple[int, int], masked: bool, dtype: torch.dtype) -> None:
    """One plan for each power of two of keys, with right results at any number of them."""
    PLANS.clear()
    for keys in (1023, 700, 513, 40, 37, 63, 5000, 8191, 17, 1022):
        q, k, v = make_qkv(batch, 1, keys, 8, 2, *dims, dtype=dtype, device="cuda", seed=keys)
        seen = torch.rand(batch, 1, 1, keys, device="cuda") < 0.7 if masked else None
        mask = ImplicitMask((-1, 0), key_mask=seen)
        layer = as_layers_hold_them(q, k, v)
        actual, _ = hf.attention_forward(torch.nn.Module(), *layer, mask, scaling=0.1, softcap=20.0)
        options: dict[str, Any] = {"softmax_scale": 0.1, "softcap": 20.0, "mask": seen}
        exact = eager_attention(q.double(), k.double(), v.double(), **options)
        if dtype == torch.float32:  # eager attention sums in another order, with an error that is sometimes much smaller
            hf_families.assert_same(actual, exact.float())
        else:
            assert_matches_reference(actual, exact, eager_attention(q, k, v, **options))
    assert len(PLANS) == 4


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("queries", [1, 40])
def test_a_trace_holds_the_attention(queries: int) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return hf.attention_forward(self, q, k, k, ImplicitMask((-1, 0)), scaling=0.1)[0]

    q, k, _ = (x.transpose(1, 2) for x in make_qkv(2, queries, 40, 4, 4, 64, dtype=torch.bfloat16, device="cuda"))
    other = q.flip(0)
    traced: Any = torch.jit.trace(Layer(), (q, k))
    assert torch.equal(traced(other, k), Layer()(other, k))
    assert not torch.equal(traced(other, k), traced(q, k))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 0)], ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (192, 128), (256, 256), (80, 80)], ids=str)
def test_prompts_of_a_known_length_share_plans(dims: tuple[int, int], window: tuple[int, int]) -> None:
    """Bit for bit what the public function gives, at each length."""
    PLANS.clear()
    lengths = [(600, 600), (20, 700), (600, 600), (20, 700), (5, 40), (600, 600)]
    for seed, (queries, keys) in enumerate(lengths):
        q, k, v = make_qkv(2, queries, keys, 8, 2, *dims, dtype=torch.bfloat16, device="cuda", seed=seed)
        layer = as_layers_hold_them(q, k, v)
        actual, _ = hf.attention_forward(torch.nn.Module(), *layer, ImplicitMask(window), scaling=0.1, softcap=20.0)
        plans = len(PLANS)
        # a window that reaches over all keys is unlimited
        left = -1 if window[0] + 1 >= keys else window[0]
        views = (x.transpose(1, 2) for x in layer)
        expected = api.attention(*views, softmax_scale=0.1, softcap=20.0, window_size=(left, window[1]))
        assert torch.equal(actual, expected)
        assert len(PLANS) == plans, "the adapter's call looks like the public one"
    assert len(PLANS) == 3


BATCHES: dict[str, dict[str, Any]] = {
    "no graphs": {"use_cuda_graph": False},
    "graphs": {"use_cuda_graph": True},
    "short batches": {"use_cuda_graph": True, "max_batch_tokens": 48, "q_padding_interval_size": 16},
}


@each([BY_NAME[name] for name in ("llama", "gemma2", "gpt-oss")])
@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
def test_continuous_batching(family: Family, batches: dict[str, Any]) -> None:
    """transformers' own continuous batching, with block tables and CUDA graphs."""
    eager, ours = pair(family)
    ours.config._experts_implementation = "batched_mm"  # the eager implementation synchronises
    eager.generation_config.eos_token_id = None
    prompts = [tokens(n, seed=n).tolist() for n in (5, 17, 1, 30, 9, 64)]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
    expected = [eager.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts]
    done = ours.generate_batch(
        prompts,
        generation_config=GenerationConfig(eos_token_id=-1, pad_token_id=0, **options),
        continuous_batching_config=ContinuousBatchingConfig(
            **{"num_blocks": 128, "max_batch_tokens": 64, "block_size": 16, "max_blocks_per_request": 8, **batches}
        ),
    )
    outputs = sorted(done.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))
    assert [output.error for output in outputs] == [None] * len(prompts)
    assert [output.generated_tokens for output in outputs] == expected


def test_continuous_batching_at_the_sizes_of_a_model() -> None:
    """bfloat16, heads of 128, pages of 256: tokens are nearly as good as those of eager bfloat16.

    A token's gap is how far its float32 logit, given the tokens before it, lies below the best one. The mean gap may be twice
    that of eager bfloat16.
    """
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    exact = LlamaForCausalLM(config).eval()
    for parameter in exact.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.8 * parameter.shape[-1] ** -0.5)
    exact.set_attn_implementation("eager")
    rounded = copy.deepcopy(exact).to(torch.bfloat16)
    ours = fa_serve.patch(copy.deepcopy(rounded))
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(3, 4096, (n,), generator=generator, device="cpu").tolist() for n in (1, 255, 256, 257, 512, 700, 33, 1000)
    ]

    def short(ids: list[int], chosen: list[int]) -> Tensor:
        logits = exact(torch.tensor([ids + chosen])).logits[0, len(ids) - 1 : -1]
        return (logits.amax(-1) - logits.gather(1, torch.tensor(chosen)[:, None])[:, 0]) / logits.std()

    done = ours.generate_batch(
        prompts,
        generation_config=GenerationConfig(eos_token_id=-1, pad_token_id=0, do_sample=False, max_new_tokens=40),
        continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=0.2),
    )
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
    gaps = []
    bound = []
    for ids, output in zip(prompts, done.values(), strict=True):
        assert output.error is None
        assert len(output.generated_tokens) == 40
        gaps.append(short(ids, output.generated_tokens))
        bound.append(short(ids, rounded.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()))
    ours_gap, eager_gap = (torch.cat(x).mean().item() for x in (gaps, bound))
    assert ours_gap <= 2 * eager_gap + 1e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_on_several_gpus(dtype: torch.dtype) -> None:
    """Kernels run on the device of their tensors, which is not the current device for half of the layers."""
    eager, ours = (model.to(dtype) for model in pair(BY_NAME["qwen3"]))
    ours.to("cuda:0")
    ours.model.layers[1].to("cuda:1")

    def there(module: Any, args: Any, kwargs: Any) -> Any:
        def move(x: Any) -> Any:
            return tuple(map(move, x)) if isinstance(x, tuple) else x.to("cuda:1") if hasattr(x, "to") else x

        return move(args), {name: move(x) for name, x in kwargs.items()}

    ours.model.layers[1].register_forward_pre_hook(there, with_kwargs=True)
    ours.model.layers[1].register_forward_hook(lambda module, args, out: out.to("cuda:0"))
    mask = padding_mask("left")
    ids = tokens(*mask.shape).masked_fill(mask == 0, 0)
    options: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "min_new_tokens": 8, "max_new_tokens": 8}
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))
