"""Compiled, exported and traced models compute what they compute otherwise, and attention is one node of their graphs."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from hf_families import BY_NAME, cached, tokens
from sampled_cases import each_nth
from torch import Tensor
from transformers import CompileConfig, StaticCache
from transformers.integrations.executorch import convert_and_export_with_cache

import fa_serve
from fa_serve import api
from fa_serve.hf.adapter import attention
from fa_serve.testing import make_qkv


@pytest.mark.slow
@pytest.mark.parametrize("family", each_nth(3, ["gemma2", "mistral", "llama"]))  # gemma2 has layers with windows and without
@torch.no_grad()
def test_compiles_without_a_graph_break(family: str) -> None:
    eager = BY_NAME[family].build()
    ours = fa_serve.patch(BY_NAME[family].build())
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :4] = 0
    ids = tokens(*mask.shape)
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    actual = compiled(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(actual[mask.bool()], eager(ids, attention_mask=mask).logits[mask.bool()], atol=3e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "graphs", "kernels"),  # a sliding static cache runs other code once it is full
    each_nth(2, [("gemma3", 2, "kernels"), ("gemma3", 2, "none"), ("llama", 1, "none"), ("llama", 1, "kernels")]),
    indirect=["kernels"],
)
def test_compiled_decoding_does_not_recompile_and_has_no_sizes_that_grow(family: str, graphs: int, kernels: bool) -> None:
    """Apart from transformers' count of tokens. CUDA graphs, which only devices with kernels have, are recorded again for
    each new number that a graph is given."""
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :4] = 0
    ids = tokens(*mask.shape)
    options = {"attention_mask": mask, "do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6}
    expected = BY_NAME[family].build().generate(ids, **options)
    numbers: dict[str, list[int]] = {}
    for name in ("sdpa", "fa_serve") if kernels else ("fa_serve",):
        model = BY_NAME[family].build()
        model.set_attn_implementation(name)
        seen = numbers[name] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Any], seen: list[int] = seen, **options: Any) -> Any:
            seen.append(sum(not isinstance(x, Tensor) for x in inputs))
            return graph.forward

        compile_config = CompileConfig(backend=backend, fullgraph=True, mode=None)  # type: ignore[arg-type]
        compile_config._compile_all_devices = True
        torch.compiler.reset()
        actual = model.generate(ids, **options, cache_implementation="static", compile_config=compile_config)
        assert torch.equal(actual, expected)
    assert len(numbers["fa_serve"]) == graphs
    if kernels:
        assert numbers["fa_serve"] == numbers["sdpa"]
        assert numbers["sdpa"][0] == 0
        assert family == "llama" or numbers["sdpa"][1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["none", "padding"])
@torch.no_grad()
def test_a_step_compiled_by_the_user_is_one_graph(padded: bool, kernels: bool) -> None:
    """model(...) with a static cache, without a mask and with one as long as the cache: no graph break, no graph per token."""
    eager = BY_NAME["llama"].build(num_hidden_layers=1)
    ours = fa_serve.patch(BY_NAME["llama"].build(num_hidden_layers=1))
    ids = tokens(2, 12)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    given: list[dict[str, Any]] = [{"position_ids": torch.arange(n)[None]} for n in range(13)]
    if padded:
        room = torch.ones(2, 20, dtype=torch.int64)
        room[0, :3] = 0
        positions = (room.cumsum(1) - 1).clamp(min=0)
        given = [{"attention_mask": room[:, :n], "position_ids": positions[:, :n]} for n in range(13)]
    cache = StaticCache(config=ours.config, max_cache_len=20)
    ours(ids[:, :6], **given[6], **cached(ours, cache))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for n in range(7, 13):
        step = dict(given[n])
        step["position_ids"] = step["position_ids"][:, -1:].clone(memory_format=torch.contiguous_format)
        if padded:
            step["attention_mask"] = torch.nn.functional.pad(step["attention_mask"], (0, 20 - n))
        actual = compiled(ids[:, n - 1 : n], **step, **cached(ours, cache)).logits
    expected = eager(ids, **given[12]).logits[:, -1:]
    torch.testing.assert_close(actual, expected, atol=3e-5, rtol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# transformers collects outputs in a global while it is traced
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@pytest.mark.parametrize("kernels", each_nth(2, ["kernels", "none"]), indirect=True)
@torch.no_grad()
def test_exports_with_a_static_cache(kernels: bool) -> None:
    """Each attention is one node of the exported graph, and the graph decodes as the model does."""
    eager = BY_NAME["llama"].build(num_hidden_layers=1)
    ours = fa_serve.patch(BY_NAME["llama"].build(num_hidden_layers=1))
    ours.generation_config.cache_implementation = "static"
    ours.generation_config.cache_config = {"batch_size": 1, "max_cache_len": 16}
    program = convert_and_export_with_cache(ours)
    name = "fa_serve.attention.default"
    assert [str(node.target) for node in program.graph.nodes].count(name) == ours.config.num_hidden_layers
    ids = tokens(1, 9)
    module = program.module()
    steps = [module(input_ids=ids[:, n : n + 1], cache_position=torch.tensor([n])) for n in range(9)]
    torch.testing.assert_close(torch.cat(steps, 1), eager(ids).logits, atol=3e-5, rtol=0)


def test_an_export_asks_nothing_of_the_number_of_queries() -> None:
    """The number may be one or many, and unknown when the model is exported."""

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, n: Tensor) -> Tensor:
            queries = n.item()
            torch._check(queries >= 0)
            torch._check(queries <= q.shape[2])
            return attention.attention_forward(self, q[:, :, :queries], k, k, None, is_causal=False)[0]

    q, k, _ = (x.transpose(1, 2) for x in make_qkv(2, 8, 40, 4, 2, 32))
    with torch.no_grad():
        program = torch.export.export(Layer(), (q, k, torch.tensor(5)), strict=False).module()
        for n in (1, 5, 8):
            torch.testing.assert_close(program(q, k, torch.tensor(n)), Layer()(q, k, torch.tensor(n)))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_holds_the_attention(packed: bool, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is launched past PyTorch would not be recorded, and the trace would return unwritten memory.

    On a CPU, PyTorch's own operators compute attention and are recorded as they are.
    """

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            starts = torch.tensor([0, 3, 8], dtype=torch.int32) if packed else None
            return attention.attention_forward(self, q, k, k, None, is_causal=False, cu_seq_lens_q=starts)[0]

    q, k, other = (x.transpose(1, 2) for x in make_qkv(1, 8, 8, 4, 4, 32))
    for needs_grad in (False, True):
        with monkeypatch.context() as patch:
            if gpu:
                patch.setattr(api, "is_traced", lambda *qkv, is_traced=api.is_traced: is_traced(*map(_on_a_gpu, qkv)))
            trace: Any = torch.jit.trace(Layer(), (q.clone().requires_grad_(needs_grad), k), check_trace=False)
        held = str(trace.inlined_graph).count("fa_serve::attention")
        assert held == (1 if gpu else 0)
        torch.testing.assert_close(trace(other, k), Layer()(other, k))
        other = other.detach().requires_grad_()
    trace(other, k).sum().backward()
    assert other.grad is not None


def _on_a_gpu(x: Tensor) -> Any:
    return types.SimpleNamespace(is_cuda=True, requires_grad=x.requires_grad)
