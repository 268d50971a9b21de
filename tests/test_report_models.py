"""The pages about models say what the tests reported, for the types, families and checks that exist today."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import report_experts
import report_hybrids
import report_limits
import report_models
import report_support
import report_table
import transformers
from cross_compile import TARGETS
from every_type import CAUSAL, IMAGE_TEXT, tiny_config
from hf_families import FAMILIES
from hf_multimodal import MODELS
from report_fusion import architectures
from report_models import (
    COLUMNS,
    DOCS,
    LOADING,
    UPSTREAM,
    compared_types,
    concerned,
    formats_of_transformers,
    kept_experts,
    kept_weights,
    latent,
    outcomes,
    pages,
)
from report_models import FAMILIES as RESULTS
from sampled_cases import each_nth, whole_runs
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from benchmarks.engine.load_memory import all_formats
from fa_serve.hf.info import describe

TESTS = Path(__file__).parent
AGAIN = "run python tests/support/report_models.py to write the results and the page again"
CHECKS = {
    "decoder": {"padded", "packed", "decode", "chunks", "static cache", "own masks", "generate", "pages"},
    "encoder": {"padded"},
    "seq2seq": {"padded", "generate"},
    "vision": {"images"},
}


def test_the_pages_are_those_of_the_results() -> None:
    results, upstream = (json.loads(path.read_text()) for path in (RESULTS, UPSTREAM))
    for name, text in pages(results, upstream).items():
        assert (DOCS / name).read_text() == text, AGAIN


def test_every_type_of_transformers_has_a_row_of_answers_and_codes() -> None:
    """No exception's text, and no count of tests, is a cell."""
    results = json.loads(RESULTS.read_text())
    found = report_table.rows(results)
    assert set(found) >= {*results["census"], *CAUSAL, *IMAGE_TEXT}
    allowed = {
        "yes",
        "no",
        "nothing",
        "one",
        "some",
        "-",
        "vectors",
        "length",
        *(reason.code for reason in report_table.REASONS),
    }
    assert {part for row in found.values() for cell in row[:7] for part in cell.split(", ")} <= allowed
    assert found["llama"] == ("yes", "yes", "-", "yes", "yes", "yes", "yes", "generate, eager")
    assert found["gptj"][:2] == ("own", "own")
    assert found["bert"][:2] == ("yes", "vectors")
    assert {name for name, row in found.items() if row[0] == "nothing"} == set(results["without attention"])
    assert (found["convnext"][:2], found["mamba"][:2]) == (("nothing", "-"), ("nothing", "yes"))
    assert (found["qwen3_next"][4], found["zamba"][4], found["qwen3_next"][6]) == ("yes", "rule", "yes")
    assert found["gemma3"][2] == "yes"
    assert {name for name, row in found.items() if "length" in row[1]} == {"minimax_m3_vl", "minimax_m3_vl_text", "glm5_next"}
    assert found["blip-2"][2] == "images"
    cells = [
        part.strip()
        for name in pages(results, json.loads(UPSTREAM.read_text()))
        for part in (DOCS / name).read_text().split("|")
    ]
    assert [cell for cell in cells if re.search(r"^\d+ of \d+$|object has no attribute|[a-z]Error:", cell)] == []


def test_a_reason_without_a_code_is_noticed() -> None:
    with pytest.raises(LookupError, match="must have a code for 'the moon is full'"):
        report_table.cell("the moon is full")


@pytest.mark.slow
def test_the_rows_of_what_the_engine_does_beyond_text_are_what_the_code_does() -> None:
    results = json.loads(RESULTS.read_text())
    if results["versions"]["transformers"] != transformers.__version__:
        pytest.skip("the page is about another release of transformers")
    assert results["tested"] == compared_types(), AGAIN
    assert set(results["support"]) == {name for name, row in results["types"].items() if row["engine text"] == "yes"}, AGAIN
    sample = ["gpt2", "gpt_oss", "jamba", "llama", "nemotron_h", "qwen3_moe"]
    assert report_support.rows(sample) == {name: results["support"][name] for name in sample}, AGAIN


