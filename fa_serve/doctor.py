"""`fa-serve doctor`: checks whether this machine has what the server needs, and says what it found and what to do about it.

    findings = examine(host="127.0.0.1", port=8000)
    for finding in findings: print(finding.name, finding.state, finding.found, finding.remedy)
    print(issue_block(findings))           # for an issue: no names of machines, folders or keys

A failed check keeps `fa-serve serve` from working. A warning names something that is slower, or that will be missing later. A
check that raises an error counts as failed and shows the error, and the other checks still run. Left out: which kernels serve a
model (`fa-serve info MODEL`).
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import fa_serve
from fa_serve.environment import PREFIX
from fa_serve.server.settings import load

if TYPE_CHECKING:
    from torch import Tensor

State = Literal["ok", "warning", "failed"]
NEWEST_TESTED = (3, 13)
"""The newest release of Python with which the tests run. Later releases are not refused."""
GIB = 1 << 30
KERNEL_CACHE_BYTES = GIB
WEIGHT_CACHE_BYTES = 5 * GIB
HOST_BYTES = 4 * GIB
OPEN_FILES = 4096
SHOWN_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "safetensors",
    "tokenizers",
    "fastapi",
    "pydantic",
    "uvicorn",
)
ROUNDINGS = 2.0
"""A kernel's error may be this many times the sum of PyTorch's own error and one rounding, as in fa_serve.testing."""


@dataclass(frozen=True)
class Finding:
    """What one check found. remedy: what to do; empty if nothing is wrong"""

    name: str
    state: State
    found: str
    remedy: str = ""


def examine(host: str, port: int) -> list[Finding]:
    """Run every check, in this order. A check that raises is a failed finding."""
    checks: Mapping[str, Callable[[], Finding]] = {
        "python": check_python,
        "packages": check_packages,
        "environment": check_environment,
        "driver": check_driver,
        "gpu": check_gpu,
        "triton": check_triton,
        "kernel cache": check_kernel_cache,
        "weight cache": check_weight_cache,
        "memory": check_memory,
        "open files": check_open_files,
        "port": partial(check_port, host, port),
        "kernels": check_kernels,
    }
    return [_guarded(name, check) for name, check in checks.items()]


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # a broken machine may raise any error
        first = (str(error) or type(error).__name__).splitlines()[0]
        return Finding(name, "failed", f"the check raised {type(error).__name__}: {first}", "attach the output to an issue")


def check_python() -> Finding:
    """The interpreter, and the system that it runs on."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        return Finding("python", "warning", found, f"tested only up to Python {newest}; use that if a package is missing")
    return Finding("python", "ok", found)


def check_packages() -> Finding:
    """The versions of the packages that fa_serve and its server need, as the installed package declares them."""
    from packaging.requirements import Requirement

    try:
        declared = requires("fa-serve") or []
    except PackageNotFoundError:
        found = f"fa-serve {fa_serve.__version__} runs from {Path(fa_serve.__file__).parents[1]} but is not installed"
        remedy = "its requirements are unknown; in the clone run: pip install -e '.[server]'"
        return Finding("packages", "warning", found, remedy)
    wrong = []
    count = 0
    for line in declared:
        requirement = Requirement(line)
        if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": x}) for x in ("", "server")):
            continue
        count += 1
        installed = _version(requirement.name)
        if installed is None:
            wrong.append(f"{requirement.name} is not installed")
        elif not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{requirement.name} {installed} does not satisfy {requirement.specifier}")
    if wrong:
        return Finding("packages", "failed", "; ".join(wrong), "in the clone run: pip install '.[server]' -c constraints.txt")
    return _misfit_torchvision() or Finding(
        "packages", "ok", f"fa-serve {fa_serve.__version__}; all {count} requirements are met"
    )


def _misfit_torchvision() -> Finding | None:
    """A failed check if torchvision was built for another torch: transformers cannot import any model then. Otherwise None."""
    installed = _version("torchvision")
    if installed is None:
        return None
    try:
        import_module("torchvision")
    except Exception as error:  # its type depends on the build
        pair = f"torchvision {installed} cannot be imported with torch {_version('torch')}"
        found = f"{pair}, so transformers cannot import any model: {error}"
        remedy = "install the torchvision release for that torch from the same package index, or: pip uninstall torchvision"
        return Finding("packages", "failed", found, remedy)
    return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_environment() -> Finding:
    """The variables FA_SERVE_*, the file that FA_SERVE_CONFIG names and the file of API keys, as a start reads them."""
    file = os.environ.get("FA_SERVE_CONFIG")
    try:
        keys = load({}, Path(file) if file else None).all_keys
    except (ValueError, OSError) as error:
        return Finding("environment", "failed", str(error), "correct or unset the variable, or correct the line of the file")
    names = sorted(name for name in os.environ if name.upper().startswith(PREFIX))
    if not keys and os.environ.get("FA_SERVE_API_KEY"):
        remedy = "for the keys that a server accepts, set FA_SERVE_API_KEYS"
        return Finding("environment", "warning", "FA_SERVE_API_KEY is the key that clients send", remedy)
    return Finding("environment", "ok", ", ".join(names) or f"no variable {PREFIX}* is set")


