"""flash-attention's own tests, on `fa_serve.flash_attn` in the place of flash-attn.

    python tests/upstream/run_flash_attn.py [--cases 40] [--seed 0] [--suites fa2,fa3] [--out tests/upstream/flash_attn.json]
    python tests/upstream/run_flash_attn.py --suites cute,cute_fast,cute_varlen --checkout ../flash-attention

The script fetches the package that flash-attention's tests need, once, into --cache. The tests of the suites fa2 and fa3 come
from flash-attn's source distribution, which is fetched too. The tests of FlashAttention-4, the suites whose names begin with
cute, are in flash-attention's repository only: --checkout names a checkout of it.

The script imports the files of tests unchanged, draws combinations from the grid of each test until --cases of them were not
skipped, and calls the test with them. A case passes, is skipped by the test, is refused by fa_serve (by the name of the
argument), finds no memory on the GPU, computes a wrong result, or fails with another error. The exit status is 1 if a case is
wrong or fails. NOISY has tests whose tolerances even exact results exceed with some seeds.

On a machine without a GPU the tests' device "cuda" means the CPU, and only short sequences and narrow heads are drawn. Cases
with one key are left out there: the gradients of q and k are exactly 0 and the tests allow no error, but those of PyTorch's
function have errors of 1e-6.

The references of FlashAttention-4's tests are in `flash_attn/cute/testing.py`, which needs PyTorch and einops only. It is
imported from the checkout. `flash_attn/cute/cache_utils.py` imports the compiler of the kernels, so an empty module stands for
it. A test that uses a name which this module or our interface lacks, such as `_flash_attn_bwd`, is refused by that name.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tarfile
import time
import traceback
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

import fa_serve.flash_attn
from fa_serve.spec import ParameterError, UnsupportedError

VERSION = "2.8.3"
SUITES = {
    "fa2": "tests/test_flash_attn.py",
    "fa3": "hopper/test_flash_attn.py",
    "cute": "tests/cute/test_flash_attn.py",
    "cute_fast": "tests/cute/test_flash_attn_fast.py",
    "cute_varlen": "tests/cute/test_flash_attn_varlen.py",
}
REPOSITORY = "https://github.com/Dao-AILab/flash-attention"
NOT_OURS = {
    "test_flash3_bw_compatibility": "asks for the schemas of FlashAttention-3's operators",
    "test_flash_attn_invalid_head_dim": "asks for errors about head sizes that fa_serve supports",
    "test_flash_attn_varlen_cumsum_metadata_paths": "reads private fields of the scheduler's metadata, which fa_serve has not",
}
NOT_ON_A_CPU = {
    "fa3 test_flash_attn_race_condition": "allocates 70 GiB",
    "cute test_flash_attn_lse_grad": "differentiates lse by v, which is no part of the graph where PyTorch computes lse",
    "cute test_flash_attn_lse_grad_unused": "compares bits with and without lse, for which PyTorch has different functions",
    "cute test_flash_attn_ex2_emu_decode_prefill_consistency": "compares bits of one row alone and among others",
}
NOISY = {
    "cute test_flash_attn_varlen_learnable_sink_backward_with_lse": "the tolerance is three times the error of an evaluation "
    "in bfloat16, which is small by chance for some numbers: the exact gradient of a float32 sink fails with 9 of 60 seeds",
}
"""Tests that even exact results fail with some seeds. A case that fails is repeated with other seeds, and if most of them pass,
it is counted as noisy."""
OTHER_SEEDS = range(1, 10)
OUTCOMES = ("passed", "skipped", "refused", "no memory", "noisy", "wrong", "error")
TOOLS = ["einops==0.8.1"]
SKIPPED = 12
"""Cases that are drawn for one that the test does not skip."""
SHORT = 300
"""Upper bounds for a CPU: the product of the lengths is at most its square."""


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


class NotOurs(UnsupportedError, AttributeError):
    """A test uses a name of flash-attention that is not part of the public interface. hasattr() of what it lacks is False."""

    def __init__(self, name: str) -> None:
        super().__init__(f"fa_serve has no {name}")
        self.name = name


class Missing:
    """Stands for a name that a test imports and fa_serve lacks. Using it raises NotOurs."""

    def __init__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__["name"] = name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotOurs(self.name)

    def __getattr__(self, attribute: str) -> NoReturn:
        raise NotOurs(self.name)


def fetch_tools(cache: Path) -> None:
    """Fetch the package that the tests need, and make it importable."""
    tools = cache / "flash-attn-tools"
    if not tools.exists():
        subprocess.run([*PIP, "install", "-q", "--no-deps", "--target", str(tools), *TOOLS], check=True)
    sys.path.append(str(tools))


def fetch(cache: Path) -> Path:
    """The folder of the unpacked distribution."""
    source = cache / f"flash_attn-{VERSION}"
    if not source.exists():
        options = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(cache)]
        environment = os.environ | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
        subprocess.run([*PIP, "download", "-q", *options, f"flash-attn=={VERSION}"], check=True, env=environment)
        with tarfile.open(cache / f"flash_attn-{VERSION}.tar.gz") as archive:
            folders = tuple(f"flash_attn-{VERSION}/{name}/" for name in ("tests", "hopper"))
            archive.extractall(cache, [m for m in archive if m.name.startswith(folders)], filter="data")
    return source


def use_checkout(checkout: Path) -> None:
    """Make what FlashAttention-4's tests import beside the interface importable. Must be called after install()."""
    load(checkout / "flash_attn" / "cute" / "testing.py", "flash_attn.cute.testing")
    cache_utils = sys.modules["flash_attn.cute.cache_utils"] = ModuleType("flash_attn.cute.cache_utils")
    for module in (cache_utils, sys.modules["flash_attn.cute.interface"]):
        module.__dict__["__getattr__"] = Missing


