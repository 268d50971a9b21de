"""Reads a model's hidden states between its layers while a forward runs.

    reader = HiddenStateReader(model, depths=(2, 16, 29))
    with reader.reading() as states:
        logits = paged_forward(model, ...)
    states                                   # after 2, 16 and 29 layers: (1, total, hidden) each

Depth 0 is the embedding, and depth n is the output of layer n - 1, before the last norm. Fused layers overwrite their input, so
the states are copies. The hooks exist only during the forward; a replay of a CUDA graph repeats the copies without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers.modeling_utils import PreTrainedModel

from fa_serve.hf.layer_kinds import decoder_layers
from fa_serve.spec import UnsupportedModelError


class HiddenStateReader:
    """Reads hidden states at some depths.

    depths: number of layers before each state that is read

    Raises UnsupportedModelError if the model's layers are not in one list, or are fewer than a depth.
    """

    def __init__(self, model: PreTrainedModel, depths: Sequence[int]) -> None:
        total = model.config.get_text_config().num_hidden_layers
        self._layers = decoder_layers(model, total)
        self._depths = depths
        if not self._layers:
            raise UnsupportedModelError(f"the layers of {type(model).__name__} are not in one list")
        if min(depths) < 0 or max(depths) > total:
            raise UnsupportedModelError(
                f"it reads hidden states after {', '.join(map(str, depths))} layers, but {type(model).__name__} has {total}"
            )

    @contextmanager
    def reading(self) -> Iterator[list[Tensor]]:
        """Yields a list. At the end of the context it gets the states of the forward that ran inside, in the order of
        `depths`."""
        states: list[Tensor] = []
        found: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for depth in {*self._depths}:
                stack.callback(self._hook(depth, found).remove)
            yield states
        states += [found[depth] for depth in self._depths if depth in found]

    def _hook(self, depth: int, found: dict[int, Tensor]) -> RemovableHandle:
        def before(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            found[depth] = (given[0] if given else named["hidden_states"]).clone()

        def after(_: Any, given: tuple[Any, ...], result: Any) -> None:
            found[depth] = (result[0] if isinstance(result, tuple) else result).clone()

        if depth < len(self._layers):
            return self._layers[depth].register_forward_pre_hook(before, with_kwargs=True)
        return self._layers[-1].register_forward_hook(after)
