"""`generate` gives the tokens of eager attention, in each of its ways to use a cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hf_families import BY_NAME, tokens

import fa_serve

GENERATE = {
    "static": {"cache_implementation": "static", "disable_compile": True},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 10},
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "batch": 1},
    "prefill in chunks": {"prefill_chunk_size": 4},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize(
    ("family", "kernels"),
    # without kernels transformers makes the masks, of which a sliding window is the only special one
    [*((family, "kernels") for family in ("llama", "mistral", "gemma3", "gpt-oss")), ("gemma3", "none")],
    indirect=["kernels"],
)
@pytest.mark.parametrize("options", GENERATE.values(), ids=GENERATE)
def test_ways_to_generate(family: str, options: dict[str, Any], kernels: bool) -> None:
    options = dict(options)
    mask = torch.ones(options.pop("batch", 2), 12, dtype=torch.int64)
    mask[0, :4] = 0
    ids = tokens(*mask.shape).masked_fill(mask == 0, 0)
    results = []
    for model in (BY_NAME[family].build(), fa_serve.patch(BY_NAME[family].build())):
        torch.manual_seed(0)
        results.append(
            model.generate(ids, attention_mask=mask, min_new_tokens=8, max_new_tokens=8, **{"do_sample": False, **options})
        )
    assert torch.equal(*results)


@torch.no_grad()
def test_a_draft_model_may_assist() -> None:
    ids = tokens(1, 9)
    eager = BY_NAME["llama"].build()
    ours = fa_serve.patch(BY_NAME["llama"].build())
    draft = fa_serve.patch(BY_NAME["llama"].build(seed=1))
    expected = eager.generate(ids, do_sample=False, min_new_tokens=8, max_new_tokens=8)
    assert torch.equal(ours.generate(ids, do_sample=False, min_new_tokens=8, max_new_tokens=8, assistant_model=draft), expected)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_gpt2_generates_in_a_static_cache(padded: bool) -> None:
    eager = BY_NAME["gpt2"].build()
    ours = fa_serve.patch(copy.deepcopy(eager))
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[0, : 3 * padded] = 0
    given = {
        "attention_mask": mask,
        "max_new_tokens": 5,
        "do_sample": False,
        "cache_implementation": "static",
        "pad_token_id": 0,
    }
    ids = tokens(2, 7)
    assert ours.generate(ids, **given).tolist() == eager.generate(ids, **given).tolist()
