"""Layers that cache latent keys: their tokens are those of `generate`, whatever happens to the batch and to the cache."""

from __future__ import annotations

import pytest
import torch
from hf_families import VOCAB, Family
from latent_families import LATENT, SCALED_QUERIES, attention_call
from sampled_cases import ALL
from tiny_models import random_prompts
from torch import nn

from benchmarks.soak.long_run import long_run
from fa_serve.engine import SamplingParams
from fa_serve.engine.runner import model_runner
from fa_serve.engine.speculation.drafts import NgramDrafter
from fa_serve.hf.latent_layers import LatentSizes
from fa_serve.hf.surgery.fuse.latent import LatentAttention, build_latent
from fa_serve.hf.surgery.proof import NotReplacedError

KINDS = [
    family for family in LATENT if ALL or family.name in {"deepseek-v3-yarn", "deepseek-v3-halves", "deepseek-v2", "youtu"}
]
"""Queries of one projection and of two, either rotary embedding, scaled scores, and layers without experts."""
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def prompts() -> list[list[int]]:
    return [[token % (VOCAB - 3) + 3 for token in prompt] for prompt in random_prompts(6, longest=20)]


def expected(family: Family, asked: list[list[int]]) -> list[list[int]]:
    """What transformers generates with eager attention."""
    model = family.build()
    model.generation_config.eos_token_id = None
    answers = [model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8)[0] for prompt in asked]
    return [answer[len(prompt) :].tolist() for prompt, answer in zip(asked, answers, strict=True)]


def latent_layers(engine) -> list[LatentAttention]:
    fused = [module.forward for module in engine._runner.model.modules() if hasattr(module, "self_attn")]
    return [layer.attention for layer in fused if isinstance(getattr(layer, "attention", None), LatentAttention)]


@pytest.mark.parametrize("family", KINDS, ids=lambda family: family.name)
def test_tokens_are_those_of_generate(make_engine, family, monkeypatch) -> None:
    """With chunks of prompts, preemption and prefix cache, over pages that held something else before."""
    forms: list[str] = []
    for form in ("_plain", "_absorbed"):
        compute = getattr(LatentAttention, form)
        monkeypatch.setattr(
            LatentAttention, form, lambda *args, form=form, compute=compute: forms.append(form) or compute(*args)
        )
    engine = make_engine(model=family.build(), num_pages=10, max_model_len=40, max_num_batched_tokens=11)
    forms.clear()
    layers = latent_layers(engine)
    assert len(layers) == 2
    sizes = layers[0].sizes
    config = family.make_config()
    assert sizes == (config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim)
    for k_cache, v_cache in engine._runner.kv_caches.values():
        assert k_cache.shape == (10, 4, 1, sizes.rank + sizes.rope)
        assert v_cache.data_ptr() == k_cache.data_ptr()
        k_cache.fill_(float("nan"))
    assert engine._runner.bytes_per_page == 2 * 4 * (sizes.rank + sizes.rope) * 4
    asked = prompts()
    tokens = expected(family, asked)
    assert [c.token_ids for c in engine.generate(asked, GREEDY)] == tokens
    assert engine.stats().num_preemptions > 0
    assert set(forms) == {"_plain", "_absorbed"}
    hit = engine.generate([asked[-1]], GREEDY)[0]
    assert hit.num_cached_tokens > 0
    assert hit.token_ids == tokens[-1]
    engine.check_integrity()


@pytest.mark.parametrize(("plain_tokens", "captured"), [(20, False), (21, True)])
def test_many_new_tokens_keep_the_plain_form_where_there_are_graphs(
    make_engine, replays, monkeypatch, plain_tokens, captured
) -> None:
    """A step with prompts is captured when it comes for the second time, and graphs compute the absorbed form."""
    monkeypatch.setattr(model_runner, "PLAIN_TOKENS", plain_tokens)
    family = LATENT[0]
    engine = make_engine(model=family.build(), prefix_caching=False)
    engine._runner.make_graphs()
    asked = [list(range(3, 13)), list(range(8, 18))]
    for _ in range(3):
        assert [c.token_ids for c in engine.generate(asked, GREEDY)] == expected(family, asked)
    assert latent_layers(engine)
    seen = {x.tokens for x in engine._runner._graphs._replays if x.kind == "prompts"}
    assert bool(seen) == captured


def test_drafts_are_verified_on_latent_keys(make_engine, monkeypatch) -> None:
    """Every draft has two right tokens and a wrong one, so each step verifies four tokens."""
    family = LATENT[0]
    asked = prompts()[:3]
    answers = expected(family, asked)
    known = {tuple(prompt): prompt + answer for prompt, answer in zip(asked, answers, strict=True)}

    def propose(_: object, sequence, count: int) -> list[int]:
        right = known[tuple(sequence.request.prompt)][len(sequence.tokens) :][:2]
        return [*right, (right[-1] + 1) % VOCAB][:count] if right else []

    monkeypatch.setattr(NgramDrafter, "propose", propose)
    engine = make_engine(model=family.build(), speculative="ngram")
    assert [c.token_ids for c in engine.generate(asked, GREEDY)] == answers
    assert latent_layers(engine)
    drafts = engine.stats().speculation
    assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens


