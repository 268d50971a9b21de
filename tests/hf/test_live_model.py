"""What an engine reads of a model that is being trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from tiny_models import make_model
from torch import Tensor, nn

from fa_serve.engine import RolloutEngine
from fa_serve.hf import (
    Addresses,
    ModelState,
    check_live,
    forwards_with_copies,
    trained_model,
    unwrap_calls,
)
from fa_serve.hf.live_model import modules_in
from fa_serve.hf.surgery.fuse.fusion import fuse_model
from fa_serve.hf.surgery.fuse.router import FusedRouter
from fa_serve.spec import UnsupportedModelError


def test_a_wrapper_is_opened() -> None:
    model = make_model()

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    assert trained_model(Wrapper(Wrapper(model))) is model
    assert trained_model(torch.compile(model, backend="eager")) is model


def test_a_state_is_restored_with_or_without_modes() -> None:
    model = make_model()
    own = ModelState.of(model)

    def disturb() -> None:
        model.train()
        model.set_attn_implementation("sdpa")
        model.lm_head.forward = lambda x: x

    disturb()
    own.restore()
    assert (model.config._attn_implementation, model.lm_head.training) == ("eager", False)
    assert "forward" not in vars(model.lm_head)
    disturb()
    own.restore(modes=False)
    assert (model.config._attn_implementation, model.lm_head.training) == ("eager", True)


def test_compiled_calls_are_taken_away_and_given_back() -> None:
    model = make_model()
    own = ModelState.of(model)
    model.lm_head.compile(backend="eager")
    compiled = ModelState.of(model)
    unwrap_calls(model)
    assert model.lm_head._compiled_call_impl is None
    compiled.restore()
    assert callable(model.lm_head._compiled_call_impl)
    own.restore()
    assert model.lm_head._compiled_call_impl is None


def test_a_module_may_keep_something_else_under_the_name_of_a_config() -> None:
    """The configs of Idefics's layers with cross-attention are numbers."""
    model = make_model()
    model.lm_head.config = 1.0
    ModelState.of(model).restore()
    assert model.lm_head.config == 1.0


def test_the_modules_of_a_model_come_once_and_in_order() -> None:
    model = make_model("qwen3-moe")
    model.again = model.model.layers[0].mlp
    model.missing = None
    model.register_module("absent", None)
    assert modules_in(model) == [*model.modules()]


def test_a_parameter_of_an_owner_is_named() -> None:
    model = make_model()
    model.model.norm.weight.ds_id = 3
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight is divided by DeepSpeed"):
        check_live(model)
    del model.model.norm.weight.ds_id
    check_live(model)


def test_addresses_tell_other_memory_and_other_objects_but_not_other_numbers() -> None:
    model = make_model()
    before = Addresses.of(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert Addresses.of(model) == before
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    moved = Addresses.of(model)
    assert moved != before
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data)
    assert Addresses.of(model) != moved


def test_a_forward_that_holds_a_copy_of_weights_is_found() -> None:
    model = make_model("qwen3-moe")
    model.set_attn_implementation("fa_serve")
    fuse_model(model)
    assert forwards_with_copies(model) == []
    router = next(m for m in model.modules() if isinstance(vars(m).get("forward"), FusedRouter))

    @dataclass(frozen=True)
    class Wide:
        original: Callable[[Tensor], Tensor]
        weights: tuple[Tensor, ...]

    router.forward = Wide(router.forward, (router.weight.double(),))
    assert forwards_with_copies(model) == [router]


def test_a_router_in_float32_of_a_narrow_model_follows_a_step() -> None:
    """Its fused form holds a copy, which `update` makes again."""
    model = make_model("qwen3-moe").to(torch.bfloat16)
    sizes = {"device": "cpu", "num_pages": 16, "page_size": 4, "max_num_seqs": 2}
    engine = RolloutEngine(model, **sizes)
    router = model.model.layers[0].mlp.gate
    [forward] = [forward for module, _, forward, _ in engine._lent.modules if module is router]
    assert isinstance(forward, FusedRouter)
    copied = FusedRouter(forward.original, forward.weight.float(), None, None, forward.router, forward.dtype, forward.order)
    engine._lent.modules[:] = [(m, t, copied if m is router else f, c) for m, t, f, c in engine._lent.modules]
    with torch.no_grad():
        router.weight.neg_()
    engine.update()
    [forward] = [forward for module, _, forward, _ in engine._lent.modules if module is router]
    assert torch.equal(forward.weight.float(), router.weight.float())


def test_the_autocast_of_accelerate_is_dropped_until_the_state_is_restored() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(make_model())
    wrapped = vars(model)["forward"]
    own = ModelState.of(model)
    unwrap_calls(model)
    assert "forward" not in vars(model)
    own.restore()
    assert vars(model)["forward"] is wrapped
    model._original_forward = model.lm_head.forward  # of somebody who had replaced it before
    unwrap_calls(model)
    assert model.forward == model.lm_head.forward
