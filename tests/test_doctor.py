"""`fa-serve doctor`: each check finds what it is for, with a remedy, and the exit code says whether a start would work."""

import json
import os
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import fa_serve
from fa_serve import doctor
from fa_serve.__main__ import app
from fa_serve.doctor import (
    Finding,
    check_driver,
    check_environment,
    check_folder,
    check_gpu,
    check_kernels,
    check_memory,
    check_open_files,
    check_packages,
    check_port,
    check_python,
    check_triton,
    examine,
    issue_block,
)


def run(*arguments: str, **environment: str):
    return CliRunner().invoke(app, ["doctor", *arguments], env={"NO_COLOR": "1", **environment})


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as PyTorch would describe it."""
    memory = SimpleNamespace(free=70 << 30, total=80 << 30, capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (memory.free, memory.total))
    monkeypatch.setattr("fa_serve.spec.arch_of", lambda _: 10 * memory.capability[0] + memory.capability[1])
    return memory


def test_this_machine_passes_and_the_output_can_be_attached(monkeypatch):
    port = str(free_port())
    done = run("--port", port)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line[:8].strip() in ("ok", "warning", "failed")].count("failed") == 0
    assert f"127.0.0.1:{port} is free" in done.stdout
    assert "prompts: sdpa, decoding: sdpa; error 0." in done.stdout
    assert lines[-1] == "```"
    assert lines[lines.index("```text") + 2].startswith(f"torch {version('torch')}, ")


def test_a_failure_is_the_exit_code_and_json_says_the_same():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("--json", FA_SERVE_PORT=port)
    report = json.loads(done.stdout)
    assert (done.exit_code, report["ok"]) == (1, False)
    [failed] = [each for each in report["checks"] if each["state"] == "failed"]
    assert failed["name"] == "port"
    assert failed["found"].startswith(f"127.0.0.1:{port}: ")
    assert failed["remedy"] == "end the process that uses it, or choose another --port"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_an_address_of_another_machine_cannot_be_listened_on():
    assert check_port("192.0.2.1", free_port()).remedy == "choose another --host or --port"


def test_a_check_that_raises_is_a_finding_and_the_others_go_on(monkeypatch):
    def broken():
        raise RuntimeError("no such device\nmore")

    monkeypatch.setattr(doctor, "check_gpu", broken)
    monkeypatch.setattr(doctor, "check_kernels", lambda: Finding("kernels", "ok", "not run here"))
    findings = {each.name: each for each in examine("127.0.0.1", free_port())}
    assert (findings["gpu"].state, findings["gpu"].found) == ("failed", "the check raised RuntimeError: no such device")
    assert list(findings)[-1] == "kernels"


@pytest.mark.parametrize(("release", "state"), [((3, 10, 0), "ok"), ((3, 13, 9), "ok"), ((3, 99, 0), "warning")])
def test_releases_of_python(release, state, monkeypatch):
    monkeypatch.setattr(doctor.sys, "version_info", release)
    assert check_python().state == state


def test_packages_that_are_missing_or_old(monkeypatch):
    declared = ["torch>=999", "not-there>=1", "numpy>=1", 'rich>=13; extra == "server"', 'ray>=9999; extra == "ray"']
    monkeypatch.setattr(doctor, "requires", lambda _: declared)
    found = check_packages()
    assert found.found == f"torch {version('torch')} does not satisfy >=999; not-there is not installed"
    assert (found.state, found.remedy[:38]) == ("failed", "in the clone run: pip install '.[serve")
    monkeypatch.setattr(doctor, "requires", lambda _: declared[2:])
    assert "all 2 requirements are met" in check_packages().found


def test_a_checkout_on_the_path_that_is_not_installed(monkeypatch):
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "requires", missing)
    found = check_packages()
    assert found.state == "warning"
    assert found.found == f"fa-serve {fa_serve.__version__} runs from {Path(fa_serve.__file__).parents[1]} but is not installed"
    monkeypatch.setattr(doctor, "version", missing)
    assert f"fa-serve {fa_serve.__version__}\n" in issue_block([found])


@pytest.mark.parametrize(
    ("body", "state"),
    [("raise RuntimeError('operator torchvision::nms does not exist')", "failed"), ("", "ok")],
    ids=["of another build", "fits"],
)
def test_a_torchvision_of_another_build_than_torch_is_named(body, state, tmp_path, monkeypatch):
    (tmp_path / "torchvision.py").write_text(body)
    (tmp_path / "torchvision-0.99.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.99.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.99.0\n"
    )
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "requires", lambda _: [])
    found = check_packages()
    assert found.state == state
    if state == "failed":
        assert found.found.startswith(f"torchvision 0.99.0 cannot be imported with torch {version('torch')}, so transformers")
        assert found.found.endswith(" cannot import any model: operator torchvision::nms does not exist")
        assert found.remedy.endswith("or: pip uninstall torchvision")
    sys.modules.pop("torchvision", None)


@pytest.fixture
def variables(monkeypatch):
    """Set these variables, and no others of ours."""

    def only(**given: str) -> None:
        for name in [name for name in os.environ if name.startswith("FA_SERVE_")]:
            monkeypatch.delenv(name)
        for name, value in given.items():
            monkeypatch.setenv("FA_SERVE_" + name, value)

    return only


def test_a_misspelt_variable_and_no_values_are_shown(variables):
    variables(PROT="1")
    assert check_environment().state == "failed"
    variables(API_KEYS="secret", PORT="1")
    assert check_environment() == Finding("environment", "ok", "FA_SERVE_API_KEYS, FA_SERVE_PORT")


def test_values_and_files_are_read_as_a_start_reads_them(variables, tmp_path):
    (tmp_path / "settings.toml").write_text("max_num_seqs = 0\n")
    (tmp_path / "keys").write_text("# none yet\n")
    for given, said in (
        ({"MAX_NUM_SEQS": "0"}, "max_num_seqs must be at least 1, got '0'"),
        ({"CONFIG": str(tmp_path / "settings.toml")}, "max_num_seqs must be at least 1, got 0"),
        ({"CONFIG": str(tmp_path / "nowhere")}, f"config must be an existing TOML or YAML file, got {tmp_path}/nowhere"),
        ({"API_KEY_FILE": str(tmp_path / "keys")}, f"api_key_file must hold at least one key, got none in {tmp_path}/keys"),
        ({"API_KEYS": " "}, "FA_SERVE_API_KEYS must not be empty; unset the variable to run without it"),
    ):
        variables(**given)
        found = check_environment()
        assert (found.state, found.found) == ("failed", said)


def test_the_clients_key_is_none_of_the_server(variables):
    variables(API_KEY="secret")
    found = check_environment()
    assert (found.state, found.remedy) == ("warning", "for the keys that a server accepts, set FA_SERVE_API_KEYS")
    variables(API_KEY="secret", API_KEYS="secret")
    assert check_environment().state == "ok"


@pytest.mark.parametrize(
    ("installed", "built", "state", "said"),
    [
        (False, None, "warning", "the server runs on the CPU"),
        (True, None, "failed", "built without GPU support"),
        (True, "13.0", "failed", "check nvidia-smi"),
    ],
    ids=["no driver", "build", "release"],
)
def test_a_driver_that_pytorch_cannot_use(installed, built, state, said, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    release = tmp_path / "version"
    if installed:
        release.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n")
    found = check_driver(release, tmp_path / "nvidiactl")
    assert found.state == state
    assert said in found.remedy
    assert ("NVIDIA 570.86.15" in found.found) == installed


def test_a_driver_that_works(tmp_path, gpu):
    assert check_driver(tmp_path / "version", tmp_path / "nvidiactl").state == "ok"


def test_gpus(gpu):
    assert (check_gpu().state, check_gpu().found) == ("ok", "a GPU (9.0), 70.0 of 80.0 GiB free")
    gpu.free = 30 << 30
    assert (check_gpu().state, check_gpu().found) == ("warning", "cuda:0: a GPU (9.0), 30.0 of 80.0 GiB free")
    gpu.free = gpu.total
    gpu.capability = (7, 5)
    assert "need compute capability 8.0" in check_gpu().remedy


def test_triton_needs_a_compiler_on_a_gpu_only(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    monkeypatch.setattr(doctor, "_version", lambda _: "3.6.0")
    assert check_triton() == Finding("triton", "ok", "3.6.0, C compiler not needed on a CPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert check_triton() == Finding("triton", "failed", "3.6.0, no C compiler", "apt-get install gcc libc6-dev, or set CC")
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    assert check_triton().state == "failed"


def test_folders(tmp_path, monkeypatch):
    made_later = tmp_path / "a" / "b"
    assert check_folder("cache", made_later, "HF_HOME", 1) == Finding(
        "cache", "ok", f"{made_later}, {doctor.shutil.disk_usage(tmp_path).free / 2**30:.1f} GiB free"
    )
    assert not made_later.exists()
    full = check_folder("cache", made_later, "HF_HOME", 1 << 60)
    assert (full.state, full.remedy) == ("warning", "free at least 1073741824 GiB, or set HF_HOME to a folder on another disk")
    monkeypatch.setattr(
        doctor.os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC, f_bavail=1, f_blocks=1, f_bfree=1, f_frsize=1)
    )
    assert check_folder("cache", tmp_path, "TRITON_CACHE_DIR", 1, runs=True).state == "failed"
    assert check_folder("cache", tmp_path, "HF_HOME", 1).state == "ok"

    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    assert check_folder("cache", tmp_path, "HF_HOME", 1).found == f"{tmp_path} cannot be written: Permission denied"


def test_memory_and_open_files(monkeypatch):
    monkeypatch.setattr("fa_serve.engine.cache.tensors.reclaimable_memory", lambda: 1 << 30)
    assert (check_memory().state, check_memory().found) == ("warning", "1.0 GiB of host memory available")
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert (check_open_files().state, check_open_files().found) == ("warning", "1024")


def test_a_kernel_that_computes_something_else_is_found(monkeypatch):
    """Exact results are far below the bound; keys of the wrong head are far above it, and so is what is no number."""
    assert max(doctor.kernel_errors("cpu")) < 0.5
    from fa_serve import api

    right = api.attention

    def wrong(q, k, v, *, backend="auto", **options):
        return right(q, k.flip(2) if backend == "auto" else k, v, backend=backend, **options)

    monkeypatch.setattr(api, "attention", wrong)
    assert doctor.kernel_errors("cpu")[0] > 10
    assert (check_kernels().state, "attach" in check_kernels().remedy) == ("failed", True)
    monkeypatch.setattr(doctor, "kernel_errors", lambda _: (0.1, float("nan")))
    assert check_kernels().state == "failed"


def test_the_block_for_an_issue_names_no_home():
    home = Path.home()
    block = issue_block([Finding("weight cache", "ok", f"{home}/.cache, 1.0 GiB free")])
    assert "weight cache: ok: ~/.cache, 1.0 GiB free" in block
    assert str(home) not in block
