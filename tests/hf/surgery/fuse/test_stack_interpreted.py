"""Layers of whole models are computed by one kernel, if this is proven to change nothing. Other models are left as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from decode_step_cases import tensors_of
from hf_families import family
from interpreter_bounds import reachable
from tiny_models import make_model, make_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.cache import tensors as kv_cache
from fa_serve.hf import PagedBatch, model_layers, paged_forward, patch
from fa_serve.hf.surgery.fuse import stack
from fa_serve.hf.surgery.fuse.fusion import fuse_layers, unfuse_model
from fa_serve.hf.surgery.fuse.layer import FusedLayer
from fa_serve.hf.surgery.fuse.stack import stack_layers
from fa_serve.ops.decode_step.run import DecodeStack
from fa_serve.ops.decode_step.stacked import StackStep


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The switch is on. The list has the number of layers of each launch, those of the proof included."""
    made: list[int] = []
    compute = DecodeStack.compute

    def noted(self: DecodeStack, x: Tensor, step: StackStep, **options: Any) -> Tensor:
        made.append(len(self._layers))
        with reachable(*tensors_of(self._layers, step)):
            return compute(self, x, step, **options)

    monkeypatch.setattr(DecodeStack, "compute", noted)
    monkeypatch.setattr(stack, "STACKS_LAYERS", True)
    return made


def fused_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    patch(model)
    fuse_layers(model)
    return [module for module in model.modules() if isinstance(vars(module).get("forward"), FusedLayer)]


