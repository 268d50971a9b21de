"""Checks the names in the settings before weights are read: finds the commit of a revision, and reads adapters' files.

    config = settle_names(config, ranks)     # raises for a name of something that does not exist

Reading the weights of a large model takes minutes, so a wrong name is reported before that. Left out: whether an adapter fits
the model (fa_serve.hf.lora.memory), and what the model's own files say (loading.py).
"""

from __future__ import annotations

from dataclasses import replace

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.parallel.ranks import Ranks
from fa_serve.hf.lora.format import check_adapter
from fa_serve.spec import ParameterError


def settle_names(config: EngineConfig, ranks: Ranks) -> EngineConfig:
    """The config with a commit as its revision, the same on all ranks.

    Raises ParameterError for a setting that names something that does not exist, or an adapter that fa_serve cannot compute,
    and OSError for a revision that cannot be found or downloaded and for files that cannot be read.
    """
    config.require_files()
    if config.revision is not None:
        config = replace(config, revision=ranks.broadcast("revision", lambda: config.pin_revision().revision))
    for each in config.lora:
        try:
            check_adapter(each.split("=", 1)[1], config.lora_host_bytes)
        except ParameterError as error:
            raise ParameterError("lora", f"name adapters that fa_serve supports: {error}", each) from None
    return config
