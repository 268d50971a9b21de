"""Mistakes of operators are refused at the start, with what is wrong; and what an operator does in passing ends nothing."""

import pytest
from fa_serve.server.settings import load
from warm_processes import run_warm

from fa_serve.engine import Engine, EngineConfig
from fa_serve.spec import ParameterError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("good\nsecret  # for me\n", "line 2 of"),
        ("\x00\x01\n", "line 1 of"),
        (b"\xff\xfe", "UTF-8"),
        ("# none\n", "got none in"),
    ],
    ids=["a comment behind it", "control characters", "not text", "no key"],
)
def test_a_bad_file_of_keys(text, said, tmp_path):
    file = tmp_path / "keys"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=said) as error:
        _ = load({"api_key_file": file}).all_keys
    assert "secret" not in str(error.value)


def test_the_mark_at_the_beginning_of_a_file_is_not_part_of_a_key(tmp_path):
    (tmp_path / "keys").write_text("one\n", encoding="utf-8-sig")
    assert load({"api_key_file": tmp_path / "keys"}).all_keys == ("one",)


@pytest.mark.parametrize("name", ["FA_SERVE_API_KEYS", "fa_serve_api_keys", "FA_SERVE_API_KEY_FILE"])
def test_an_empty_variable_of_keys_does_not_open_the_server(name, warm_context, monkeypatch):
    monkeypatch.setenv(name, "")
    done = run_warm("serve", "--port", "0", "--device", "cpu", timeout=120)
    assert done.returncode == 2
    assert "after" not in done.stdout, "it said that it was ready"
    assert f"{name} must not be empty" in done.stderr


def test_an_empty_list_of_keys_in_the_file(tmp_path):
    (tmp_path / "fa-serve.toml").write_text("api_keys = []\n")
    with pytest.raises(ValueError, match="api_keys must hold at least one key"):
        load({}, tmp_path / "fa-serve.toml")


@pytest.mark.slow
def test_the_process_ends_for_a_broken_template_even_if_it_never_ends(tmp_path):
    loops = "".join("{% for _ in range(99999) %}" for _ in range(3)) + "x" + "{% endfor %}" * 3
    (tmp_path / "template").write_text(loops)
    done = run_warm(
        "serve", "--port", "0", "--device", "cpu", "--num-pages", "64", "--chat-template", str(tmp_path / "template")
    )
    assert done.returncode == 1
    assert "chat_template must" in done.stderr, "it ends at its deadline, or earlier at the bound of a prompt"


@pytest.mark.slow
@pytest.mark.parametrize("text", ["{{ 9 ** (9 ** 9) }}", "{{ 'x' * 1000000000000 }}", "{{ 'x' * 0xfffffffff }}"])
def test_the_process_ends_for_a_template_that_holds_the_interpreter(text, tmp_path):
    """Before: jinja2 computed the power when it compiled the template, for hours, and SIGTERM ended nothing."""
    (tmp_path / "template").write_text(text)
    done = run_warm(
        "serve", "--port", "0", "--device", "cpu", "--num-pages", "64", "--chat-template", str(tmp_path / "template")
    )
    assert done.returncode == 1
    assert "must have no power" in done.stderr


def test_more_pages_than_memory():
    with pytest.raises(
        ParameterError,
        match=r"num_pages must be at most \d+: a page of .* tokens takes .* KiB in .* GiB of memory are available",
    ):
        Engine(EngineConfig(device="cpu", num_pages=10**12))
