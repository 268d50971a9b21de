"""Engines with adapters give the tokens of peft's own forward, alone and in mixed batches."""

from __future__ import annotations

import pytest
from peft_adapters import ATTENTION, peft_model, peft_tokens, save_adapter
from tiny_models import greedy, make_model, random_prompts

from fa_serve.engine import SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
LORA = {"lora_bytes": 1 << 26, "max_lora_rank": 32}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("fusion", [True, False], ids=["fused", "unfused"])
def test_tokens_are_those_of_peft(make_engine, tmp_path, family, fusion) -> None:
    folder = save_adapter(tmp_path / "a", family)
    engine = make_engine(family, fusion=fusion, **LORA)
    engine.load_adapter("a", folder)
    prompts = random_prompts(3)
    found = engine.generate(prompts, GREEDY, adapter="a")
    model = peft_model(folder, family)
    assert [each.token_ids for each in found] == [peft_tokens(model, prompt, 8) for prompt in prompts]
    base = engine.generate(prompts, GREEDY)
    assert [each.token_ids for each in base] == [greedy(make_model(family), prompt, 8) for prompt in prompts]
    assert found[0].token_ids != base[0].token_ids
    engine.check_integrity()
