"""What the application is assembled from, by its settings: open paths, CORS, a warning without keys."""

import pytest

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_keys": "one"}, False),
        ({}, False),
    ],
)
async def test_a_server_without_keys_says_so_where_others_can_reach_it(serving, caplog, settings, said):
    async with serving(**settings):
        assert ("no API key is set: every client that can reach 0.0.0.0, port 8000, can use the model" in caplog.text) is said


@pytest.mark.parametrize(("settings", "said"), [({}, True), ({"api_keys": "one"}, False)])
async def test_the_clients_variable_for_its_key_is_no_key_of_the_server(serving, caplog, monkeypatch, settings, said):
    """One letter less, and everybody would be served in silence."""
    monkeypatch.setenv("FA_SERVE_API_KEY", "one")
    async with serving(**settings) as client:
        assert (await client.get("/v1/models")).status_code == (200 if said else 401)
    assert ("the keys that this server accepts are in FA_SERVE_API_KEYS" in caplog.text) is said


async def test_public_metrics(serving):
    async with serving(api_keys="one", public_metrics=True) as client:
        assert (await client.get("/metrics")).status_code == 200


async def test_cors_only_when_asked(serving):
    ask = {"origin": "https://a", "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with serving() as client:
        assert "access-control-allow-origin" not in (await client.get("/health", headers={"origin": "https://a"})).headers
    async with serving(cors_origins="https://a", api_keys="one") as client:
        preflight = await client.options("/v1/completions", headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a"
        stranger = await client.options("/v1/completions", headers={**ask, "origin": "https://b"})
        assert "access-control-allow-origin" not in stranger.headers
