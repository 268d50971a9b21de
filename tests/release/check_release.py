"""Check a built release: what the wheel and the sdist contain, and that the wheel alone serves and plugs in.

    python tests/release/check_release.py dist --constraints constraints.txt        # after `python -m build`

`make release` builds and then runs this. The contents are compared with the source tree. Then the wheel is installed with its
extra [server] into an empty virtual environment, outside of the source tree, and there

- `fa-serve serve` answers a request with the embedded model and ends with status 0 when it is told to stop,
- `attn_implementation="fa_serve"` generates the tokens of eager attention.

Left out: the metadata's form, which `twine check --strict` reads, and everything else that the test suite holds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0
PLUGIN = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fa_serve
from fa_serve.demo import model_path

tokenizer = AutoTokenizer.from_pretrained(model_path())
ids = tokenizer("def read(path):", return_tensors="pt")["input_ids"]
tokens = {}
for attention in ("eager", "fa_serve"):
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32, attn_implementation=attention)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    tokens[attention] = out[0].tolist()
print(json.dumps({"file": fa_serve.__file__, "version": fa_serve.__version__, "tokens": tokens}))
"""


def version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def expected_files(root: Path) -> set[str]:
    """What the wheel installs: the modules of the source tree, and the data that pyproject.toml names."""
    setuptools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    moved = setuptools["package-dir"]
    places = {x.replace(".", "/"): root / moved.get(x, x.replace(".", "/")) for x in setuptools["packages"]}
    found = {f"{place}/{path.name}" for place, folder in places.items() for path in folder.glob("*.py")}
    for package, patterns in setuptools["package-data"].items():
        place = package.replace(".", "/")
        for pattern in patterns:
            found |= {f"{place}/{path.relative_to(places[place])}" for path in places[place].glob(pattern)}
    return found


def wheel_complaints(names: set[str], expected: set[str], version: str) -> Iterator[str]:
    """What is wrong with a wheel that holds files of these names."""
    info = f"fa_serve-{version}.dist-info/"
    yield from (f"the wheel lacks {name}" for name in sorted(expected - names))
    extra = {name for name in names - expected if not name.startswith(info)}
    yield from (f"the wheel has {name}, which is not a part of the package" for name in sorted(extra))
    required = ("licenses/LICENSE", "entry_points.txt", "METADATA")
    yield from (f"the wheel lacks {info}{name}" for name in required if info + name not in names)


def sdist_complaints(names: set[str], version: str) -> Iterator[str]:
    """What is wrong with an sdist; the wheel is built from it, so what builds the wheel is there."""
    base = f"fa_serve-{version}/"
    required = ("LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", "pyproject.toml")
    yield from (f"the sdist lacks {name}" for name in required if base + name not in names)
    unwanted = {name.removeprefix(base).partition("/")[0] for name in names} & {"tests", "benchmarks", "docs", ".github"}
    yield from (f"the sdist has a part of {folder}/" for folder in sorted(unwanted))


def metadata_complaints(metadata: str, version: str) -> Iterator[str]:
    fields = Parser().parsestr(metadata)
    if fields["Version"] != version:
        yield f"the metadata says version {fields['Version']}, pyproject.toml {version}"
    if fields["License-Expression"] != "Apache-2.0":
        yield f"the metadata says license {fields['License-Expression']}"
    yield from (f"the metadata depends on an address: {x}" for x in fields.get_all("Requires-Dist", []) if "@" in x)


def changelog_complaints(changelog: str, version: str) -> Iterator[str]:
    if not re.search(rf"^## \[{re.escape(version)}\]", changelog, re.MULTILINE):
        yield f"CHANGELOG.md has no section [{version}]"


def check_contents(wheel: Path, sdist: Path) -> list[str]:
    """The complaints about both files, in words."""
    now = version()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"fa_serve-{now}.dist-info/METADATA"
        metadata = archive.read(info).decode() if info in names else ""
    with tarfile.open(sdist) as archive:
        packed = set(archive.getnames())
    return [
        *wheel_complaints(names, expected_files(ROOT), now),
        *sdist_complaints(packed, now),
        *metadata_complaints(metadata, now),
        *changelog_complaints((ROOT / "CHANGELOG.md").read_text(), now),
    ]


def install(wheel: Path, constraints: Path, folder: Path) -> Path:
    """A new environment that holds the wheel and what it depends on; returns its folder of programs."""
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    command = [programs / "python", "-m", "pip", "install", "-q", "-c", constraints, f"{wheel}[server]"]
    subprocess.run(command, check=True)
    return programs


def check_service(programs: Path, folder: Path, environment: dict[str, str]) -> None:
    """`fa-serve serve` answers with the embedded model, and ends well."""
    command = [programs / "fa-serve", "serve", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment) as process:
        assert process.stdout is not None
        late = threading.Timer(START_SECONDS, process.kill)
        late.start()
        try:
            found = None
            for line in process.stdout:
                found = re.match(r"(http://\S+)$", line)
                if found:
                    break
            if not found:
                raise SystemExit(f"fa-serve serve ended, or printed no address within {START_SECONDS:.0f} s")
            answer = ask(f"{found[1]}/v1/completions", {"model": "fa-serve-demo", "prompt": "def f(x):", "max_tokens": 8})
            print(f"served: {answer['choices'][0]['text']!r}")
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
            status = process.wait()
        finally:
            late.cancel()
            process.kill()
    if status != 0:
        raise SystemExit(f"fa-serve serve ended with {status} after SIGTERM")
    if not answer["choices"][0]["text"]:
        raise SystemExit(f"fa-serve serve answered with no text: {answer}")


def ask(url: str, body: dict[str, object]) -> dict[str, list[dict[str, str]]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, list[dict[str, str]]] = json.load(response)
    return answer


def check_plugin(programs: Path, folder: Path, environment: dict[str, str]) -> None:
    """transformers generates with the installed package what it generates with eager attention."""
    done = subprocess.run(
        [programs / "python", "-c", PLUGIN], stdout=subprocess.PIPE, text=True, check=True, cwd=folder, env=environment
    )
    report = json.loads(done.stdout)
    if not Path(report["file"]).is_relative_to(programs.parent):
        raise SystemExit(f"fa_serve was imported from {report['file']}, not from the wheel")
    if report["version"] != version():
        raise SystemExit(f"the installed fa_serve says version {report['version']}, pyproject.toml {version()}")
    if report["tokens"]["fa_serve"] != report["tokens"]["eager"]:
        raise SystemExit(f"fa_serve and eager attention generate different tokens: {report['tokens']}")
    print(f"plugin: {len(report['tokens']['fa_serve'])} tokens as with eager attention")


def only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{folder} must hold one {pattern}, holds {[path.name for path in found]}")
    return found[0].resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="folder with one wheel and one sdist")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt", help="what pip installs under")
    args = parser.parse_args()
    wheel = only(args.dist, "*.whl")
    complaints = check_contents(wheel, only(args.dist, "*.tar.gz"))
    if complaints:
        sys.exit("\n".join(complaints))
    print(f"contents: {wheel.name} and its sdist hold what they must")
    with tempfile.TemporaryDirectory(prefix="fa_serve_release_") as name:
        folder = Path(name)
        programs = install(wheel, args.constraints.resolve(), folder / "venv")
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment |= {"HF_HUB_OFFLINE": "1", "HOME": name}
        check_service(programs, folder, environment)
        check_plugin(programs, folder, environment)
    print(f"fa-serve {version()} is fit for release")


if __name__ == "__main__":
    main()
