"""What an engine has decided beside the values in its config, for people: `engine.summary`, which a server prints and serves.

It crosses the pipe of the engine's process. Left out: the config, whose fields hold no "auto" any more, and how each decision
is made, which its module says.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineSummary:
    """
    device:      name of the device
    attention:   the backends of attention, by kind of step: of its layers, the most frequent one first
    cache_bytes: of the KV cache, with the states
    graphs:      whether steps replay CUDA graphs
    fuses:       whether layers are computed by fused kernels where that is possible
    images:      why the model takes no images; None if it takes them
    """

    device: str = ""
    attention: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cache_bytes: int = 0
    graphs: bool = False
    fuses: bool = False
    images: str | None = "an encoder reads texts"
