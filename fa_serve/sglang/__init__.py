"""A plugin for SGLang, experimental: its attention on the kernels of fa_serve.

    pip install fa-serve                     # in the environment of SGLang
    FA_SERVE_SGLANG=1 python -m sglang.launch_server --model-path MODEL --attention-backend fa_serve --page-size 16

SGLang finds `register` through the entry point `sglang.srt.plugins` and calls it in each of its processes. Without the variable
FA_SERVE_SGLANG it does nothing, and SGLang is not imported. With it, `register` compares the signatures that this plugin relies
on with the installed SGLang, and adds the backend "fa_serve".

    sglang_interface.py   the names in SGLang that the plugin needs
    radix_backend.py      the backend: metadata of a step, cache update, forward

Left out: MLA, encoders, cross attention, speculative decoding, context parallelism, and pools that translate the numbers of
their slots.
"""

from __future__ import annotations

import os
from typing import Any

from fa_serve.spec import UnsupportedError

VARIABLE = "FA_SERVE_SGLANG"
NAME = "fa_serve"


def register() -> None:
    """Register the backend with SGLang if the environment asks for it.

    Raises UnsupportedError if the installed SGLang lacks something that the backend relies on.
    """
    if os.environ.get(VARIABLE, "0") in ("", "0"):
        return
    from sglang import __version__ as version

    from fa_serve.adapters import installed, missing
    from fa_serve.sglang.sglang_interface import MODULES, REQUIRED

    try:
        absent = missing(installed(MODULES, REQUIRED), REQUIRED)
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES
    except ImportError as error:
        absent = [str(error)]
    if absent:
        raise UnsupportedError(
            f"fa_serve does not support SGLang {version}: it lacks {', '.join(absent)}; "
            "unset FA_SERVE_SGLANG or install another release"
        )
    if NAME not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append(NAME)
    register_attention_backend(NAME)(_make)


def _make(model_runner: Any) -> Any:
    from fa_serve.sglang.radix_backend import RadixBackend

    return RadixBackend(model_runner)
