"""The adapters that clients may ask for by name in `model`, and the administrator's routes that load and unload them.

    adapters = Adapters(engine, settings)
    adapters.knows("french")                 # loaded, or a folder of --lora-folder
    await adapters.require("french")         # loads it from that folder if it is not loaded, or if its files have changed

Left out: what an adapter is and where it is computed (fa_serve.engine.lora).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import Request

from fa_serve.engine.errors import EngineDeadError
from fa_serve.named_files import ADAPTER_FILES
from fa_serve.spec import ParameterError

from .errors import MAX_NAME, ApiError, BadRequest, Forbidden, NotFound, Unavailable
from .settings import Settings

if TYPE_CHECKING:
    from fa_serve.engine import AsyncEngine

ADMINISTRATION = "Administration"
"""The tag of the routes that accept only the administrator's key. bodies.py checks a POST's key before it reads the body."""
MAX_LISTED = 1024
"""How many folders of --lora-folder /v1/models lists at most."""


class Adapters:
    """Loads and unloads adapters, and tracks the files in --lora-folder. Used only on the event loop."""

    def __init__(self, engine: AsyncEngine, settings: Settings):
        self._engine = engine
        self._folder = settings.lora_folder
        self._states: dict[str, tuple[tuple[int, int], ...]] = {}  # by adapter: the result of `_state` when it was loaded
        self._loading: dict[str, asyncio.Task[None]] = {}

    def names(self) -> list[str]:
        """The names that clients may ask for, loaded adapters first."""
        loaded = self._engine.adapters
        if self._folder is None:
            return loaded
        found = sorted(path.parent.name for path in self._folder.glob(f"*/{ADAPTER_FILES[0]}"))[:MAX_LISTED]
        return [*loaded, *(name for name in found if name not in loaded)]

    def knows(self, name: str) -> bool:
        """Whether clients may ask for this name."""
        return name in self._engine.adapters or self._state(name) is not None

    async def require(self, name: str) -> None:
        """Return when the adapter is loaded in the version that --lora-folder now has. Raises ApiError."""
        state = self._state(name)
        is_loaded = name in self._engine.adapters
        if is_loaded and (state is None or name not in self._states or self._states[name] == state):
            return
        if state is None:
            raise NotFound(f"The adapter {name[:MAX_NAME]!r} was unloaded.", param="model", code="model_not_found")
        if name not in self._loading:
            assert self._folder is not None
            task = self._loading[name] = asyncio.create_task(self._load(name, self._folder / name, state))
            task.add_done_callback(lambda _: self._loading.pop(name))
        await asyncio.shield(self._loading[name])

    async def load(self, name: str, folder: str) -> None:
        """Load an adapter. Raises ApiError if the engine refuses it or has died, or if its files cannot be read."""
        try:
            await self._engine.load_adapter(name, folder)
        except ParameterError as error:
            field = "lora_name" if error.field == "lora_name" else "lora_path"
            raise BadRequest(f"The adapter is refused: {error}", param=field) from None
        except EngineDeadError:
            raise Unavailable("The server is not ready: the engine has died.") from None
        except (OSError, RuntimeError) as error:
            raise BadRequest(f"The adapter cannot be read: {error}", param="lora_path") from None
        self._states.pop(name, None)

    async def unload(self, name: str) -> None:
        """Stop serving an adapter. Raises ApiError for an unknown name, and if the engine has died."""
        try:
            await self._engine.unload_adapter(name)
        except ParameterError as error:
            raise NotFound(f"The adapter is unknown: {error}", param="lora_name", code="model_not_found") from None
        except EngineDeadError:
            raise Unavailable("The server is not ready: the engine has died.") from None
        self._states.pop(name, None)

    async def _load(self, name: str, folder: Path, state: tuple[tuple[int, int], ...]) -> None:
        try:
            await self.load(name, str(folder))
        except ApiError as error:
            raise Unavailable(f"The model {name[:MAX_NAME]!r} cannot be loaded: {error.message}") from None
        self._states[name] = state

    def _state(self, name: str) -> tuple[tuple[int, int], ...] | None:
        """Size and time of each file of an adapter in --lora-folder; None if the folder has no adapter of this name."""
        if self._folder is None or not name or name.startswith(".") or not set("/\\\0").isdisjoint(name):
            return None
        try:
            states = [(self._folder / name / file).stat() for file in ADAPTER_FILES]
        except OSError:
            return None
        return tuple((state.st_size, state.st_mtime_ns) for state in states)


def require_administrator(request: Request, settings: Settings) -> None:
    """Raise Forbidden unless the request has the administrator's key."""
    if settings.admin_key is None:
        raise Forbidden("This server has no administrator's key (FA_SERVE_ADMIN_KEY), so it allows no administrative requests.")
    known = hashlib.sha256(settings.admin_key.get_secret_value().encode()).hexdigest()
    if not hmac.compare_digest(known, getattr(request.state, "key", "") or ""):
        raise Forbidden("The administrator's key is required. Send the header Authorization: Bearer KEY.")
