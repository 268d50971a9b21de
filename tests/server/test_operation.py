"""The operator's routes: behind a key, and with the version of the weights in every response."""

import asyncio

import httpx
import pytest
from fa_serve.server.app import create_app
from fa_serve.server.settings import Settings
from starlette.applications import Starlette
from starlette.routing import Mount

from fa_serve.engine import EngineAsleepError, WeightTransferError
from fa_serve.spec import ParameterError

pytestmark = pytest.mark.anyio
KEY = {"authorization": "Bearer operator"}
PLACE = {"name": "lm_head.weight", "dtype": "float32", "shape": [2, 3], "offset": 8}


@pytest.fixture
def told(engine) -> list:
    """What the engine is told. Each update makes another version."""
    calls = []
    engine.weight_version = 0
    engine.is_paused = engine.is_asleep = False

    def method(name):
        async def call(*args, **kwargs):
            calls.append((name, *args, kwargs))
            engine.weight_version += name == "update_weights"
            engine.is_paused = name in ("pause", "sleep")
            engine.is_asleep = name == "sleep"

        return call

    for name in ("pause", "resume", "sleep", "wake_up", "update_weights", "join_weight_group"):
        setattr(engine, name, method(name))
    return calls


async def test_trainers_requests_reach_the_engine(serving, told):
    async with serving(admin_key="operator", api_keys=["user"]) as client:
        paused = await client.post("/pause?mode=keep", headers=KEY)
        assert (paused.status_code, paused.json()) == (200, {"is_paused": True, "is_sleeping": False, "weight_version": 0})
        updated = await client.post("/update_weights", headers=KEY, json={"weight_dir": "/checkpoints/7"})
        assert (updated.json()["weight_version"], updated.headers["x-weight-version"]) == (1, "1")
        places = {"name": "segment", "tensors": [PLACE]}
        await client.post("/update_weights", headers=KEY, json={"shared_memory": places, "keep_pages": True})
        await client.post("/resume", headers=KEY)
        await client.post("/sleep?level=2", headers=KEY)
        await client.post("/sleep", headers=KEY, json={"level": 0})
        sleeping = {"is_paused": True, "is_sleeping": True, "weight_version": 2}
        assert (await client.get("/is_sleeping", headers=KEY)).json() == sleeping
        await client.post("/wake_up?tags=weights&tags=kv_cache", headers=KEY)
        await client.post("/wake_up", headers=KEY, json={})
        await client.post("/pause", headers=KEY, json={"mode": "wait"})
        assert (await client.get("/is_paused", headers=KEY)).json() == sleeping | {"is_sleeping": False}
    assert told == [
        ("pause", {"mode": "keep"}),
        ("update_weights", {"keep_pages": False, "folder": "/checkpoints/7"}),
        ("update_weights", {"keep_pages": True, "segment": "segment", "tensors": [PLACE]}),
        ("resume", {}),
        ("sleep", {"level": 2}),
        ("sleep", {"level": 0}),
        ("wake_up", {"tags": ["weights", "kv_cache"]}),
        ("wake_up", {"tags": None}),
        ("pause", {"mode": "wait"}),
    ]


async def test_a_trainer_meets_the_engine_and_announces_weights(serving, told):
    init = {"master_address": "10.0.0.7", "master_port": 29500, "rank_offset": 1, "world_size": 2}
    info = {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], []]}
    async with serving(admin_key="operator") as client:
        assert (await client.get("/get_world_size", headers=KEY)).json() == {"world_size": 1}
        await client.post("/init_weight_transfer_engine", headers=KEY, json={"init_info": init})
        more = {"rank_offset": 3, "world_size": 5, "backend": "gloo", "timeout": 2}
        await client.post("/init_weight_transfer_engine", headers=KEY, json={"init_info": init | more})
        await client.post("/update_weights", headers=KEY, json={"update_info": info, "dry_run": True})
        await client.post("/update_weights", headers=KEY, json={"update_info": info | {"packed": False}})
        await client.post("/shutdown_weight_transfer_engine", headers=KEY)
    place = {"host": "10.0.0.7", "port": 29500, "rank": 1, "world_size": 2, "backend": None, "timeout": 30.0}
    announced = [{"name": "a", "dtype": "float32", "shape": (2, 3)}, {"name": "b", "dtype": "bfloat16", "shape": ()}]
    assert told == [
        ("join_weight_group", place),
        ("join_weight_group", place | {"rank": 3, "world_size": 5, "backend": "gloo", "timeout": 2}),
        ("update_weights", {"keep_pages": False, "dry_run": True, "announced": announced}),
        ("update_weights", {"keep_pages": False, "announced": announced}),
        ("join_weight_group", {}),
    ]


