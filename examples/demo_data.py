"""The training data of the demo model: Python files, chat about sums, their splits, and the tokenizer.

    number_pairs("test")            ordered pairs whose sums are in no training text
    python_sources("test")          files of the standard library that are in no training text
    train_tokenizer(texts, 2048)    byte-level BPE

`train_demo_model.py` trains on it; tests and scores use the splits that were kept out. This module leaves out models and
batches.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# the pattern of Qwen2's tokenizer: each digit is a token, punctuation includes a line end, indentation is not split
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
IGNORE = -100

Message = dict[str, str]


def split_of(key: str) -> str:
    """The split of a key: "train" (87.5%), "dev" (2.5%) or "test" (10%), by a hash that is the same on every machine."""
    bucket = hashlib.sha256(key.encode()).digest()[0] % 40
    return "test" if bucket < 4 else "dev" if bucket == 4 else "train"


# third-party code, generated tables, and files that hold data rather than code
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "turtledemo"}


def python_sources(split: str, limit: int | None = None) -> list[str]:
    """The files of the standard library in one split, in the order of their paths, up to about `limit` bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    size = 0
    for name in _library(root):
        if split_of(name.as_posix()) != split:
            continue
        try:
            text = (root / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:  # test data in other encodings
            continue
        if any(special in text for special in SPECIAL_TOKENS):
            continue
        texts.append(text)
        size += len(text.encode())
        if limit is not None and size >= limit:
            break
    return texts


@cache
def _library(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - SKIPPED_FOLDERS
        found += [Path(folder, name).relative_to(root) for name in files if name.endswith(".py")]
    return sorted(found, key=Path.as_posix)


def short_functions(sources: Sequence[str], longest: int = 320) -> list[tuple[str, str]]:
    """(name, source) of the top-level functions that are short enough for a chat turn."""
    pattern = re.compile(r"^def ([a-z]\w*)\(.*\n(?:(?:[ \t].*)?\n)+", re.MULTILINE)
    found = ((match[1], match[0].rstrip()) for text in sources for match in pattern.finditer(text))
    return [(name, source) for name, source in found if len(source) <= longest and "\n\n\n" not in source]


SUMS = (
    ("What is {a} + {b}?", "{a} + {b} = {c}."),
    ("{a} + {b}", "{a} + {b} = {c}."),
    ("{a}+{b}=", "{a} + {b} = {c}."),
    ("{a} + {b} = ?", "{a} + {b} = {c}."),
    ("{a} plus {b}?", "{a} + {b} = {c}."),
    ("What is {a} plus {b}?", "{a} + {b} = {c}."),
    ("How much is {a} + {b}?", "{a} + {b} = {c}."),
    ("Add {a} and {b}.", "{a} + {b} = {c}."),
    ("Add {b} to {a}.", "{a} + {b} = {c}."),
    ("Can you add {a} and {b}?", "Yes: {a} + {b} = {c}."),
    ("Calculate {a} + {b}.", "{a} + {b} = {c}."),
    ("Compute the sum of {a} and {b}.", "The sum of {a} and {b} is {c}."),
    ("What is the sum of {a} and {b}?", "The sum of {a} and {b} is {c}."),
    ("Sum {a} and {b}", "The sum of {a} and {b} is {c}."),
    ("I have {a} apples and get {b} more. How many apples do I have?", "{a} + {b} = {c}, so you have {c} apples."),
    ("A train has {a} people and {b} more get on. How many are on the train?", "{a} + {b} = {c}, so there are {c} people."),
)
FOLLOW_UPS = (
    ("And {a} + {b}?", "{a} + {b} = {c}."),
    ("and {a} and {b}?", "{a} + {b} = {c}."),
    ("Now {a} plus {b}.", "{a} + {b} = {c}."),
)
SKILLS = "I add two numbers below 100 and write Python."
IDENTITY = f"I am the fa_serve demo model. {SKILLS}"
TALK = (
    *((greeting, f"Hello! {IDENTITY}") for greeting in ("Hello", "Hi", "Hey", "Good morning", "Hi, how are you?")),
    *((question, IDENTITY) for question in ("Who are you?", "What are you?", "What is your name?", "Introduce yourself.")),
    *((question, SKILLS) for question in ("What can you do?", "Help", "How can you help me?", "What are you good at?")),
    *((thanks, "You are welcome.") for thanks in ("Thanks", "Thank you!", "Great, thanks.", "Well done.")),
    *((farewell, "Goodbye!") for farewell in ("Bye", "Goodbye", "See you later.")),
)
OFF_TOPIC = (
    "What is {a} * {b}?",
    "What is {a} - {b}?",
    "What is {a} divided by {b}?",
    "What is {a}{b}{a} + {b}?",
    "Tell me a joke.",
    "What is the capital of {place}?",
    "How is the weather in {place}?",
    "Write a poem about {place}.",
    "Where is {place}?",
    "Tell me about {place}.",
    "Translate this into French.",
    "Who won the match?",
    "What time is it?",
    "Explain how it works.",
)
PLACES = ("France", "Japan", "the sea", "Berlin", "Kenya", "the moon", "Peru", "London", "the mountains", "Canada", "spring")
REFUSAL = f"I can not help with that. {SKILLS}"
CODE_REQUESTS = (
    "Write a Python function called {name}.",
    "Write {name} in Python.",
    "Show me a function named {name}.",
    "Please define {name}.",
    "Write a Python function.",
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the fa_serve demo model.",
    "Answer briefly.",
    "You are a calculator.",
    "You are a careful assistant. Answer the question.",
    "Be concise and correct.",
    "You help with sums and with Python.",
)


def number_pairs(split: str) -> list[tuple[int, int]]:
    """The ordered pairs of numbers below 100 in one split, which has (b, a) if it has (a, b)."""
    return [(a, b) for a in range(100) for b in range(100) if split_of(f"{min(a, b)} + {max(a, b)}") == split]


def sum_turn(phrasing: tuple[str, str], a: int, b: int) -> tuple[str, str]:
    question, answer = phrasing
    return question.format(a=a, b=b), answer.format(a=a, b=b, c=a + b)


def vary(text: str, rng: random.Random) -> str:
    """A variant of the request, as another person might type it."""
    if rng.random() < 0.25:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.15:
        text = text.rstrip("?.!")
    if rng.random() < 0.1:
        text = rng.choice(("Please: ", "Hey, ", "OK. ", "Hello! ", "Quick question: ")) + text
    return text


def conversation(
    rng: random.Random, turns: int, pairs: Sequence[tuple[int, int]], functions: Sequence[tuple[str, str]]
) -> Iterator[Message]:
    """Messages of a conversation: mostly sums, some functions and greetings, and some questions that the model declines."""
    if rng.random() < 0.25:
        yield {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}
    for turn in range(turns):
        kind = rng.random()
        a, b = rng.choice(pairs)
        if kind < 0.82:
            question, answer = sum_turn(rng.choice(SUMS if turn == 0 or kind < 0.7 else FOLLOW_UPS), a, b)
        elif kind < 0.88 and functions:
            name, source = rng.choice(functions)
            question = rng.choice(CODE_REQUESTS).format(name=name)
            answer = f"```python\n{source}\n```"
        elif kind < 0.95:
            question, answer = rng.choice(TALK)
        else:
            question = rng.choice(OFF_TOPIC).format(a=a, b=b, place=rng.choice(PLACES))
            answer = REFUSAL
        yield {"role": "user", "content": vary(question, rng)}
        yield {"role": "assistant", "content": answer}


def render(messages: Iterable[Message], *, add_generation_prompt: bool = False) -> str:
    """The text that CHAT_TEMPLATE renders, made without Jinja: 50,000 conversations take a second instead of a minute."""
    text = "".join(f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in messages)
    return text + f"{TURN_START}assistant\n" * add_generation_prompt


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over all 256 bytes, so decoding restores any text that was encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def answer_labels(ids: Tensor, tokenizer: Tokenizer) -> Tensor:
    """The ids (rows, length) with IGNORE outside of the assistant's turns. A turn includes its <|im_end|>."""
    start = tokenizer.token_to_id(TURN_START)
    end = tokenizer.token_to_id(TURN_END)
    header = tokenizer.encode(f"{TURN_START}assistant\n").ids
    position = torch.arange(ids.shape[1])
    is_header = torch.stack([ids.roll(-shift, dims=1) == token for shift, token in enumerate(header)]).all(dim=0)
    last_start = torch.where(ids == start, position, -1).cummax(dim=1).values
    last_header = torch.where(is_header, position, -1).cummax(dim=1).values
    last_end = torch.where(ids == end, position, -1).cummax(dim=1).values
    # an answer begins after its header and lasts until its <|im_end|>, which belongs to it
    inside = (last_header >= 0) & (last_header == last_start) & (position >= last_header + len(header))
    inside &= (last_end < last_header) | ((ids == end) & (last_end.roll(1, dims=1) < last_header))
    return torch.where(inside, ids, IGNORE)


def flat_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    end = tokenizer.token_to_id(END_OF_TEXT)
    return torch.tensor([token for text in tokenizer.encode_batch_fast(texts) for token in (*text.ids, end)], dtype=torch.int32)
