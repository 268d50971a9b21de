"""transformers' own tests of attention with fa_serve in the place of sdpa.

    python tests/upstream/run.py [--families llama,bert] [--version 5.17.0] [--out tests/upstream/results.json]

The script fetches the source distribution of transformers (of the installed release, unless another one is named) and the three
packages that its tests need, once, into --cache. It runs the tests of `test_modeling_common.py` that concern attention (see
`suite.py`), and runs those that fail once more with sdpa itself. For each family it prints what passed, and why the rest
failed. The exit status is 1 if a failure has no known reason.

The distribution lacks the tests of generation, of masks and of single models. fa_serve's tests of these are in tests/hf/.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
ATTENTION = (
    "eager_matches_sdpa or equivalence or batching or determinism or training or gradient or attention or attn or dispatch "
    "or hidden_states or inputs_embeds or offload or parallelism or capture or meta or flex or compile"
)
# The first asks whether a test file has a mixin that the distribution lacks, the second chooses among sdpa's own kernels.
NOT_HERE = "generation_tester_mixin or sdpa_kernels"
TOOLS = ["accelerate==1.15.0", "parameterized==0.9.0", "psutil==7.2.2"]
# What fa_serve refuses on purpose, by words of the error.
REASONS = {
    "never forms the attention weights": "asks sdpa for attention weights, which sdpa leaves out with a warning and fa_serve "
    "refuses with a sentence",
    "attention dropout must be 0": "trains with attention dropout, which fa_serve refuses with a sentence",
}
SAME = "fails with sdpa itself in the same way"


def fetch(version: str, cache: Path) -> tuple[Path, Path]:
    """The folder of the unpacked distribution, and a folder with packages that its tests import."""
    source = cache / f"transformers-{version}"
    tools = cache / "tools"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if not source.exists():
        options = ["--no-deps", "--no-build-isolation", "--no-binary", "transformers", "--dest", str(cache)]
        subprocess.run([*pip, "download", "-q", *options, f"transformers=={version}"], check=True)
        with tarfile.open(cache / f"transformers-{version}.tar.gz") as archive:
            archive.extractall(cache, filter="data")
    if not tools.exists():
        subprocess.run([*pip, "install", "-q", "--no-deps", "--target", str(tools), *TOOLS], check=True)
    return source, tools


def pytest(source: Path, tools: Path, report: Path, redirect: bool, *arguments: str) -> list[ET.Element]:
    paths = [str(tools), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "REDIRECT": str(int(redirect)),
        "TRANSFORMERS_SOURCE": str(source),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    options = ["-q", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider", "-W", "ignore", "--tb=short"]
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *arguments]
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False)
    if not report.exists():
        sys.exit(done.stdout + done.stderr)
    return list(ET.parse(report).iter("testcase"))


def failures(cases: list[ET.Element]) -> dict[str, str]:
    """The message of each test that failed, by the test's name."""
    found: dict[str, str] = {}
    for case in cases:
        for kind in ("failure", "error"):
            for element in case.findall(kind):
                found[str(case.get("name"))] = f"{element.get('message')}\n{element.text}"
    return found


def run(family: str, source: Path, tools: Path, cache: Path) -> dict[str, object]:
    suite = str(HERE / "suite.py")
    report = cache / f"{family}.xml"
    report.unlink(missing_ok=True)
    cases = pytest(source, tools, report, True, f"{suite}::Test{family}", "-k", f"({ATTENTION}) and not ({NOT_HERE})")
    failed = failures(cases)
    names = {str(case.get("name")) for case in cases}
    skipped = {str(case.get("name")) for case in cases if case.find("skipped") is not None} - set(failed)
    reasons = {}
    for name, text in failed.items():
        reasons[name] = next((reason for words, reason in REASONS.items() if words in text), "")
    unknown = [name for name, reason in reasons.items() if not reason]
    if unknown:
        report.unlink()
        again = failures(pytest(source, tools, report, False, *(f"{suite}::Test{family}::{name}" for name in unknown)))
        for name in unknown:
            reasons[name] = SAME if name in again else re.sub(r"\s+", " ", failed[name].partition("\n")[0])[:300]
    report.unlink()
    return {"passed": len(names - set(failed) - skipped), "skipped": len(skipped), "failed": dict(sorted(reasons.items()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--families", help="names of tests/support/hf_families.py, separated by commas; default: all")
    parser.add_argument("--version", default=transformers.__version__, help="version of the tests, normally the installed one")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "fa_serve" / "upstream")
    parser.add_argument("--out", type=Path, help="JSON file to write; its other families stay if it is of the same versions")
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE.parent / "support"))
    from hf_families import FAMILIES

    arguments.cache.mkdir(parents=True, exist_ok=True)
    source, tools = fetch(arguments.version, arguments.cache)
    known = {*REASONS.values(), SAME}
    versions = {"transformers": transformers.__version__, "tests": arguments.version, "torch": torch.__version__}
    results = {}
    unexplained = 0
    if arguments.out and arguments.out.exists():
        before = json.loads(arguments.out.read_text())
        if before["versions"] == versions:
            results = before["families"]
    known_families = [f.name for f in FAMILIES]
    chosen = arguments.families.split(",") if arguments.families else known_families
    if missing := set(chosen) - set(known_families):
        parser.error(f"--families must be names of tests/support/hf_families.py, got {', '.join(sorted(missing))}")
    for family in chosen:
        results[family] = result = run(family, source, tools, arguments.cache)
        failed = result["failed"]
        assert isinstance(failed, dict)
        print(f"{family:18} {result['passed']:4} passed {len(failed):3} failed {result['skipped']:4} skipped", flush=True)
        for name, reason in failed.items():
            print(f"    {name}: {reason}", flush=True)
            unexplained += reason not in known
        if arguments.out:
            arguments.out.write_text(json.dumps({"versions": versions, "families": results}, indent=1) + "\n")
    sys.exit(bool(unexplained))


if __name__ == "__main__":
    main()
