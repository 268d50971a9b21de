"""Write the digest of each base image beside its tag, so that a build and a start use the image that was tested.

    python deploy/pin_images.py Dockerfile compose.yaml        # or `make pin-images`

`python:3.11-slim` becomes `python:3.11-slim@sha256:...`, and an old digest is replaced. The tag stays for readers; docker uses
the digest. The digests come from the registry, through `docker buildx imagetools`. Our own images (`fa-serve:...`) stay
as they are.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# `ARG BASE_IMAGE=name:tag` of the Dockerfile and `image: name:tag` of compose files, with or without a digest
IMAGE = re.compile(r"^(ARG BASE_IMAGE=|\s+image: )([\w./-]+:[\w.-]+)(@sha256:[0-9a-f]{64})?$", re.MULTILINE)
OURS = "fa-serve:"


def digest(image: str) -> str:
    """The digest of the image's list of platforms, such as "sha256:..."."""
    command = ["docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", image]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", found):
        raise ValueError(f"docker must print a digest of {image}, got {found!r}")
    return found


def pinned(text: str) -> str:
    """The text of a Dockerfile or compose file with a digest behind each image's tag."""

    def pin(match: re.Match[str]) -> str:
        before, image, _ = match.groups()
        return match[0] if image.startswith(OURS) else f"{before}{image}@{digest(image)}"

    return IMAGE.sub(pin, text)


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        path.write_text(pinned(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
