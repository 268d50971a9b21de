"""What the tests of the adapter share."""

from __future__ import annotations

import pytest

from fa_serve.hf.adapter import masks


@pytest.fixture(params=["kernels", "none"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a test twice: with the masks that are made for devices with kernels, and with those for other devices.

    Kernels take a mask over keys alone in decoding, and packed keys for a padded prompt. Others get the whole mask.
    """
    if request.param == "kernels":
        monkeypatch.setattr(masks, "KERNELS_ON", {"cpu"})
    return bool(request.param == "kernels")
