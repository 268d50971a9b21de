"""The weights of a runner's model while they change or leave the device.

    weights = ResidentWeights(runner, owned=True)
    weights.copy([("model.embed_tokens.weight", tensor), ...])        # or the caller has changed them in place
    weights.settle()                         # what was made from the weights before is made again
    weights.leave(level=1)                   # to the host's memory
    weights.come_back()

A parameter that is changed in place is seen at once: merged weights of fused layers share its memory. A parameter that has got
other memory is not, nor is it by CUDA graphs, and some fused forms hold copies, such as a router that multiplies in float32. So
`settle` fuses and captures again then. Left out: the keys and values that were
computed with other weights (scheduler.py), and where new weights come from.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fa_serve.engine.runner.model_runner import ModelRunner
from fa_serve.hf import Addresses, forwards_with_copies
from fa_serve.hf.surgery.fuse.fusion import unfuse_model
from fa_serve.hf.surgery.quantised.experts import QuantizedExperts
from fa_serve.hf.surgery.quantised.linear import QuantizedLinear
from fa_serve.spec import ParameterError


class ResidentWeights:
    """Owner of the places of a runner's weights.

    owned: whether nobody else uses them. Those of a model that was given to the engine stay where they are

    `missing` are the names of the parameters that have no values, because they have left for good.
    """

    def __init__(self, runner: ModelRunner, *, owned: bool) -> None:
        self._runner = runner
        self._owned = owned
        self._addresses = Addresses.of(runner.model)
        self._left: list[tuple[str, nn.Parameter, torch.Size]] = []
        self.missing: set[str] = set()

    @torch.no_grad()
    def copy(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy numbers into parameters and buffers, by the names that the model has for them; other ones keep their values.

        weights: (name, tensor), from any device and of any float dtype. A DTensor is gathered, one at a time

        Raises ParameterError for a name or a shape that the model does not have. Weights before it have been copied then.
        """
        model = self._runner.model
        known = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        for name, tensor in weights:
            if name not in known:
                if self._is_quantised():
                    raise ParameterError("weights", "be of a model of floats: this one keeps quantised weights", name)
                raise ParameterError("weights", f"have the names of parameters of {type(model).__name__}", name)
            whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if whole.shape != known[name].shape:
                raise ParameterError("weights", f"have the shape {tuple(known[name].shape)} for {name}", tuple(whole.shape))
            known[name].copy_(whole)
            self.missing -= {other for other in self.missing if other == name or known[other] is known[name]}

    def settle(self) -> bool:
        """Make again what was made from the weights before. Returns whether layers were fused and graphs captured again."""
        if self.missing:
            return False  # zeros prove nothing about a fused layer
        runner = self._runner
        moved = Addresses.of(runner.model) != self._addresses or bool(forwards_with_copies(runner.model))
        if moved:
            runner.refit()
            self._addresses = Addresses.of(runner.model)
        runner.rescale()
        return moved

    def leave(self, level: int) -> None:
        """Free the memory of the weights on the device. Graphs must be gone.

        level: 1 keeps them in the host's memory, 2 keeps nothing

        Raises ParameterError for quantised weights, which are no parameters.
        """
        if not self._owned:
            return
        if self._is_quantised():
            raise ParameterError("level", "be 0 for a model of quantised weights, which stay on the device", level)
        unfuse_model(self._runner.model)  # merged weights go with the fused forwards
        for name, parameter in self._runner.model.named_parameters():
            self._left.append((name, parameter, parameter.shape))
            parameter.data = parameter.data.cpu() if level == 1 else parameter.data.new_empty(0)
            if level == 2:
                self.missing.add(name)

    def come_back(self) -> None:
        """Give the weights memory on the device again. After level 2 they have no values: see `missing`."""
        device = self._runner.device
        for name, parameter, shape in self._left:
            if name in self.missing:
                parameter.data = torch.zeros(shape, dtype=parameter.dtype, device=device)
            else:
                parameter.data = parameter.data.to(device)
        self._left = []
        self.settle()

    def _is_quantised(self) -> bool:
        return any(isinstance(module, QuantizedLinear | QuantizedExperts) for module in self._runner.model.modules())
