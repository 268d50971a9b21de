"""Changes and frees what a runner keeps on the device: weights, KV cache, CUDA graphs.

    residence = Residence(runner, config, owned=True, num_ranks=1)
    residence.copy([("model.embed_tokens.weight", tensor), ...])      # or the caller has changed them in place
    residence.settle()                       # makes again what was made from the old weights
    residence.sleep(level=1)                 # moves the weights to host memory
    residence.wake_up()

A parameter that is changed in place takes effect at once, because merged weights of fused layers share its memory. If a
parameter has moved to other memory, fused layers and CUDA graphs still read the old memory. Some fused forms hold copies, such
as a router that multiplies in float32. CUDA graphs replay the adapters of peft that were active when they were captured. In
these cases `settle` fuses and captures again. Left out: sequences whose keys and
values were computed with the old weights (scheduler.py), and where new weights come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice

import torch
from torch import Tensor, nn

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.errors import EngineAsleepError
from fa_serve.engine.images.encoder import ImageEncoder
from fa_serve.engine.runner.model_runner import ModelRunner
from fa_serve.hf import Addresses, adapter_switches, forwards_with_copies
from fa_serve.hf.surgery.fuse.fusion import unfuse_model
from fa_serve.hf.surgery.quantised.experts import QuantizedExperts
from fa_serve.hf.surgery.quantised.linear import QuantizedLinear
from fa_serve.spec import ParameterError

_PAIRS = "be pairs of a name and a tensor, such as model.named_parameters() or weights.items()"
"""The rule that the weights of an update follow."""
WAKE_UP_TAGS = ("weights", "kv_cache")
"""What `Residence.sleep` frees, under vLLM's names."""


