"""Messages are for people: nothing parses them, and they are plain technical English."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from house.source import Allowed, House, Planted

READERS = ("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "removeprefix", "find", "index", "replace")
MATCHERS = ("re.match", "re.search", "re.fullmatch", "re.findall", "re.split", "re.sub")
ERRORS = ("error", "exc", "exception", "err")
"""Names that hold an error even where no `except` gives them to it, as parameters do."""

BANNED = (
    "its like",
    "their like",
    r"of (?:its|their|one's|his|her|our|your|my) own",
    "whoever",
    "whosoever",
    "whatsoever",
    "dear",
    "lest",
    "thereof",
    "whence",
    # sentences that a reader had to read twice, see the tests of the house
    "to the next up to which",
    "ask(?:s|ed)? for nothing",
    "go(?:es)? on meanwhile",
    "kernels of attention",
    "the less of (?:it|them)",
    "for the right reason",
    "only what lies",
    "for a small rest",
    r"of six each",
    "neither a name nor a number",
    "gave [0-9]+ \\(one [0-9]+",
)
BANNED_ENGLISH = re.compile(
    r"\b(?:" + "|".join(words.replace(" ", r"\s+(?:#\s*)?") for words in BANNED) + r")\b", re.IGNORECASE
)
INVERTED = re.compile(r"(?:^|[.:;|]\s|\"\"\"|#\s)(?:Of (?:an?|these,|those,) \w+|Whose \w+)")
"""A sentence that begins with its object, "Of a float8 cache the scale is ...", or with a relative clause, "Whose it is"."""


def errors_are_not_parsed(house: House) -> Iterator[str]:
    """Errors carry fields and codes, start-up phases are events; the words of a message may change freely."""
    for module in house:
        caught = {node.name for node in module.nodes if isinstance(node, ast.ExceptHandler) and node.name}
        names = caught | set(ERRORS)
        for node in module.nodes:
            if any(_is_message(read, names) for read in _texts_read(node)):
                yield f"{module.name}:{node.lineno} reads the text of a message: {ast.unparse(node)}"  # type: ignore[attr-defined]


def _texts_read(node: ast.AST) -> list[ast.expr]:
    """The texts that an expression looks into."""
    if isinstance(node, ast.Compare):
        # two messages may be compared with each other, a message with a constant may not
        asked = isinstance(node.ops[0], ast.In | ast.NotIn)
        constant = any(isinstance(part, ast.Constant) for side in node.comparators for part in ast.walk(side))
        return [*node.comparators, *([node.left] if constant else [])] if asked or constant else []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if ast.unparse(node.func) in MATCHERS:
            return node.args[1:]
        if node.func.attr in READERS:
            return [node.func.value]
    if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice):  # a slice shortens a message
        return [node.value]
    return []


def _is_message(node: ast.expr, errors: set[str]) -> bool:
    """Whether it is str(error), error.args, error.message or the message of a log record."""
    text = ast.unparse(node)
    if re.fullmatch(r"(?:\w+\.)*(?:record|rec)\.(?:getMessage\(\)|message|msg)", text):
        return True
    for name in errors:
        holder = rf"(?:\w+\.)*{re.escape(name)}"
        if re.fullmatch(rf"(?:str|repr)\({holder}\)(?:\.lower\(\))?|{holder}\.(?:args|message)(?:\[0\])?", text):
            return True
    return False


def _prose(text: str, is_python: bool) -> str:
    """The text without fenced blocks and code in a document; a Python file as it is, since its names are no English."""
    if is_python:
        return text
    blank = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "code", blank)


def the_english_is_plain(house: House) -> Iterator[str]:
    """In every docstring, comment and message, and in the documents; the rules themselves name what they ban."""
    places = [(module.path, True) for module in house.files] + [(path, False) for path in house.documents]
    for path, is_python in places:
        name = path.relative_to(house.root).as_posix()
        if name.startswith("tests/house/"):
            continue
        text = _prose(path.read_text(encoding="utf-8"), is_python)
        found = [*BANNED_ENGLISH.finditer(text), *INVERTED.finditer(text)]
        for match in sorted(found, key=lambda match: match.start()):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{name}:{line} says {' '.join(match[0].split())!r}"


PLANTED: list[Planted] = [
    (
        errors_are_not_parsed,
        {"server/app.py": "try:\n    f()\nexcept ValueError as e:\n    if 'leave no token' in str(e): g()"},
        "fa_serve.server.app:4 reads the text of a message: 'leave no token' in str(e)",
    ),
    (errors_are_not_parsed, {"server/app.py": "def f(error):\n    return str(error).split()[0]"}, "str(error).split()"),
    (
        errors_are_not_parsed,
        {"server/app.py": "def f(error):\n    a, b, c = str(error).partition(' ')"},
        "str(error).partition",
    ),
    (errors_are_not_parsed, {"server/app.py": "def f(x):\n    return str(x.error).startswith('a')"}, "str(x.error).startswith"),
    (errors_are_not_parsed, {"server/app.py": "def f(x):\n    return 'top_p' in x.error.message"}, "x.error.message"),
    (errors_are_not_parsed, {"server/app.py": "def f(error):\n    return error.args[0]"}, "error.args[0]"),
    (
        errors_are_not_parsed,
        {"server/app.py": "def f(error):\n    return str(error) in ('a', 'b')"},
        "str(error) in ('a', 'b')",
    ),
    (
        errors_are_not_parsed,
        {"server/app.py": "def f(error):\n    return re.match('a', str(error))"},
        "re.match('a', str(error))",
    ),
    (
        errors_are_not_parsed,
        {"server/app.py": "def f(record):\n    return record.getMessage().split(':')"},
        "record.getMessage()",
    ),
    (the_english_is_plain, {"fa_serve/api.py": "# a page of their\n# own"}, "fa_serve/api.py:1 says 'of their # own'"),
    (the_english_is_plain, {"fa_serve/api.py": '"""Tiles and its\n    like."""'}, "fa_serve/api.py:1 says 'its like'"),
    (the_english_is_plain, {"server/app.py": "x = 1\nraise E('Whoever asks')"}, "server/app.py:2 says 'Whoever'"),
    (the_english_is_plain, {"fa_serve/api.py": '"""Of a float8 cache the scale."""'}, "fa_serve/api.py:1 says"),
    (the_english_is_plain, {"docs/guide.md": "a\n\n```\nlest\n```\nlest it fails"}, "docs/guide.md:6 says 'lest'"),
    (the_english_is_plain, {"README.md": "too dear"}, "README.md:1 says 'dear'"),
    (
        the_english_is_plain,
        {"docs/guide.md": "Milliseconds from one token to the next up to which the prompts of others may slow it down."},
        "docs/guide.md:1 says 'to the next up to which'",
    ),
    (the_english_is_plain, {"docs/guide.md": "| `a` | Whose requests it is compared with |"}, "says '| Whose requests'"),
    (the_english_is_plain, {"server/app.py": "# Values that ask for\n# nothing pass."}, "says 'ask for # nothing'"),
    (the_english_is_plain, {"server/app.py": '"""The fuller it is, the less of it a key may take."""'}, "'the less of it'"),
    (the_english_is_plain, {"docs/guide.md": "The engine goes on meanwhile, so only what lies after"}, "'goes on meanwhile'"),
    (the_english_is_plain, {"docs/guide.md": "The kernels of attention were measured."}, "'kernels of attention'"),
    (the_english_is_plain, {"docs/guide.md": "Higher. Of these, ours would be 1.78."}, "says '. Of these, ours'"),
    (the_english_is_plain, {"docs/guide.md": "Two H100s gave 295 (one 180, vLLM 242)."}, "says 'gave 295 (one 180'"),
    (the_english_is_plain, {"docs/guide.md": "words that are neither a name nor a number"}, "'neither a name nor a number'"),
    (the_english_is_plain, {"docs/guide.md": "or is refused there for the right reason"}, "'for the right reason'"),
    (the_english_is_plain, {"docs/guide.md": "A prompt is not divided for a small rest."}, "'for a small rest'"),
    (the_english_is_plain, {"docs/guide.md": "In float16, six answers of six each are equal."}, "'of six each'"),
]

ALLOWED: list[Allowed] = [
    (
        errors_are_not_parsed,
        {"server/app.py": "def f(error):\n    if error.code == 'timeout':\n        log(str(error), error.field)"},
    ),
    (
        errors_are_not_parsed,
        {"server/app.py": "def f(error, seen):\n    return str(error)[:200] if str(error) not in seen else ''"},
    ),
    (the_english_is_plain, {"docs/guide.md": "```\ndear lest\n```\nThe flag `--of-its-own`, `whoever`. A list of outputs."}),
    (the_english_is_plain, {"fa_serve/api.py": "blest = dearth = 1  # celeste; one of an even number"}),
]
