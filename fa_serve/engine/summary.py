"""Decisions of an engine that its config does not hold, for people: `engine.summary`, which a server prints and serves.

It is sent through the pipe of the engine's process. Left out: the decisions that replace "auto" and None in the config, and how
each decision is made, which the module that makes it says.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineSummary:
    """
    device:      name of the device
    attention:   for each kind of step, the attention backends of the layers, the most frequent backend first
    cache_bytes: bytes of the KV cache, including states
    graphs:      whether steps replay CUDA graphs
    fuses:       whether layers are computed by fused kernels where that is possible
    images:      why the model takes no images; None if it takes them
    """

    device: str = ""
    attention: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cache_bytes: int = 0
    graphs: bool = False
    fuses: bool = False
    images: str | None = "an encoder takes only text"
