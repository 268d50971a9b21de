"""The memory of the KV cache: sizes, layouts and float8."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hf_families import BY_NAME
from tiny_models import VOCAB, make_model

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.cache import tensors as kv_cache
from fa_serve.hf import model_layers, patch
from fa_serve.hf.latent_layers import latent_sizes, latent_spec
from fa_serve.spec import ParameterError


def test_a_page_has_the_bytes_of_its_tensors() -> None:
    model = make_model("qwen3")
    patch(model)
    layers = model_layers(model).attention
    caches = kv_cache.allocate(layers, 5, 4, torch.device("cpu"))
    assert [k.shape for k, _ in caches.values()] == [(5, 4, 2, 16)] * 2
    assert sum(x.nbytes for pair in caches.values() for x in pair) == 5 * kv_cache.bytes_per_page(layers.values(), 4)


def test_descales_store_the_largest_number_as_the_headroom() -> None:
    model = make_model()
    patch(model)
    descales = kv_cache.descales(model, VOCAB, model_layers(model).attention)
    assert [(k.shape, v.shape) for k, v in descales.values()] == [((2,), (2,))] * 2
    assert all((x > 0).all() for pair in descales.values() for x in pair)
    # the first layer's keys of the same tokens, by hand
    ids = torch.randint(VOCAB, (256,), generator=torch.Generator().manual_seed(0))
    layer = model.model.layers[0]
    with torch.no_grad():
        values = layer.self_attn.v_proj(layer.input_layernorm(model.model.embed_tokens(ids))).view(256, 2, 16)
    torch.testing.assert_close(descales[0][1] * kv_cache.HEADROOM, values.abs().amax(dim=(0, 2)))


def test_latent_keys_have_one_descale_by_the_largest_of_their_numbers() -> None:
    """The vector behind its norm, and the key that is rotated, of the first layer."""
    model = BY_NAME["deepseek-v3"].build()
    patch(model)
    sizes = [latent_sizes(layer.self_attn, 4, 24) for layer in model.model.layers]
    layers = {i: latent_spec(spec, sizes[i]) for i, spec in model_layers(model).attention.items()}
    descales = kv_cache.descales(model, model.config.vocab_size, layers)
    ids = torch.randint(model.config.vocab_size, (256,), generator=torch.Generator().manual_seed(0))
    first = model.model.layers[0]
    with torch.no_grad():
        latent, key = first.self_attn.kv_a_proj_with_mqa(first.input_layernorm(model.model.embed_tokens(ids))).split(
            [sizes[0].rank, sizes[0].rope], dim=1
        )
        numbers = torch.cat([first.self_attn.kv_a_layernorm(latent), key], dim=1)
    k_descale, v_descale = descales[0]
    torch.testing.assert_close(k_descale * kv_cache.HEADROOM, numbers.abs().amax()[None])
    assert torch.equal(k_descale, v_descale)
    assert not first.self_attn.kv_a_layernorm._forward_hooks


def test_available_memory_is_that_of_this_machine() -> None:
    assert 1 << 20 < kv_cache.available_memory() < 1 << 50
    assert kv_cache.reclaimable_memory() > kv_cache.available_memory() // 2, "caches of files count, the reserve does not"


def test_a_float8_cache_is_near_and_small(make_engine) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0)
    plain = EngineConfig(device="cpu", dtype="float32", num_pages=64)
    exact = Engine(plain)
    rough = Engine(replace(plain, kv_cache_dtype="fp8"))
    caches = [engine._runner.kv_caches[0][0] for engine in (exact, rough)]
    assert (caches[1].dtype, caches[0].element_size()) == (torch.float8_e4m3fn, 4 * caches[1].element_size())
    asked = ["What is 17 + 25?", "def add(a, b):\n    return", "import "]
    for left, right in zip(exact.generate(asked, params), rough.generate(asked, params), strict=True):
        # the first token's attention has not been through the cache
        assert left.token_ids[0] == right.token_ids[0]
        assert right.logprobs[0].logprob == pytest.approx(left.logprobs[0].logprob, abs=1e-3)
        same = [a == b for a, b in zip(left.token_ids, right.token_ids, strict=True)]
        until = same.index(False) if False in same else len(same)
        for a, b in zip(left.logprobs[:until], right.logprobs[:until], strict=True):
            assert b.logprob == pytest.approx(a.logprob, abs=0.25)
    again = rough.generate(asked, params)
    assert [c.error for c in again] == [None] * 3


def test_the_room_on_a_gpu_is_what_this_process_and_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 80 GiB, 30 of which are free. This process holds 10, so other programs hold 40."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 << 30)
    device = torch.device("cuda")
    assert kv_cache.device_room(device, share=0.75, needed=15 << 30, least=1) == 5 << 30
    with pytest.raises(ParameterError, match=r"take 15\.0 GiB, other programs 40\.0 GiB") as raised:
        kv_cache.device_room(device, share=0.75, needed=15 << 30, least=(5 << 30) + 1)
    assert raised.value.field == "gpu_memory_utilization"
