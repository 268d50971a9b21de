"""Steps that one kernel cannot compute for all layers at once take no graph that may have captured that kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fa_serve.engine.runner import cuda_graphs
from fa_serve.engine.runner.batch_arrays import BatchArrays
from fa_serve.engine.runner.cuda_graphs import CAPTURE_AFTER, Shape


def test_a_decoding_step_that_is_computed_layer_by_layer_has_no_graph(make_engine, replays) -> None:
    """A graph of decoding may have captured one kernel for all layers. Those of prompts have more tokens than it computes."""
    engine = make_engine()
    engine._runner.make_graphs()
    graphs = engine._runner._graphs
    inputs = {"position_ids": np.zeros(2, dtype=np.int64)}
    arrays = BatchArrays(inputs, {}, {}, [], [], [], 2, 2, 1, 5, decoding=True, fresh=False)
    assert graphs.shape_of(arrays) == Shape(2, 2, 1, 256)
    assert graphs.shape_of(replace(arrays, by_layers=True)) is None
    prompt = replace(arrays, decoding=False, by_layers=True)
    with torch.inference_mode():
        shapes = [graphs.shape_of(prompt) for _ in range(CAPTURE_AFTER)]
    assert shapes[-1] is not None
    assert shapes[-1].tokens == cuda_graphs.TOKEN_MULTIPLE
