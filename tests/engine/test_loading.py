"""Loading: the sizes of the cache and of sequences, and code that comes with a model."""

import json

import pytest

from fa_serve.engine import EngineConfig
from fa_serve.engine.loading import load_model
from fa_serve.spec import ParameterError


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


def test_sizes_that_cannot_work_are_refused_with_numbers(make_engine) -> None:
    for settings, message in (
        ({"num_pages": 16, "max_model_len": 65}, r"max_model_len must be at most 64.*16 pages of 4 tokens.*got 65"),
        ({"max_model_len": 257}, r"at most 256.*max_position_embeddings, got 257"),
    ):
        with pytest.raises(ParameterError, match=message) as error:
            make_engine(**settings)
        assert error.value.field == "max_model_len"


def test_sizes_follow_from_the_model_and_the_cache(make_engine) -> None:
    assert make_engine(num_pages=16).max_model_len == 64
    assert make_engine(num_pages=None, max_num_seqs=2).config.num_pages == 2 * 256 // 4
