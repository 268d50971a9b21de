"""Adapters over HTTP: by name in `model`, listed, loaded and unloaded by the administrator, and from a folder on request."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fa_serve.server.app import create_app
from fa_serve.server.observe.metrics import AdapterCounters
from fa_serve.server.settings import Settings, load
from peft_adapters import ATTENTION, PeftForwards, save_adapter
from prometheus_client import CollectorRegistry

from fa_serve.demo import model_path
from fa_serve.engine import AsyncEngine, EngineConfig, RequestOutput
from fa_serve.engine.start.loading import load_model
from fa_serve.spec import ParameterError

ADMIN = {"authorization": "Bearer root-key"}
PROMPT = [40, 41, 42, 43, 44]
ENGINE = EngineConfig(
    device="cpu",
    dtype="float32",
    num_pages=64,
    page_size=4,
    max_num_seqs=4,
    lora_bytes=1 << 24,
    max_lora_rank=16,
    process=False,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of the embedded model, in one folder."""
    folder = tmp_path_factory.mktemp("adapters")
    model = EngineConfig(model=model_path(), device="cpu", dtype="float32")
    return {
        name: save_adapter(folder / name, model=load_model(model), seed=seed, target_modules=ATTENTION)
        for seed, name in enumerate(("french", "latin"))
    }


@asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(AsyncEngine(ENGINE), Settings(**{"admin_key": "root-key"} | settings))
    async with app.router.lifespan_context(app):
        await app.state.service.loaded()
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield client


def completion(model: str) -> dict[str, object]:
    return {"model": model, "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "return_token_ids": True, "ignore_eos": True}


async def tokens(client: httpx.AsyncClient, model: str) -> list[int]:
    reply = await client.post("/v1/completions", json=completion(model))
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    return reply.json()["choices"][0]["token_ids"]


@pytest.mark.slow
@pytest.mark.anyio
async def test_the_administrator_loads_and_unloads(folders) -> None:
    peft = PeftForwards(load_model(EngineConfig(model=model_path(), device="cpu", dtype="float32")), folders)
    async with serving() as client:
        unknown = await client.post("/v1/completions", json=completion("french"))
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        for name, folder in folders.items():
            body = {"lora_name": name, "lora_path": str(folder)}
            assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 403
            reply = await client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
            assert (reply.status_code, reply.json()) == (200, {"lora_name": name, "status": "loaded"})
        listed = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["fa-serve-demo", "french", "latin"]
        assert [card.get("parent") for card in listed] == [None, "fa-serve-demo", "fa-serve-demo"]
        assert (await client.get("/v1/models/latin")).json()["id"] == "latin"
        found = await asyncio.gather(*(tokens(client, name) for name in ("french", "fa-serve-demo", "latin")))
        for name, answer in zip(("french", None, "latin"), found, strict=True):
            assert answer == peft.choose(name, PROMPT, answer)
        assert len(set(map(tuple, found))) == 3
        assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "french"})).status_code == 403
        reply = await client.post("/v1/unload_lora_adapter", json={"lora_name": "french"}, headers=ADMIN)
        assert reply.json() == {"lora_name": "french", "status": "unloaded"}
        assert (await client.post("/v1/completions", json=completion("french"))).status_code == 404
        assert await tokens(client, "latin") == found[2]


@pytest.mark.parametrize(
    ("name", "path", "status", "param"),
    [
        ("a/b", "{}/french", 400, "lora_name"),
        ("../french", "{}/french", 400, "lora_name"),
        ("fa-serve-demo", "{}/french", 400, "lora_name"),
        ("french", "{}/nothing", 400, "lora_path"),
    ],
)
@pytest.mark.anyio
async def test_hostile_loads_are_refused_and_change_nothing(folders, name, path, status, param) -> None:
    async with serving() as client:
        body = {"lora_name": name, "lora_path": path.format(folders["french"].parent)}
        reply = await client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["fa-serve-demo"]
        assert len(await tokens(client, "fa-serve-demo")) == 5


@pytest.mark.anyio
async def test_a_folder_of_adapters_is_loaded_on_request_and_again_when_it_changes(folders, tmp_path) -> None:
    model = EngineConfig(model=model_path(), device="cpu", dtype="float32")
    save_adapter(tmp_path / "one", model=load_model(model), seed=5, target_modules=ATTENTION)
    (tmp_path / "broken").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "broken" / name).write_text("{}")
    async with serving(lora_folder=tmp_path) as client:
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["fa-serve-demo", "broken", "one"]
        before = await tokens(client, "one")
        assert before == await tokens(client, "one")
        save_adapter(tmp_path / "one", model=load_model(model), seed=6, target_modules=ATTENTION, r=8)
        assert await tokens(client, "one") != before
        assert (await client.post("/v1/completions", json=completion("broken"))).status_code == 503
        for name in ("../" + tmp_path.name, "one/", ".", "x\0"):
            assert (await client.post("/v1/completions", json=completion(name))).status_code in (400, 404)


