"""Runs an EAGLE-3 head as a draft model: the runner that `DraftModel` has for `speculative="eagle3=HEAD"`.

    runner = load_head_runner(config, runner)        # tells `runner` to keep hidden states
    drafter = DraftModel(runner, 8192)

A head takes two inputs at each position p: what the model has computed for token p (kept_features.py), and token p + 1. Tokens
are therefore one place ahead of positions, pages and keys (`lead`). A draft has no feature yet, because the model has not
computed it. The head's output of the position before stands in, which is kept for each slot. When the model has verified the
drafts, the head computes its keys of the right ones again, from the features.

Left out: the head itself (fa_serve.hf.eagle3), and which sequences draft (draft_model.py, speculation.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.cuda_graphs import Inputs
from fa_serve.engine.kept_features import KeptFeatures
from fa_serve.engine.model_runner import ModelRunner
from fa_serve.hf import paged_output
from fa_serve.hf.model_location import find_model
from fa_serve.spec import ParameterError, UnsupportedModelError


class HeadRunner(ModelRunner):
    """Owner of the head's cache, of its graphs, and of its last output for each slot.

    kept: the features that the model's runner keeps, which both share
    """

    lead = 1

    def __init__(self, head: Any, config: EngineConfig, kept: KeptFeatures, **options: Any) -> None:
        super().__init__(head, config, drafting=True, **options)
        self.vocab_size = head.config.vocab_size  # its logits are spread over the model's vocabulary
        self._kept = kept
        # one row more, for the sequences of padding
        self._last_outputs = torch.zeros(config.max_num_seqs + 1, head.config.hidden_size, dtype=head.dtype, device=self.device)

    def allocate(self, num_pages: int, max_model_len: int) -> None:
        """Allocate the head's KV cache and the features of as many tokens."""
        self._kept.allocate(0)
        super().allocate(num_pages, max_model_len)
        self._kept.allocate(num_pages * self.page_size)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of the head's keys and values of one page, and of its features."""
        return super().bytes_per_page + self.page_size * self._kept.bytes_per_token

    def _forward(self, inputs: Inputs) -> Tensor:
        paged = inputs.paged
        drawn = inputs.input_ids < 0  # drafts of the head
        slots = (-1 - inputs.input_ids).clamp(min=0)
        input_ids = torch.where(drawn, self._last_tokens[slots], inputs.input_ids)
        features = torch.where(drawn[:, None], self._last_outputs[slots], self._kept.read(paged.slot_mapping))
        output = paged_output(
            self.model, input_ids, inputs.position_ids, paged, inputs.logits_indices, hidden_states=features[None]
        )
        rows = torch.where(paged.seqused_k > 0, inputs.slots, self.max_num_seqs)
        last = output.hidden_states[0].index_select(0, paged.cu_seqlens_q[1:] - 1)
        self._last_outputs.index_copy_(0, rows, last)
        logits: Tensor = output.logits[0]
        return logits


def load_head_runner(config: EngineConfig, runner: ModelRunner) -> HeadRunner:
    """The runner of the head that the settings name. `runner`, the model's, keeps hidden states for it from now on.

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
        head = load_head(folder, runner.model)
        runner.kept_features = KeptFeatures(runner.model, head)
        return HeadRunner(head, own, runner.kept_features, check=runner.check)
    except (ParameterError, UnsupportedModelError, OSError) as error:
        rule = f"name an EAGLE-3 head of {config.model_name}: {error}"
        raise ParameterError("speculative", rule, config.speculative) from error
