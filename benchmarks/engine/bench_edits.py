"""Edits with and without prompt lookup: a small model that was trained for it renames a variable in a file.

    python -m benchmarks.engine.bench_edits                            # the size of the embedded model; trains on a GPU
    python -m benchmarks.engine.bench_edits --size small --device cpu  # smaller and shorter: 8 minutes on two cores
    python -m benchmarks.engine.bench_edits --size tiny --device cpu   # to try the script; the answers are wrong

A request is a piece of a Python file, and the name to change. The answer is the whole piece with the new name, greedily. The
model has the tokenizer and training text of the embedded one (examples/demo_data.py). It is trained from scratch on edits of
files of the split "train", and asked for edits of files of the split "test".

Unlike `edit` of bench_engine.py, whose acceptance is set, drafts are right here where the answer repeats the file. The gate:
with prompt lookup the answers are those without it. What is written: output tokens per second of so many requests at once, the
peer is the same engine without speculation. Printed are the answers that are the right file, and the drafts that were right.
Every run is the second one of its engine; the first one compiles and captures what it needs. Results of a CPU are only printed.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.engine.engine_workloads import say
from fa_serve.demo import model_path
from fa_serve.engine import Completion, Engine, EngineConfig, SamplingParams
from fa_serve.engine.speculation.drafts import SpeculationStats

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))

from demo_data import END_OF_TEXT, TURN_END, answer_labels, python_sources, render  # noqa: E402
from train_demo_model import Recipe, chat_tokenizer, new_model, next_token_loss, optimizer_for, to_bfloat16  # noqa: E402

SHORTEST = 160  # characters of a piece
AT_ONCE = (1, 4, 16)
NAME = re.compile(r"\b[a-z_]\w{2,}\b")


@dataclass(frozen=True)
class Size:
    """A model, its training and what it is asked for.

    rows:    edits of a training step
    learned: different edits that it is trained on
    longest: characters of a piece
    tokens:  of an answer at most
    """

    recipe: Recipe
    rows: int
    steps: int
    learned: int
    longest: int
    tokens: int


SIZES = {
    "embedded": Size(Recipe(max_length=1024), 32, 4000, 40_000, 1300, 600),
    "small": Size(Recipe(max_length=192, hidden_size=128, num_layers=3, intermediate_size=160), 24, 2200, 12_000, 240, 110),
    "tiny": Size(Recipe(max_length=192, hidden_size=64, num_layers=1, intermediate_size=64), 4, 3, 64, 240, 8),
}


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


def fitting(tokenizer: Tokenizer, size: Size, source: Iterator[Edit], count: int) -> tuple[list[Edit], list[list[int]]]:
    """So many edits that fit into the model's length, and their token ids."""
    found: list[Edit] = []
    rows: list[list[int]] = []
    while len(rows) < count:
        drawn = list(islice(source, 256))
        texts = [f"{edit.prompt}{edit.answer}{TURN_END}\n" for edit in drawn]
        for edit, encoding in zip(drawn, tokenizer.encode_batch_fast(texts), strict=True):
            if len(encoding.ids) <= size.recipe.max_length:
                found.append(edit)
                rows.append(encoding.ids)
    return found[:count], rows[:count]


def train(model: Any, tokenizer: Tokenizer, size: Size, sources: Sequence[str]) -> None:
    _, edited = fitting(tokenizer, size, edits(sources, size.longest, 0), size.learned)
    end = tokenizer.token_to_id(END_OF_TEXT)
    length = size.recipe.max_length + 1
    ids = torch.tensor([row + [end] * (length - len(row)) for row in edited], dtype=torch.int32)
    rows = torch.stack([ids, answer_labels(ids, tokenizer)], dim=1).to(model.device)
    optimizer = optimizer_for(model, size.recipe)
    generator = torch.Generator().manual_seed(0)
    rate = size.recipe.learning_rate
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=size.steps, pct_start=0.1)
    begin = time.time()
    for step in range(size.steps):
        chosen = torch.randint(len(rows), (size.rows,), generator=generator).to(rows.device)
        with torch.autocast(rows.device.type, dtype=torch.bfloat16, enabled=rows.is_cuda):
            loss = next_token_loss(model, rows[chosen].long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % (size.steps // 10 or 1) == 0 or step == size.steps - 1:
            say(f"step {step} of {size.steps}: loss {loss.item():.4f}, {time.time() - begin:.0f} s")


def answers(
    folder: str, prompts: Sequence[str], tokens: int, device: str, drafts: str | None
) -> tuple[dict[int, float], list[Completion], SpeculationStats]:
    """Output tokens per second by the number of requests at once, the answers to all prompts, and what the engine drafted."""
    # in float32, where rounding decides no token
    engine = Engine(EngineConfig(model=folder, device=device, dtype="float32", speculative=drafts, prefix_caching=False))
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    rates = {}
    for count in AT_ONCE:
        engine.generate(prompts[:count], params)
        begin = time.perf_counter()
        done = engine.generate(prompts[:count], params)
        rates[count] = sum(len(each.token_ids) for each in done) / (time.perf_counter() - begin)
    drafted = engine.stats().speculation
    engine.close()
    return rates, done, drafted


def compare(folder: str, asked: Sequence[Edit], size: Size, args: argparse.Namespace) -> None:
    from benchmarks.measure import Results

    prompts = [edit.prompt for edit in asked]
    plain, expected, _ = answers(folder, prompts, size.tokens, args.device, None)
    rates, done, drafted = answers(folder, prompts, size.tokens, args.device, "ngram")
    if [each.token_ids for each in done] != [each.token_ids for each in expected]:
        sys.exit("the answers with prompt lookup differ from those without: no figure is reported")
    right = sum(each.text == edit.answer for each, edit in zip(done, asked, strict=True))
    say(f"{right} of {len(asked)} answers are the right file")
    say(f"of {drafted.num_draft_tokens} drafts {sum(drafted.accepted_at)} are right")
    results = Results("edits", args.out, kept=args.device == "cuda")
    for count in AT_ONCE:
        ratio = results.add(f"{args.size} {count} at once", "tok/s", rates[count], {"plain": plain[count]})
        say(f"{count} at once: {rates[count]:.0f} tokens/s, without prompt lookup {plain[count]:.0f}, ratio {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="embedded")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    size = SIZES[args.size]
    limit = 200_000 if args.size == "tiny" else None
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    model = new_model(size.recipe, tokenizer).to(args.device)
    train(model, tokenizer, size, python_sources("train", limit))
    held_out = [text for text in python_sources("test", limit) if len(text) > size.longest]
    asked, _ = fitting(tokenizer, size, edits(held_out, size.longest, 1), AT_ONCE[-1])
    with TemporaryDirectory(prefix="bench_edits_") as folder:
        to_bfloat16(model).save_pretrained(folder)
        chat_tokenizer(tokenizer, size.recipe).save_pretrained(folder)
        del model
        compare(folder, asked, size, args)


if __name__ == "__main__":
    main()
