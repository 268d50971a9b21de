"""The Protocol that every backend of ops implements, and the types of its arguments.

`fa_serve.ops` documents the arguments. A backend gets all of them, by position and with defaults filled in. This module leaves
out the choice among backends (`__init__.py`) and their code (`torch_ops.py`, `triton_ops.py`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from fa_serve.ops.quantized_weight import QuantizedWeight
from fa_serve.spec import OpSpec

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
"""Names of the activations: SiLU, GELU in its tanh approximation, and GELU by the error function."""


Weight: TypeAlias = Tensor | QuantizedWeight
"""The weights of a product: a matrix (n, k), or a quantised one."""


class Norm(NamedTuple):
    """The parameters of an RMS norm.

    weight: (width,)
    eps:    added to the mean square
    offset: added to the weight; 1 for models that store weights around 0
    """

    weight: Tensor
    eps: float
    offset: float = 0.0


class OpsBackend(Protocol):
    """Computes every function of `fa_serve.ops`; shapes and conventions are documented there."""

    name: str

    def supports(self, spec: OpSpec) -> str | None:
        """None if the backend serves the spec, else the reason why it does not."""
        ...

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        norm: Norm | None,
        activation: str | None,
        residual: Tensor | None,
        alpha: float,
        /,
    ) -> Tensor: ...

    def rms_norm(self, x: Tensor, norm: Norm, residual: Tensor | None, out: Tensor | None, /) -> Tensor: ...

    def rotary_store_kv(
        self,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        num_heads: int,
        cos: Tensor | None,
        sin: Tensor | None,
        q_norm: Norm | None,
        k_norm: Norm | None,
        k_descale: Tensor | None,
        v_descale: Tensor | None,
        /,
    ) -> None: ...

    def act_and_mul(self, x: Tensor, activation: str, /) -> Tensor: ...

    def sample_rows(
        self,
        logits: Tensor,
        keys: Tensor | None,
        temperature: Tensor | None,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
        slots: Tensor | None,
        last_tokens: Tensor | None,
        largest_top_k: int | None,
        /,
    ) -> Tensor: ...

    def invariant_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, /) -> Tensor: ...

    def invariant_sum(self, x: Tensor, /) -> Tensor: ...
