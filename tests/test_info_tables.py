"""The output of `fa-serve info`: a backend for each call, each shared reason once, and lines that fit 100 columns."""

import io

import pytest
from every_type import tiny_config
from rich.console import Console
from transformers import AutoConfig
from typer.testing import CliRunner

from fa_serve import info_tables
from fa_serve.__main__ import app
from fa_serve.backends import explain
from fa_serve.info_tables import chosen, common_cases, shared_reasons


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["info", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    return done.stdout


def words(text: str) -> str:
    """The text without the borders and line breaks of tables."""
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("arch", [0, 80, 90], ids=["cpu", "sm80", "sm90"])
def test_every_call_has_a_backend_and_a_shared_reason_stands_once(arch):
    text = run(*(["--arch", str(arch)] if arch else []))
    device = "cuda" if arch else "cpu"
    cases = [(title, spec, explain(spec)) for title, spec in common_cases(device, arch)]
    assert all(title in text for title, _, _ in cases)
    assert all(chosen(reasons) != "none" for _, _, reasons in cases)
    shared = shared_reasons([reasons for _, _, reasons in cases])
    for name, reason in shared.items():
        assert words(text).count(f"{name}: {reason}") == 1
    assert ("Refused for every call below:" in text) == bool(shared)
    assert bool(shared) == (arch != 90)


@pytest.mark.parametrize("arguments", [(), ("--arch", "90"), ("--arch", "80")], ids=" ".join)
def test_it_fits_100_columns(arguments):
    assert max(map(len, run(*arguments).splitlines())) <= 100


@pytest.mark.parametrize("arguments", [(), ("--arch", "90")], ids=["cpu", "sm90"])
def test_the_layers_of_a_model_fit_100_columns(arguments, tmp_path):
    AutoConfig.for_model("gemma3_text", num_hidden_layers=6, sliding_window=512).save_pretrained(tmp_path)
    text = run(str(tmp_path), *arguments)
    assert max(map(len, text.splitlines())) <= 100
    assert "Gemma3Attention" in text
    assert "engine: " in text
    for backend in ("hopper", "triton"):
        assert text.count(f"{backend}: ") == (0 if arguments else 1), "a reason for every layer stands once"


@pytest.mark.parametrize(("release", "arch", "slow"), [("3.8.0", 90, True), ("3.7.1", 90, False), ("3.8.0", 80, False)])
def test_a_slower_release_of_triton_is_told_where_it_was_measured(release, arch, slow, monkeypatch):
    monkeypatch.setattr(info_tables, "version", lambda package: release if package == "triton" else "1.0")
    text = words(run("--arch", str(arch)))
    assert f"triton {release}, transformers 1.0" in text
    assert ("torch 2.11 has Triton 3.6" in text) == slow


def test_reasons_of_single_calls_stand_in_their_rows():
    text = words(run("--arch", "90"))
    [float32] = [spec for title, spec in common_cases("cuda", 90) if "float32" in title]
    assert explain(float32)["hopper"] is not None
    assert text.count("got float32") == 1


def test_float8_products_are_told_where_they_exist():
    assert "prefill, float8 products" in run("--arch", "90")
    assert "float8 products" not in run("--arch", "80")
    float8 = [spec for _, spec in common_cases("cuda", 90) if spec.precision == "fp8"]
    assert [chosen(explain(spec)) for spec in float8] == ["hopper"] * 3
    for arch in (89, 100, 120):
        float8 = [spec for _, spec in common_cases("cuda", arch) if spec.precision == "fp8"]
        assert [chosen(explain(spec)) for spec in float8] == ["triton"] * 3


def test_shared_reasons_hold_for_every_call():
    calls = [{"a": "slow", "b": "old", "c": None}, {"a": "slow", "b": "new", "c": None}]
    assert shared_reasons(calls) == {"a": "slow"}
    assert shared_reasons([]) == {}
    assert [chosen(reasons) for reasons in (*calls, {"a": "slow"})] == ["c", "c", "none"]


def test_a_narrow_terminal_is_respected(monkeypatch):
    monkeypatch.setattr("sys.stdout", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("TERM", "xterm")
    assert info_tables.make_console().width == 70
    monkeypatch.setenv("COLUMNS", "250")
    assert info_tables.make_console().width == 100
    assert isinstance(info_tables.make_console(), Console)


def test_what_each_rank_holds(tmp_path):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 4096, "dtype": "bfloat16"}
    AutoConfig.for_model("llama", num_attention_heads=8, num_key_value_heads=2, **sizes).save_pretrained(tmp_path)
    text = run(str(tmp_path), "--tensor-parallel", "4")
    assert max(map(len, text.splitlines())) <= 100
    # one layer: q and o 2 * 2^20, k and v 2 * 2^18, the MLP 3 * 2^22; embeddings and head 2 * 2^22; norms 17 * 2^10
    layers = 8 * (2 * 2**20 + 2 * 2**18 + 3 * 2**22) * 2
    vocabulary = 2 * 2**22 * 2
    whole = 17 * 2**10 * 2
    shared = 8 * 2 * 2**17 * 2  # four ranks hold one of two key and value heads each
    held = layers / 4 + shared / 2 + vocabulary / 4 + whole
    assert f"each of 4 ranks holds {held / 2**30:.3g} GiB of the {(layers + vocabulary + whole) / 2**30:.3g} GiB" in text
    assert "heads in layer 0: 2 for queries, 1 for keys and values; 4 KiB of KV cache per token" in text


def test_a_limit_of_the_length_stands_beside_the_engine(tmp_path):
    tiny_config("minimax_m3_vl").save_pretrained(tmp_path)
    text = words(run(str(tmp_path)))
    assert "engine: runs it for sequences of up to 256 tokens, where its sparse attention selects all keys" in text


def test_a_model_that_cannot_be_divided(tmp_path):
    AutoConfig.for_model("gpt2", n_layer=2, n_embd=64, n_head=4).save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["info", str(tmp_path), "--tensor-parallel", "2"])
    assert done.exit_code == 1
    reason = "GPT2LMHeadModel cannot be divided between 2 ranks: transformers has no tensor-parallel plan for its layers"
    assert f"tensor parallel: {reason}" in words(done.stdout)