class OnCpu(TorchFunctionMode):
    """The device "cuda" means the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def load(path: Path, name: str) -> ModuleType:
    """The file as a module of that name. Its folder can be imported from, as under pytest."""
    sys.path.insert(0, str(path.parent))
    # files of both suites have the same names
    for neighbour in ("test_util", "padding"):
        sys.modules.pop(neighbour, None)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(path.parent))
    return module


def grid(test: Any) -> list[list[dict[str, Any]]]:
    """The axes of a test's grid, each a list of keyword arguments."""
    axes = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name != "parametrize":
            continue
        names = [name.strip() for name in mark.args[0].split(",")]
        axes.append([dict(zip(names, value if len(names) > 1 else (value,), strict=True)) for value in mark.args[1]])
    return axes


def draw(axes: list[list[dict[str, Any]]], count: int, rng: random.Random, small: bool) -> list[dict[str, Any]]:
    """Different combinations of the axes, at most `count`; all of them if there are fewer. `small` is for a CPU."""
    if small:
        drawn = draw([[value for value in axis if _is_small(value)] or axis[:1] for axis in axes], count, rng, False)
        return [case for case in drawn if case.get("seqlen_k") != 1]
    total = math.prod(len(axis) for axis in axes)
    if total <= count:
        return [_merged(choice) for choice in itertools.product(*axes)]
    chosen = []
    for number in rng.sample(range(total), count):
        choice = []
        for axis in axes:
            number, place = divmod(number, len(axis))
            choice.append(axis[place])
        chosen.append(_merged(choice))
    return chosen


def _merged(choice: Any) -> dict[str, Any]:
    return {name: value for part in choice for name, value in part.items()}


def _is_small(value: dict[str, Any]) -> bool:
    lengths = [n for name, n in value.items() if "seqlen" in name.replace("_", "") and type(n) is int]
    return math.prod(lengths) <= SHORT ** len(lengths) and value.get("d", value.get("D", 0)) <= 128


def run(test: Any, case: dict[str, Any]) -> tuple[str, str]:
    """(what came of it, detail)."""
    if any(mark.name == "skipif" and mark.args[0] for mark in getattr(test, "pytestmark", [])):
        return "skipped", ""
    try:
        with contextlib.redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as monkeypatch:
            fixtures = {"monkeypatch": monkeypatch} if "monkeypatch" in inspect.signature(test).parameters else {}
            test(**case, **fixtures)
    except (pytest.skip.Exception, pytest.xfail.Exception):
        return "skipped", ""
    except ParameterError as error:
        return ("refused", error.field) if error.code == "unsupported" else ("error", traceback.format_exc())
    except NotOurs as error:
        return "refused", error.name
    except UnsupportedError:
        return "refused", "no backend"
    except torch.OutOfMemoryError:  # one test allocates 70 GiB
        torch.cuda.empty_cache()
        return "no memory", ""
    except (AssertionError, pytest.fail.Exception):
        return "wrong", traceback.format_exc()
    except Exception:  # whatever a foreign test raises is counted and shown
        return "error", traceback.format_exc()
    return "passed", ""


