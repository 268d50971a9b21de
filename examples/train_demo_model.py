"""Train the embedded model of fa_serve: a Llama of 3 million parameters that adds two numbers below 100 and writes Python.

    python examples/train_demo_model.py --out model              # about five minutes on one GPU, everything included
    python examples/train_demo_model.py --out model --steps 4000 # the same training with a given number of steps

Nothing is downloaded. The training text is the standard library of the running Python and synthetic chat; the tokenizer is a
byte-level BPE trained on both. A hash splits pairs of numbers and files into "train", which the model learns, "dev", which
selects the checkpoint, and "test", which is used once, for the scores on the model card. a + b and b + a are in the same split.

The script needs torch, transformers and tokenizers, but neither `fa_serve` nor a network. It leaves out training on several
GPUs and resuming.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from demo_data import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    FOLLOW_UPS,
    IDENTITY,
    IGNORE,
    SUMS,
    SYSTEM_PROMPTS,
    TURN_END,
    Message,
    answer_labels,
    conversation,
    flat_tokens,
    number_pairs,
    python_sources,
    render,
    short_functions,
    sum_turn,
    train_tokenizer,
)
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the result. The defaults made the embedded model."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 320
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    max_length: int = 2048
    chat_length: int = 192  # tokens of a short conversation
    conversations: int = 50_000
    long_conversations: int = 1_500
    python_rows: int = 13  # per step, of max_length tokens
    long_chat_rows: int = 3  # per step, of max_length tokens
    chat_rows: int = 96  # per step, of chat_length tokens
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    warmup_steps: int = 100
    evaluations: int = 12
    tokenizer_chats: int = 2_000  # conversations that the tokenizer is trained on, beside all Python
    python_bytes: int | None = None  # limit for each split; None uses the whole library
    scored_pairs: int | None = None  # pairs of dev and of test that are scored; None scores all
    seed: int = 0

    @property
    def tokens_per_step(self) -> int:
        return (self.python_rows + self.long_chat_rows) * self.max_length + self.chat_rows * self.chat_length


@dataclass(frozen=True)
class Dataset:
    """Token ids on the training device, int32. Rows of chat are (rows, 2, length): ids and labels."""

    python: Tensor
    chat: Tensor
    long_chat: Tensor
    dev_python: Tensor
    dev_bytes: int

    @classmethod
    def build(cls, recipe: Recipe, tokenizer: Tokenizer, sources: Sequence[str], device: torch.device) -> Dataset:
        rng = random.Random(recipe.seed)
        functions = short_functions(sources)
        pairs = number_pairs("train")
        end = tokenizer.token_to_id(END_OF_TEXT)
        dev = python_sources("dev", recipe.python_bytes)

        def chat_rows(count: int, length: int) -> Tensor:
            texts = [render(conversation(rng, length // 20, pairs, functions)) for _ in range(count)]
            rows = (encoding.ids[:length] for encoding in tokenizer.encode_batch_fast(texts))
            ids = torch.tensor([row + [end] * (length - len(row)) for row in rows], dtype=torch.int32)
            return torch.stack([ids, answer_labels(ids, tokenizer)], dim=1).to(device)

        return cls(
            python=flat_tokens(tokenizer, sources).to(device),
            chat=chat_rows(recipe.conversations, recipe.chat_length + 1),
            long_chat=chat_rows(recipe.long_conversations, recipe.max_length + 1),
            dev_python=flat_tokens(tokenizer, dev).to(device),
            dev_bytes=sum(len(text.encode()) for text in dev),
        )

    def batches(self, recipe: Recipe, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Ids and labels of one step, (rows, 2, length): long rows of Python and chat, and short rows of chat."""
        device = self.python.device

        def draw(high: int, count: int) -> Tensor:
            return torch.randint(high, (count,), generator=generator).to(device, non_blocking=True)

        window = torch.arange(recipe.max_length + 1, device=device)
        starts = draw(self.python.numel() - recipe.max_length, recipe.python_rows)
        python = self.python[starts[:, None] + window]
        long_chat = self.long_chat[draw(len(self.long_chat), recipe.long_chat_rows)]
        short = self.chat[draw(len(self.chat), recipe.chat_rows)]
        return torch.cat([torch.stack([python, python], dim=1), long_chat]).long(), short.long()


