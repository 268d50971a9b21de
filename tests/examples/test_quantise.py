"""The script that writes quantised copies, and a real server that serves one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import server_process
from quantise import formats, main

from fa_serve.demo import model_path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("copies")


@pytest.mark.parametrize(("name", "most"), [("awq", 3.0), ("fp8", 4.0)])
def test_a_copy_is_served(folder: Path, monkeypatch, capsys, name: str, most: float) -> None:
    """The command writes a few MB, and a server answers with them as the embedded model does."""
    out = folder / name
    monkeypatch.setattr(sys, "argv", ["quantise.py", name, str(out)])
    main()
    assert capsys.readouterr().out.startswith(f"{out}: ")
    assert (out / "model.safetensors").stat().st_size < most * 1e6 < (model_path() / "model.safetensors").stat().st_size
    served = server_process.start(str(out), "--served-model-name", name)
    try:
        ask = {"model": name, "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
        reply = httpx.post(f"{served.url}/v1/chat/completions", json=ask, timeout=60).json()
        assert reply["choices"][0]["message"]["content"] == "17 + 25 = 42."
    finally:
        served.end()


def test_a_checkpoint_that_cannot_be_served_ends_the_command_with_one_sentence(folder: Path, monkeypatch) -> None:
    out = folder / "spoiled"
    monkeypatch.setattr(sys, "argv", ["quantise.py", "gptq", str(out)])
    main()
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["bits"] = 3
    (out / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "fa_serve", "serve", str(out), "--device", "cpu", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith("the model could not be loaded: quantization_config.bits must be 4, got 3")


def test_every_format_is_in_the_help() -> None:
    script = Path(__file__).parents[2] / "examples" / "quantise.py"
    text = script.read_text()
    for name in formats(64):
        assert f"\n    {name} " in text