def test_the_hardware_is_that_of_the_results_and_of_the_targets() -> None:
    """A GPU counts as measured if lines of benchmarks/results name it."""
    lines = report_table.hardware()
    assert report_table.measured() == {"H100", "H200"}
    assert sum("**measured**" in line for line in lines) == 1
    assert sum("**compiled only**" in line for line in lines) == len(TARGETS) - 1


@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in report_hybrids.TYPES][::8])
def test_info_says_what_the_page_says(name: str) -> None:
    """`fa-serve info` reads a config; the page is about models that were made and run."""
    results = json.loads(RESULTS.read_text())
    if results["versions"]["transformers"] != transformers.__version__:
        pytest.skip("the page is about another release of transformers")
    answer = results["types"][name]["engine text"]
    if report_table.code_or_none(answer) == "untried":
        pytest.skip("no tiny model can be made of the default config of this type")
    refused = describe(tiny_config(name)).engine
    assert (refused is None) == (answer == "yes"), refused


def test_the_results_are_of_every_family_and_every_check() -> None:
    results = json.loads(RESULTS.read_text())
    families = results["families"]
    expected = {f.name: CHECKS[f.kind] for f in FAMILIES}
    expected |= {f"{name} (multimodal)": {"generate", "pages"} - ({"pages"} if name == "whisper" else set()) for name in MODELS}
    assert {name: set(row) for name, row in families.items()} == expected, AGAIN
    assert all(passed == count for row in families.values() for passed, count in row.values())
    assert set(results["layers"]) == {f.model for f in FAMILIES}, AGAIN
    assert {column for row in families.values() for column in row} == set(COLUMNS.values())


@pytest.mark.slow
def test_the_table_of_models_with_states_is_what_the_code_does() -> None:
    results = json.loads(RESULTS.read_text())["hybrids"]
    assert list(results) == list(report_hybrids.TYPES), AGAIN
    sample = each_nth(5, report_hybrids.TYPES)
    assert report_hybrids.rows(sample) == {name: results[name] for name in sample}, AGAIN
    assert sum(row["engine"] == "y" for row in results.values()) >= 19


def test_the_table_of_quantised_weights_is_what_the_code_does() -> None:
    results = json.loads(RESULTS.read_text())
    assert results["kept_weights"] == kept_weights(), AGAIN
    experts = kept_experts()
    assert results["kept_experts"] == experts, AGAIN
    refused = {"compressed-tensors, 4 bits, act-order", "gptq, act-order"}
    assert {row["format"] for row in experts if row["H200"] == "refused"} == refused
    known = formats_of_transformers()
    assert {method: loader for method, loader in results["formats"].items() if method in known} == known, AGAIN
    assert {"awq", "compressed-tensors", "fp8", "gptq", "mxfp4"} == {m for m, loader in known.items() if loader == "fa_serve"}


def test_loading_makes_no_full_precision_copy_of_any_format() -> None:
    rows = json.loads(LOADING.read_text())["rows"]
    assert {row["format"] for row in rows} == set(all_formats("dense"))
    quantised = [row for row in rows if row["format"] != "bfloat16"]
    assert all(row["peak"] <= row["held"] + 0.1 * row["floats"] for row in quantised)


def test_the_table_of_architectures_is_what_the_engine_does() -> None:
    results = json.loads(RESULTS.read_text())
    if results["versions"]["transformers"] != transformers.__version__:
        pytest.skip("the page is about another release of transformers")
    rows = results["engine"]
    assert sorted(rows) == concerned(results), AGAIN
    live = architectures(["mixtral", "deepseek_v3", "gpt_oss", "granitemoe", "axk2", "jamba", "minimax", "deepseek_v4"])
    assert live == {name: rows[name] for name in live}, AGAIN
    assert [row["layers"] for row in live.values()] == ["fused"] * 3 + ["unfused"] * 4 + ["refused"]
    assert all(row["reason"] for row in rows.values() if row["layers"] != "fused")


def test_every_refused_model_has_a_reason() -> None:
    census = json.loads(RESULTS.read_text())["census"]
    assert len(census) > 300
    assert set(census) <= set(CONFIG_MAPPING_NAMES)
    assert {"bloom", "mpt", "falcon", "gptj"} <= {name for name, reason in census.items() if "attention itself" in reason}
    assert all(census[name] == "" for name in ("llama", "gemma4", "gpt_oss", "deepseek_v3", "t5", "whisper", "qwen2_5_vl"))


