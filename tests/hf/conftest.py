"""What the tests of the adapter share. Nothing is imported before a test asks, because the process that hands tests to workers
reads this file, too."""

from __future__ import annotations

import pytest

OF_5_17 = {
    "test_gathered_keys": "GIT computes its attention itself in 5.17 alone",
    "test_a_language_model_that_computes_its_attention_itself": "GIT and BLIP compute their attention themselves in 5.17 alone",
    "refused_at_load[gptj]": "GPT-J has transformers' attention interface in later releases",
    "refused_at_load[codegen]": "CodeGen has transformers' attention interface in later releases",
    "refused_at_load[falcon]": "Falcon has transformers' attention interface from 5.25 on",
    "need_no_weights[aria_text]": "later releases divide Aria's experts by packed_rowwise, a rule that is refused",
    "test_ranks_together_compute_the_same[bamba-4]": "later releases norm each of two groups alone",
    "test_ranks_together_compute_the_same[mamba2-4]": "later releases norm each of two groups alone",
    "test_ranks_together_compute_the_same[lfm3-2]": "LFM3 came after 5.17, and a division of it is refused",
    "test_ranks_together_compute_the_same[bailing-hybrid-2]": "Bailing came after 5.17, and a division of it is refused",
    "test_a_norm_over_all_heads_adds_up_squares": "later releases norm each group of Bamba alone",
    "test_projections_without_a_plan_are_found_by_their_names": "LFM2 names the parts of its MLPs otherwise in later releases",
    "test_prefix_tuning_prepends_keys": "peft 0.21 calls the cache of a model by the name that it had up to 5.23",
}
"""Parts of names of tests that hold for transformers 5.17, and why not for later releases."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import transformers

    if transformers.__version__.startswith("5.17."):
        return
    for item in items:
        for part, reason in OF_5_17.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["kernels", "none"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a test twice: with the masks that are made for devices with kernels, and with those for other devices.

    Kernels take a mask over keys alone in decoding, and packed keys for a padded prompt. Others get the whole mask.
    """
    from fa_serve.hf.adapter import masks

    if request.param == "kernels":
        monkeypatch.setattr(masks, "KERNELS_ON", {"cpu"})
    return bool(request.param == "kernels")
