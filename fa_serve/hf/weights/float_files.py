"""Checks that the tensors which a model takes as plain floats are floats in the files of its checkpoint.

    check_float_files(Path("/models/qwen"), model)       # raises ParameterError that names a tensor

transformers converts a tensor to the dtype of its parameter. Quantised numbers that no quantization_config describes (a config
that was lost, a layer that a list leaves out by mistake) would become floats without their scales: wrong answers without an
error. Left out: files other than safetensors, and formats that transformers loads into its own modules.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from fa_serve.hf.weights.file_names import names_in_model
from fa_serve.hf.weights.formats import Rounded
from fa_serve.hf.weights.headers import headers, weight_files
from fa_serve.spec import ParameterError

PLAIN = ("F64", "F32", "F16", "BF16")
"""The dtypes of floats without a scale, by their names in safetensors."""
RULE = "have floats of 16 or more bits, because its checkpoint has no quantization_config that names a format for it"


def check_float_files(folder: Path, model: nn.Module) -> None:
    """Raise ParameterError for a tensor in the files of a folder that is no float, although its parameter is one.

    model: with the modules for quantised weights, whose tensors are not checked
    """
    own = set()
    for layer, module in model.named_modules():
        if not isinstance(getattr(module, "scheme", None), Rounded):
            own |= {f"{layer}.{name}" for name in getattr(module, "expected", ())}
    plain = {name for name, tensor in model.named_parameters() if tensor.is_floating_point() and name not in own}
    found = dict(headers(weight_files(folder)))
    if all(header.dtype in PLAIN for header in found.values()):
        return
    for key, name in names_in_model(model, found).items():
        if name in plain and found[key].dtype not in PLAIN:
            raise ParameterError(key, RULE, found[key].dtype)
