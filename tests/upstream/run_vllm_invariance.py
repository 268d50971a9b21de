"""vLLM's own tests of batch invariance, with the plugin's kernels as vLLM's attention. Needs a GPU and vLLM.

    PYTHONPATH=DIR python tests/upstream/run_vllm_invariance.py       # DIR has vLLM and what it needs
    PYTHONPATH=DIR python tests/upstream/run_vllm_invariance.py --backend FLASH_ATTN      # the same with vLLM's own kernels

The script fetches the source distribution of the installed vLLM, once, into --cache, and runs
`tests/v1/determinism/test_batch_invariance.py` unchanged, with VLLM_BATCH_INVARIANT=1. The tests compare a request alone with
the same request in a batch: greedy text among up to 128 others, and log-probabilities of sampled tokens bit for bit. Their
backends are replaced by --backend, and their model by a Llama with random weights and the embedded model's tokenizer.
The exit status is that of pytest.

Left out: the test that expects a difference without the mode, which depends on the model, and the one that vLLM's authors run
with FLASH_ATTN only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import LlamaConfig
from vllm_signatures import fetch

import fa_serve.demo

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from benchmarks.engine.bench_vllm_plugin import declare_plugin  # noqa: E402
from benchmarks.engine.engine_workloads import make_model  # noqa: E402

FOLDER = "tests/v1/determinism"
TESTS = "needle or bitwise or simple_generation"


def tests_of(release: str, cache: Path) -> Path:
    """The folder of the tests, as the source distribution of this release has it."""
    found = cache / f"vllm-{release}" / FOLDER
    if not found.exists():
        with tarfile.open(fetch(release, cache)) as archive:
            members = [member for member in archive if member.name.startswith(f"vllm-{release}/{FOLDER}/")]
            archive.extractall(cache, members=members, filter="data")
    return found


def write_model(folder: Path) -> None:
    """A model of 70 million parameters in bfloat16, whose weights are so large that its answers vary."""
    torch.manual_seed(0)
    known = LlamaConfig.from_pretrained(fa_serve.demo.model_path())
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": known.vocab_size}
    model = make_model("tiny", "cpu", dtype=torch.bfloat16, **sizes, eos_token_id=known.eos_token_id, initializer_range=0.1)
    model.save_pretrained(folder)
    for file in fa_serve.demo.model_path().glob("tokenizer*"):
        shutil.copy(file, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="CUSTOM")
    parser.add_argument("--tests", default=TESTS, help="pytest's -k")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "fa_serve" / "upstream")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        release = version("vllm").partition("+")[0]  # a build may add the version of CUDA
        shutil.copytree(tests_of(release, args.cache), folder / "tests")
        # vllm.config comes first: the tests' utilities begin with a module of vLLM that it imports and that imports it
        replaced = f"import vllm.config\n\nimport utils\n\nutils.BACKENDS[:] = ['{args.backend}']\n"
        (folder / "replaced_backends.py").write_text(replaced)
        declare_plugin(folder / "plugins")
        write_model(folder / "model")
        paths = [folder / "tests", folder, folder / "plugins", ROOT]
        own = {"PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])}
        own |= {"FA_SERVE_VLLM": str(int(args.backend == "CUSTOM")), "VLLM_BATCH_INVARIANT": "1"}
        own |= {"VLLM_TEST_MODEL": str(folder / "model"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        command = [sys.executable, "-m", "pytest", "tests/test_batch_invariance.py", "-k", args.tests, "-q", "-rA"]
        command += ["-p", "replaced_backends", "-p", "no:cacheprovider", "--import-mode=prepend", "--rootdir", name]
        sys.exit(subprocess.run(command, cwd=folder, env=os.environ | own, check=False).returncode)


if __name__ == "__main__":
    main()
