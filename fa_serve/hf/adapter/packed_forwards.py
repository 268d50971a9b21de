"""Finds the packed sequences of a forward in its arguments, for each model that is made with fa_serve.

    watch_packs(model, counts_positions=False)               # once for each model and each part of it

A hook before the forward looks for packed sequences in the arguments by which transformers knows them: `cu_seq_lens_q`,
`seq_idx`, or positions that restart. It notes them in `packs.py`, where masks, attention and a `PatchedMixer` find them,
whatever the model hands down. A part of a model whose arguments tell no packed sequences has those of the model around it.

Packed sequences that a model cannot follow are refused before anything is computed: because its positions cannot start again,
or because a module would carry the state of one sequence into the next.

Left out: padding, which mixers set to zero themselves, and the engine's steps, whose batches know their sequences.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices

from fa_serve.hf.adapter.packs import Forward, Packs, hides_values, refuse_untold_positions, running
from fa_serve.hf.adapter.releases import CHECKPOINTING
from fa_serve.hf.adapter.state_modules import find_state_modules, patched_mixer
from fa_serve.spec import UnsupportedModelError

_WORDS = "_fa_serve_words"
_COUNTS = "_fa_serve_counts_positions"
_MIXERS = "_fa_serve_mixers"
_HOOKS = "_fa_serve_hooks"


def watch_packs(model: PreTrainedModel, counts_positions: bool) -> None:
    """Look for packed sequences before each forward of this model, whose modules need not exist yet.

    counts_positions: whether the model numbers positions as fairseq does, so that the first one is not 0
    """
    if _WORDS not in model.__dict__:
        model.__dict__[_COUNTS] = counts_positions
        model.__dict__[_WORDS] = tuple(inspect.signature(type(model).forward).parameters)[1:]
        model.__dict__[_HOOKS] = (
            model.register_forward_pre_hook(_enter, with_kwargs=True),
            model.register_forward_hook(_leave, always_call=True),
        )


def watched_modules(model: nn.Module) -> set[nn.Module]:
    """The modules whose forwards `watch_packs` looks into."""
    return {module for module in model.modules() if _HOOKS in module.__dict__}


def unwatch_packs(modules: Iterable[nn.Module]) -> None:
    """Undo `watch_packs` for these modules."""
    for module in modules:
        for hook in module.__dict__.pop(_HOOKS):
            hook.remove()
        del module.__dict__[_WORDS]
        del module.__dict__[_COUNTS]


def _enter(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    words = model.__dict__[_WORDS]
    given = {**dict(zip(words, args, strict=False)), **kwargs}
    tokens = given.get("input_ids")
    if tokens is None:
        tokens = given.get("inputs_embeds")
    outer = running.forward
    shape = None
    packs = None
    if isinstance(tokens, Tensor) and given.get("fa_serve_batch") is None:  # other inputs and steps of the engine have none
        shape = tuple(tokens.shape[:2])
        inherited = None if outer is None or outer.shape != shape else outer.packs
        packs = inherited or _find(model, given, shape)
    if packs is None and outer is None:
        return None  # most forwards: they change no state, because a compiled step would be guarded by it
    begun = Forward(model, outer, shape, packs)
    # The recurrences of packed sequences are not compiled. Where the graph breaks in a layer, code that is compiled after that
    # does not see what a traced hook has noted, so the graph breaks here.
    if packs is not None and packs.of_states is not None and torch.compiler.is_compiling() and _mixers(model):
        found: tuple[tuple[Any, ...], dict[str, Any]] | None
        found = _begin_untraced(begun, packs is inherited, args, kwargs, given)
        return found
    return _begin(begun, packs is not None and packs is inherited, args, kwargs, given)


def _begin(
    begun: Forward, is_inherited: bool, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Note a forward, and add positions to its arguments if it has packed sequences and no positions.

    is_inherited: whether its packed sequences are those of the model that it is a part of; given: all arguments by name
    """
    running.forward = begun
    model: Any = begun.model
    packs = begun.packs
    if packs is None:
        return None
    _tell_states(model, packs)
    if is_inherited or "read_index" in kwargs:  # transformers' continuous batching
        return None
    _check_positions(model, model.__dict__[_WORDS])
    makes_positions = given.get("position_ids") is None and _makes_positions(model, model.__dict__[_WORDS])
    if begun.shape is None or packs.cu_seqlens is None or not makes_positions:
        return None
    tokens = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
    positions = packs.positions(begun.shape[1]).to(tokens.device)
    return args, {**kwargs, "position_ids": positions + (first_position(model) if model.__dict__[_COUNTS] else 0)}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _begin_untraced(*args: Any) -> Any:
    return _begin(*args)


def _leave(model: nn.Module, *unused: Any) -> None:
    forward = running.forward
    if forward is not None and forward.model is model:
        running.forward = forward.outer