@pytest.mark.parametrize(
    ("change", "told_back"),
    [
        ({"names": ["a", "b"]}, "names must have as many entries as dtype_names and shapes"),
        ({"names": [], "dtype_names": [], "shapes": []}, "names must have at least 1 item"),
        ({"dtype_names": ["int8"]}, "dtype_names"),
        ({"packed": True}, "packed"),
    ],
)
async def test_an_announcement_that_is_none_is_refused(serving, told, change, told_back):
    info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2, 3]]} | change
    async with serving(admin_key="operator") as client:
        refused = await client.post("/update_weights", headers=KEY, json={"update_info": info})
        assert (refused.status_code, told_back in refused.json()["error"]["message"]) == (400, True), refused.text
    assert told == []


@pytest.mark.parametrize(
    ("change", "told_back"),
    [
        ({"rank_offset": 0}, "rank_offset must be at least 1"),
        ({"rank_offset": 2}, "rank_offset must be below world_size"),
        ({"master_port": 0}, "master_port must be at least 1"),
        ({"timeout": 0}, "timeout must be above 0"),
        ({"backend": "mpi"}, "backend"),
    ],
)
async def test_a_place_that_is_none_is_refused(serving, told, change, told_back):
    init = {"master_address": "10.0.0.7", "master_port": 29500, "rank_offset": 1, "world_size": 2} | change
    async with serving(admin_key="operator") as client:
        refused = await client.post("/init_weight_transfer_engine", headers=KEY, json={"init_info": init})
        assert (refused.status_code, told_back in refused.json()["error"]["message"]) == (400, True), refused.text
    assert told == []


async def test_weights_that_do_not_arrive_are_a_504(serving, engine, told):
    async def fail(**_):
        raise WeightTransferError("a rank has left")

    engine.update_weights = engine.join_weight_group = fail
    async with serving(admin_key="operator") as client:
        for path, body in (("/update_weights", {"weight_dir": "/x"}), ("/shutdown_weight_transfer_engine", {})):
            refused = await client.post(path, headers=KEY, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (504, "weight_transfer_failed")


async def test_every_response_has_the_version_of_the_weights(serving, engine, told):
    async with serving(admin_key="operator") as client:
        engine.weight_version = 7
        for path in ("/v1/models", "/health", "/nowhere", "/is_paused"):
            assert (await client.get(path)).headers["x-weight-version"] == "7", path
        body = {"model": "fake", "prompt": "Hi", "max_tokens": 2}
        for stream in (False, True):
            response = await client.post("/v1/completions", json=body | {"stream": stream})
            assert (response.status_code, response.headers["x-weight-version"]) == (200, "7")
    async with serving() as client:
        assert "x-weight-version" not in (await client.get("/v1/models")).headers


async def test_only_the_administrator_may_tell(serving, told):
    async with serving(admin_key="operator", api_keys=["user"]) as client:
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer operato"}, 401),
            ({"authorization": "Bearer user"}, 403),
            ({"x-api-key": "user"}, 403),
        ):
            init = {"init_info": {"master_address": "10.0.0.7", "master_port": 29500}}
            bodies = {"/update_weights": {"weight_dir": "/x"}, "/init_weight_transfer_engine": init}
            for path in ("/pause", "/resume", "/sleep", "/wake_up", "/shutdown_weight_transfer_engine", *bodies):
                for body in (bodies.get(path, {}), {"unknown": 1}):
                    assert (await client.post(path, headers=headers, json=body)).status_code == status, path
                garbage = await client.post(path, headers=headers, content=b"{")
                assert garbage.status_code == status, "what a body lacks is told to the administrator alone"
            for path in ("/is_paused", "/is_sleeping", "/get_world_size"):
                assert (await client.get(path, headers=headers)).status_code == status
    assert told == []


