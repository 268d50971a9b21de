"""A plugin for vLLM: its attention on the kernels of fa_serve.

    pip install fa-serve                     # in the environment of vLLM
    FA_SERVE_VLLM=1 vllm serve MODEL --attention-backend CUSTOM

vLLM finds `register` through the entry point `vllm.general_plugins` and calls it in each of its processes. Without the variable
FA_SERVE_VLLM it does nothing, and vLLM is not imported. With it, `register` compares the signatures that this plugin relies on
with the installed vLLM, and registers `PagedBackend` as the backend "CUSTOM".


    signatures.py      the names in vLLM that the plugin needs
    paged_backend.py   the backend: cache layout, metadata, cache update, forward

Left out: encoders, cross attention, MLA, ALiBi, context parallelism, and float8 queries.
"""

from __future__ import annotations

import os

from fa_serve.spec import UnsupportedError

VARIABLE = "FA_SERVE_VLLM"
BACKEND = "fa_serve.vllm.paged_backend.PagedBackend"


def register() -> None:
    """Register the backend with vLLM if the environment asks for it.

    Raises UnsupportedError if the installed vLLM lacks something that the backend relies on.
    """
    if os.environ.get(VARIABLE, "0") in ("", "0"):
        return
    from vllm import __version__ as version
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from fa_serve.adapters import installed, missing
    from fa_serve.vllm.signatures import MODULES, REQUIRED

    absent = missing(installed(MODULES, REQUIRED), REQUIRED)
    if absent:
        raise UnsupportedError(
            f"fa_serve does not support vLLM {version}: it lacks {', '.join(absent)}; "
            "unset FA_SERVE_VLLM or install another release"
        )
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