def check_driver(release_file: Path = Path("/proc/driver/nvidia/version"), device: Path = Path("/dev/nvidiactl")) -> Finding:
    """The driver of NVIDIA, and whether this build of PyTorch can use it."""
    import torch

    built = torch.version.cuda or torch.version.hip
    found = f"torch {torch.__version__}"
    release = re.search(r"\s(\d{3,}\.[\d.]+)\s", release_file.read_text()) if release_file.exists() else None
    if release is not None:
        found = f"NVIDIA {release[1]}, {found}"
    if torch.cuda.is_available():
        return Finding("driver", "ok", found)
    if release is None and not device.exists():
        remedy = "the server runs on the CPU; to use a GPU, install its driver and check that nvidia-smi lists the GPU"
        return Finding("driver", "warning", f"no GPU driver, {found}", remedy)
    if built is None:
        return Finding("driver", "failed", found, "this PyTorch is built without GPU support: pip install a torch with CUDA")
    remedy = f"PyTorch (CUDA {built}) sees no GPU: check nvidia-smi, CUDA_VISIBLE_DEVICES and the driver's release"
    return Finding("driver", "failed", found, remedy)


def check_gpu() -> Finding:
    """The GPUs that PyTorch sees, their free memory, and whether the kernels know them."""
    import torch

    from fa_serve.spec import arch_of

    if not torch.cuda.is_available():
        return Finding("gpu", "ok", "none: --device auto uses the CPU")
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        memory = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
        found.append(f"{torch.cuda.get_device_name(index)} ({arch_of(torch.device('cuda', index)) / 10}), {memory}")
        if free < 0.5 * total:
            remedy = "another process uses its memory: find it with nvidia-smi, or lower --gpu-memory-utilization"
            return Finding("gpu", "warning", f"cuda:{index}: {found[-1]}", remedy)
    arch = arch_of(torch.device("cuda", 0))
    if 0 < arch < 80:
        remedy = "the kernels need compute capability 8.0 or newer; PyTorch's SDPA is used instead"
        return Finding("gpu", "warning", "; ".join(found), remedy)
    return Finding("gpu", "ok", "; ".join(found))


def check_triton() -> Finding:
    """Triton, and the C compiler with which it builds its launchers."""
    import torch

    release = _version("triton")
    on_gpu = torch.cuda.is_available()
    if release is None:
        if on_gpu:
            return Finding("triton", "failed", "not installed", "pip install triton; without it, PyTorch's SDPA is used")
        return Finding("triton", "ok", "not installed, and not needed on a CPU")
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if on_gpu and compiler is None:
        return Finding("triton", "failed", f"{release}, no C compiler", "apt-get install gcc libc6-dev, or set CC")
    return Finding("triton", "ok", f"{release}, C compiler {Path(compiler).name if compiler else 'not needed on a CPU'}")


def check_kernel_cache() -> Finding:
    """The folder of compiled kernels: Triton loads libraries from it."""
    from fa_serve.launching.compilations import kernel_cache_root

    return check_folder("kernel cache", kernel_cache_root(), "TRITON_CACHE_DIR", KERNEL_CACHE_BYTES, runs=True)


def check_weight_cache() -> Finding:
    """The folder of models from the hub."""
    from huggingface_hub import constants

    return check_folder("weight cache", Path(constants.HF_HUB_CACHE), "HF_HOME", WEIGHT_CACHE_BYTES)


def check_folder(name: str, folder: Path, variable: str, least: int, *, runs: bool = False) -> Finding:
    """Whether a folder, which is made when it is needed, can be written and has room.

    variable: the environment variable that moves the folder; least: the free bytes that it needs; runs: libraries are loaded
              from the folder
    """
    there = folder
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        return Finding(name, "failed", f"{folder} cannot be written: {error.strerror}", f"set {variable} to another folder")
    if runs and os.statvfs(there).f_flag & getattr(os, "ST_NOEXEC", 0):
        return Finding(name, "failed", f"{folder} is mounted noexec", f"set {variable} to a folder from which code can run")
    free = shutil.disk_usage(there).free
    found = f"{folder}, {free / GIB:.1f} GiB free"
    if free < least:
        remedy = f"free at least {least / GIB:.0f} GiB, or set {variable} to a folder on another disk"
        return Finding(name, "warning", found, remedy)
    return Finding(name, "ok", found)


