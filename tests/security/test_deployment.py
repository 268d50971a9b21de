"""What the files of a deployment promise: hashed packages, no privileges, bounded resources, and a page that lists every limit.

tests/server/test_deploy.py holds that the programs that read these files accept them. Here stands what a hostile neighbour, a
moved tag or a replaced package could use. No test needs Docker or a cluster.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

import httpx
import kubernetes_validate
import pytest
import server_process
import yaml
from documentation import check_generated, table_cell
from fa_serve.server.settings import PREFIX, SECRETS, Settings, load, shown_default
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sampled_cases import whole_runs
from warm_processes import WarmProcess, fa_serve_traced

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
UNIT = ROOT / "deploy" / "systemd" / "fa-serve.service"
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
RAY_COMPOSE = yaml.safe_load((ROOT / "deploy" / "ray" / "compose.yaml").read_text())
IMAGES = ("cpu", "cuda")


def run(*command, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


def program(name: str) -> str:
    return shutil.which(name, path="/usr/bin:/usr/sbin:/bin:/sbin") or pytest.skip(f"{name} is not installed")


# Packages


def requirements(name: str) -> dict[str, tuple[str, list[str]]]:
    """The version and the hashes of each package in requirements/<name>.txt."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text().replace("\\\n", "")
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            package, *hashes = line.split()
            package, version = re.fullmatch(r"([a-z0-9-]+)==([\w.+]+)", package).groups()
            found[package] = version, hashes
    return found


def constraints() -> dict[str, str]:
    """The versions for the Python of the images, 3.11."""
    lines = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#"))
    pins = [Requirement(line) for line in lines]
    held = [pin for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": "3.11"})]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in held}


@pytest.mark.parametrize("name", [*IMAGES, "ray", "tools"])
def test_every_package_has_hashes(name):
    packages = requirements(name)
    assert packages
    for package, (_, hashes) in packages.items():
        assert hashes, f"{package} has no hash"
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), package


@pytest.mark.parametrize("name", IMAGES)
def test_the_images_have_the_versions_that_are_tested(name):
    """`make requirements` makes the files from constraints.txt; this fails when that was forgotten."""
    packages = {package: version.removesuffix("+cpu") for package, (version, _) in requirements(name).items()}
    of_cuda = re.compile(r"nvidia-.*|cuda-(bindings|pathfinder|toolkit)")
    tested = constraints() | ({"torch": "2.11.0", "torchvision": "0.26.0"} if name == "cuda" else {})
    assert {
        package: version for package, version in packages.items() if not of_cuda.fullmatch(package)
    }.items() <= tested.items()
    assert {"torch", "triton", "transformers", "fastapi", "uvicorn", "setuptools", "opentelemetry-sdk"} <= packages.keys()


def test_ray_is_added_to_an_image_without_a_change_of_it():
    """requirements/ray.txt repeats some packages of the images. pip takes both lists only if these agree."""
    ray = requirements("ray")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = (ROOT / "requirements" / "ray.in").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == extras["ray"]
    tested = constraints()
    assert {package: version for package, (version, _) in ray.items()}.items() <= tested.items()
    for name in IMAGES:
        both = requirements(name)
        assert {"fastapi", "pydantic"} <= both.keys() & ray.keys()
        assert {package: both[package] for package in both.keys() & ray.keys()}.items() <= ray.items()


def test_pip_verifies_what_it_installs():
    for line in re.findall(r"pip install.*", DOCKERFILE):
        if "-r requirements/" in line:
            assert {"--require-hashes", "--only-binary"} <= set(line.split()), line
        else:  # the source of this repository
            assert {"--no-index", "--no-deps", "--no-build-isolation", "."} <= set(line.split()), line
    copied = re.findall(r"^COPY (requirements/\S+) requirements/ray.txt requirements/$", DOCKERFILE, re.MULTILINE)
    assert sorted(copied) == [f"requirements/{name}.txt" for name in IMAGES]
    assert re.findall(r"-r (requirements/\w+\.txt) +\$\{RAY:\+-r requirements/ray\.txt\}", DOCKERFILE) == copied
    assert "!requirements" in (ROOT / ".dockerignore").read_text().splitlines()


