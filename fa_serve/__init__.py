"""fa_serve: fast attention for Hugging Face transformers, and a server for language models that uses it.

    import fa_serve
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa_serve")
    out = fa_serve.attention(q, k, v, causal=True)

Importing the package registers `attn_implementation="fa_serve"` with transformers. The functions below work on plain tensors.
`fa_serve.engine` holds the continuous-batching engine, and `fa_serve.server` the HTTP service.

The import takes milliseconds. A function is loaded when it is first named. The registration happens as soon as transformers has
loaded the module that holds its registry, before or after this import. Without transformers, everything but `patch` works.
"""

from __future__ import annotations

import importlib.util as _importlib_util
import sys as _sys
import typing as _typing
from importlib import import_module as _import_module
from importlib.abc import MetaPathFinder as _MetaPathFinder

if _typing.TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from fa_serve.api import attention, attention_paged, attention_varlen, store_kv
    from fa_serve.block_lists import BlockLists
    from fa_serve.hf import exact, patch, token_logprobs
    from fa_serve.spec import AttentionSpec, FaServeError, ParameterError, UnsupportedError, UnsupportedModelError

__version__ = "0.2.0"

__all__ = [
    "AttentionSpec",
    "BlockLists",
    "FaServeError",
    "ParameterError",
    "UnsupportedError",
    "UnsupportedModelError",
    "attention",
    "attention_paged",
    "attention_varlen",
    "exact",
    "patch",
    "store_kv",
    "token_logprobs",
]

_FUNCTIONS = ("attention", "attention_paged", "attention_varlen", "store_kv")
_OF_MODELS = ("exact", "patch", "token_logprobs")
_HOMES = dict.fromkeys(_FUNCTIONS, "api") | dict.fromkeys(_OF_MODELS, "hf") | {"BlockLists": "block_lists"}
_REGISTRY = "transformers.modeling_utils"


def __getattr__(name: str) -> _typing.Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f"{__name__}.{_HOMES.get(name, 'spec')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register() -> None:
    try:
        from fa_serve.hf import register
    except ImportError:  # transformers is too old; `patch` says so
        return
    register()


class _WhenLoaded(_MetaPathFinder):
    """An import hook that registers fa_serve right after transformers has loaded its registry. It finds no module itself."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _REGISTRY:
            return None
        _sys.meta_path.remove(self)
        spec = _importlib_util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if _REGISTRY in _sys.modules:
    _register()
else:
    _sys.meta_path.insert(0, _WhenLoaded())
