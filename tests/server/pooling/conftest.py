"""Tiny encoders of each task, and applications over them."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from encoder_folders import save_encoder
from fa_serve.server.app import create_app
from fa_serve.server.settings import Settings

from fa_serve.engine import AsyncEngine, Encoder, EngineConfig

LABELS = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
GENERAL = {"prompts": {"query": "find this: ", "document": ""}}
FOLDERS: dict[str, dict[str, Any]] = {
    "embed": {"general": GENERAL},
    "score": {"modules": None, "head": "ForSequenceClassification", "num_labels": 1},
    "classify": {"modules": None, "head": "ForSequenceClassification", **LABELS},
    "sparse": {"modules": None, "head": "ForMaskedLM"},
}


@pytest.fixture(scope="session")
def encoder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Encoder]:
    """`encoder_of("embed")`: an encoder of that task, made once."""
    made: dict[str, Encoder] = {}

    def encoder(task: str) -> Encoder:
        if task not in made:
            path = save_encoder(tmp_path_factory.mktemp(task), "bert", **FOLDERS[task])
            made[task] = Encoder(EngineConfig(model=path, device="cpu", dtype="float32", task=task, max_num_batched_tokens=64))
        return made[task]

    return encoder


@pytest.fixture
def encoding(encoder_of: Callable[[str], Encoder]) -> Callable[..., Any]:
    """`async with encoding("embed", setting=value) as client`: an httpx client of an application over an encoder."""

    @asynccontextmanager
    async def start(task: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
        app = create_app(AsyncEngine(encoder_of(task)), Settings(served_model_name="tiny", **settings))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            await app.state.service.loaded()
            client.service = app.state.service
            yield client

    return start
