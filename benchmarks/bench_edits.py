"""Edits with and without prompt lookup: a small model that was trained for it renames a variable in a file.

    python benchmarks/bench_edits.py                       # trains for about two minutes on a GPU, then measures
    python benchmarks/bench_edits.py --tiny --device cpu   # to try the script; the answers are wrong

A request is a piece of a Python file with up to 1,300 characters, and the name to change. The answer is the whole piece with
the new name, greedily. The model has the sizes, tokenizer and training text of the embedded one (examples/demo_data.py).
It is trained from scratch on edits of files of the split "train", and asked for edits of files of the split "test".

Unlike `edit` of bench_engine.py, whose acceptance is set, drafts are right here where the answer repeats the file. The gate:
with prompt lookup the answers are those without it. What is written: output tokens per second of so many requests at once, the
peer is the same engine without speculation. Printed are the answers that are the right file, and the drafts that were right.
Every run is the second one of its engine; the first one compiles and captures what it needs.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from engine_workloads import say

from fa_serve.demo import model_path
from fa_serve.engine import Engine, EngineConfig, SamplingParams

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parent / "examples")]

from demo_data import END_OF_TEXT, answer_labels, python_sources, render  # noqa: E402
from train_demo_model import Recipe, chat_tokenizer, new_model, next_token_loss, optimizer_for, to_bfloat16  # noqa: E402

SHORTEST = 200  # characters of a piece
NAME = re.compile(r"\b[a-z_]\w{2,}\b")


@dataclass(frozen=True)
class Edit:
    """A request and its answer, each as the text of a chat."""

    prompt: str
    answer: str


def edits(sources: Sequence[str], longest: int, seed: int) -> Iterator[Edit]:
    """Renamings of a name that occurs at least twice in a piece of a file, without end."""
    draw = random.Random(seed)
    names = sorted({name for source in sources for name in NAME.findall(source)})
    while True:
        source = draw.choice(sources)
        begin = source.find("\n", draw.randrange(max(len(source) - SHORTEST, 1))) + 1
        piece = source[begin : begin + draw.randint(SHORTEST, longest)]
        piece = piece[: piece.rfind("\n") + 1]
        found = NAME.findall(piece)
        often = sorted({name for name in found if found.count(name) > 1})
        if not often:
            continue
        old = draw.choice(often)
        new = draw.choice(names)
        renamed = re.sub(rf"\b{old}\b", new, piece)
        prompt = render([{"role": "user", "content": f"Rename {old} to {new}:\n{piece}"}], add_generation_prompt=True)
        yield Edit(prompt, renamed)


def rows_of(tokenizer: Any, recipe: Recipe, source: Iterator[Edit], count: int) -> torch.Tensor:
    """Ids and labels of `count` edits that fit, (count, 2, length + 1)."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    rows: list[list[int]] = []
    while len(rows) < count:
        texts = [f"{edit.prompt}{edit.answer}<|im_end|>\n" for edit, _ in zip(source, range(256), strict=False)]
        for ids in (encoding.ids for encoding in tokenizer.encode_batch_fast(texts)):
            if len(ids) <= recipe.max_length + 1:
                rows.append(ids + [end] * (recipe.max_length + 1 - len(ids)))
    ids = torch.tensor(rows[:count], dtype=torch.int32)
    return torch.stack([ids, answer_labels(ids, tokenizer)], dim=1)


def train(model: Any, rows: torch.Tensor, recipe: Recipe, steps: int) -> None:
    optimizer = optimizer_for(model, recipe)
    generator = torch.Generator().manual_seed(0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=steps, pct_start=0.1)
    begin = time.time()
    for step in range(steps):
        chosen = torch.randint(len(rows), (recipe.chat_rows,), generator=generator).to(rows.device)
        with torch.autocast(rows.device.type, dtype=torch.bfloat16, enabled=rows.is_cuda):
            loss = next_token_loss(model, rows[chosen].long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % (steps // 10 or 1) == 0 or step == steps - 1:
            say(f"step {step} of {steps}: loss {loss.item():.4f}, {time.time() - begin:.0f} s")


def answers(folder: str, asked: Sequence[Edit], counts: Sequence[int], args: argparse.Namespace, drafts: str | None) -> Any:
    """Output tokens per second by the number of requests at once, the tokens of all answers, and the engine's counters."""
    engine = Engine(EngineConfig(model=folder, device=args.device, speculative=drafts, prefix_caching=False, dtype=args.dtype))
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0)
    rates = {}
    for count in counts:
        for _ in range(2):
            begin = time.perf_counter()
            done = engine.generate([edit.prompt for edit in asked[:count]], params)
            seconds = time.perf_counter() - begin
        rates[count] = sum(len(each.token_ids) for each in done) / seconds
    counters = engine.stats().speculation
    engine.close()
    return rates, done, counters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32", help="of the engines; in float32 rounding decides no token")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=600, help="of an answer at most")
    parser.add_argument("--tiny", action="store_true", help="a few steps of a tiny model")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    recipe = Recipe(max_length=1024, chat_rows=32)
    longest = 1300
    if args.tiny:
        recipe = Recipe(max_length=256, chat_rows=4, hidden_size=64, num_layers=1, intermediate_size=64)
        longest = 300
        args.steps = 3
        args.tokens = 20
    tokenizer = _tokenizer()
    torch.manual_seed(0)
    model = new_model(recipe, tokenizer).to(args.device)
    limit = 1_000_000 if args.tiny else None
    training = rows_of(tokenizer, recipe, edits(python_sources("train", limit), longest, 0), 64 if args.tiny else 40_000)
    say(f"{len(training)} edits to learn")
    train(model, training.to(args.device), recipe, args.steps)
    held_out = edits([text for text in python_sources("test", limit) if len(text) > longest], longest, 1)
    asked = [edit for edit in (next(held_out) for _ in range(200)) if len(edit.answer) > longest * 0.7][:16]
    with TemporaryDirectory(prefix="bench_edits_") as folder:
        to_bfloat16(model).save_pretrained(folder)
        chat_tokenizer(tokenizer, recipe).save_pretrained(folder)
        del model
        compare(folder, asked, args)


def compare(folder: str, asked: Sequence[Edit], args: argparse.Namespace) -> None:
    from measure import Results

    counts = [count for count in (1, 4, 16) if count <= len(asked)]
    plain, expected, _ = answers(folder, asked, counts, args, None)
    rates, done, counters = answers(folder, asked, counts, args, "ngram")
    if [each.token_ids for each in done] != [each.token_ids for each in expected]:
        sys.exit("the answers with prompt lookup differ from those without: no figure is reported")
    right = sum(each.text == edit.answer for each, edit in zip(done, asked, strict=True))
    say(f"{right} of {len(asked)} answers are the right file")
    say(f"of {counters.num_draft_tokens} drafts {sum(counters.accepted_at)} are right")
    results = Results("edits", args.out)
    for count in counts:
        ratio = results.add(f"{count} at once", "tok/s", rates[count], {"plain": plain[count]})
        say(f"{count} at once: {rates[count]:.0f} tokens/s, without prompt lookup {plain[count]:.0f}, ratio {ratio:.2f}")
    if args.device == "cuda":
        results.merge()


def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model_path() / "tokenizer.json"))


if __name__ == "__main__":
    main()
