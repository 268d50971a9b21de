"""An engine over a model that is being trained, in the trainer's process.

    engine = RolloutEngine(model, tokenizer, deterministic=True)
    groups = engine.generate(prompts, n=8, params=SamplingParams(max_tokens=256))
    groups[0].rollouts[0].token_ids, groups[0].rollouts[0].logprobs
    ...                                      # a training step: optimizer.step() changes the parameters in place
    engine.update()                          # drops keys and values that were computed with the previous weights

The engine uses the trainer's parameters in place. Fused layers merge projections: the parameters become views of the merged
matrices. They remain the objects that the optimizer has, so the engine sees an in-place step without a copy. Between calls the
model belongs to the trainer: its training mode, its attention, and the forwards of its modules are restored after each call.

Groups are returned as they finish, and the caller may stop in between: the other groups keep their tokens and pages, and go on
with the next call (partial rollouts).

    engine.submit(prompts, n=8, params=params)
    for group in engine.finished():
        if len(batch) == 64: break
    engine.partial()                         # unfinished groups, with their tokens so far
    engine.update()                          # they go on with the new weights, after keys and values are computed again

Left out: models whose parameters are divided (FSDP, DTensor, DeepSpeed). These are refused; a separate, whole copy of the model
can take gathered parameters through `update(weights)`. The training forward with the same bits is `fa_serve.exact`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.engine import Engine
from fa_serve.engine.request.outputs import RequestOutput
from fa_serve.engine.request.params import SamplingParams, params_of_each
from fa_serve.engine.rollout.rollouts import Rollout, RolloutGroup
from fa_serve.engine.stats import EngineStats
from fa_serve.hf import ModelState, adapter_switches, check_live, parameters_in, trained_model, unwrap_calls, vocab_size
from fa_serve.spec import ParameterError, UnsupportedModelError

_FIXED = {
    "tensor_parallel": (1, "be 1 for a live model, whose parameters are not divided between ranks"),
    "quantization": (None, "be None for a live model, whose parameters are trained without quantisation"),
}
"""Settings that cannot be changed for a live model: the value that each must have, and the rule that an error states."""


_Form: TypeAlias = tuple[torch.dtype, torch.device]
_DEFAULTS = EngineConfig(logprobs_mode="processed_logprobs", generation_config="none", max_waiting=1 << 20)


class RolloutEngine:
    """Generates with a model of this process while it is trained.

    model:     a causal model of transformers, or DistributedDataParallel, torch.compile or peft around one
    tokenizer: of transformers; without one, prompts are token ids and rollouts have no text
    config:    settings of the engine; `settings` replace some of them by name. Without a config, log-probabilities are
               "processed_logprobs", any number of answers may wait, and sampling parameters that are not given do not come
               from generation_config.json

    Raises UnsupportedModelError for parameters that are divided, quantised or on several devices, and for a model that the
    engine does not run. Raises ParameterError for settings that a live model does not have.
    """

    def __init__(self, model: nn.Module, tokenizer: Any = None, config: EngineConfig | None = None, **settings: Any) -> None:
        check_live(model)
        self.model = trained_model(model)
        config = replace(config or _DEFAULTS, **settings)
        for name, (value, rule) in _FIXED.items():
            if getattr(config, name) != value:
                raise ParameterError(name, rule, getattr(config, name))
        config = replace(config, model=config.model or getattr(self.model.config, "_name_or_path", "") or None)
        own = ModelState.of(self.model)
        unwrap_calls(self.model)
        try:
            with _plain_numbers(self.model.device):
                self._engine = Engine(config, model=self.model, tokenizer=tokenizer)
            self._lent = ModelState.of(self.model)
        finally:
            own.restore()
        self._forms = self._forms_now()
        self._form_of = {name: _form(x) for name, x in self.model.named_parameters()}
        self._seen = self._weights_now()
        self._has_stepped = False
        hook = register_optimizer_step_post_hook(partial(_note_step, weakref.ref(self)))
        weakref.finalize(self, hook.remove)
        self._groups: dict[str, RolloutGroup] = {}
        self._ready: list[RolloutGroup] = []
        self._serial = count()

    @property
    def config(self) -> EngineConfig:
        """The settings. Nothing in them is "auto" any more."""
        return self._engine.config

    @property
    def weight_version(self) -> int:
        """How often `update` was called, including the calls by `submit` and `finished`."""
        return self._engine.weight_version

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        n: int | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RolloutGroup]:
        """n answers to each prompt, by default one, in the order of the prompts. The arguments are those of `submit`.

        Raises RolloutError for an answer that ends with an error, and EngineAsleepError after `sleep`. After any exception,
        also a KeyboardInterrupt, all answers of this call are ended and dropped.
        """
        indices = self.submit(prompts, n, params)
        try:
            found = {group.index: group for group in self.finished(indices)}
        except BaseException:  # the caller does not know the numbers of these groups, so a later call must not compute them
            self._drop(indices)
            raise
        return [found[index] for index in indices]

    def stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        n: int | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RolloutGroup]:
        """As `generate`, but yields each group as soon as its answers have ended. Groups that the caller does not take go on
        with a later call, also after a RolloutError.
        """
        indices = self.submit(prompts, n, params)
        yield from self.finished(indices)

    def submit(
        self,
        prompts: Sequence[str | Sequence[int]],
        n: int | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[int]:
        """Queue n answers to each prompt. Returns the numbers of the groups. Nothing is computed yet.

        If an optimizer has stepped, parameters have been changed in place, or adapters of peft have been switched, merged or
        disabled, and `update` was not called, it is called first, because the keys and values of earlier prompts were computed
        with other weights. Torch does not report changes of a
        parameter's `data`, so after such a change the caller must call `update`.

        params: for all prompts, or one for each; None: the engine's defaults. `logprobs` is the number of the most likely
                tokens that are reported; log-probabilities of sampled tokens always are. `seed` is the first answer's seed
        n:      None: the `n` of the params, which is 1 by default

        Raises ParameterError as `Engine.add_request` does, for best_of, and for more answers than the queue holds; and
        UnsupportedModelError as `update` does. In these cases nothing is queued.
        """
        self._notice_changes()
        each = params_of_each(prompts, params, self._engine.default_params)
        own = [replace(one, n=one.n if n is None else n, logprobs=one.logprobs or 0) for one in each]
        for one in own:
            if one.best_of is not None:
                raise ParameterError("best_of", "be None, because a trainer needs all answers", one.best_of)
        indices: list[int] = []
        try:
            for prompt, one in zip(prompts, own, strict=True):
                index = next(self._serial)
                tokens = self._engine.add_request(str(index), prompt, one)
                rollouts = [Rollout(top_logprobs=[] if one.logprobs else None) for _ in range(one.n)]
                self._groups[str(index)] = RolloutGroup(index, tokens, rollouts)
                indices.append(index)
        except BaseException:  # also an interrupt, because many texts take long to tokenise
            self._drop(indices)
            raise
        return indices

    def finished(self, indices: Iterable[int] | None = None) -> Iterator[RolloutGroup]:
        """Yield each group once, as soon as all its answers have ended. indices: of the groups; None: all that were submitted.

        Leaving the iteration stops the engine after its current step. Unfinished answers keep their tokens and pages. Before
        they go on, `update` is called if the caller has forgotten it, as in `submit`.

        Raises RolloutError for a group with an answer that has ended with an error; the next call yields the other groups.
        Raises UnsupportedModelError as `update` does.
        """
        wanted = None if indices is None else set(indices)

        def is_wanted(group: RolloutGroup) -> bool:
            return wanted is None or group.index in wanted

        while True:
            for group in [group for group in self._ready if is_wanted(group)]:
                self._ready.remove(group)
                group.require_whole()
                yield group
            if not any(map(is_wanted, self._groups.values())):
                return
            self._notice_changes()
            with self._lending():  # once for many steps, because the model has many modules
                while not any(map(is_wanted, self._ready)):
                    self._absorb(self._engine.step())

    def partial(self) -> list[RolloutGroup]:
        """The groups that are not finished, with the tokens that they have. They change with later steps."""
        return [*self._groups.values()]

    def abort(self, indices: Iterable[int] | None = None) -> None:
        """End the unfinished answers of these groups, or of all, with the tokens that they have. Their groups are finished."""
        for name in [*self._groups] if indices is None else map(str, indices):
            self._absorb(self._engine.abort(name))

    def update(self, weights: Iterable[tuple[str, Tensor]] = (), *, keep_pages: bool = False) -> int:
        """The weights have changed. Returns their new version. Arguments and errors are those of `Engine.update_weights`.

        Call this after each change of the parameters. Changes in place only cost the prefix cache. If a parameter has moved to
        other memory (`load_state_dict(assign=True)`), it is merged again and graphs are captured again. Unfinished answers
        compute their tokens' keys and values again when they go on, unless `keep_pages` is given.

        Weights that were copied before an error count as missing: steps raise EngineAsleepError until they are given again, or
        until a call without weights says that the parameters are right.

        Raises UnsupportedModelError if a parameter has another dtype or device than when this engine was made, or the
        vocabulary another size: the KV cache, the kernels and the graphs are made for these.
        """
        check_live(self.model)
        self._require_same_forms()
        self._absorb(self._engine.drain())
        with self._lending():
            version = self._engine.update_weights(weights, keep_pages=keep_pages)
        self._seen = self._weights_now()
        self._has_stepped = False
        return version

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the KV cache and of CUDA graphs, for a training step. The weights are the trainer's and stay.

        level: 1 or 2, which are the same here; accepted for users of vLLM's API
        """
        self._absorb(self._engine.drain())
        with self._lending():
            self._engine.sleep(level)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Allocate what `sleep` has freed. tags: as in `Engine.wake_up`"""
        with self._lending():
            self._engine.wake_up(tags)

    wake = wake_up

    def preparations(self) -> tuple[int, int]:
        """Kernels that were compiled or loaded, and CUDA graphs that were captured, up to now."""
        return self._engine.preparations()

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        return self._engine.stats()

    def close(self) -> None:
        """Free the KV cache and the graphs. Parameters stay views of merged matrices, which takes no memory."""
        self._engine.close()

    def check_integrity(self) -> None:
        """Assert that every page is accounted for."""
        self._engine.check_integrity()

    def _weights_now(self) -> tuple[list[int], list[object]]:
        """How often torch has noticed an in-place change of each parameter, which adapters of peft are active, and how. Torch
        does not notice steps of fused optimizers."""
        versions = [0 if x.is_inference() else x._version for x in self.model.parameters()]
        return versions, adapter_switches(self.model)

    def _forms_now(self) -> list[_Form]:
        return [_form(x) for x in parameters_in(self.model)]

    def _require_same_forms(self) -> None:
        """Raise UnsupportedModelError unless dtypes, devices and the vocabulary are those that the engine was made for."""
        entries = self._engine.vocab_size
        size = vocab_size(self.model)
        if size != entries:
            raise UnsupportedModelError(
                f"the vocabulary of {type(self.model).__name__} must keep the size that it had when this RolloutEngine was "
                f"made, but it was {entries} and is now {size}: make a new RolloutEngine, or resize the embeddings back"
            )
        forms = self._forms_now()
        if forms == self._forms:
            return
        for name, parameter in self.model.named_parameters():
            before = self._form_of.get(name)
            now = _form(parameter)
            if before is not None and before != now:
                raise UnsupportedModelError(
                    f"the parameters of {type(self.model).__name__} must keep the dtype and the device that they had when this "
                    f"RolloutEngine was made, but {name} was {before[0]} on {before[1]} and is now {now[0]} on "
                    f"{now[1]}: make a new RolloutEngine, or move the model back"
                )
        # parameters were added or removed, such as those of an adapter
        self._forms = forms
        self._form_of = {name: _form(x) for name, x in self.model.named_parameters()}

    def _notice_changes(self) -> None:
        """Call `update` if torch has noticed changes of the weights since its last call, or if adapters were switched.

        An engine that sleeps is not updated, because it computes nothing before it is called again. Neither is one whose last
        update has failed: only its caller can say that the weights are right.
        """
        self._require_same_forms()
        if self._engine.is_asleep:
            return
        if self._has_stepped or self._weights_now() != self._seen:
            self.update()

    def _absorb(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            group = self._groups[output.request_id]
            group.rollouts[output.index].absorb(output, self.weight_version)
            if group.finished:
                self._ready.append(self._groups.pop(output.request_id))

    def _drop(self, indices: list[int]) -> None:
        """End and forget groups that no caller has received."""
        self.abort(indices)
        self._ready = [group for group in self._ready if group.index not in indices]

    @contextmanager
    def _lending(self) -> Iterator[None]:
        """Inside, the model is the engine's; afterwards it is the trainer's again."""
        own = ModelState.of(self.model)
        self._lent.restore()
        try:
            with _plain_numbers(self.model.device):
                yield
            self._lent = ModelState.of(self.model)
        finally:
            own.restore()


def _form(parameter: Tensor) -> _Form:
    return parameter.dtype, parameter.device


def _note_step(owner: weakref.ref[RolloutEngine], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """An optimizer of this process has stepped: remember it if the optimizer has parameters of the engine's model."""
    engine = owner()
    if engine is not None and not engine._has_stepped:
        own = {id(x) for x in engine.model.parameters()}
        engine._has_stepped = any(id(x) in own for group in optimizer.param_groups for x in group["params"])


@contextmanager
def _plain_numbers(device: torch.device) -> Iterator[None]:
    """Inside this context, the autocast that a trainer may have enabled is off."""
    with torch.autocast(device.type, enabled=False):
        yield
