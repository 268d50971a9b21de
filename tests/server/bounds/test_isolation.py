"""What the engine is told of a request's client: whose turn it takes and whose cached prefixes it shares."""

import asyncio

import pytest
from fa_serve.server.bounds.isolation import Isolation
from fa_serve.server.settings import Settings

from fa_serve.spec import ParameterError

pytestmark = pytest.mark.anyio
TEXT = {"model": "fake", "prompt": "Hi"}


def salts(**settings):
    isolation = Isolation(Settings(**settings))
    asked = [(key, salt) for key in (None, "one", "two") for salt in (None, "a", "b")]
    return {each: isolation.cache_salt(*each) for each in asked}


def test_by_default_each_key_and_each_salt_has_prefixes_to_itself():
    found = salts()
    assert found[None, None] is None
    assert len(set(found.values())) == 9
    isolation = Isolation(Settings())
    assert isolation.cache_salt("one", "a") == isolation.cache_salt("one", "a")
    assert isolation.cache_salt("one", "a") != found["one", "a"], "the secret is this process's"


@pytest.mark.parametrize("sharing", ["key", "all"])
def test_with_a_folder_of_pages_a_later_process_has_the_same_salts(sharing, tmp_path):
    found = salts(prefix_sharing=sharing, kv_host_folder=tmp_path)
    assert salts(prefix_sharing=sharing, kv_host_folder=tmp_path) == found
    assert found[None, None] is None
    assert len(set(found.values())) == (9 if sharing == "key" else 3)
    isolation = Isolation(Settings(kv_host_folder=tmp_path))
    assert isolation.client("one") not in (found["one", None], Isolation(Settings(kv_host_folder=tmp_path)).client("one"))


def test_a_folder_of_pages_that_nobody_shares_is_refused(tmp_path):
    settings = Settings(prefix_sharing="none", kv_host_memory=1 << 20, kv_host_folder=tmp_path)
    with pytest.raises(ParameterError, match="kv_host_folder must be None with prefix_sharing none"):
        settings.engine_config()


def test_all_keys_may_share_prefixes_and_salts_still_separate():
    found = salts(prefix_sharing="all")
    for salt in (None, "a", "b"):
        assert found[None, salt] == found["one", salt] == found["two", salt]
    assert (found["one", None], len(set(found.values()))) == (None, 3)


def test_no_two_requests_share_prefixes_if_nothing_is_to_be_shared():
    isolation = Isolation(Settings(prefix_sharing="none"))
    assert len({isolation.cache_salt("one", "a") for _ in range(5)} - {None}) == 5


def test_a_client_is_a_key_unless_priorities_are_global():
    isolation = Isolation(Settings())
    assert isolation.client(None) is None
    assert isolation.client("one") == isolation.client("one") != isolation.client("two")
    assert "one" not in isolation.client("one")
    assert Isolation(Settings(priority_scope="global")).client("one") is None


async def test_the_engine_gets_the_client_and_the_salt_of_a_request(serving, engine):
    async with serving(api_keys="one,two") as client:
        for key, fields in (("one", {}), ("one", {"cache_salt": "a"}), ("two", {"priority": 1000})):
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.post("/v1/completions", json=TEXT | fields, headers=headers)).status_code == 200
        first, salted, other = engine.seen
        assert first.client == salted.client != other.client
        assert len({first.cache_salt, salted.cache_salt, other.cache_salt, None}) == 4


@pytest.mark.parametrize("fields", [{"priority": -1001}, {"priority": -(2**31)}, {"cache_salt": ""}, {"cache_salt": "x" * 513}])
async def test_values_out_of_bounds_are_refused(serving, conforms, fields):
    async with serving() as client:
        response = await client.post("/v1/completions", json=TEXT | fields)
        assert response.status_code == 400
        conforms("ErrorResponse", response.json())
        assert (response.json()["error"]["param"], response.json()["error"]["code"]) == (*fields, "invalid_value")


async def test_one_of_several_keys_leaves_room_in_the_queue(serving, engine):
    engine.gate.clear()
    async with serving(api_keys="one,two,three", max_num_seqs=4, max_waiting=16) as client:

        def post(key):
            return client.post("/v1/completions", json=TEXT, headers={"authorization": f"Bearer {key}"})

        tasks = []
        refused = {}
        for key in ("one", "two", "three"):
            for _ in range(30):
                task = asyncio.create_task(post(key))
                seen = len(engine.seen)
                while not task.done() and len(engine.seen) == seen:
                    await asyncio.sleep(0.001)
                if task.done():
                    refused[key] = task.result()
                    break
                tasks.append(task)
        assert [refused[key].status_code for key in ("one", "two")] == [429, 429]
        assert "--max-key-share 0.9" in refused["one"].json()["error"]["message"]
        assert len(tasks) >= 18 + 1
        engine.gate.set()
        assert {response.status_code for response in await asyncio.gather(*tasks)} == {200}


async def test_the_only_key_may_fill_the_queue(serving, engine):
    engine.gate.clear()
    async with serving(api_keys="one", max_num_seqs=1, max_waiting=3) as client:
        headers = {"authorization": "Bearer one"}
        tasks = [asyncio.create_task(client.post("/v1/completions", json=TEXT, headers=headers)) for _ in range(4)]
        while client.service.in_flight < 4:
            await asyncio.sleep(0.001)
        engine.gate.set()
        assert {response.status_code for response in await asyncio.gather(*tasks)} == {200}