def new_model(recipe: Recipe, tokenizer: Tokenizer) -> LlamaForCausalLM:
    ids = [tokenizer.token_to_id(token) for token in (TURN_END, END_OF_TEXT)]
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        max_position_embeddings=recipe.max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ids,
        pad_token_id=None,  # the embedding of a padding token would not be trained
    )
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    model.generation_config = GenerationConfig(eos_token_id=ids, pad_token_id=ids[1])
    return model


def chat_tokenizer(tokenizer: Tokenizer, recipe: Recipe) -> FastTokenizer:
    return FastTokenizer(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        padding_side="left",
        model_max_length=recipe.max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def to_bfloat16(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Round the parameters, as `from_pretrained` does. `model.to` would round the rotary frequencies as well."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def next_token_loss(model: LlamaForCausalLM, rows: Tensor) -> Tensor:
    """The mean loss over the labels that are not IGNORE; rows is (rows, 2, length + 1), ids and labels."""
    logits = model(input_ids=rows[:, 0, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1, 1:].flatten(), ignore_index=IGNORE)


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, tokens: Tensor, text_bytes: int, *, rows: int = 16) -> float:
    """Bits per byte of text. Windows of the greatest length do not overlap: each token is predicted once, from its window."""
    length = min(model.config.max_position_embeddings, tokens.numel() - 1)
    windows = tokens[: (tokens.numel() - 1) // length * length + 1].unfold(0, length + 1, length).long()
    losses = [next_token_loss(model, part[:, None].expand(-1, 2, -1)) * len(part) for part in windows.split(rows)]
    nats_per_token = sum(loss.item() for loss in losses) / len(windows)
    return nats_per_token / math.log(2) * tokens.numel() / text_bytes


def greedy_replies(model: LlamaForCausalLM, tokenizer: FastTokenizer, prompts: Sequence[str], *, rows: int = 1024) -> list[str]:
    """Short greedy replies to rendered prompts, by `generate` of transformers on left-padded batches."""
    replies: list[str] = []
    for index in range(0, len(prompts), rows):
        batch = tokenizer(list(prompts[index : index + rows]), return_tensors="pt", padding=True, padding_side="left")
        batch = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
        out = model.generate(**batch, do_sample=False, max_new_tokens=32)
        replies += tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return replies


def count_right(
    model: LlamaForCausalLM,
    tokenizer: FastTokenizer,
    pairs: Sequence[tuple[int, int]],
    phrasings: Sequence[tuple[str, str]] = SUMS,
    history: Sequence[Message] = (),
) -> tuple[int, int]:
    """Ask every pair in every phrasing; returns (right, asked). A reply is right if all its words are."""
    turns = [sum_turn(phrasing, a, b) for phrasing in phrasings for a, b in pairs]
    prompts = [render([*history, {"role": "user", "content": q}], add_generation_prompt=True) for q, _ in turns]
    replies = greedy_replies(model, tokenizer, prompts)
    return sum(reply == answer for reply, (_, answer) in zip(replies, turns, strict=True)), len(turns)


@dataclass
class Best:
    """The best checkpoint: accuracy on the dev sums counts first, up to 99.9%, and then bits per byte of Python."""

    key: tuple[float, float] = (-1.0, 0.0)
    step: int = 0
    weights: dict[str, Tensor] | None = None

    def offer(self, model: LlamaForCausalLM, step: int, accuracy: float, bits: float) -> None:
        key = (min(accuracy, 0.999), -bits)
        if math.isfinite(bits) and key > self.key:
            self.key = key
            self.step = step
            self.weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def optimizer_for(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    scales = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=matrices[0].is_cuda)


def train(
    model: LlamaForCausalLM,
    tokenizer: FastTokenizer,
    data: Dataset,
    recipe: Recipe,
    *,
    steps: int | None = None,
    deadline: float = math.inf,
) -> dict[str, Any]:
    """Train in place, and leave the best checkpoint in the model, in bfloat16. Returns the numbers of the training.

    Without `steps`, the speed of the first steps decides how many fit before `deadline`, which is a value of time.monotonic.
    The schedule follows steps or time, whichever has progressed further, so a slow machine also completes its cosine in time.
    """
    assert steps is not None or deadline < math.inf
    device = model.device
    optimizer = optimizer_for(model, recipe)
    generator = torch.Generator().manual_seed(recipe.seed)
    pairs = number_pairs("dev")[: recipe.scored_pairs]
    best = Best()
    losses = []
    skipped = 0
    step = 0
    began = time.monotonic()
    timed = began
    evaluated = 0.0  # seconds
    while True:
        if step == recipe.warmup_steps // 5:
            timed = time.monotonic()
        if steps is None and step == recipe.warmup_steps:
            seconds_per_step = (time.monotonic() - timed) / (step - recipe.warmup_steps // 5)
            steps = step + int(0.93 * (deadline - time.monotonic()) / seconds_per_step)
        by_time = (time.monotonic() - began) / max(deadline - began, 1e-9)
        progress = min(max(step / steps if steps else 0.0, by_time), 1.0)
        warm = min((step + 1) / recipe.warmup_steps, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        done = progress >= 1.0
        every = max((steps or 0) // recipe.evaluations, 1)
        if done or (steps and step and step % every == 0):
            if device.type == "cuda":
                torch.cuda.synchronize()
            paused = time.monotonic()
            rate = step * recipe.tokens_per_step / max(paused - began - evaluated, 1e-9)
            candidate = to_bfloat16(copy.deepcopy(model)).eval()
            right, asked = count_right(candidate, tokenizer, pairs, SUMS[::5])
            bits = bits_per_byte(candidate, data.dev_python, data.dev_bytes)
            best.offer(candidate, step, right / asked, bits)
            evaluated += time.monotonic() - paused
            print(
                f"step {step:6d}/{steps}  loss {losses[-1] if losses else math.nan:.4f}  dev sums {right}/{asked}  "
                f"dev Python {bits:.3f} bits/byte  {rate / 1e6:.3f}M tokens/s  {time.monotonic() - began:.0f} s",
                flush=True,
            )
        if done:
            break
        model.train()
        long, short = data.batches(recipe, generator)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = next_token_loss(model, long) + next_token_loss(model, short)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if math.isfinite(norm.item()):
            optimizer.step()
            losses.append(loss.item())
        else:
            skipped += 1
        optimizer.zero_grad(set_to_none=True)
        step += 1
    if best.weights is None or not losses:
        raise RuntimeError(
            f"training ended without a checkpoint: {step} steps, {skipped} of them with a gradient that is not finite. "
            "Give it more time, or lower the learning rate."
        )
    to_bfloat16(model).eval().load_state_dict(best.weights)
    return {"steps": step, "best_step": best.step, "skipped": skipped, "losses": losses, "tokens_per_second": rate}


CARD = Path(__file__).with_name("demo_model_card.md")
HISTORY: tuple[Message, ...] = (
    {"role": "system", "content": SYSTEM_PROMPTS[0]},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": f"Hello! {IDENTITY}"},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "2 + 3 = 5."},
)
SAMPLE_PROMPT = "import os\n\n\ndef read_lines(path):\n"


def save(model: LlamaForCausalLM, tokenizer: FastTokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.backend_tokenizer.no_padding()  # a padded call leaves a setting behind, which would be saved
    model.save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors writes files that only the owner can read


def measure(out: Path, device: torch.device, recipe: Recipe) -> dict[str, Any]:
    """Scores of a saved model on the test split."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    pairs = number_pairs("test")[: recipe.scored_pairs]
    right, asked = count_right(model, tokenizer, pairs)
    phrasings = (*SUMS[::5], *FOLLOW_UPS)
    chat_right, chat_asked = count_right(model, tokenizer, pairs, phrasings, HISTORY)
    sources = python_sources("test", recipe.python_bytes)
    python_test_bytes = sum(len(text.encode()) for text in sources)
    tokens = flat_tokens(Tokenizer.from_file(str(out / "tokenizer.json")), sources).to(device)
    prompt = tokenizer(SAMPLE_PROMPT, return_tensors="pt")["input_ids"].to(device)
    sample = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=96)
    return {
        "right": right,
        "asked": asked,
        "accuracy": right / asked,
        "pairs": len(pairs),
        "phrasings": len(SUMS),
        "chat_right": chat_right,
        "chat_asked": chat_asked,
        "chat_accuracy": chat_right / chat_asked,
        "followup_phrasings": len(phrasings),
        "python_test_files": len(sources),
        "python_test_bytes": python_test_bytes,
        "bits": bits_per_byte(model, tokens, python_test_bytes),
        "sample": tokenizer.decode(sample[0], skip_special_tokens=True),
    }


def run(
    out: Path, recipe: Recipe, *, device: torch.device, minutes: float = math.inf, steps: int | None = None
) -> dict[str, Any]:
    """Make a whole model folder within `minutes`; returns the facts on its card."""
    began = time.monotonic()
    torch.manual_seed(recipe.seed)
    sources = python_sources("train", recipe.python_bytes)
    rng = random.Random(recipe.seed)
    pairs = number_pairs("train")
    functions = short_functions(sources)
    chats = [render(conversation(rng, 8, pairs, functions)) for _ in range(recipe.tokenizer_chats)]
    backend = train_tokenizer([*sources, *chats], recipe.vocab_size)
    print(f"{time.monotonic() - began:.1f} s: tokenizer of {backend.get_vocab_size()} tokens", flush=True)
    data = Dataset.build(recipe, backend, sources, device)
    model = new_model(recipe, backend).to(device)
    tokenizer = chat_tokenizer(backend, recipe)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{time.monotonic() - began:.1f} s: {data.python.numel():,} tokens of Python, "
        f"{len(data.chat):,} + {len(data.long_chat):,} conversations, {parameters:,} parameters",
        flush=True,
    )
    # a tenth of the time remains for the scores and the card
    outcome = train(model, tokenizer, data, recipe, steps=steps, deadline=began + 60 * minutes * 0.9)
    save(model, tokenizer, out)
    scores = measure(out, device, recipe)
    seconds = time.monotonic() - began
    config = model.config
    facts = {
        **scores,
        "parameters": parameters,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab": config.vocab_size,
        "context": config.max_position_embeddings,
        "python_files": len(sources),
        "python_bytes": sum(len(text.encode()) for text in sources),
        "python_version": platform.python_version(),
        "conversations": len(data.chat),
        "chat_length": recipe.chat_length,
        "long_conversations": len(data.long_chat),
        "train_pairs": len(pairs),
        "steps": outcome["steps"],
        "best_step": outcome["best_step"],
        "skipped": outcome["skipped"],
        "tokens_per_step": recipe.tokens_per_step,
        "learning_rate": recipe.learning_rate,
        "seed": recipe.seed,
        "seconds": seconds,
        "rate": outcome["tokens_per_second"] / 1e6,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "loss_first": outcome["losses"][0],
        "loss_last": outcome["losses"][-1],
    }
    (out / "README.md").write_text(CARD.read_text(encoding="utf-8").format(**facts), encoding="utf-8")
    return facts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--minutes", type=float, default=5.0, help="time for everything; the schedule fits into it (default 5)")
    parser.add_argument("--steps", type=int, help="training steps (default: as many as fit in --minutes)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    facts = run(args.out, Recipe(seed=args.seed), device=torch.device(args.device), minutes=args.minutes, steps=args.steps)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    sample = facts.pop("sample")
    print(f"--- sample\n{sample}\n--- {args.out}: {size / 1e6:.2f} MB in {sorted(path.name for path in args.out.iterdir())}")
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
