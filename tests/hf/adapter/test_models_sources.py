"""Classes of models whose source cannot be read, and classes that inherit from a model of another file."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from hf_families import BY_NAME, assert_same, check_pages, tokens
from transformers import AutoConfig, BloomModel, DogeModel, LlamaForCausalLM, PreTrainedModel, Qwen3MoeForCausalLM, RobertaModel
from warm_processes import warm_program

import fa_serve
from fa_serve.hf.adapter import models
from fa_serve.hf.surgery.experts.mixtures import expert_modules, take_experts
from fa_serve.spec import UnsupportedModelError

Place = Callable[[types.ModuleType], None]


def notebook(module: types.ModuleType) -> None:
    """The module of a notebook, or of a program that came from standard input, has no file."""


def lost_file(module: types.ModuleType) -> None:
    module.__file__ = "/nonexistent/lost.py"


def gone(module: types.ModuleType) -> None:
    del sys.modules[module.__name__]


def not_python(module: types.ModuleType) -> None:
    """The file has changed since it was run."""
    module.__file__ = str(Path(__file__).parents[2] / "README.md")


PLACES = [notebook, lost_file, gone, not_python]


@pytest.fixture(params=PLACES, ids=lambda place: place.__name__)
def make_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes an empty subclass of a class in a module without a source."""

    def make(base: type[PreTrainedModel], name: str = "Mine") -> Any:
        module = types.ModuleType(f"without_source_{request.param.__name__}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        # as in a process that has not met the base class before; an inherited answer stays with the base class
        if models._ANSWER in vars(base):
            monkeypatch.delattr(base, models._ANSWER)
        exec(f"class {name}(Base): pass", vars(module) | {"Base": base, "__name__": module.__name__}, made := {})
        request.param(module)
        return made[name]

    return make


@torch.no_grad()
def test_a_class_without_a_source_is_judged_by_its_base_class(
    make_class: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family = BY_NAME["llama"]
    eager = family.build()
    eager.save_pretrained(tmp_path)
    ids = tokens(2, 9)
    mine = make_class(LlamaForCausalLM)
    loaded = mine.from_pretrained(tmp_path, attn_implementation="fa_serve")
    patched = fa_serve.patch(make_class(LlamaForCausalLM).from_pretrained(tmp_path, attn_implementation="eager"))
    switched = make_class(LlamaForCausalLM).from_pretrained(tmp_path, attn_implementation="eager")
    switched.set_attn_implementation("fa_serve")
    for model in (loaded, patched, switched):
        assert model.config._attn_implementation == "fa_serve"
        assert_same(model(ids).logits, eager(ids).logits)
    assert "does not support setting its attention" not in caplog.text
    check_pages(loaded, eager)


def test_a_class_without_a_source_is_refused_as_its_base_class_is(make_class: Any) -> None:
    config = AutoConfig.for_model("bloom", n_layer=1, hidden_size=32, n_head=2, vocab_size=32)
    mine = make_class(BloomModel)
    with torch.device("meta"), pytest.raises(UnsupportedModelError, match="Mine computes its attention itself"):
        mine._from_config(config, attn_implementation="fa_serve")


def test_without_any_source_the_reason_is_told(make_class: Any) -> None:
    mine = make_class(PreTrainedModel)
    mine.config_class = BY_NAME["llama"].model_class.config_class
    with pytest.raises(
        UnsupportedModelError,
        match=r"the source of Mine or of a base class must be readable, .* \(of the module 'without_source_\w+': .*\): "
        r'define the class in a Python file and import it, or load the model with attn_implementation="eager" or "sdpa"',
    ):
        mine._from_config(BY_NAME["llama"].make_config(), attn_implementation="fa_serve")
    model = mine(BY_NAME["llama"].make_config())
    with pytest.raises(UnsupportedModelError, match="the source of Mine or of a base class must be readable"):
        fa_serve.patch(model)
    assert model.config._attn_implementation == "eager"


def test_what_a_base_class_says_holds_for_a_class_in_another_file() -> None:
    """This file is readable and says nothing of positions and masks. Neither does that of FSDP, which makes such classes."""

    class Mine(RobertaModel): ...

    class Masked(DogeModel): ...

    sharded = type("FSDPRobertaModel", (RobertaModel,), {"__module__": "torch.distributed.fsdp"})
    for each in (RobertaModel, Mine, sharded):
        assert models.counts_positions(each)
    assert models.read_source(Masked) == models.read_source(DogeModel)
    assert models.read_source(Masked).works_on_masks


def test_the_answer_for_a_base_class_is_not_that_for_a_class_with_its_own_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers keeps its answer on the base class, where the subclass would find it."""
    tmp_path.joinpath("own_attention.py").write_text(
        "from torch import nn\nfrom transformers import LlamaForCausalLM\n"
        "class OwnAttention(nn.Module): ...\nclass Mine(LlamaForCausalLM): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    models.check_class(LlamaForCausalLM)
    import own_attention  # type: ignore[import-not-found]

    with pytest.raises(UnsupportedModelError, match="Mine computes its attention itself"):
        models.check_class(own_attention.Mine)
    models.check_class(LlamaForCausalLM)
    monkeypatch.delitem(sys.modules, "own_attention")


def test_experts_of_a_class_in_another_file_are_taken() -> None:
    class Mine(Qwen3MoeForCausalLM): ...

    model = Mine(BY_NAME["qwen3-moe"].make_config())
    found = expert_modules(model)
    assert take_experts(model) == len(found) > 0
    assert {module.config._experts_implementation for module in found} == {"fa_serve"}


def test_a_program_without_a_file() -> None:
    program = """
import fa_serve, torch
from transformers import LlamaConfig, LlamaForCausalLM
class Mine(LlamaForCausalLM): pass
config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
loaded = Mine._from_config(config, attn_implementation="fa_serve")
patched = fa_serve.patch(Mine(config))
print(Mine.__module__, loaded.config._attn_implementation, patched.config._attn_implementation)
"""
    with warm_program(program) as process:
        assert process.stdout.read().split() == ["__main__", "fa_serve", "fa_serve"]
        assert process.wait(60) == 0
