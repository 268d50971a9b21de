"""The table of docs/moving/vllm.md names every argument of vLLM's attention and every ability that vLLM asks for, in each
release that the tests know, and says what becomes of it.

To generate the table again: FA_SERVE_WRITE_DOCS=1 pytest tests/vllm_plugin/test_interface_table.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from documentation import check_generated

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "moving" / "vllm.md"
RELEASES: dict[str, dict[str, list[str]]] = json.loads((ROOT / "tests" / "results" / "vllm_signatures.json").read_text())
ARGUMENTS = ("AttentionImpl.__init__", "AttentionImpl.forward")
QUESTION = "supports_"
YES = "supported"
NO = "not offered"
REFUSED = "refused unless None"
DEFAULT = "as vLLM decides"

NOTES: dict[str, tuple[str, str]] = {
    "num_heads": (YES, ""),
    "head_size": (YES, "a multiple of 8, up to 256"),
    "scale": (YES, "must be positive"),
    "num_kv_heads": (YES, "a divisor of `num_heads`"),
    "alibi_slopes": (REFUSED, ""),
    "sliding_window": (YES, ""),
    "kv_cache_dtype": (YES, "`auto`, `float16`, `bfloat16`, `fp8`, `fp8_e4m3`; vLLM refuses the others"),
    "logits_soft_cap": (YES, ""),
    "attn_type": ("refused unless decoder", "no encoders, no cross attention"),
    "kv_sharing_target_layer_name": (YES, "such a layer does not write the cache"),
    "layer": (YES, "its `_k_scale` and `_v_scale` are read with a float8 cache"),
    "query": (YES, "float16 or bfloat16"),
    "key": (YES, "written to the cache before, by `do_kv_cache_update`"),
    "value": (YES, "as `key`"),
    "kv_cache": (YES, "read in place, in the layouts of all these releases"),
    "attn_metadata": (YES, "None while vLLM measures its memory"),
    "output": (YES, "written in place"),
    "output_scale": (REFUSED, "no quantised outputs"),
    "output_block_scale": (REFUSED, "no quantised outputs"),
    "supports_head_size": (YES, "multiples of 8 up to 256"),
    "supports_compute_capability": (YES, "8.0 and later"),
    "supports_sink": (YES, ""),
    "supports_sliding_window": (YES, ""),
    "supports_batch_invariance": (YES, "4 parts of each sequence's keys"),
    "supports_dtype": (DEFAULT, "float16, bfloat16"),
    "supports_kv_cache_dtype": (DEFAULT, "as `kv_cache_dtype` above"),
    "supports_block_size": (DEFAULT, "multiples of 16 tokens"),
    "supports_attn_type": (DEFAULT, "decoders"),
    "supports_combination": (DEFAULT, "none is excluded"),
    "supports_kv_connector": (DEFAULT, "not tested"),
    "supports_alibi_sqrt": (NO, ""),
    "supports_non_causal": (NO, "a step is causal"),
    "supports_mm_prefix": (NO, "no bidirectional attention over image tokens"),
    "supports_per_head_quant_scales": (NO, "one scale for each layer"),
    "supports_pcp": (NO, "no context parallelism of prompts"),
    "supports_dcp": (NO, "no context parallelism of decoding"),
    "supports_non_causal_dcp": (NO, ""),
    "supports_rswa": (NO, ""),
    "supports_device_cpu_query_lens_mismatch": (NO, ""),
    "supports_kv_cache_update_bypass": (NO, ""),
}


def found() -> dict[str, list[str]]:
    """The releases that have each argument or question."""
    where: dict[str, list[str]] = {}
    for release, signatures in RELEASES.items():
        arguments = [name for function in ARGUMENTS for name in signatures[function] if name != "self"]
        questions = [name for name in signatures["AttentionBackend"] if name.startswith(QUESTION)]
        for name in dict.fromkeys(arguments + questions):
            where.setdefault(name, []).append(release)
    return where


def table() -> Iterator[str]:
    yield "| argument or question | releases | plugin | note |"
    yield "|---|---|---|---|"
    where = found()
    for name, (support, note) in NOTES.items():
        releases = where[name]
        text = "all" if len(releases) == len(RELEASES) else f"from {releases[0]}"
        yield f"| `{name}` | {text} | {support} | {note} |"


def test_every_argument_and_question_has_a_note() -> None:
    assert found().keys() == NOTES.keys()
    newest = list(RELEASES)[-1]
    assert all(releases[-1] == newest for releases in found().values()), "the table says from which release on"


def test_the_documented_interface_is_the_interface() -> None:
    check_generated(PAGE, "interface", "\n".join(table()))


@pytest.mark.parametrize("name", [name for name in NOTES if name.startswith(QUESTION)])
def test_the_backend_answers_as_the_table_says(name: str, vllm: ModuleType) -> None:
    """What is supported is said by a method of the backend, and everything else is left to vLLM's own class."""
    backend = import_module("fa_serve.vllm.paged_backend").PagedBackend
    assert (name in vars(backend)) == (NOTES[name][0] == YES)
