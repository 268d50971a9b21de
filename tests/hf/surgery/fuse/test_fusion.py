"""Fused layers compute what the model's own layers compute, for every family that is fused. Other layers are left alone."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from every_type import tiny_model
from hf_families import FUSED, Family, family
from latent_families import attention_call
from tiny_models import greedy, make_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

import fa_serve
from fa_serve.engine import SamplingParams
from fa_serve.engine.cache import tensors as kv_cache
from fa_serve.hf import PagedBatch, model_layers, paged_forward, patch
from fa_serve.hf.surgery.fuse import layer as layer_module
from fa_serve.hf.surgery.fuse.fusion import build_layer, cached_layers, fuse_layers, tried_rotations
from fa_serve.hf.surgery.fuse.latent import LatentAttention
from fa_serve.hf.surgery.fuse.layer import FusedLayer, HeadsAttention
from fa_serve.hf.surgery.fuse.router import FusedRouter

OWN = ("starcoder2", "cohere2", "gpt2", "opt")
PROMPT = [5, 6, 7, 8, 9, 10, 11]


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    """The logits of 24 tokens in two chunks; the second chunk attends to the pages of both."""
    layers = cached_layers(model, model_layers(model).attention)
    rows = torch.arange(24)
    caches = kv_cache.allocate(layers, 8, 8, model.device)
    out = []
    for begin, end in ((0, 10), (10, 24)):
        batch = PagedBatch(
            kv_caches=caches,
            slot_mapping=rows[begin:end] + 8,
            block_table=torch.arange(1, 7, dtype=torch.int32)[None],
            seqused_k=torch.tensor([end], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32),
            max_seqlen_q=end - begin,
            max_seqlen_k=end,
            fresh=begin == 0,
        )
        ids = rows * 7 % 90 + 3
        out.append(paged_forward(model, ids[begin:end], rows[begin:end], batch, torch.arange(end - begin)))
    return torch.cat(out)


@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family(name).build()
    patch(model)
    expected = logits(model)
    assert fuse_layers(model) == 2
    calls: list[int] = []
    compute = FusedLayer.compute
    monkeypatch.setattr(FusedLayer, "compute", lambda self, *args: calls.append(self.index) or compute(self, *args))
    actual = logits(model)
    assert calls == [0, 1, 0, 1]
    assert float((actual - expected).abs().max()) <= 2e-5 * float(expected.abs().max())


@torch.no_grad()
def test_kinds_of_attention_are_built_for_the_rotations_they_may_have() -> None:
    llama = family("llama").build().model.layers[0]
    call = attention_call(llama, (4, 16), (2, 16), (2, 16))
    attention = build_layer(llama, call, "none").attention
    assert isinstance(attention, HeadsAttention)
    assert (attention.num_heads, attention.head_dim, attention.tables) == (4, 16, None)
    assert build_layer(llama, call, "halves").attention.tables == "twice"
    assert build_layer(llama, call, "half tables").attention.tables == "once"
    for angles, tried in ((16, ("halves", "none")), (8, ("halves", "half tables", "none"))):
        assert tried_rotations(call, torch.zeros(7, angles)) == tried, "a head of 16 has at most 8 angles"
    layer = family("deepseek-v3").build().model.layers[0]
    latent = attention_call(layer, (4, 24), (4, 24), (4, 16), softmax_scale=0.3)
    assert tried_rotations(latent, torch.zeros(7, 8)) == ("halves", "neighbours")
    fused = build_layer(layer, latent, "neighbours")
    assert isinstance(fused.attention, LatentAttention)
    assert (fused.index, fused.attention.pairing, fused.options["softmax_scale"]) == (0, "neighbours", 0.3)
    default = build_layer(layer, latent._replace(softmax_scale=None), "halves")
    assert (default.attention.pairing, default.options["softmax_scale"]) == ("halves", 24**-0.5), "the scale of the heads"


@pytest.mark.parametrize("name", OWN)
def test_other_layers_run_as_they_are(name: str) -> None:
    model = family(name).build()
    patch(model)
    expected = logits(model)
    assert fuse_layers(model) == 0
    assert torch.equal(logits(model), expected)


def test_a_layer_whose_code_says_otherwise_is_left_alone(monkeypatch, caplog) -> None:
    """The modules are those of a Llama, but the layer computes something else."""
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: 1.01 * forward(self, x))
    model = make_model()
    patch(model)
    assert fuse_layers(model) == 0
    assert "LlamaDecoderLayer layers are not fused: with rotary embedding, its output would change" in caplog.text


def test_layers_of_towers_are_no_layers_of_texts(caplog) -> None:
    caplog.set_level("INFO", "fa_serve")
    model = tiny_model("llava")
    patch(model)
    layers = len(model.get_decoder().layers)
    assert fuse_layers(model) == layers
    assert f"{layers} of {layers} layers are fused" in caplog.text
    assert "are not fused" not in caplog.text, "nobody asked for those of the tower"


def test_each_kind_is_proven_by_itself() -> None:
    """Two layers differ in the scale of their scores, which only their settings show. Each must keep its scale."""
    model = make_model()
    model.model.layers[1].self_attn.scaling = 0.05
    patch(model)
    expected = logits(model)
    assert fuse_layers(model) == 2
    assert [layer.forward.options["softmax_scale"] for layer in model.model.layers] == [0.25, 0.05]
    assert float((logits(model) - expected).abs().max()) <= 2e-5 * float(expected.abs().max())


def test_queries_that_grow_with_their_position_are_found(caplog) -> None:
    """Ministral scales queries beyond `original_max_position_embeddings`, where the positions of the proof do not reach."""
    scaled = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
    model = Family("ministral3", "Ministral3ForCausalLM", config={"head_dim": 16, "rope_parameters": scaled}).build()
    patch(model)
    assert fuse_layers(model) == 0
    assert "with rotary embedding, its queries would change" in caplog.text


def test_hooks_are_not_passed_over(caplog) -> None:
    model = make_model()
    patch(model)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 2)
    assert fuse_layers(model) == 1
    assert "LlamaDecoderLayer layers are not fused: its LlamaMLP has hooks, which would not be called" in caplog.text


@pytest.mark.parametrize("exact", [False, True], ids=["engine", "exact"])
def test_hooks_that_come_after_the_fusion_are_named_once(make_engine, caplog, exact: bool) -> None:
    layer_module._warn_of_hooks.cache_clear()
    model = make_model()
    engine = None if exact else make_engine(model=model)
    context = fa_serve.exact(model, page_size=4) if exact else contextlib.nullcontext()

    def compute() -> None:
        with context:
            model(input_ids=torch.tensor([[5, 6, 7]])) if engine is None else engine.generate([[5, 6, 7]])

    model.model.layers[0].register_forward_hook(lambda *_: None)  # hooks of the layer itself are called
    compute()
    assert "not called" not in caplog.text
    hook = model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    compute()
    compute()
    assert caplog.text.count("hooks were added to parts of LlamaDecoderLayer after it was fused, and are not called") == 1
    hook.remove()
    layer_module._warn_of_hooks.cache_clear()
    compute()
    assert caplog.text.count("not called") == 1


def test_weights_that_kernels_cannot_read_are_left_alone(caplog) -> None:
    model = make_model()
    patch(model)
    down = model.model.layers[0].mlp.down_proj
    down.weight = torch.nn.Parameter(down.weight.detach().t().contiguous().t())
    assert fuse_layers(model) == 0, "both layers are of one kind, and one of them cannot be"
    assert "the weights of a projection must be contiguous" in caplog.text


def test_merged_weights_take_no_memory_of_their_own() -> None:
    model = make_model("qwen3")
    patch(model)
    expected = copy.deepcopy(model.state_dict())
    fuse_layers(model)
    layer = model.model.layers[0]
    for parts in (
        [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
        [layer.mlp.gate_proj, layer.mlp.up_proj],
    ):
        assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1
    assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())


def test_the_model_still_generates_and_so_does_the_engine(make_engine) -> None:
    model = make_model("qwen3")
    reference = make_model("qwen3")
    patch(model)
    fuse_layers(model)
    expected = greedy(reference, PROMPT, 12)
    engine = make_engine(model=model, max_num_batched_tokens=5)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    assert [c.token_ids for c in engine.generate([PROMPT, PROMPT[::-1]], params)] == [
        expected,
        greedy(reference, PROMPT[::-1], 12),
    ]
    assert greedy(model, PROMPT, 12) == expected


@pytest.mark.parametrize("setting", ["eager", "deterministic"])
def test_an_engine_without_fusion_takes_a_model_that_another_engine_has_fused(make_engine, setting: str) -> None:
    """DeepSeek's fused layers keep latent keys, which the cache of an engine without fusion has no room for."""
    model = family("deepseek-v3").build()
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    fused = make_engine(model=model).generate([PROMPT], params)
    assert any(isinstance(m.forward, FusedLayer) for m in model.modules())
    plain = make_engine(model=model, **{setting: True}).generate([PROMPT], params)
    assert not any(isinstance(m.forward, FusedLayer | FusedRouter) for m in model.modules())
    assert [c.token_ids for c in plain] == [c.token_ids for c in fused]
    assert len(plain[0].token_ids) == 6