def check_memory() -> Finding:
    """Memory of the host that this process could get, within the limit of a container."""
    from fa_serve.engine.cache.tensors import reclaimable_memory

    free = reclaimable_memory()
    found = f"{free / GIB:.1f} GiB of host memory available"
    if free < HOST_BYTES:
        return Finding(
            "memory", "warning", found, f"the service needs up to {HOST_BYTES / GIB:.0f} GiB in addition to the weights"
        )
    return Finding("memory", "ok", found)


def check_open_files() -> Finding:
    """The limit of open files. Three quarters of them may be connections."""
    try:
        import resource
    except ImportError:  # on Windows
        return Finding("open files", "ok", "no limit is known")
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < OPEN_FILES and limit != resource.RLIM_INFINITY:
        remedy = "for many clients, raise it: ulimit -n 65536, or LimitNOFILE in systemd"
        return Finding("open files", "warning", str(limit), remedy)
    return Finding("open files", "ok", "no limit" if limit == resource.RLIM_INFINITY else str(limit))


def check_port(host: str, port: int) -> Finding:
    """Whether the server could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        remedy = "end the process that uses it, or choose another --port" if taken else "choose another --host or --port"
        return Finding("port", "failed", f"{host}:{port}: {error.strerror or error}", remedy)
    return Finding("port", "ok", f"{host}:{port} is free")


def check_kernels() -> Finding:
    """Attention over a batch and over a paged cache, by the kernels that would serve it, compared with float64."""
    import torch

    from fa_serve.backends import explain
    from fa_serve.info_tables import chosen, common_cases
    from fa_serve.spec import arch_of

    begin = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = {title: spec for title, spec, *_ in common_cases(device, arch_of(torch.device(device)))}
    prompt, decoding = (chosen(explain(cases[f"{title}, Llama-3 8B"])) for title in ("prefill", "decoding"))
    errors = kernel_errors(device)
    found = f"prompts: {prompt}, decoding: {decoding}; error {max(errors):.2f} of the bound"
    found += f", {time.perf_counter() - begin:.1f} s"
    if not all(error <= 1.0 for error in errors):  # NaN fails, too
        return Finding("kernels", "failed", found, "results are wrong on this machine: attach this output to an issue")
    return Finding("kernels", "ok", found)


def kernel_errors(device: str) -> tuple[float, float]:
    """The error of a prompt and of a decoding step in bfloat16, divided by the bound of fa_serve.testing: 1.0 is allowed."""
    import torch

    from fa_serve.api import attention, attention_paged

    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 160, heads, 128) for heads in (8, 2, 2)]  # queries, keys and values, in 10 pages of 16
    q, k, v = (torch.randn(*shape, generator=generator).to(device, torch.bfloat16) for shape in shapes)
    exact = attention(q.double(), k.double(), v.double(), causal=True, backend="reference")
    plain = attention(q, k, v, causal=True, backend="sdpa")
    decoded = attention_paged(
        q[0, -1:],
        k.reshape(10, 16, 2, 128),
        v.reshape(10, 16, 2, 128),
        block_table=torch.arange(10, dtype=torch.int32, device=device)[None],
        seqused_k=torch.tensor([160], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32, device=device),
        max_seqlen_q=1,
    )
    assert isinstance(decoded, torch.Tensor)
    bound = ROUNDINGS * (_distance(plain, exact) + torch.finfo(q.dtype).eps * exact.abs().max().item())
    return _distance(attention(q, k, v, causal=True), exact) / bound, _distance(decoded, exact[0, -1:]) / bound


def _distance(actual: Tensor, exact: Tensor) -> float:
    return (actual.double() - exact).abs().max().item()


def issue_block(findings: list[Finding]) -> str:
    """What to attach to an issue: versions and findings, in a block of Markdown, with the home folder written as ~."""
    versions = ", ".join(f"{name} {found}" for name in SHOWN_PACKAGES if (found := _version(name)) is not None)
    lines = [f"{each.name}: {each.state}: {each.found}" for each in findings]
    text = "\n".join([f"fa-serve {fa_serve.__version__}", versions, platform.platform(), *lines])
    return f"```text\n{text.replace(str(Path.home()), '~')}\n```"