class Residence:
    """Decides where a runner's weights and cache are in memory.

    config: the engine has replaced every None that it decides
    owned:  whether nobody else uses the weights. The weights of a model that was given to the engine are not moved
    """

    def __init__(self, runner: ModelRunner, config: EngineConfig, *, owned: bool, num_ranks: int) -> None:
        self._runner = runner
        self._config = config
        self._owned = owned
        self._num_ranks = num_ranks
        # None: what was made from the weights has been freed, so it must be made again even if no weight has moved
        self._addresses: Addresses | None = Addresses.of(runner.model)
        self._switches = adapter_switches(runner.model)
        self._left: list[tuple[str, nn.Parameter, torch.Size]] = []
        self._missing: set[str] = set()  # parameters without values, after `sleep(2)` or a failed update
        self._asleep: set[str] = set()

    @property
    def is_asleep(self) -> bool:
        """Whether some memory has been freed, or weights have no values."""
        return bool(self._asleep or self._missing)

    def require_awake(self) -> None:
        """Raise EngineAsleepError, with the remedy, unless a step can be computed."""
        if self._asleep:
            raise EngineAsleepError("the engine is asleep and computes nothing: call wake_up() first")
        if self._missing:
            raise EngineAsleepError(
                f"the engine's weights have no values: {len(self._missing)} parameters are missing since "
                "sleep(level=2) or an update that failed. Call update_weights with them first"
            )

    def require_one_rank(self, name: str) -> None:
        """Raise ParameterError if there are several ranks, because each of them would have to do the same."""
        if self._num_ranks > 1:
            raise ParameterError("tensor_parallel", f"be 1 for {name}, which does not support several ranks", self._num_ranks)

    def begin(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The weights for `copy`, with the first one read ahead: a source that refuses its arguments raises now, before
        anything changes. Raises EngineAsleepError if the model's own weights have no memory."""
        if "weights" in self._asleep:
            raise EngineAsleepError('the engine\'s weights are asleep: call wake_up(["weights"]) before update_weights')
        if isinstance(weights, Mapping | Tensor | str) or not isinstance(weights, Iterable):
            raise ParameterError("weights", _PAIRS, type(weights).__name__)
        rest = iter(weights)
        return chain([*islice(rest, 1)], rest)

    @torch.no_grad()
    def copy(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights into the model's parameters and buffers of the same names. All others keep their values.

        weights: (name, tensor), from any device and of any float dtype. A DTensor is gathered, one at a time

        Raises ParameterError for a name or a shape that the model does not have, and what the source raises. Weights that were
        copied before an error count as missing until they are given again, so no step computes with a part of new weights.
        """
        model = self._runner.model
        known: dict[str, Tensor] = {}
        copied: set[str] = set()
        try:
            for pair in weights:
                name, tensor = _named(pair)
                # looked up at the first weight: a trainer that has changed its parameters in place gives none
                known = known or known_weights(model)
                whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                check_weight(model, known, name, whole.shape)
                if known[name].is_floating_point() and not whole.is_floating_point():
                    raise ParameterError("weights", f"have floats for {name}", whole.dtype)
                copied.add(name)  # before the copy, which an interrupt may end
                known[name].copy_(whole)
        except BaseException:
            self._missing |= copied
            raise
        if copied:
            given = {id(known[name]) for name in copied}  # tied weights have several names
            self._missing = {name for name in self._missing if id(known[name]) not in given}
        elif not self._owned:
            self._missing.clear()  # the owner of the weights vouches for their values

    def settle(self) -> bool:
        """Make again what was made from the old weights. Returns whether layers were fused and graphs captured again."""
        if self._missing:
            return False  # a fused layer is proven with the weights, and zeros prove nothing
        runner = self._runner
        switches = adapter_switches(runner.model)
        moved = Addresses.of(runner.model) != self._addresses or switches != self._switches
        moved = moved or bool(forwards_with_copies(runner.model))
        if moved:
            self._switches = switches
            runner.refit()
            if isinstance(runner.images, ImageEncoder):
                runner.images.reader.speed_up()
            self._addresses = Addresses.of(runner.model)
        runner.rescale()
        if runner.adapters is not None:
            runner.adapters.rescale()
        if isinstance(runner.images, ImageEncoder):
            runner.images.forget()
        return moved

    def check_level(self, level: int) -> None:
        """Raise ParameterError for a level that does not exist, or that is not available for this model."""
        if level not in (0, 1, 2):
            raise ParameterError("level", "be 0, 1 or 2", level)
        if level and self._owned and is_quantised(self._runner.model):
            raise ParameterError("level", "be 0 for a model with quantised weights, which stay on the device", level)

    def sleep(self, level: int) -> None:
        """Free the KV cache, the graphs and, by level, the weights, as `Engine.sleep` does. A second call does nothing."""
        self.check_level(level)
        if self._asleep:
            return
        self._runner.close()
        self._asleep.add("kv_cache")
        if level and self._owned:
            self._asleep.add("weights")
            self._leave(level)
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Allocate what `sleep` has freed, as `Engine.wake_up` says."""
        wanted = set(WAKE_UP_TAGS if tags is None else tags)
        if wanted - {*WAKE_UP_TAGS}:
            raise ParameterError("tags", f"hold only {', '.join(WAKE_UP_TAGS)}", sorted(wanted))
        woken = wanted & self._asleep
        if "weights" in woken:
            self._come_back()
        if "kv_cache" in woken:
            num_pages = self._config.num_pages
            max_model_len = self._config.max_model_len
            assert num_pages is not None
            assert max_model_len is not None
            self._runner.allocate(num_pages, max_model_len, self._config.num_states or 0)
        self._asleep -= wanted
        if woken and not self._asleep and not self._runner.eager:  # graphs refer to the weights and to the cache
            self._runner.make_graphs()

    def _leave(self, level: int) -> None:
        """Move the weights to host memory, or free them. The graphs have been freed already."""
        unfuse_model(self._runner.model)  # merged weights are freed with the fused forwards
        self._addresses = None
        for name, parameter in self._runner.model.named_parameters():
            self._left.append((name, parameter, parameter.shape))
            parameter.data = parameter.data.cpu() if level == 1 else parameter.data.new_empty(0)
            if level == 2:
                self._missing.add(name)

    def _come_back(self) -> None:
        """Give the weights memory on the device again. After level 2 they have no values."""
        device = self._runner.device
        for name, parameter, shape in self._left:
            if name in self._missing:
                parameter.data = torch.zeros(shape, dtype=parameter.dtype, device=device)
            else:
                parameter.data = parameter.data.to(device)
        self._left = []
        self.settle()


def _named(pair: object) -> tuple[str, Tensor]:
    """A name and its weight. Raises ParameterError for anything else."""
    if isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor):
        return pair[0], pair[1]
    raise ParameterError("weights", _PAIRS, pair)


def known_weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that `Residence.copy` may change: parameters and buffers by name, tied ones under each of their names.

    Raises ParameterError for a model that keeps quantised weights, before anything is changed.
    """
    if is_quantised(model):
        rule = "belong to a model with floating-point weights: this one has quantised weights"
        raise ParameterError("weights", rule, type(model).__name__)
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def check_weight(model: nn.Module, known: Mapping[str, Tensor], name: str, shape: Sequence[int]) -> None:
    """Raise ParameterError for a name or a shape that the model does not have. known: its `known_weights`"""
    if name not in known:
        raise ParameterError("weights", f"have the names of parameters of {type(model).__name__}", name)
    if tuple(shape) != known[name].shape:
        raise ParameterError("weights", f"have the shape {tuple(known[name].shape)} for {name}", tuple(shape))


def is_quantised(model: nn.Module) -> bool:
    """Whether layers or experts have quantised weights."""
    return any(isinstance(module, QuantizedLinear | QuantizedExperts) for module in model.modules())
