"""Train a model with GRPO: rollouts and gradients in one process, on the same weights, with the same bits.

    python examples/grpo.py                                            # the embedded model, a few minutes on two cores
    python examples/grpo.py --not-exact                                # the same with the plain forward, for comparison
    python examples/grpo.py --model Qwen/Qwen3-0.6B --samples 16

The model continues the beginning of a Python statement, and is rewarded if the result is valid Python, which it cannot be if it
is cut off at the last token. So it learns to write short statements and to end. GRPO (Shao et al. 2024, arXiv:2402.03300,
section 4.1) samples a group of answers to each prompt and compares each answer with its group; the ratio of new and old
probabilities is clipped as in PPO.

`RolloutEngine` runs the trainer's own parameters, so there is nothing to copy after a step but `engine.update()`, which drops
keys and values of the weights before. In `fa_serve.exact`, the training forward has the log-probabilities of the rollout in
every bit. So each first ratio is exactly 1, and no correction for another engine's numbers is needed. Nothing is saved.
"""

import argparse
import ast
import contextlib
import time
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import fa_serve
from fa_serve.demo import model_path
from fa_serve.engine import RolloutEngine, RolloutGroup, SamplingParams

PROMPTS = ("def ", "class ", "import ", "for ", "if ", "with ", "return ", "while ")
CLIP = 0.2


class Batch(NamedTuple):
    """Answers to all prompts, padded to the right. Shapes are (answers, tokens); those of answers have one column less.

    ids, mask:  prompts and answers
    answered:   the columns whose next token belongs to the answer
    old:        log-probabilities of these tokens in the rollout
    advantages: (answers, 1)
    """

    ids: Tensor
    mask: Tensor
    answered: Tensor
    old: Tensor
    advantages: Tensor


def reward(text: str) -> float:
    """1 for valid Python. A `return` may stand outside of a function."""
    with contextlib.suppress(SyntaxError, ValueError):
        ast.parse(text)
        return 1.0
    return 0.0


def collate(groups: list[RolloutGroup], rewards: Tensor, pad: int, device: torch.device) -> Batch:
    """rewards: (groups, answers)"""
    rows = [(group.prompt_token_ids, rollout) for group in groups for rollout in group.rollouts]
    length = max(len(prompt) + len(rollout.token_ids) for prompt, rollout in rows)
    ids = torch.full((len(rows), length), pad)
    mask = torch.zeros_like(ids)
    answered = torch.zeros(len(rows), length - 1, dtype=torch.bool)
    old = torch.zeros(len(rows), length - 1)
    for row, (prompt, rollout) in enumerate(rows):
        end = len(prompt) + len(rollout.token_ids)
        ids[row, :end] = torch.tensor(prompt + rollout.token_ids)
        mask[row, :end] = 1
        answered[row, len(prompt) - 1 : end - 1] = True
        old[row, len(prompt) - 1 : end - 1] = torch.tensor(rollout.logprobs)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return Batch(*(x.to(device) for x in (ids, mask, answered, old, advantages.view(-1, 1))))


def loss_of(model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """GRPO's loss, without a penalty for leaving a reference model, and the ratios of all tokens of answers."""
    logits = model(input_ids=batch.ids, attention_mask=batch.mask).logits[:, :-1]
    logprobs = fa_serve.token_logprobs(logits, batch.ids[:, 1:])
    ratios = (logprobs - batch.old).exp()
    gains = torch.minimum(ratios * batch.advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * batch.advantages)
    return -gains[batch.answered].mean(), ratios[batch.answered].detach()


class Step(NamedTuple):
    """What a step has shown. reward: the mean; first, last: largest distance of a ratio from 1 before and after an update"""

    reward: float
    first: float
    last: float


def main(arguments: list[str] | None = None) -> list[Step]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="hub name or folder; default: the embedded model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help=f"how many of {PROMPTS}")
    parser.add_argument("--samples", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--max-tokens", type=int, default=12, help="tokens of an answer")
    parser.add_argument("--updates", type=int, default=2, help="updates with the answers of a step")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--not-exact", action="store_true", help="the plain forward, and an engine in its usual mode")
    options = parser.parse_args(arguments)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, attn_implementation="fa_serve")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    engine = RolloutEngine(model, tokenizer, deterministic=not options.not_exact, max_model_len=128, num_pages=1024)
    exact = contextlib.nullcontext() if options.not_exact else fa_serve.exact(model)
    prompts = PROMPTS[: options.prompts]

    steps = []
    for number in range(options.steps):
        begin = time.perf_counter()
        params = SamplingParams(max_tokens=options.max_tokens, seed=number)
        groups = engine.generate(prompts, n=options.samples, params=params)
        texts = [[prompt + rollout.text for rollout in group.rollouts] for prompt, group in zip(prompts, groups, strict=True)]
        rewards = torch.tensor([[reward(text) for text in group] for group in texts])
        batch = collate(groups, rewards, tokenizer.pad_token_id or 0, model.device)
        distances = []
        for _ in range(options.updates):
            with exact:
                loss, ratios = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            distances.append(float((ratios - 1).abs().max()))
        engine.update()
        steps.append(Step(float(rewards.mean()), distances[0], distances[-1]))
        seconds = time.perf_counter() - begin
        print(f"step {number:3}: reward {steps[-1].reward:.2f}, |ratio - 1| {distances[0]:.1e} at first, {seconds:.1f} s")
    print(f"for example {texts[0][0]!r}")
    engine.close()
    return steps


if __name__ == "__main__":
    main()
