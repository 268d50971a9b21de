"""Kernels for Hopper (sm90) alone, in Gluon: TMA, warp specialisation, wgmma. Not written yet: nothing is chosen from here."""

from __future__ import annotations

from fa_serve.spec import AttentionSpec


class HopperBackend:
    name = "hopper"

    def supports(self, spec: AttentionSpec) -> str | None:
        return "the Hopper kernels are not in this version"