async def test_only_the_administrator_may_tell_an_application_that_another_one_mounts(engine, told):
    """Its paths begin with the mount's there, and are those of the same routes."""
    app = create_app(engine, Settings(admin_key="operator", api_keys=["user"]))
    transport = httpx.ASGITransport(Starlette(routes=[Mount("/llm", app)]))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost/llm") as client,
    ):
        await app.state.service.loaded()
        assert (await client.post("/pause", headers={"authorization": "Bearer user"})).status_code == 403
        assert told == []
        assert (await client.post("/pause", headers=KEY)).status_code == 200
    assert told == [("pause", {"mode": "abort"})]


@pytest.mark.parametrize("settings", [{}, {"admin_key": "operator", "api_keys": ["user"]}], ids=["no key", "keys"])
async def test_no_other_path_reaches_the_administrators_routes(serving, told, settings):
    """The pattern of a route of Starlette also matches its path with a newline at the end."""
    async with serving(**settings) as client:
        for path in ("/pause", "/resume", "/sleep", "/wake_up", "/shutdown_weight_transfer_engine"):
            for other in (f"{path}%0A", f"{path}%0a", f"{path}%00", f"{path}%0D%0A", f"{path}/", f"{path};"):
                response = await client.post(other, headers={"authorization": "Bearer user"}, json={})
                assert response.status_code in (307, 403, 404), other
    assert told == []


async def test_without_a_key_nobody_may_tell(serving, told):
    async with serving() as client:
        for headers in ({}, KEY):
            refused = await client.post("/pause", headers=headers)
            assert (refused.status_code, "FA_SERVE_ADMIN_KEY" in refused.text) == (403, True)
            assert (await client.post("/update_weights", headers=headers, json={"weight_dir": "/x"})).status_code == 403
    with pytest.raises(ValueError, match="one word without spaces"):
        Settings(admin_key="two words")
    assert told == []


async def test_what_cannot_be_told_is_refused(serving, engine, told):
    async with serving(admin_key="operator") as client:
        for body, word in (
            ({}, "weight_dir must be given, or else shared_memory or update_info"),
            ({"weight_dir": "/x", "shared_memory": {"name": "s", "tensors": []}}, "and only one of the three"),
            ({"weight_dir": "/x", "update_infos": {}}, "Unknown or unsupported field: update_infos"),
            ({"shared_memory": {"name": "s", "tensors": [PLACE | {"dtype": "int8"}]}}, "dtype"),
        ):
            refused = await client.post("/update_weights", headers=KEY, json=body)
            assert refused.status_code == 400
            assert word in refused.json()["error"]["message"]
        assert (await client.post("/sleep?level=many", headers=KEY)).status_code == 400
        assert told == []

        async def fail(**_):
            raise ParameterError("weight_dir", "be a folder", "/x")

        engine.update_weights = fail
        refused = await client.post("/update_weights", headers=KEY, json={"weight_dir": "/x"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "weight_dir")

        async def sleep(**_):
            raise EngineAsleepError("the engine sleeps")

        engine.update_weights = sleep
        refused = await client.post("/update_weights", headers=KEY, json={"weight_dir": "/x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "engine_asleep")


async def test_an_operator_who_leaves_does_not_stop_an_update(serving, engine, told):
    begun = asyncio.Event()
    go = asyncio.Event()
    done = asyncio.Event()

    async def update(**_):
        begun.set()
        await go.wait()
        done.set()

    engine.update_weights = update
    async with serving(admin_key="operator") as client:
        call = asyncio.create_task(client.post("/update_weights", headers=KEY, json={"weight_dir": "/x"}))
        await begun.wait()
        call.cancel()
        go.set()
        await asyncio.wait_for(done.wait(), 5)
