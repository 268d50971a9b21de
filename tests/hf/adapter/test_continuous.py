"""transformers' own continuous batching gives with fa_serve the tokens that `generate` gives."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_families import BY_NAME, VOCAB
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import cache as cache_module
from transformers.generation.continuous_batching import continuous_api, initialization, model_runner

import fa_serve
from fa_serve import hf
from fa_serve.hf.adapter import continuous
from fa_serve.spec import UnsupportedModelError

NEW_TOKENS = 12


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without psutil, transformers believes that a CPU has no memory."""
    monkeypatch.setattr(cache_module.PagedAttentionMemoryHandler, "get_available_memory", lambda self: 10**9)


@pytest.fixture(params=["read and write indices", "block tables"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The two ways in which a batch reaches the cache; transformers uses the second on GPUs only."""
    if request.param == "block tables":
        monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *args: None)
    return str(request.param)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (5, 17, 1, 30, 9)]


def expected(model: PreTrainedModel) -> list[list[int]]:
    # `generate` gets no end token either: `min_new_tokens` would forbid it, which generate_batch does not do
    model.generation_config.eos_token_id = None
    return [
        model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS)[0, len(ids) :].tolist()
        for ids in prompts()
    ]


def generate_batch(model: PreTrainedModel) -> list[Any]:
    done = model.generate_batch(
        prompts(),
        generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=64, max_batch_tokens=16, block_size=16, max_blocks_per_request=4
        ),
    )
    return sorted(done.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))


def batched(model: PreTrainedModel) -> list[list[int]]:
    outputs = generate_batch(model)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.generated_tokens for output in outputs]


def counting(taken: Counter[str], name: str) -> Callable[..., Any]:
    original = getattr(continuous, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        taken[name] += 1
        return original(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("family", "path"),
    [
        ("llama", "read and write indices"),
        ("llama", "block tables"),
        ("qwen2-window", "block tables"),
        ("gemma2", "read and write indices"),
        ("gpt-oss", "block tables"),
    ],
    indirect=["path"],
)
def test_the_tokens_of_generate(family: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts longer than a batch are computed in chunks, beside requests that decode."""
    model = BY_NAME[family].build()
    tokens = expected(model)
    taken: Counter[str] = Counter()
    for name in ("attention_varlen", "attention_paged"):
        monkeypatch.setattr(continuous, name, counting(taken, name))
    assert batched(fa_serve.patch(model)) == tokens
    assert model.config._attn_implementation == "fa_serve"
    assert taken["attention_varlen"] > 0
    windows = getattr(model.config, "sliding_window", None) is not None
    assert (taken["attention_paged"] > 0) == (path == "block tables" and not windows)


def test_padded_batches(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs pad every batch to the size of a larger one, with requests that do not exist."""
    made = model_runner.ModelRunner.__init__

    def padding(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.pad_inputs = True

    monkeypatch.setattr(model_runner.ModelRunner, "__init__", padding)
    monkeypatch.setattr(model_runner.ModelRunner, "warmup", lambda *args: None)
    model = BY_NAME["llama"].build()
    tokens = expected(model)
    assert batched(fa_serve.patch(model)) == tokens


def test_a_cache_that_cannot_hold_the_heads() -> None:
    """Up to 5.24, transformers sizes its cache by the wrong dimension of multi-head latent attention."""
    model = BY_NAME["deepseek-v3"].build()
    tokens = expected(model)
    done = generate_batch(fa_serve.patch(model))
    if all(output.error is None for output in done):
        assert [output.generated_tokens for output in done] == tokens
        return
    ours = "24 in DeepseekV3Attention, got a cache that holds heads of size 8"
    theirs = "Source/destination tensor must have same slice shapes"  # later than 5.23, where the model stores its keys before
    assert all(ours in str(output.error) or theirs in str(output.error) for output in done)


@pytest.mark.parametrize("asked", [None, True, False])
def test_batches_are_synchronous(asked: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    continuous.enable()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    resolve: Any = continuous_api.resolve_continuous_batching_config
    later = {"device": torch.device("cpu")} if "device" in inspect.signature(resolve).parameters else {}
    for name, ours in (("fa_serve", True), ("paged|fa_serve", True), ("flash_attention_2", False)):
        config = BY_NAME["llama"].build().config
        config._attn_implementation_internal = name
        wanted = ContinuousBatchingConfig(use_cuda_graph=True, use_async_batching=asked, max_blocks_per_request=0)
        theirs = resolve.__wrapped__(config, wanted, None, False, **later).use_async_batching
        if ours and asked:
            with pytest.raises(UnsupportedModelError, match="use_async_batching must be None or False with fa_serve, got True"):
                resolve(config, wanted, None, False, **later)
            continue
        chosen = resolve(config, wanted, None, False, **later).use_async_batching
        assert chosen == (False if ours else theirs)
        assert wanted.use_async_batching is asked


@pytest.mark.parametrize("failing", ["__init__", "warmup"])
@torch.no_grad()
def test_a_failed_start_leaves_the_model_as_it_was(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fa_serve.patch(BY_NAME["llama"].build())
    manager = continuous_api.ContinuousBatchingManager
    step = "resolve_continuous_batching_config" if failing == "__init__" else "_create_batch_processor"
    expected = model(torch.tensor([[5, 6, 7]])).logits

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("this model cannot be served")

    monkeypatch.setattr(continuous_api if failing == "__init__" else manager, step, fail)
    with pytest.raises(ValueError, match="this model cannot be served"):
        generate_batch(model)
    assert model.config._attn_implementation == "fa_serve"
    assert torch.equal(model(torch.tensor([[5, 6, 7]])).logits, expected)


def test_the_first_layer_of_a_step_computes_the_slots() -> None:
    """Slots are kept for the later layers of a step, not for the next run over the same tensors, which a graph may capture."""
    batch = torch.arange(3, dtype=torch.int32)
    table = torch.tensor([[5, -1], [2, 7]], dtype=torch.int32)

    def slots(layer: int, *lengths: int) -> tuple[list[int], list[int]]:
        view: Any = object.__new__(continuous._CacheView)
        view.layer_idx = layer
        view.block_table = table
        view.k_cache = torch.empty(8, 4, 1, 1)
        view.cu_seqlens_k = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        used, where = view._slots(batch, 3)
        return used.tolist(), where.tolist()

    first = ([3, 6], [5 * 4 + 2, 7 * 4 + 1, -1])
    assert slots(0, 3, 6) == slots(1, 0, 0) == slots(4, 0, 0) == first
    assert slots(0, 4, 0) == slots(1, 3, 6) == ([4, 0], [5 * 4 + 3, -1, -1])


def test_a_window_that_a_layer_does_not_tell_is_refused() -> None:
    """Later than transformers 5.23 the keys are in the cache before, which keeps those of the window of the config."""
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    module.config = SimpleNamespace(sliding_window=3)  # type: ignore[assignment]
    x = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, 2, 4], dtype=torch.int32)  # the last row belongs to no request
    words = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 2, "max_length_k": 2, "read_index": []}
    with pytest.raises(UnsupportedModelError, match="the window of the layer, None keys in Module, got a cache that keeps 3"):
        hf.attention_forward(module, x, x, x, None, 0.25, **words)
    out, _ = hf.attention_forward(module, x, x, x, None, 0.25, sliding_window=3, **words)
    for first in (0, 2):
        rows = x[..., first : first + 2, :]
        expected = torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True, scale=0.25)
        torch.testing.assert_close(out[:, first : first + 2], expected.transpose(1, 2))
    assert not out[:, 4].any()


SWITCH = r'call model\.generate_batch, or call model\.set_attn_implementation\("fa_serve"\) before a plain forward or generate'


@torch.no_grad()
def test_a_plain_call_of_the_paged_attention_says_what_to_call() -> None:
    model = BY_NAME["llama"].build()
    ids = torch.tensor([prompts()[0]])
    plain = fa_serve.patch(BY_NAME["llama"].build())
    logits = plain(ids).logits
    model.set_attn_implementation("paged|fa_serve")
    if model.config._attn_implementation == "fa_serve":  # transformers 5.23 drops the prefix
        assert torch.equal(model(ids).logits, logits)
        return
    calls: list[Callable[[], Any]] = [
        lambda: model(ids),
        lambda: model(ids, attention_mask=torch.ones_like(ids)),
        lambda: model.generate(ids, do_sample=False, max_new_tokens=2),
        lambda: hf.model_layers(model),
    ]
    for call in calls:
        with pytest.raises(UnsupportedModelError, match=f"got a call of LlamaAttention without a cache: {SWITCH}"):
            call()
    for each in (model, plain):
        with pytest.raises(
            UnsupportedModelError, match=f"LlamaAttention with cache=object and without packed requests: {SWITCH}"
        ):
            each(ids, cache=object())
    assert [output.error for output in generate_batch(model)] == [None] * len(prompts())
    model.set_attn_implementation("fa_serve")
    assert torch.equal(model(ids).logits, logits)


@torch.no_grad()
def test_an_encoder_with_the_paged_attention_says_what_to_call() -> None:
    model = BY_NAME["roberta"].build()
    model.set_attn_implementation("paged|fa_serve")
    if model.config._attn_implementation == "fa_serve":  # transformers 5.23 drops the prefix
        return
    with pytest.raises(UnsupportedModelError, match=SWITCH):
        model(torch.tensor([prompts()[0]]))
