"""Rollouts: answers that a trainer samples from the model it trains, in its own process.

    rollouts.py        the results: `Rollout`, `RolloutGroup`, `RolloutError`
    rollout_engine.py  `RolloutEngine`, an engine over a live model
    trl.py             `use_rollouts`, which gives that engine to a trainer of trl
    weight_sender.py   `WeightSender`, for a trainer whose engines are servers
    weight_group.py    the process group of such a trainer and its servers

Left out: how an engine takes weights from another process (fa_serve.engine.start.new_weights), and the training forward with
the same bits (fa_serve.hf.exact_forward).
"""
