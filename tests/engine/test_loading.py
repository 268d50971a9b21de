"""Code that comes with a model is run only when that is asked for."""

import json

import pytest

from fa_serve.engine import EngineConfig
from fa_serve.engine.loading import load_model


@pytest.mark.parametrize("trusted", [False, True], ids=["default", "trusted"])
def test_code_of_a_model(tmp_path, monkeypatch, trusted):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / f"model_{trusted}"
    ran = tmp_path / "ran"
    folder.mkdir()
    config = {"model_type": f"alien{trusted}", "auto_map": {"AutoConfig": "alien.Alien", "AutoModelForCausalLM": "alien.Alien"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "alien.py").write_text(f"open({str(ran)!r}, 'w').close()\nraise ValueError('the code has run')\n")
    with pytest.raises(ValueError, match="the code has run" if trusted else "trust_remote_code"):
        load_model(EngineConfig(model=folder, trust_remote_code=trusted))
    assert ran.exists() == trusted