@pytest.mark.parametrize(
    "settings", [{"fusion": False}, {"eager": True}, {"deterministic": True}], ids=["no-fusion", "eager", "deterministic"]
)
def test_layers_that_are_not_fused_cache_heads(make_engine, settings) -> None:
    family = LATENT[0]
    asked = prompts()[:2]
    engine = make_engine(model=family.build(), **settings)
    assert engine._runner.kv_caches[0][0].shape[2:] == (4, 24)
    assert [c.token_ids for c in engine.generate(asked, GREEDY)] == expected(family, asked)


def test_a_float8_cache_of_latent_keys_loses_no_more_than_one_of_heads(make_engine) -> None:
    """Log-probabilities of a prompt in chunks, which reads the cache, beside those of the model."""
    family = LATENT[0]
    prompt = prompts()[-1] * 3
    with torch.no_grad():
        exact = family.build()(torch.tensor([prompt])).logits[0].log_softmax(-1)
    wanted = exact[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    errors = {}
    for fusion in (True, False):
        engine = make_engine(model=family.build(), kv_cache_dtype="fp8", fusion=fusion, max_num_batched_tokens=7)
        k_cache = engine._runner.kv_caches[0][0]
        assert k_cache.dtype == torch.float8_e4m3fn
        assert (k_cache.shape[2] == 1) == fusion
        found = engine.generate([prompt], params)[0].prompt_logprobs[1:]
        errors[fusion] = float((torch.tensor([x.logprob for x in found]) - wanted).abs().mean())
    assert 0 < errors[True] <= 2 * errors[False] < 0.5


def test_queries_that_are_scaled_by_position_keep_the_layers_own_code(make_engine, caplog) -> None:
    """At the positions of the proof their scale is 1: only positions that are far away show it."""
    asked = prompts()[:2]
    engine = make_engine(model=SCALED_QUERIES.build())
    assert not latent_layers(engine)
    assert "Mistral4DecoderLayer layers are not fused: with rotary embedding, its scores would change" in caplog.text
    assert engine._runner.kv_caches[0][0].shape[2:] == (1, 24 + 8), "the layers cache latent keys nevertheless"
    assert [c.token_ids for c in engine.generate(asked, GREEDY)] == expected(SCALED_QUERIES, asked)


@pytest.mark.slow
def test_nothing_is_lost_in_random_traffic(make_engine) -> None:
    engine = make_engine(model=LATENT[-1].build(), num_pages=48, max_model_len=128, max_num_batched_tokens=48, max_num_seqs=12)
    assert latent_layers(engine)
    report = long_run(engine, 40, alive=16, longest=60)
    assert set(report["answers"]) >= {"length", "abort"}
    assert report["cached_tokens"] > 0


V3 = next(family for family in LATENT if family.name == "deepseek-v3")
SIZES = LatentSizes(16, 8, 16, 16)


@torch.no_grad()
def test_latent_attention_takes_the_weights_of_its_module() -> None:
    layer = V3.build().model.layers[0]
    built = build_latent(layer.self_attn, attention_call(layer, (4, 24), (4, 24), (4, 16)), SIZES, "neighbours")
    assert (built.num_heads, built.sizes, built.pairing) == (4, SIZES, "neighbours")
    assert built.kv_up.data_ptr() == layer.self_attn.kv_b_proj.weight.data_ptr()
    assert built.down.weight.data_ptr() == layer.self_attn.q_a_proj.weight.data_ptr()
    assert built.down.weight.shape == (16 + 24, 64)


@pytest.mark.parametrize(
    "option",
    [{"window_size": (9, 0)}, {"attention_chunk": 4}, {"softcap": 5.0}, {"sinks": torch.zeros(4)}],
    ids=lambda x: next(iter(x)),
)
def test_latent_attention_with_other_options_is_left_alone(option) -> None:
    layer = V3.build().model.layers[0]
    with pytest.raises(NotReplacedError, match="latent attention with a window, chunks, softcap or sinks"):
        build_latent(layer.self_attn, attention_call(layer, (4, 24), (4, 24), (4, 16), **option), SIZES, "halves")


def test_a_projection_of_latent_vectors_with_a_bias_is_left_alone() -> None:
    layer = V3.build().model.layers[0]
    layer.self_attn.kv_b_proj.bias = nn.Parameter(torch.zeros(4 * 32))
    with pytest.raises(NotReplacedError, match="must be a plain matrix without bias"):
        build_latent(layer.self_attn, attention_call(layer, (4, 24), (4, 24), (4, 16)), SIZES, "halves")