def _find(model: Any, given: dict[str, Any], shape: tuple[int, ...]) -> Packs | None:
    """The packed sequences in the arguments of a forward, or None."""
    cu_seqlens = given.get("cu_seq_lens_q")
    if cu_seqlens is None and given.get("seq_idx") is not None and not hides_values(given["seq_idx"]):
        cu_seqlens = _borders(model, given["seq_idx"])
    if cu_seqlens is not None:
        if shape[0] > 1:
            raise _not_end_to_end(model, shape[0])
        cu_seqlens = cu_seqlens.to(torch.int32)
        return Packs(cu_seqlens, of_states=cu_seqlens)
    position_ids = given.get("position_ids")
    # as in transformers, which treats the tokens of a row as one sequence if there is a mask
    if position_ids is None or shape[1] == 1 or given.get("attention_mask") is not None or hides_values(position_ids):
        return None
    positions = _text_positions(position_ids)
    of_states = None
    use_cache = given.get("use_cache")
    caches = getattr(model.config, "use_cache", False) if use_cache is None else use_cache
    if len(positions) == 1 and not (caches or position_ids.is_meta) and _mixers(model):
        numbers = find_packed_sequence_indices(positions[0])
        of_states = None if numbers is None else _borders(model, numbers)
    restarts = not position_ids.is_meta and _come_back(positions)
    return Packs(restarts=restarts, of_states=of_states) if restarts or of_states is not None else None


def _text_positions(position_ids: Tensor) -> list[Tensor]:
    """The positions of tokens in the text, one tensor of (batch, seqlen), or one for each axis of models with several axes."""
    if position_ids.dim() < 3:
        return [position_ids.view(-1, position_ids.shape[-1])]
    return [position_ids[0]] if position_ids.shape[0] == 4 else list(position_ids)


def _come_back(positions: list[Tensor]) -> bool:
    """Whether some later token has the positions of the first token. It waits for the device.

    Positions that only jump or repeat do not mean packed sequences: the positions of an image do both.
    """
    same = torch.stack([each[:, 1:] == each[:, :1] for each in positions])
    return bool(same.all(0).any())


def _borders(model: Any, numbers: Tensor) -> Tensor:
    """(1, seqlen), the number of each token's sequence -> (n + 1,) int32: where each sequence starts, and the end."""
    if len(numbers) > 1:
        raise _not_end_to_end(model, len(numbers))
    begins = torch.diff(numbers[0], prepend=numbers[0, :1] - 1) != 0
    end = torch.tensor([numbers.shape[1]], device=numbers.device)
    return torch.cat([begins.nonzero()[:, 0], end]).to(torch.int32)


def _not_end_to_end(model: Any, batch: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"packed sequences need a batch of 1 that holds them end to end, got a batch of {batch} from {type(model).__name__}"
    )


def _check_positions(model: Any, words: tuple[str, ...]) -> None:
    """Raise UnsupportedModelError for a model whose positions do not start again with each packed sequence."""
    text = model.config.get_text_config()
    reason = ""
    if model.config.is_encoder_decoder:
        reason = "its decoder and its encoder have sequences of different lengths"
    elif getattr(text, "log_scaling_n_floor", None) or (
        getattr(text, "attn_temperature_tuning", False) and not all(getattr(text, "no_rope_layers", [1]))
    ):
        reason = "it scales queries by their place in the row"
    elif "linear_attention" in (getattr(text, "layer_types", None) or ()) and not _mixers(model):
        reason = "its linear attention would carry the state of one sequence into the next"
    elif "position_ids" not in words and len(_mixers(model)) == 0:
        reason = "its forward takes no position_ids"
    if reason:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot follow packed sequences, because {reason}: pass one sequence in each row, with "
            "padding and an attention_mask"
        )


def _makes_positions(model: nn.Module, words: tuple[str, ...]) -> bool:
    """Whether a model that is given no position_ids counts tokens from the start of the row. Some models also place images."""
    return "position_ids" in words and not any(hasattr(part, "get_rope_index") for part in model.modules())


def first_position(model: nn.Module) -> int:
    """The first position in a model that counts as fairseq does: the row after the padding row in its table of positions."""
    tables = [getattr(each, "padding_idx", None) for each in model.modules() if not isinstance(each, nn.Embedding)]
    return next((index + 1 for index in tables if isinstance(index, int)), 0)


def _tell_states(model: Any, packs: Packs) -> None:
    """Make sure that modules with states know the packed sequences, also when gradient checkpointing computes a layer again.

    Raises UnsupportedModelError for a model whose modules with states cannot be told.
    """
    if packs.of_states is None:
        if packs.restarts and _mixers(model):
            refuse_untold_positions(model)
        return
    for module in _mixers(model):
        if patched_mixer(module) is None:
            raise UnsupportedModelError(
                f"packed sequences in {type(model).__name__} need fa_serve.patch(model) after its weights are loaded, because "
                f"{type(module).__name__} would carry the state of one sequence into the next"
            )
    if model.training and _mixers(model):
        for module in model.modules():
            checkpoint = vars(module).get(CHECKPOINTING)
            if checkpoint is not None and not isinstance(checkpoint, _Remembering):
                setattr(module, CHECKPOINTING, _Remembering(checkpoint))


class _Remembering:
    """Gradient checkpointing whose layers find their packed sequences again when the backward pass recomputes them."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        forward = running.forward

        def compute(*given: Any, **words: Any) -> Any:
            before = running.forward
            running.forward = forward
            try:
                return function(*given, **words)
            finally:
                running.forward = before

        return self.checkpoint(compute, *args, **kwargs)


def _mixers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that keep states. They are found once per model."""
    if _MIXERS not in model.__dict__:
        model.__dict__[_MIXERS] = find_state_modules(model)
    found: list[nn.Module] = model.__dict__[_MIXERS]
    return found
