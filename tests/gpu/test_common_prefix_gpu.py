"""Attention that reads shared pages once, on a GPU: values against float64 and the plain path, graphs, and tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import SIZES, VOCAB, make_model, make_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.engine.bench_cascade import LAYERS, Case, check_step, make_step
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.runner import attention_kinds
from fa_serve.hf import PagedBatch
from fa_serve.hf.adapter.common_prefix import CommonPrefixes

FLOAT8 = pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU that multiplies float8")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 64, 4096, 100),
        Case(1, 64, 4096, 100, members=64),
        Case(1, 130, 512, 7, members=130),
        Case(9, 4, 1024, 33),
        Case(5, 16, 208, 300, heads=64, dim=64),
        Case(3, 2, 48, 1, heads=8, kv_heads=8),
        Case(2, 11, 1600, 50, heads=16, kv_heads=2, dim=256),
        Case(2, 16, 1600, 50, heads=12, kv_heads=1),
    ],
    ids=lambda case: case.name,
)
def test_values_are_exact(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    step, q = make_step(case, "cuda", dtype)
    check_step(case, step, q)


def attend(step: PagedBatch, q: torch.Tensor, **options: Any) -> torch.Tensor:
    return step.attention(0, q, q, q, **{"left": -1, "softmax_scale": None, "softcap": 0.0, "sinks": None} | options)


@pytest.mark.parametrize("members", [16, 64])
@pytest.mark.parametrize(
    "kind", ["softcap", "sinks", pytest.param("float8", marks=FLOAT8), pytest.param("float8 and float16", marks=FLOAT8)]
)
def test_options_give_what_the_plain_path_gives(kind: str, members: int) -> None:
    torch.manual_seed(0)
    dtype = torch.float16 if kind.endswith("float16") else torch.bfloat16
    step, q = make_step(Case(2, 24, 1024, 90, members=members), "cuda", dtype)
    q = 3 * q
    options: dict[str, Any] = {}
    if kind == "softcap":
        options["softcap"] = 5.0
    elif kind == "sinks":
        options["sinks"] = 8 * torch.randn(32, device="cuda", dtype=dtype)
    else:
        caches = {layer: tuple(x.to(torch.float8_e4m3fn) for x in pair) for layer, pair in step.kv_caches.items()}
        scales = tuple(torch.rand(8, device="cuda") + 0.5 for _ in range(2))
        step = replace(step, kv_caches=caches, descales=dict.fromkeys(range(LAYERS), scales))
    torch.testing.assert_close(
        attend(step, q, **options), attend(replace(step, common=None), q, **options), rtol=3e-2, atol=2e-2
    )


def test_a_graph_serves_other_groups() -> None:
    """Lengths, members and pages are read on the device."""
    torch.manual_seed(0)
    step, q = make_step(Case(4, 12, 640, 70), "cuda", torch.bfloat16)
    table = step.block_table
    used = step.seqused_k
    ends = torch.tensor([0, 12, 24, 36, 48], dtype=torch.int32, device="cuda")
    pages = torch.tensor([40, 40, 40, 40], dtype=torch.int32, device="cuda")
    shared = torch.full((48,), 40, dtype=torch.int32, device="cuda")
    rows = torch.tensor([0, 12, 24, 36], device="cuda")

    def compute() -> torch.Tensor:
        common = CommonPrefixes.of_step(
            table,
            used,
            group_table=table[rows],
            group_ends=ends,
            group_pages=pages,
            shared_pages=shared,
            page_size=16,
            max_seqlen_q=16,
        )
        return attend(replace(step, common=common), q)

    plain = attend(replace(step, common=None), q)
    torch.testing.assert_close(compute(), plain, rtol=2e-2, atol=2e-3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    for sizes, counts in (((12, 12, 12, 12), (40, 40, 40, 40)), ((12, 12, 0, 0), (7, 39, 0, 0)), ((0, 0, 0, 0), (0, 0, 0, 0))):
        ends.copy_(torch.tensor([0, *sizes]).cumsum(0))
        pages.copy_(torch.tensor(counts))
        shared.zero_()
        shared[: sum(sizes)] = torch.tensor(counts, device="cuda").repeat_interleave(torch.tensor(sizes, device="cuda")).int()
        out.zero_()
        graph.replay()
        torch.testing.assert_close(out, plain, rtol=2e-2, atol=2e-3)


@pytest.mark.usefixtures("full_float32")
@pytest.mark.parametrize("ahead", [False, True], ids=["offline", "ahead"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tokens_are_those_without_groups(family: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kinds, "LEAST_GROUP_BYTES", 1 << 10)
    draw = random.Random(0)
    prefixes = [[draw.randrange(3, VOCAB) for _ in range(length)] for length in (60, 100)]
    given = [[*prefixes[number % 2], *(draw.randrange(3, VOCAB) for _ in range(3))] for number in range(14)]
    model = make_model(family).to("cuda")
    found = []
    for cascade in (False, True):
        config = EngineConfig(
            device="cuda", num_pages=512, page_size=4, max_num_seqs=16, max_model_len=160, cascade_attention=cascade, seed=0
        )
        engine = Engine(config, model=model, tokenizer=make_tokenizer(), ahead=ahead)
        outputs = [*engine.generate(given, GREEDY), *engine.generate([given[0]], SamplingParams(n=4, max_tokens=20, seed=3))]
        found.append([output.token_ids for output in outputs])
        graphs = engine._runner._graphs
        assert graphs is not None
        assert any(shape.groups for shape in graphs._replays) == cascade
        engine.check_integrity()
        engine.close()
    assert found[0] == found[1]


def test_nothing_is_compiled_for_a_step_with_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a start ahead, steps of groups of any size and length find their kernels."""
    monkeypatch.setattr(attention_kinds, "LEAST_GROUP_BYTES", 1 << 10)
    config = EngineConfig(device="cuda", num_pages=1024, max_num_seqs=32, max_model_len=1024, cascade_attention=True, seed=0)
    sizes = SIZES | {"head_dim": 64, "hidden_size": 256, "num_attention_heads": 8, "max_position_embeddings": 2048}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.bfloat16).to("cuda")
    engine = Engine(config, model=model, tokenizer=make_tokenizer(), ahead=True)
    before = engine.preparations()
    draw = random.Random(1)
    for count in (2, 5, 13, 30):
        for length in (40, 300, 900):
            prefix = [draw.randrange(3, VOCAB) for _ in range(length)]
            engine.generate([[*prefix, *(draw.randrange(3, VOCAB) for _ in range(3))] for _ in range(count)], GREEDY)
    assert engine.preparations()[0] == before[0]
    engine.close()
