"""Rollouts: answers that a trainer samples from the model it trains, in its own process.

    rollouts.py        what comes out: `Rollout`, `RolloutGroup`
    rollout_engine.py  `RolloutEngine`, an engine over a live model

Left out: weights that come from another process, which `Engine.update_weights` and the server's routes take, and the training
forward with the same bits (fa_serve.hf.exact_forward).
"""
