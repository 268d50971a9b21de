"""Adapters that peft makes for tiny models, and what peft's own forward computes with them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import make_model, random_prompts
from torch import Tensor
from transformers import PreTrainedModel

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.testing import assert_matches_reference

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def save_adapter(
    folder: Path, family: str = "llama", *, model: PreTrainedModel | None = None, seed: int = 0, **options: Any
) -> Path:
    """Let peft write an adapter with random weights that change most tokens of the model."""
    given: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ALL} | options
    with ignored_advice():
        wrapped = get_peft_model(model or make_model(family), LoraConfig(init_lora_weights=False, **given))
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_magnitude" in name:
            parameter.data *= 0.5 + torch.rand(parameter.shape, generator=draw)
        elif "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.15
        elif "modules_to_save" in name:
            parameter.data += torch.randn(parameter.shape, generator=draw) * 0.2
    wrapped.create_or_update_model_card = lambda _: None  # a template of Jinja, whose compilation is half of the time of a save
    with ignored_advice():
        wrapped.save_pretrained(str(folder))
    return folder


@contextmanager
def ignored_advice() -> Iterator[None]:
    """peft warns of everything that is not usual in training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class PeftForwards:
    """A model as peft runs it, with one of several saved adapters at a time."""

    def __init__(self, model: PreTrainedModel, folders: Mapping[str, Path]) -> None:
        name, *others = folders
        with ignored_advice():
            self.model = PeftModel.from_pretrained(model, str(folders[name]), adapter_name=name).eval()
            for other in others:
                self.model.load_adapter(str(folders[other]), adapter_name=other)
        self._chosen: dict[tuple[object, ...], list[int]] = {}

    @torch.no_grad()
    def logits(self, adapter: str | None, ids: Sequence[int]) -> Tensor:
        """(tokens, vocab), of one forward without a cache. adapter: None is the base"""
        with self.model.disable_adapter() if adapter is None else nullcontext():
            if adapter is not None:
                self.model.set_adapter(adapter)
            found: Tensor = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        return found

    def choose(self, adapter: str | None, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """The token that greedy takes after the prompt and each beginning of the answer: the answer, if it is greedy."""
        asked = (adapter, *prompt, None, *answer)
        if asked not in self._chosen:
            self._chosen[asked] = self.logits(adapter, [*prompt, *answer[:-1]])[len(prompt) - 1 :].argmax(-1).tolist()
        return self._chosen[asked]


def assert_bfloat16_logits(folder: Path, device: str, requests: int) -> None:
    """Log-probabilities of an engine in bfloat16, with adapters and the base in a batch, have at most twice the error of peft's
    in bfloat16; both are measured against peft in float32 with the same weights (`assert_matches_reference`)."""
    names = [f"r{requests}-{seed}" for seed in range(3)]
    folders = {name: save_adapter(folder / name, seed=seed, r=4 + 8 * seed) for seed, name in enumerate(names)}
    rounded = make_model().bfloat16()
    config = EngineConfig(device=device, num_pages=256, max_num_seqs=16, lora_bytes=1 << 24, max_lora_rank=32)
    engine = Engine(config, model=copy.deepcopy(rounded).to(device))
    for name, each in folders.items():
        engine.load_adapter(name, each)
    prompts = random_prompts(requests, longest=20)
    asked: list[str | None] = [[*names, None][i % 4] for i in range(requests)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
    answers = engine.generate(prompts, params, adapter=asked)
    engine.close()
    peers = [PeftForwards(copy.deepcopy(rounded), folders) for _ in range(2)]
    peers[0].model.bfloat16().float()
    peers[1].model.bfloat16()
    found: list[float] = []
    others: list[list[Tensor]] = [[], []]
    for name, prompt, answer in zip(asked, prompts, answers, strict=True):
        tokens = answer.token_ids
        found += [each.logprob for each in answer.logprobs or ()]
        for peer, into in zip(peers, others, strict=True):
            logits = peer.logits(name, [*prompt, *tokens[:-1]])[len(prompt) - 1 :].float()
            into.append(logits.log_softmax(-1)[range(len(tokens)), tokens])
    exact, eager = (torch.cat(into) for into in others)
    assert_matches_reference(torch.tensor(found).bfloat16(), exact, eager.bfloat16())


def write_over(folder: Path) -> None:
    """Write zeros into an adapter's file in place, which changes whatever still reads it."""
    weights = folder / "adapter_model.safetensors"
    with weights.open("r+b") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        file.write(bytes(weights.stat().st_size - file.tell()))
