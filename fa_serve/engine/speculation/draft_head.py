"""Runs an EAGLE-3 head as a draft model: the runner that `DraftModel` has for `speculative="eagle3=HEAD"`.

    head_runner = load_head_runner(config, model)
    drafter = DraftModel(head_runner, 8192)
    runner = ModelRunner(model, config, draft=head_runner)       # its forwards keep features for the head

A head takes two inputs at each position p: the *feature* of token p, which the model has computed, and token p + 1. Tokens are
therefore one place ahead of positions, pages and keys (`tokens_ahead`). A draft has no feature yet, because the model has not
computed it. The head's output at the previous position, which is kept for each slot, takes its place. When the model has
verified the drafts, the head computes its keys of the right drafts again, from the features.

A feature is the head's projection (`fc`) of the hidden states of three layers: as many numbers as one hidden state. Features
lie in a tensor with the same pages as the KV cache, in the slots of their tokens. So a prefix that is found in the cache brings
its features along, the features of a wrong draft are overwritten together with its keys, and the features of a preempted
sequence are lost with its pages. Reading and writing have fixed addresses and sizes, which CUDA graphs need.

Left out: the head itself (fa_serve.hf.eagle3), and which sequences draft (draft_model.py, drafts.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.runner.cuda_graphs import Inputs, OnError
from fa_serve.engine.runner.model_runner import ModelRunner
from fa_serve.hf import HiddenStateReader, PagedBatch, paged_output
from fa_serve.hf.model_location import find_model
from fa_serve.spec import ParameterError, UnsupportedModelError

if TYPE_CHECKING:
    from fa_serve.hf.eagle3 import Eagle3Head


class KeptFeatures:
    """Owner of the features. Raises UnsupportedModelError for a model whose hidden states cannot be read.

    model: a PreTrainedModel
    """

    def __init__(self, model: Any, head: Eagle3Head) -> None:
        self._reader = HiddenStateReader(model, head.depths)
        self._head = head
        self._features = self._rows(0)

    @property
    def bytes_per_token(self) -> int:
        return self._features.shape[1] * self._features.itemsize

    def allocate(self, num_slots: int) -> None:
        """Make room for so many slots of the KV cache. What was kept is lost."""
        self._features = self._rows(num_slots)

    @contextmanager
    def keeping(self, batch: PagedBatch) -> Iterator[None]:
        """Keep the features of a forward of the model within this context."""
        with self._reader.reading() as states:
            yield
        if len(states) < len(self._head.depths):
            return  # a forward of a few layers, which stand for all layers in the warm-up
        last = len(self._features) - 1  # the extra row takes what belongs to no token
        slots = torch.where(batch.slot_mapping < 0, last, batch.slot_mapping)
        self._features.index_copy_(0, slots, self._head.combine(states))

    def read(self, slot_mapping: Tensor) -> Tensor:
        """(total,) slots of the cache -> (total, hidden), anything where there is no slot"""
        return self._features.index_select(0, slot_mapping.clamp(min=0))

    def _rows(self, num_slots: int) -> Tensor:
        """The slots, and one row more. Zeros, because a draft may read what has never been written."""
        head = self._head
        return torch.zeros(num_slots + 1, head.config.hidden_size, dtype=head.dtype, device=head.device)


class HeadRunner(ModelRunner):
    """Owner of the head's cache, of its graphs, of its last output for each slot, and of the features.

    kept: the features of the model that the head drafts for
    """

    tokens_ahead = 1

    def __init__(self, head: Any, config: EngineConfig, kept: KeptFeatures, **options: Any) -> None:
        super().__init__(head, config, drafting=True, **options)
        self.vocab_size = head.config.vocab_size  # its logits are spread over the model's vocabulary
        self.kept = kept
        # one row more, for the sequences of padding
        self._last_outputs = torch.zeros(config.max_num_seqs + 1, head.config.hidden_size, dtype=head.dtype, device=self.device)

    def allocate(self, num_pages: int, max_model_len: int, num_states: int = 0) -> None:
        """Allocate the head's KV cache and the features of as many tokens."""
        self.kept.allocate(0)
        super().allocate(num_pages, max_model_len, num_states)
        self.kept.allocate(num_pages * self.page_size)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of the head's keys and values of one page, and of its features."""
        return super().bytes_per_page + self.page_size * self.kept.bytes_per_token

    def keeping_features(self, batch: PagedBatch) -> AbstractContextManager[None]:
        """A context for a forward of the model, in which the features of its tokens are kept."""
        return self.kept.keeping(batch)

    def _forward(self, inputs: Inputs) -> Tensor:
        paged = inputs.paged
        drawn = inputs.input_ids < 0  # drafts of the head
        slots = (-1 - inputs.input_ids).clamp(min=0)
        input_ids = torch.where(drawn, self._last_tokens[slots], inputs.input_ids)
        features = torch.where(drawn[:, None], self._last_outputs[slots], self.kept.read(paged.slot_mapping))
        output = paged_output(
            self.model, input_ids, inputs.position_ids, paged, inputs.logits_indices, hidden_states=features[None]
        )
        rows = torch.where(paged.seqused_k > 0, inputs.slots, self.max_num_seqs)
        last = output.hidden_states[0].index_select(0, paged.cu_seqlens_q[1:] - 1)
        self._last_outputs.index_copy_(0, rows, last)
        logits: Tensor = output.logits[0]
        return logits


def load_head_runner(config: EngineConfig, model: Any, on_graph_error: OnError) -> HeadRunner:
    """The runner of the head that the settings name, for this PreTrainedModel. on_graph_error: as in `ModelRunner`

    Raises ParameterError, with the reason, for a folder or hub name without such a head, and for the head of another model.
    """
    from fa_serve.hf.eagle3 import load_head  # imported late, because it imports a model of transformers

    # a head has one layer, so its cache is small and keeps the model's dtype
    assert config.draft_head is not None
    own = replace(config.for_drafts(config.draft_head), fusion=False, kv_cache_dtype="auto")
    try:
        find_model(own.model_path())
        folder = Path(own.model_path())
        if not folder.is_dir():
            folder = Path(snapshot_download(str(own.model), allow_patterns=["*.json", "*.safetensors", "*.bin"]))
        head = load_head(folder, model)
        return HeadRunner(head, own, KeptFeatures(model, head), on_graph_error=on_graph_error)
    except (ParameterError, UnsupportedModelError, OSError) as error:
        rule = f"name an EAGLE-3 head of {config.model_name}: {error}"
        raise ParameterError("speculative", rule, config.speculative) from error
