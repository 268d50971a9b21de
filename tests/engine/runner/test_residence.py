"""Weights that change, leave and come back, on the runner of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hf_families import pair
from hybrids import BY_NAME
from tiny_models import make_model, make_tokenizer
from torch import nn
from transformers import GenerationConfig

from fa_serve.engine import Engine, EngineAsleepError, EngineConfig, SamplingParams
from fa_serve.engine.runner.residence import Residence
from fa_serve.hf.surgery.quantised.linear import QuantizedLinear
from fa_serve.spec import ParameterError

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


def test_nothing_is_made_again_after_a_change_in_place(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    weights = Residence(engine._runner, engine.config, owned=True, num_ranks=1)
    forwards = [vars(module).get("forward") for module in engine._runner.model.modules()]
    with torch.no_grad():
        engine._runner.model.lm_head.weight.neg_()
    assert not weights.settle()
    assert [vars(module).get("forward") for module in engine._runner.model.modules()] == forwards
    engine._runner.model.lm_head.weight.data = engine._runner.model.lm_head.weight.data.clone()
    assert weights.settle()
    assert not weights.settle()


def test_switched_adapters_of_peft_need_other_graphs(make_engine: Callable[..., Engine]) -> None:
    """A graph replays what layers computed when it was captured."""
    engine = make_engine()
    layer = engine._runner.model.lm_head
    vars(layer).update(_disable_adapters=False, merged_adapters=[], scaling={"default": 1.0})
    weights = Residence(engine._runner, engine.config, owned=True, num_ranks=1)
    assert not weights.settle()
    for switch in (
        lambda: vars(layer).update(_disable_adapters=True),
        lambda: layer.merged_adapters.append("default"),
        lambda: layer.scaling.update(default=2.0),
    ):
        switch()
        assert weights.settle()
        assert not weights.settle()


def test_the_graphs_of_moved_weights_are_captured_again(make_engine: Callable[..., Engine], replays: list[int]) -> None:
    """A graph reads the memory that a weight had when it was captured."""
    engine = make_engine()
    runner = engine._runner
    runner.eager = False
    runner.make_graphs()
    captured = runner._graphs
    engine.update_weights()
    assert runner._graphs is captured, "a change in place needs no other graph"
    runner.model.lm_head.weight.data = runner.model.lm_head.weight.data.clone()
    engine.update_weights()
    assert runner._graphs is not captured
    engine.sleep(0)
    assert runner._graphs._replays == runner.kv_caches == {}
    runner.model.lm_head.weight.data = runner.model.lm_head.weight.data.clone()
    engine.update_weights()
    assert runner._graphs._replays == {}, "there is no cache that a graph could read"
    engine.wake_up()
    assert engine.generate([[5, 6, 7]], GREEDY)[0].finish_reason == "length"
    assert replays


def test_a_divided_tensor_is_gathered(make_engine: Callable[..., Engine]) -> None:
    class Part(nn.Parameter):
        def full_tensor(self) -> torch.Tensor:
            return torch.full((320, 32), 0.25)

    engine = make_engine()
    assert engine.update_weights([("lm_head.weight", Part(torch.zeros(2, 32)))]) == 1
    assert (engine._runner.model.lm_head.weight == 0.25).all()


def test_both_names_of_a_tied_weight_are_known(make_engine: Callable[..., Engine]) -> None:
    model = make_model()
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    engine = make_engine(model=model)
    engine.update_weights([("lm_head.weight", torch.zeros(320, 32))])
    assert not model.model.embed_tokens.weight.any()


def test_the_scales_of_a_float8_cache_follow_the_weights(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(kv_cache_dtype="fp8")
    scales = engine._runner._options["descales"][0]
    before = [scale.clone() for scale in scales]
    with torch.no_grad():
        engine._runner.model.model.layers[0].self_attn.v_proj.weight.mul_(8)
    engine.update_weights()
    assert engine._runner._options["descales"][0] is scales, "graphs read them where they are"
    torch.testing.assert_close(scales[1], before[1] * 8)


@pytest.mark.parametrize("first", ["weights", "kv_cache"])
def test_graphs_are_captured_once_when_all_is_back(first: str, tmp_path: Path) -> None:
    """A graph that is captured while the weights are away fails, and a runner without a first graph never captures again."""
    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    engine = Engine(EngineConfig(model=str(tmp_path), device="cpu", num_pages=32))
    runner = engine._runner
    captured: list[int] = []
    runner.eager = False
    runner.make_graphs = lambda: captured.append(sum(x.numel() for x in runner.model.parameters()) * len(runner.kv_caches))
    [second] = {"weights", "kv_cache"} - {first}
    size = sum(x.numel() for x in runner.model.parameters())
    engine.sleep(2)
    engine.wake_up([first])
    assert captured == []
    engine.wake_up([second])
    engine.wake_up()
    assert captured == [size * 2], "two layers have a cache"


def test_quantised_weights_stay(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine._runner.model.add_module("quantised", QuantizedLinear.__new__(QuantizedLinear))
    nn.Module.__init__(engine._runner.model.quantised)
    weights = Residence(engine._runner, engine.config, owned=True, num_ranks=1)
    with pytest.raises(ParameterError, match="level must be 0 for a model with quantised weights"):
        weights.sleep(1)
    with pytest.raises(ParameterError, match="weights must belong to a model with floating-point weights"):
        weights.copy([("model.layers.0.mlp.up_proj.qweight", torch.zeros(1))])


def test_a_model_with_states_computes_unfinished_answers_again(make_engine: Callable[..., Engine]) -> None:
    _, model = pair(BY_NAME["qwen3.5"])
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=-1)
    engine = make_engine(model=model)
    [expected] = engine.generate([[*range(3, 20)]], GREEDY)
    engine.add_request("a", [*range(3, 20)], GREEDY)
    engine.step()
    assert engine.update_weights() == 1
    engine.check_integrity()
    tokens: list[int] = []
    while engine.has_unfinished():
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert expected.token_ids[1:] == tokens
    with pytest.raises(ParameterError, match="keep_pages must be False for a model that keeps states"):
        engine.update_weights(keep_pages=True)


def test_a_part_of_new_weights_computes_nothing(make_engine: Callable[..., Engine]) -> None:
    """An update that fails in the middle has copied weights that belong to others. They have to come again, with these."""
    engine = make_engine()
    new = {name: torch.full_like(x, 0.01) for name, x in engine.model.named_parameters()}

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from [*new.items()][:3]
        raise OSError("the file is cut off")

    with pytest.raises(OSError, match="cut off"):
        engine.update_weights(broken())
    assert engine.is_asleep
    with pytest.raises(EngineAsleepError, match=r"3 parameters are missing since sleep\(level=2\) or an update that failed"):
        engine.generate([[5, 6, 7]], GREEDY)
    engine.update_weights([*new.items()][1:3])
    with pytest.raises(EngineAsleepError, match="1 parameters are missing"):
        engine.generate([[5, 6, 7]], GREEDY)
    assert engine.update_weights(new.items()) == 3
    assert len(engine.generate([[5, 6, 7]], GREEDY)[0].token_ids) == 4


def test_an_update_that_fails_at_its_first_weight_changes_nothing(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        raise OSError("the file is cut off")
        yield

    with pytest.raises(OSError, match="cut off"):
        engine.update_weights(broken())
    assert (engine.is_asleep, engine.weight_version) == (False, 0)


def test_the_owner_of_weights_mends_a_part_of_new_ones_in_place(make_engine: Callable[..., Engine]) -> None:
    """A trainer whose live model has taken a part of an update, by a name that there is not."""
    engine = make_engine()
    head = engine.model.lm_head.weight.detach().clone()
    with pytest.raises(ParameterError, match="names of parameters"):
        engine.update_weights([("lm_head.weight", -head), ("nothing", head)])
    assert engine.is_asleep
    with torch.no_grad():
        engine.model.lm_head.weight.copy_(head)
    engine.update_weights()
    assert not engine.is_asleep