def test_the_types_without_attention_are_those_of_the_results() -> None:
    """FNet mixes by Fourier transforms and ConvNeXt by convolutions; DPR's attention is another model's."""
    results = json.loads(RESULTS.read_text())
    sample = {name: results["census"][name] for name in ("convnext", "dpr", "fnet", "llama", "mamba", "llava")}
    found = report_limits.without_attention(sample)
    assert found == ["convnext", "fnet", "mamba"]
    assert set(found) == set(sample) & set(results["without attention"])


def test_the_limits_of_the_length_are_those_of_the_results() -> None:
    limits = json.loads(RESULTS.read_text())["limits"]
    assert limits == dict.fromkeys(("glm5_next", "minimax_m3_vl", "minimax_m3_vl_text"), 2048)
    assert report_limits.length_limits(["llama", *limits]) == limits


def test_no_failure_of_transformers_own_tests_is_without_a_reason() -> None:
    families = json.loads(UPSTREAM.read_text())["families"]
    assert set(families) == {f.name for f in FAMILIES}
    for row in families.values():
        assert row["passed"] > 20
        assert all("refuses with a sentence" in why or "with sdpa itself" in why for why in row["failed"].values())


def test_the_table_of_latent_attention_is_what_the_engine_does() -> None:
    results = json.loads(RESULTS.read_text())
    if results["versions"]["transformers"] != transformers.__version__:
        pytest.skip("the page is about another release of transformers")
    assert results["latent"] == latent(results["census"]), AGAIN
    served = {row["type"] for row in results["latent"]["tested"].values() if row["cache"] == "latent keys"}
    assert served == {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"}
    assert {row["rotary"] for row in results["latent"]["tested"].values()} == {"halves", "neighbours", "-"}


@pytest.mark.slow
def test_the_experts_are_those_of_the_installed_transformers() -> None:
    results = json.loads(RESULTS.read_text())
    if results["versions"]["transformers"] != transformers.__version__:
        pytest.skip("the page is about another release of transformers")
    kept = results["experts"]["mixtures"]
    sample = each_nth(4, list(kept))
    read = {name: why if name in sample or why == report_experts.OWN else report_experts.UNREAD for name, why in kept.items()}
    assert report_experts.mixtures(sample) == read, AGAIN
    assert report_experts.layouts() == results["experts"]["layouts"], AGAIN
    named = {"gpt_oss", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "olmoe", "granitemoe", "phimoe"}
    assert {name for name in named if kept[name]} == set()
    assert len(kept) > 60


@whole_runs
def test_the_outcomes_of_one_family_are_those_of_the_page() -> None:
    """A family that is added is reported without the tests of all others."""
    assert outcomes(["siglip"]) == {"siglip": json.loads(RESULTS.read_text())["families"]["siglip"]}


def test_outcomes_are_counted_by_family_and_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each column is a test of the families. The tests of qwen3-moe are not those of qwen3."""
    sources = "".join((TESTS / "hf" / f"test_{module}.py").read_text() for module in ("families", "multimodal"))
    assert [test for test in COLUMNS if f"def test_{test}(" not in sources] == []
    ended = {
        "forward[qwen3]": "",
        "forward[qwen3-moe]": "<failure/>",
        "decode[qwen3-float32]": "",
        "decode[float32-qwen3]": "<failure/>",
        "decode[float64-qwen3]": "<skipped/>",
        "mutant_is_caught[qwen3]": "",
    }

    def report(command: list[str], **_: object) -> None:
        [path] = [option.partition("=")[2] for option in command if option.startswith("--junitxml=")]
        cases = "".join(f'<testcase name="test_{name}">{how}</testcase>' for name, how in ended.items())
        Path(path).write_text(f"<testsuite>{cases}</testsuite>")

    monkeypatch.setattr(report_models.subprocess, "run", report)
    assert outcomes(["qwen3"]) == {"qwen3": {"padded": [1, 1], "decode": [1, 3]}}
    with pytest.raises(SystemExit, match="hf_families has no nobody"):
        outcomes(["siglip", "nobody"])
