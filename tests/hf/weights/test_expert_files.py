"""Checkpoints whose experts lack a tensor, differ, or are in a layout that is not loaded: refused by their headers; and
configs that choose more experts than there are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from quantised_copies import load
from quantised_experts import write_fp8_block
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from fa_serve.hf.weights.expert_files import check_experts_agree, require_enough_experts
from fa_serve.hf.weights.headers import headers
from fa_serve.spec import ParameterError

LAYER = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda tensors: tensors.pop(f"{LAYER}.3.up_proj.weight_scale_inv"),
            f"model must have the tensor {LAYER}.3.up_proj.weight_scale_inv in its files, got 'a missing tensor'",
            id="missing-scale",
        ),
        pytest.param(
            lambda tensors: tensors.pop(f"{LAYER}.0.down_proj.weight"),
            f"model must have the tensor {LAYER}.0.down_proj.weight in its files",
            id="missing-first",
        ),
        pytest.param(
            lambda tensors: tensors.update({f"{LAYER}.2.up_proj.weight": torch.zeros(48, 64)}),
            rf"{LAYER}.2.up_proj.weight must have the dtype F8_E4M3 and the shape \[48, 64\] of other .*, got 'F32 \[48, 64\]'",
            id="dtype",
        ),
        pytest.param(
            lambda tensors: tensors.update({f"{LAYER}.0.up_proj.weight_scale_inv": torch.zeros(1, 2)}),
            rf"{LAYER}.0.up_proj.weight_scale_inv must have the dtype F32 and the shape \[2, 2\] of other experts",
            id="shape",
        ),
        pytest.param(
            lambda tensors: tensors.update({f"{LAYER}.1.up_proj.weight_g_idx": torch.zeros(64, dtype=torch.int32)}),
            f"have no experts with quantised weights in this layout, but its files have {LAYER}.1.up_proj.weight_g_idx",
            id="order-of-columns",
        ),
    ],
)
def test_a_tensor_that_cannot_be_is_named(tmp_path: Path, change, message: str) -> None:
    write_fp8_block(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ParameterError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_a_tensor_of_an_expert_of_floats_is_named(tmp_path: Path, change: str) -> None:
    """transformers told only that it could not stack the tensors."""
    make_model("qwen3-moe").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    check_experts_agree(headers([file]))
    tensors = load_file(file)
    whole = tensors.pop(f"{LAYER}.2.up_proj.weight")
    message = f"model must have the tensor {LAYER}.2.up_proj.weight in its files"
    if change == "shape":
        tensors[f"{LAYER}.2.up_proj.weight"] = whole[:-1]
        message = rf"{LAYER}.2.up_proj.weight must have the dtype F32 and the shape \[24, 32\] of other experts"
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ParameterError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("count", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_a_config_chooses_an_expert_and_no_more_than_there_are(count: str) -> None:
    def config(**fields: object) -> SimpleNamespace:
        return SimpleNamespace(get_text_config=lambda: SimpleNamespace(**fields))

    for chosen in (1, 6, None):
        require_enough_experts(config(**{count: 6, "num_experts_per_tok": chosen}))
    for without in (0, None):
        for chosen in (0, 8):
            require_enough_experts(config(**{count: without, "num_experts_per_tok": chosen}))
    for chosen in (7, 0, -1):
        rule = f"num_experts_per_tok must be between 1 and 6, the number of experts in .*, got {chosen}"
        with pytest.raises(ParameterError, match=rule):
            require_enough_experts(config(**{count: 6, "num_experts_per_tok": chosen}))
    with pytest.raises(ParameterError, match="moe_topk must be between 1 and 6, "):  # of Aria
        require_enough_experts(config(**{count: 6, "moe_topk": 7}))