@pytest.mark.slow
def test_a_changed_package_is_not_installed(tmp_path):
    """pip itself refuses a file with another hash, for a package of the list."""
    wheel = tmp_path / "idna-3.20-py3-none-any.whl"
    wheel.write_bytes(b"not the file that was tested")
    listed = tmp_path / "requirements.txt"
    listed.write_text(f"idna==3.20 {' '.join(requirements('cpu')['idna'][1])}\n")
    # `importlib.util.find_spec("pip")` would make setuptools give this process the distutils of Python for good, and whatever
    # imports setuptools behind it, such as inductor, would fail
    pip = [sys.executable, "-m", "pip"] if PathFinder.find_spec("pip") else [program("pip3")]
    flags = ["--require-hashes", "--only-binary", ":all:", "--no-index", "--find-links", str(tmp_path), "--dry-run"]
    done = run(*pip, "--isolated", "install", *flags, "--target", str(tmp_path / "into"), "-r", str(listed))
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr.upper(), done.stderr


# Base images


def test_one_line_names_the_base_image():
    [image] = re.findall(r"^ARG BASE_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"[\w./-]+:[\w.-]+(@sha256:[0-9a-f]{64})?", image)
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    names = {name for _, name in stages}
    assert {image for image, _ in stages} - names == {"${BASE_IMAGE}"}


def test_pin_images_adds_digests(tmp_path):
    """With a registry's answers from a stand-in for docker, which is not installed where the tests run."""
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text("#!/bin/sh\nprintf 'sha256:%s\\n' $(printf %s \"$7\" | sha256sum | cut -d' ' -f1)\n")
    docker.chmod(0o755)
    files = [shutil.copy(ROOT / name, tmp_path) for name in ("Dockerfile", "compose.yaml")]
    path = f"{docker.parent}:{os.environ['PATH']}"
    for _ in range(2):  # the second time it replaces digests
        done = run(sys.executable, str(ROOT / "deploy" / "pin_images.py"), *files, env=os.environ | {"PATH": path})
        assert done.returncode == 0, done.stderr
        assert re.search(r"^ARG BASE_IMAGE=python:3\.11-slim@sha256:[0-9a-f]{64}$", Path(files[0]).read_text(), re.MULTILINE)
        images = [service["image"] for service in yaml.safe_load(Path(files[1]).read_text())["services"].values()]
        assert [image.count("@sha256:") for image in images] == [0, 1, 1], images
    docker.write_text("#!/bin/sh\necho latest\n")
    done = run(sys.executable, str(ROOT / "deploy" / "pin_images.py"), *files, env=os.environ | {"PATH": path})
    assert "docker must print a digest of python:3.11-slim, got 'latest'" in done.stderr


# Containers


def test_containers_of_compose_have_no_privileges():
    assert RAY_COMPOSE["services"].keys() - COMPOSE["services"].keys() == {"engine"}
    for name, service in {**COMPOSE["services"], "engine": RAY_COMPOSE["services"]["engine"]}.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert not {"cap_add", "privileged", "devices", "network_mode", "pid"} & service.keys(), name
        assert service["security_opt"] == ["no-new-privileges:true"], (
            f"{name}: no other option may turn off Docker's seccomp profile"
        )
        assert {"pids_limit", "mem_limit"} <= service.keys(), name
        assert all("size=" in mount for mount in service.get("tmpfs", [])), name


@cache
def documents() -> dict[str, dict]:
    text = (ROOT / "deploy" / "kubernetes" / "fa-serve.yaml").read_text()
    found = {}
    for document in yaml.safe_load_all(text):
        found.setdefault(document["kind"], document)  # the first service is the one that clients use
        kubernetes_validate.validate(document, "1.34", strict=True)
    return found


def test_the_pod_is_restricted():
    """The rules of the "restricted" Pod Security Standard, a read-only root, and a bound for everything that can grow."""
    pod = documents()["StatefulSet"]["spec"]["template"]["spec"]
    _assert_restricted(pod)
    policy = documents()["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    [door] = policy["ingress"]
    assert [port["port"] for port in door["ports"]] == [pod["containers"][0]["ports"][0]["containerPort"]]


def test_the_pods_of_a_ray_cluster_are_restricted():
    """Only they reach Ray's ports, which run code."""
    text = (ROOT / "deploy" / "ray" / "kubernetes.yaml").read_text()
    found = list(yaml.safe_load_all(text))
    pods = [document["spec"]["template"]["spec"] for document in found if document["kind"] == "StatefulSet"]
    assert len(pods) == 2
    for pod in pods:
        _assert_restricted(pod)
        assert {"name": "RAY_AUTH_MODE", "value": "token"} in pod["containers"][0]["env"]
    inside, door = (document["spec"] for document in found if document["kind"] == "NetworkPolicy")
    assert inside["policyTypes"] == ["Ingress", "Egress"]
    assert inside["ingress"] == [{"from": [{"podSelector": inside["podSelector"]}]}]
    assert inside["egress"][1:] == documents()["NetworkPolicy"]["spec"]["egress"]
    assert door["ingress"] == documents()["NetworkPolicy"]["spec"]["ingress"]


def _assert_restricted(pod: dict) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert {"memory", "ephemeral-storage"} <= container["resources"]["limits"].keys()
    for volume in pod["volumes"]:
        assert "hostPath" not in volume
        assert "sizeLimit" in volume["emptyDir"], volume["name"]


def test_a_service_does_not_configure_the_server(monkeypatch):
    """Kubernetes gives pods <SERVICE>_PORT=tcp://... for each service, which would be our setting `port`."""
    name = documents()["Service"]["metadata"]["name"].upper().replace("-", "_")
    monkeypatch.setenv(f"{name}_PORT", "tcp://10.96.0.17:80")
    with pytest.raises(ValueError, match="port"):
        load({})
    assert documents()["StatefulSet"]["spec"]["template"]["spec"]["enableServiceLinks"] is False


# systemd


def test_the_unit_scores_below_3():
    """7.7 before: the unit had no rule for system calls, capabilities, devices, namespaces and address families."""
    done = run(program("systemd-analyze"), "security", "--offline=yes", "--no-pager", str(UNIT))
    score = float(re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)[1])
    assert score < 3.0, done.stdout


def allowed_calls(analyze: str) -> set[str]:
    """The system calls that the unit's filters allow."""

    def expand(group: str) -> set[str]:
        lines = run(analyze, "syscall-filter", "--no-pager", group).stdout.splitlines()[1:]
        names = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        return set().union(*(expand(name) if name.startswith("@") else {name} for name in names))

    calls: set[str] = set()
    for line in re.findall(r"^SystemCallFilter=(.*)$", UNIT.read_text(), re.MULTILINE):
        named = set().union(*(expand(word) for word in line.removeprefix("~").split()))
        calls = calls - named if line.startswith("~") else calls | named
    assert {"read", "mmap", "futex"} <= calls
    return calls


def forbidden_calls(seen: set[str]) -> list[str]:
    """Options of strace that count what the unit's filters forbid, and these calls, in all processes that are started."""
    hidden = ",".join(f"?{name}" for name in sorted(allowed_calls(program("systemd-analyze")) - seen))
    return ["-f", "-c", "-S", "name", "-e", f"trace=!{hidden}"]


def calls_of(summary: Path) -> set[str]:
    return {line.split()[-1] for line in summary.read_text().splitlines()[2:-2]}


def ask_and_end(lines: Iterable[str], server: Callable[[], int]) -> None:
    """A structured answer of a server that prints these lines, and then SIGTERM."""
    url = next(line.strip() for line in lines if line.startswith("http://"))
    deadline = time.monotonic() + server_process.START_SECONDS
    while httpx.get(f"{url}/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    body = {"model": "fa-serve-demo", "prompt": "import os\n", "max_tokens": 4, "guided_regex": "[a-z]+"}
    httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
    os.kill(server(), signal.SIGTERM)


FLAGS = ("--port", "0", "--device", "cpu", "--num-pages", "512", "--process")


@pytest.mark.slow
def test_the_unit_allows_what_a_server_calls(tmp_path):
    """A server with an engine process starts, answers and ends, and strace sees no system call that the filter forbids.

    It traces processes that have imported everything. The test below imports under strace too.
    """
    strace = [program("strace"), *forbidden_calls({"accept4"}), "-o", str(tmp_path / "calls")]
    command = ["serve", server_process.one_layer(), "--served-model-name", "fa-serve-demo", *FLAGS]
    traced = WarmProcess(fa_serve_traced, command)
    with (tmp_path / "attached").open("w") as said:
        tracer = subprocess.Popen([*strace, "-p", str(traced.pid)], stdout=subprocess.DEVNULL, stderr=said)
    engines = []

    def server() -> int:
        engines.append(server_process.engine_of(traced.pid))
        return traced.pid

    try:
        ask_and_end(traced.stdout, server)
        assert traced.wait(60) == 0
        tracer.wait(60)
    finally:
        traced.kill()
        traced.wait()
        traced.stdout.close()
        tracer.kill()
        tracer.wait()
    assert calls_of(tmp_path / "calls") == {"accept4"}
    assert f"Process {engines[0]} attached" in (tmp_path / "attached").read_text(), "the engine's process is not seen"


@whole_runs
def test_the_unit_allows_what_a_fresh_server_calls(tmp_path):
    """Allowed calls do not stop at strace, which would triple the time, but for two that show that it sees every process."""
    seen = {"execve", "accept4"}
    strace = [program("strace"), "--seccomp-bpf", *forbidden_calls(seen), "-qq", "-o", str(tmp_path / "calls")]
    command = [*strace, sys.executable, "-m", "fa_serve", "serve", *FLAGS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        ask_and_end(process.stdout, lambda: server_process.children_of(process.pid)[0])
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert calls_of(tmp_path / "calls") == seen


# What is built and written


def test_the_sbom_lists_the_packages_of_the_images():
    """Of the documents that `make sbom` has written, if it has: the tool is not among the packages of the tests."""
    written = {name: ROOT / "sbom" / f"fa-serve-{name}.cdx.json" for name in IMAGES}
    if not all(path.exists() for path in written.values()):
        pytest.skip("make sbom has not run")
    for name, path in written.items():
        document = json.loads(path.read_text())
        assert document["bomFormat"] == "CycloneDX"
        assert {part["name"]: part["version"] for part in document["components"]} == {
            package: version for package, (version, _) in requirements(name).items()
        }
        assert all(part["externalReferences"][0]["hashes"] for part in document["components"])


GROUPS = ("Limits", "Access")


def limits() -> str:
    """The tables of docs/security.md, generated from the settings."""
    lines = []
    for group in GROUPS:
        lines += ["", f"**{group}**", "", "| flag | default | meaning |", "|---|---|---|"]
        for name, field in Settings.model_fields.items():
            if field.json_schema_extra["group"] == group:
                flag = f"{PREFIX}{name.upper()}" if name in SECRETS else f"--{name.replace('_', '-')}"
                default = f"`{shown_default(name)}`" if shown_default(name) else ""
                lines.append(f"| `{flag}` | {default} | {table_cell(field.description)} |")
    return "\n".join(lines[1:]) + "\n"


def test_the_documented_limits_are_the_settings():
    """To generate the tables again: FA_SERVE_WRITE_DOCS=1 pytest tests/security/test_deployment.py"""
    check_generated(ROOT / "docs" / "security.md", "limits", limits())


@pytest.mark.parametrize("name", ["SECURITY.md", "docs/security.md", "docs/hardening.md"])
def test_flags_in_the_pages_are_settings(name):
    known = {f"--{field.replace('_', '-')}" for field in Settings.model_fields}
    known |= {"--require-hashes", "--config", "--master-addr", "--master-port"}  # of pip, uvicorn and torchrun
    assert set(re.findall(r"`(--[a-z-]+)", (ROOT / name).read_text())) <= known
