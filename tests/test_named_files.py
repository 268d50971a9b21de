"""Settings that name files: each wrong one is refused with a sentence, and nothing slow is imported for it."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from fa_serve.demo import model_path
from fa_serve.named_files import find_wrong_file, find_wrong_model, is_hub_name


@dataclass(frozen=True)
class Named:
    model: str | None = None
    revision: str | None = None
    generation_config: str = "auto"
    speculative: str | None = None
    lora: tuple[str, ...] = ()
    kv_host_folder: str | None = None


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "french"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def test_what_is_there_is_not_refused(adapter, tmp_path):
    demo = str(model_path())
    for settings in (
        Named(),
        Named(model=demo, generation_config=demo, speculative=f"draft={demo}", lora=(f"a={adapter}", f"b={adapter}")),
        Named(model="org/model", revision="v1", generation_config="none", speculative="ngram"),
        Named(kv_host_folder=str(tmp_path / "made" / "later"), speculative="eagle3=org/head"),
        Named(speculative="something else"),  # which the engine's config refuses
    ):
        assert find_wrong_file(settings) is None, settings


@pytest.mark.parametrize(
    ("settings", "field", "said"),
    [
        ({"model": "./nope"}, "model", "be a hub name, such as Qwen/Qwen3-0.6B, or an existing folder"),
        ({"model": "{tmp}"}, "model", "be a folder with a config.json"),
        ({"revision": "v1"}, "revision", "be left out for the embedded model, which has only one revision"),
        ({"model": "{demo}", "revision": "v1"}, "revision", "be left out for a folder, which has only one revision"),
        ({"model": "org/model", "revision": " "}, "revision", "be a commit, a tag or a branch of the model on the hub"),
        ({"generation_config": "{tmp}"}, "generation_config", "(there is no generation_config.json in it)"),
        ({"generation_config": "{tmp}/x"}, "generation_config", "(there is no such folder)"),
        ({"speculative": "draft={tmp}/x"}, "speculative", "name a draft model: model must be a hub name"),
        ({"speculative": "eagle3={tmp}"}, "speculative", "name an EAGLE-3 head: model must be a folder with a config.json"),
        ({"lora": ("a={tmp}/x",)}, "lora", "be NAME=FOLDER with an existing folder"),
        (
            {"lora": ("a={tmp}",)},
            "lora",
            "adapter_config.json and adapter_model.safetensors in it: adapter_config.json is missing",
        ),
        (
            {"lora": ("a/b={tmp}/french",)},
            "lora",
            "where NAME must have at most 128 characters, only letters, digits and . : @ + - _",
        ),
        ({"lora": ("={tmp}/french",)}, "lora", "where NAME must have at most 128 characters"),
        ({"lora": ("a={tmp}/french", "a={tmp}/french")}, "lora", "give each adapter a different name"),
        ({"kv_host_folder": "{tmp}/french/adapter_config.json"}, "kv_host_folder", "adapter_config.json is not a folder"),
        ({"kv_host_folder": "{tmp}/french/adapter_config.json/x"}, "kv_host_folder", "adapter_config.json is not a folder"),
    ],
)
def test_what_is_not_there_is_refused(settings, field, said, adapter, tmp_path):
    def filled(value):
        if isinstance(value, tuple):
            return tuple(map(filled, value))
        return value.replace("{tmp}", str(tmp_path)).replace("{demo}", str(model_path()))

    wrong = find_wrong_file(Named(**{name: filled(value) for name, value in settings.items()}))
    assert wrong is not None
    assert wrong.field == field
    assert said in wrong.rule


PATHS = ["a/b/c", "./nope", "../x", "/x", "x/", "~/x", "a b", "", "C:\\x"]
NAMES = ["gpt2", "org/model", "org/model-1.5_x", "-a", "a-", "a--b", "a..b", "a.git", "é/x", ".a", "a."]
LONG = ["org/" + "x" * 96, "org/" + "x" * 97, "x" * 120 + "/x"]


@pytest.mark.parametrize("name", [*PATHS, *NAMES, *LONG])
def test_names_of_the_hub_are_those_of_its_client(name):
    try:
        validate_repo_id(name)
    except HFValidationError:
        assert not is_hub_name(name)
    else:
        assert is_hub_name(name)


def test_a_model_without_a_revision_needs_none():
    assert find_wrong_model(None) is None
    assert find_wrong_model("org/model") is None


def test_nothing_slow_is_imported():
    code = (
        "import sys; from fa_serve.server.setting_files import require_setting_files; "
        "from fa_serve.server.settings import load; "
        "require_setting_files(load({'lora': [], 'model': 'org/model', 'revision': 'v1'}), with_engine=True); "
        "print(sorted({'torch', 'transformers', 'huggingface_hub', 'fastapi', 'jinja2'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
