"""The script that writes quantised copies, and a real server that serves one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from quantise import formats, main
from warm_processes import run_warm

from fa_serve.demo import model_path
from fa_serve.engine import Engine, EngineConfig, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("copies")


@pytest.mark.parametrize(("name", "most"), [("awq", 3.0), ("fp8", 4.0)])
def test_a_copy_is_served(folder: Path, monkeypatch, capsys, name: str, most: float) -> None:
    """The command writes a few MB, and the engine of a server answers with them as the embedded model does."""
    out = folder / name
    monkeypatch.setattr(sys, "argv", ["quantise.py", name, str(out)])
    main()
    assert capsys.readouterr().out.startswith(f"{out}: ")
    assert (out / "model.safetensors").stat().st_size < most * 1e6 < (model_path() / "model.safetensors").stat().st_size
    engine = Engine(EngineConfig(model=str(out), device="cpu", num_pages=64))
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    prompt = engine.tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    [answer] = engine.generate([prompt], SamplingParams(max_tokens=20, temperature=0.0))
    assert (answer.text, answer.finish_reason) == ("17 + 25 = 42.", "stop")


def test_a_checkpoint_that_cannot_be_served_ends_the_command_with_one_sentence(folder: Path, monkeypatch) -> None:
    out = folder / "spoiled"
    monkeypatch.setattr(sys, "argv", ["quantise.py", "gptq", str(out)])
    main()
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["bits"] = 3
    (out / "config.json").write_text(json.dumps(config))
    ended = run_warm("serve", str(out), "--device", "cpu", "--port", "0")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith("the model could not be loaded: quantization_config.bits must be 4, got 3")


def test_every_format_is_in_the_help() -> None:
    script = Path(__file__).parents[2] / "examples" / "quantise.py"
    text = script.read_text()
    for name in formats(64):
        assert f"\n    {name} " in text
