"""The pages for a browser: the playground at / and the API reference at /docs.

    HTMLResponse(PLAYGROUND.text, headers=PLAYGROUND.headers)

    playground.html     the markup of the playground; playground.css is its style, playground.js its behaviour
    markdown.js         shows what a model writes as nodes of the document, never as HTML
    reference.html      the API reference, built in the browser from /openapi.json

Each page is sent as one document that loads nothing else, so it works without internet access and needs no build step. Its
content security policy allows only the scripts and styles that are in the document, by their hashes. So what a model writes
cannot run as a script, even if a bug in the page inserts it unescaped. Source: https://www.w3.org/TR/CSP3/
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
LINKED = re.compile(r'<link rel="stylesheet" href="([\w.]+)">|<script src="([\w.]+)"></script>')
WRITTEN = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)
HEADERS = {
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True)
class Page:
    """A document and the headers that it is sent with."""

    text: str
    headers: dict[str, str]


def read_page(name: str) -> Page:
    """Read a page from its file. The style sheets and scripts that it links are written into it."""
    text = LINKED.sub(_written, (FOLDER / name).read_text(encoding="utf-8"))
    hashes: dict[str, list[str]] = {"style": [], "script": []}
    for kind, content in WRITTEN.findall(text):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    policy = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "style-src": " ".join(hashes["style"]),
        "script-src": " ".join(hashes["script"]),
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return Page(text, {"content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()), **HEADERS})


def _written(link: re.Match[str]) -> str:
    tag = "style" if link[1] else "script"
    return f"<{tag}>\n{(FOLDER / (link[1] or link[2])).read_text(encoding='utf-8')}</{tag}>"


PLAYGROUND = read_page("playground.html")
REFERENCE = read_page("reference.html")