@torch.no_grad()
def decode(model: PreTrainedModel, **others: Any) -> tuple[Tensor, list[Tensor]]:
    """Logits of three prompts, then of a token of one sequence and of tokens of all three; and the caches."""
    caches = kv_cache.allocate(model_layers(model).attention, 12, 4, model.device)
    table = torch.randperm(11, generator=torch.Generator().manual_seed(0)).to(torch.int32)[:9].view(3, 3) + 1
    out = []
    lengths = [0, 0, 0]
    for q_lens in ((9, 2, 5), (1, 0, 0), (1, 1, 1)):
        rows = [row for row, queries in enumerate(q_lens) if queries]
        places = [(row, lengths[row] + i) for row in rows for i in range(q_lens[row])]
        fresh = max(lengths) == 0
        for row in rows:
            lengths[row] += q_lens[row]
        batch = PagedBatch(
            kv_caches=caches,
            slot_mapping=torch.tensor([int(table[row, at // 4]) * 4 + at % 4 for row, at in places]),
            block_table=table[rows].contiguous(),
            seqused_k=torch.tensor([lengths[row] for row in rows], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, *(q_lens[row] for row in rows)]).cumsum(0).to(torch.int32),
            max_seqlen_q=max(q_lens),
            max_seqlen_k=max(lengths),
            fresh=fresh,
            **others,
        )
        ids = torch.tensor([(7 * at + row) % 90 + 3 for row, at in places])
        out.append(paged_forward(model, ids, torch.tensor([at for _, at in places]), batch, torch.arange(len(places))))
    return torch.cat(out), [x for pair in caches.values() for x in pair]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "granite"])
def test_steps_of_few_tokens_are_one_launch_and_compute_the_same(name: str, calls: list[int]) -> None:
    model = family(name).build()
    modules = fused_layers(model)
    expected, cached = decode(model)
    assert stack_layers(model, modules)
    assert calls == [1, 1, 1], "the proof computes one layer"
    calls.clear()
    actual, caches = decode(model)
    assert calls == [2, 2], "prompts are computed layer by layer, and each step of decoding is one launch of two layers"
    assert float((actual - expected).abs().max()) <= 2e-5 * float(expected.abs().max())
    for cache, wanted in zip(caches, cached, strict=True):
        torch.testing.assert_close(cache, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
    unfuse_model(model)
    calls.clear()
    decode(model)
    assert calls == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mistral", "windows"),
        ("olmo2", "norms do not stand before"),
        ("qwen3-moe", "missing, quantised or divided"),
        ("smollm3", "differ in what they ask"),
    ],
)
def test_other_models_are_computed_layer_by_layer(
    name: str, reason: str, calls: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model = family(name).build()
    modules = fused_layers(model)
    with caplog.at_level("INFO", logger="fa_serve.hf"):
        assert not stack_layers(model, modules)
    assert reason in caplog.text
    assert all(module.forward.stack is None for module in modules)


def test_a_model_that_changes_hidden_states_between_its_layers_is_left_alone(
    calls: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model = family("llama").build()
    modules = fused_layers(model)
    modules[1].register_forward_pre_hook(lambda _, given: (given[0] * 2, *given[1:]))
    with caplog.at_level("INFO", logger="fa_serve.hf"):
        assert not stack_layers(model, modules)
    assert "changes what a layer returns" in caplog.text


@pytest.mark.parametrize("part", ["output", "cached keys or values"])
def test_a_kernel_that_computes_something_else_is_not_used(
    part: str, calls: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compute = DecodeStack.compute

    def wrong(self: DecodeStack, x: Tensor, step: StackStep, **options: Any) -> Tensor:
        y = compute(self, x, step, **options)
        (y if part == "output" else step.caches[0][0]).mul_(1.001)
        return y

    monkeypatch.setattr(DecodeStack, "compute", wrong)
    model = family("llama").build()
    modules = fused_layers(model)
    with caplog.at_level("INFO", logger="fa_serve.hf"):
        assert not stack_layers(model, modules)
    assert f"its {part} would change" in caplog.text


def test_a_kernel_that_cannot_be_launched_is_not_used(
    calls: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(self: DecodeStack, x: Tensor, step: StackStep, **options: Any) -> Tensor:
        raise RuntimeError("too many blocks in cooperative launch")

    monkeypatch.setattr(DecodeStack, "compute", refused)
    model = family("llama").build()
    modules = fused_layers(model)
    with caplog.at_level("INFO", logger="fa_serve.hf"):
        assert not stack_layers(model, modules)
    assert "its proof failed: too many blocks in cooperative launch" in caplog.text
    assert all(module.forward.stack is None for module in modules)


def test_a_cpu_that_interprets_no_kernels_and_older_gpus_keep_their_layers(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family("llama").build()
    modules = fused_layers(model)
    monkeypatch.setattr(stack.spec, "arch_of", lambda device: 80)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert not stack_layers(model, modules)
    assert calls == []
    assert not stack._runs_on(torch.device("cuda"))
    monkeypatch.setattr(stack.spec, "arch_of", lambda device: 120)
    assert stack._runs_on(torch.device("cuda"))


def test_steps_with_more_than_the_kernel_computes(calls: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """States that are read between layers, and sums in a fixed order, take the layers one by one."""
    model = family("llama").build()
    modules = fused_layers(model)
    assert stack_layers(model, modules)
    calls.clear()
    decode(model, num_splits=4)
    assert calls == []
    with caplog.at_level("INFO", logger="fa_serve.hf"):
        decode(model, by_layers=True)
    assert calls == []
    reason = "computed layer by layer: it has images, or a sequence reads pages"
    assert caplog.text.count(reason) == 1, "two steps of few tokens have the same reason"
    decode(model, backend="reference")
    assert calls == [], "attention is that of the backend that was chosen"
    handle = modules[1].register_forward_pre_hook(lambda *_: None)
    decode(model)
    assert calls == []
    handle.remove()
    decode(model)
    assert calls == [2, 2]


def test_engines_compute_steps_that_pass_pages_on_layer_by_layer(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal prompts begin in one step of 6 tokens: the second one reads the page that the first one fills."""
    answers = []
    for switch in (False, True):
        monkeypatch.setattr(stack, "STACKS_LAYERS", switch)
        config = EngineConfig(device="cpu", dtype="float32", page_size=4, num_pages=32, max_num_seqs=4, seed=0)
        engine = Engine(config, model=make_model("llama"), tokenizer=make_tokenizer())
        calls.clear()
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        answers.append([output.token_ids for output in engine.generate([[5, 6, 7, 8, 9]] * 2, params)])
        assert len(calls) == (2 if switch else 0), "the steps after the prompts are one launch each"
        engine.close()
    assert answers[0] == answers[1]


def test_it_is_off_until_a_gpu_has_run_it() -> None:
    assert stack.STACKS_LAYERS is False
    model = family("llama").build()
    assert not stack_layers(model, fused_layers(model))
