"""Latent attention on the GPU: the cases of the interpreter and DeepSeek's sizes in 16 bits, CUDA graphs, and the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from latent_cases import CASES, LatentCase, check_latent, make_latent
from latent_families import LATENT
from tiny_models import random_prompts

import fa_serve
from fa_serve.backends.hopper.latent.tiles import MIN_ROWS
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.hf import patch

DEEPSEEK = LatentCase(dims=(576, 512), heads=(128, 1))
SIZES = [
    replace(DEEPSEEK, q_lens=(1,) * 5, kv_lens=(3000, 1, 70, 0, 513)),
    replace(DEEPSEEK, q_lens=(1,), kv_lens=(20000,), heads=(16, 1)),
    replace(DEEPSEEK, q_lens=(4, 4, 3), kv_lens=(900, 4, 2000), heads=(40, 1), page_size=64),
    replace(DEEPSEEK, q_lens=(300, 1, 0, 2), kv_lens=(1500, 700, 9, 40), heads=(64, 1)),
    replace(DEEPSEEK, q_lens=(1, 1), kv_lens=(1000, 30), num_splits=4, head_major=True),
    replace(DEEPSEEK, q_lens=(1,) * 4, kv_lens=(3000, 0, 1, 513), heads=(20, 1)),
    LatentCase(q_lens=(1, 20), kv_lens=(500, 300), heads=(40, 1), dims=(288, 256)),
    replace(DEEPSEEK, q_lens=(1,) * 3, kv_lens=(3000, 1, 513), float8=True),
    replace(DEEPSEEK, q_lens=(1,) * 3, kv_lens=(2000, 1, 513), heads=(16, 1), float8=True),
    replace(DEEPSEEK, q_lens=(300, 2), kv_lens=(1500, 700), heads=(64, 1), float8=True, page_size=64),
]
HOPPER_SIZES = [
    *(case for case in SIZES if max(case.q_lens) <= 16 and not case.float8 and case.heads[0] * max(case.q_lens) >= MIN_ROWS),
    replace(DEEPSEEK, q_lens=(1,) * 3, kv_lens=(20000, 1, 5000), heads=(64, 1)),
    replace(DEEPSEEK, q_lens=(16, 2, 0, 7), kv_lens=(1600, 2, 5, 333), page_size=48),
    replace(DEEPSEEK, q_lens=(1, 1), kv_lens=(4096, 31), heads=(33, 1), page_size=128),
    LatentCase(q_lens=(1, 3), kv_lens=(500, 300), heads=(40, 1), dims=(288, 256)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: LatentCase, dtype: torch.dtype) -> None:
    check_latent(replace(case, dtype=dtype), "triton", "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SIZES, ids=str)
def test_sizes_of_models(case: LatentCase, dtype: torch.dtype) -> None:
    check_latent(replace(case, dtype=dtype), "auto", "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", HOPPER_SIZES, ids=str)
def test_the_kernel_for_hopper(case: LatentCase, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("runs on Hopper")
    for _ in range(3):  # a race is not lost every time
        check_latent(replace(case, dtype=dtype), "hopper", "cuda")


def test_the_kernel_for_hopper_agrees_with_the_portable_one() -> None:
    """Many sequences of unequal lengths, for which both kernels cut keys into shares."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("runs on Hopper")
    lengths = tuple(1 + 977 * i % 5000 for i in range(96))
    case = replace(DEEPSEEK, q_lens=(1,) * 96, kv_lens=lengths, dtype=torch.bfloat16)
    q, cache, _, options = make_latent(case, "cuda")
    ways = [fa_serve.attention_paged(q, cache, cache[..., :512], backend=name, **options) for name in ("hopper", "triton")]
    torch.testing.assert_close(ways[0][0], ways[1][0], atol=0.02, rtol=0.02)
    torch.testing.assert_close(ways[0][1], ways[1][1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_lengths_may_change_below_a_captured_graph(no_synchronisation, backend: str) -> None:
    q, cache, _, options = make_latent(replace(SIZES[0], dtype=torch.bfloat16), "cuda")

    def call() -> torch.Tensor:
        given = options | {"return_lse": False, "backend": backend}
        return fa_serve.attention_paged(q, cache, cache[..., :512], **given)

    call()
    with no_synchronisation():
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    options["seqused_k"].copy_(torch.tensor([17, 1, 0, 0, 400]))
    graph.replay()
    assert torch.equal(out, call())


@pytest.mark.parametrize(
    "settings", [{}, {"eager": True}, {"num_pages": 12, "max_model_len": 48, "max_num_batched_tokens": 13}]
)
@pytest.mark.parametrize("family", LATENT, ids=lambda family: family.name)
@pytest.mark.usefixtures("full_float32")
def test_tokens_are_those_of_generate(family, settings) -> None:
    model = family.build().to("cuda")
    model.generation_config.eos_token_id = None
    asked = [[token % 93 + 3 for token in prompt] for prompt in random_prompts(4, longest=25)]
    expected = []
    for prompt in asked:
        ids = torch.tensor([prompt], device="cuda")
        expected.append(model.generate(ids, do_sample=False, max_new_tokens=12)[0, len(prompt) :].tolist())
    patch(model)
    engine = Engine(EngineConfig(device="cuda", page_size=4, **({"num_pages": 128} | settings)), model=model)
    assert (engine._runner.kv_caches[0][0].shape[2] == 1) != settings.get("eager", False)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    assert [c.token_ids for c in engine.generate(asked, params)] == expected


def test_bfloat16_is_as_close_to_float64_as_the_models_own_code() -> None:
    """Log-probabilities of a prompt, in chunks behind cached keys: twice the error of the model's own bfloat16 at most."""
    family = next(f for f in LATENT if f.name == "minicpm3")
    ids = (torch.arange(100) * 7 % 90 + 3).tolist()
    tensor = torch.tensor([ids], device="cuda")
    exact = family.build().double().to("cuda")(tensor).logits[0].log_softmax(-1)
    own = family.build().to("cuda", torch.bfloat16)
    eager = own(tensor).logits[0].double().log_softmax(-1)
    patch(own)
    engine = Engine(EngineConfig(device="cuda", num_pages=64, max_num_batched_tokens=33, max_num_seqs=4), model=own)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    found = engine.generate([ids], params)[0].prompt_logprobs
    assert found is not None
    ours = torch.tensor([x.logprob for x in found[1:]], dtype=torch.float64)
    chosen = torch.tensor(ids[1:])[:, None]
    wanted, theirs = (x[:-1].cpu().gather(1, chosen)[:, 0] for x in (exact, eager))
    assert (ours - wanted).square().mean().sqrt() <= 2 * (theirs - wanted).square().mean().sqrt()