def run_with_seeds(test: Any, case: dict[str, Any]) -> tuple[str, str]:
    """As `run`, for a test of NOISY."""
    what, detail = run(test, case)
    if what != "wrong":
        return what, detail
    seed_with = torch.manual_seed
    outcomes = []
    for other in OTHER_SEEDS:

        def seed_with_another(seed: int, other: int = other) -> torch.Generator:
            return seed_with(seed + other)

        with (
            mock.patch.object(torch, "manual_seed", seed_with_another),
            mock.patch.object(torch.random, "manual_seed", seed_with_another),
        ):
            outcomes.append(run(test, case)[0])
    passed = outcomes.count("passed")
    detail += f"With other seeds, {passed} of {len(outcomes)} passed.\n"
    return ("noisy" if 2 * passed > len(outcomes) else "wrong"), detail


def run_suite(suite: str, source: Path, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    module = load(source / SUITES[suite], f"upstream_{suite}")
    on_cpu = not torch.cuda.is_available()
    results: dict[str, dict[str, Any]] = {}
    for name, test in vars(module).items():
        if not name.startswith("test_") or name in NOT_OURS or args.match not in name:
            continue
        if on_cpu and f"{suite} {name}" in NOT_ON_A_CPU:
            continue
        begin = time.monotonic()
        counts: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        shown = ""
        for case in draw(grid(test), SKIPPED * args.cases, random.Random(f"{args.seed} {name}"), on_cpu):
            what, detail = run_with_seeds(test, case) if f"{suite} {name}" in NOISY else run(test, case)
            counts[what] += 1
            if what == "refused":
                refused[detail] += 1
            elif detail:
                shown = shown or f"{case}\n{detail}"
            if counts.total() - counts["skipped"] >= args.cases or time.monotonic() - begin > args.seconds:
                break
        results[name] = dict(counts) | {"refused": dict(refused)}
        words = "  ".join(f"{what} {counts[what]}" for what in OUTCOMES)
        reasons = "  ".join(f"{field}: {n}" for field, n in refused.most_common())
        print(f"{suite} {name:<38} {words}  {time.monotonic() - begin:6.1f} s  {reasons}", flush=True)
        if shown:
            print(shown, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--cases", type=int, default=40, help="cases of each test")
    parser.add_argument("--seconds", type=float, default=600, help="upper bound for each test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--suites", default="fa2,fa3", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--checkout", type=Path, help=f"a checkout of {REPOSITORY}, for the suites of FlashAttention-4")
    parser.add_argument("--match", default="", help="a part of the names of tests")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "fa_serve" / "upstream")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    suites = args.suites.split(",")
    in_checkout = [suite for suite in suites if suite.startswith("cute")]
    if in_checkout and not (args.checkout and all((args.checkout / SUITES[suite]).is_file() for suite in in_checkout)):
        parser.error(
            f"--checkout must be a checkout of {REPOSITORY} for the suites {', '.join(in_checkout)}, got {args.checkout}"
        )
    args.cache.mkdir(parents=True, exist_ok=True)
    fetch_tools(args.cache)
    distribution = fetch(args.cache) if len(in_checkout) < len(suites) else None
    os.environ["FLASH_ATTENTION_DISABLE_LOCAL"] = "TRUE"  # without it nearly every test of FA3 also asks for attention_chunk
    fa_serve.flash_attn.install()
    # the tests import it to read a dropout mask, and dropout is refused
    sys.modules["flash_attn.flash_attn_interface"].__dict__["_get_block_size_n"] = lambda *_: 128
    if in_checkout:
        use_checkout(args.checkout)
    results = {}
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)))
            stack.enter_context(mock.patch.object(torch.cuda, "synchronize"))
            stack.enter_context(OnCpu())
        for suite in suites:
            results[suite] = run_suite(suite, args.checkout if suite in in_checkout else distribution, args)
    if args.out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        versions = {"flash-attn": VERSION, "torch": torch.__version__, "device": device, "seed": args.seed}
        args.out.write_text(json.dumps({"versions": versions, "suites": results}, indent=1) + "\n")
    failed = sum(test.get("wrong", 0) + test.get("error", 0) for tests in results.values() for test in tests.values())
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