async def adapter_series(client: httpx.AsyncClient) -> dict[str, float]:
    """The metrics of adapters, without those of when they were made."""
    text = (await client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("fa_serve:lora_") and "_created" not in line]
    return {name: float(value) for name, value in (line.removeprefix("fa_serve:").rsplit(" ", 1) for line in lines)}


@pytest.mark.anyio
async def test_metrics_tell_which_adapter_is_used(folders, tmp_path) -> None:
    shutil.copytree(folders["french"], tmp_path / "french")
    (tmp_path / "broken").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "broken" / name).write_text("{}")
    async with serving(lora_folder=tmp_path) as client:
        await tokens(client, "fa-serve-demo")
        for name, status in (("nobody", 404), ("a" * 300, 404), ("broken", 503)):
            assert (await client.post("/v1/completions", json=completion(name))).status_code == status
        assert await adapter_series(client) == {}, "a name of a client is in no label"
        body = {"lora_name": "latin", "lora_path": str(folders["latin"])}
        assert (await client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)).status_code == 200
        for _ in range(2):
            await tokens(client, "latin")
        beams = completion("french") | {"use_beam_search": True, "n": 2}
        assert (await client.post("/v1/completions", json=beams)).status_code == 200, "also as the first request"
        found = await adapter_series(client)
    french = 'adapter="french",model_name="fa-serve-demo"'
    latin = 'adapter="latin",model_name="fa-serve-demo"'
    assert found == {
        f'lora_request_success_total{{adapter="french",finished_reason="length",{french.split(",")[1]}}}': 2,
        f'lora_request_success_total{{adapter="latin",finished_reason="length",{latin.split(",")[1]}}}': 2,
        f"lora_prompt_tokens_total{{{french}}}": 10,
        f"lora_generation_tokens_total{{{french}}}": 10,
        f"lora_prompt_tokens_total{{{latin}}}": 10,
        f"lora_generation_tokens_total{{{latin}}}": 10,
    }


def test_the_labels_of_adapters_are_bounded(monkeypatch) -> None:
    """A folder of adapters may hold any number of them, one after the other."""
    monkeypatch.setattr("fa_serve.server.observe.metrics.MAX_ADAPTERS", 2)
    registry = CollectorRegistry()
    counters = AdapterCounters(registry)
    for name in ("a", "b", "c", "d", "a"):
        counters.ended("m", name, "stop", RequestOutput("1", [1], num_prompt_tokens=3, num_output_tokens=2))
    counters.ended("m", "b", "abort", None)
    value = registry.get_sample_value
    labels = [{"model_name": "m", "adapter": name} for name in ("a", "b", "(others)", "c")]
    assert [value("fa_serve:lora_prompt_tokens_total", each) for each in labels] == [6, 3, 6, None]
    assert [value("fa_serve:lora_generation_tokens_total", each) for each in labels] == [4, 2, 4, None]
    assert value("fa_serve:lora_request_success_total", labels[1] | {"finished_reason": "abort"}) == 1


@pytest.mark.anyio
async def test_without_an_administrators_key_nobody_changes_anything(folders) -> None:
    async with serving(admin_key=None) as client:
        body = {"lora_name": "french", "lora_path": str(folders["french"])}
        reply = await client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
        assert reply.status_code == 403
        assert "FA_SERVE_ADMIN_KEY" in reply.json()["error"]["message"]


@pytest.mark.anyio
async def test_an_api_key_is_not_the_administrators(folders) -> None:
    async with serving(api_keys=["user-key"]) as client:
        body = {"lora_name": "french", "lora_path": str(folders["french"])}
        for key, status in (("user-key", 403), ("root-key", 200), ("nobody", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.post("/v1/load_lora_adapter", json=body, headers=headers)).status_code == status
            if key != "root-key":
                assert (await client.post("/v1/unload_lora_adapter", json={}, headers=headers)).status_code == status


@pytest.mark.parametrize("settings", [{}, {"served_model_name": "m"}])
def test_no_adapter_has_the_name_of_the_model(tmp_path, settings) -> None:
    """Requests for it would be for the model, whatever the operator has meant."""
    name = settings.get("served_model_name", "fa-serve-demo")
    with pytest.raises(ParameterError, match=f"give no adapter the name of the model, '{name}'"):
        Settings(lora=f"{name}={tmp_path}", **settings).engine_config()


@pytest.mark.anyio
async def test_a_folder_with_the_name_of_the_model_is_not_listed(folders, tmp_path) -> None:
    name = EngineConfig().model_name
    shutil.copytree(folders["french"], tmp_path / name)
    shutil.copytree(folders["latin"], tmp_path / "latin")
    async with serving(lora_folder=tmp_path) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card.get("parent")) for card in listed] == [(name, None), ("latin", name)]


def test_settings_reach_the_engine(tmp_path) -> None:
    settings = load({"lora": "a=/x,b=/y", "max_lora_rank": 8})
    assert settings.engine_config().lora == ["a=/x", "b=/y"]
    assert settings.engine_config().lora_budget == 1 << 30
    assert load({"lora_folder": tmp_path}).engine_config().lora_budget == 1 << 30
    assert load({}).engine_config().lora_budget == 0
    with pytest.raises(ValueError, match="NAME=FOLDER"):
        load({"lora": "a"}).engine_config()
