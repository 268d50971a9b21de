"""Who follows: entry points ask on each rank of torchrun, and a constructor never does."""

from __future__ import annotations

from typing import Any

import pytest

from fa_serve.engine import AsyncEngine, Engine, EngineConfig, open_engine
from fa_serve.engine.parallel import follower_main
from fa_serve.engine.parallel.follower_main import follow_if_not_rank_0
from fa_serve.engine.parallel.torchrun import KEY, Torchrun
from fa_serve.spec import ParameterError

TWO = EngineConfig(device="cpu", num_pages=64, tensor_parallel=2)
ENVIRONMENT = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    KEY: "a secret of the test",
}


class FollowedError(Exception):
    """In the place of the end of the process, with what the process was to follow."""


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`rank(1)` makes this process that rank of torchrun's two. Rank 0 is there at once."""

    def be(number: int) -> None:
        for name, value in (ENVIRONMENT | {"RANK": str(number)}).items():
            monkeypatch.setenv(name, value)

    def run(*arguments: Any) -> None:
        raise FollowedError(*arguments)

    monkeypatch.setattr(Torchrun, "connect", lambda torchrun: f"connection of rank {torchrun.rank}")
    monkeypatch.setattr(follower_main, "run", run)
    return be


async def start(config: EngineConfig) -> None:
    await AsyncEngine(config).start()


def test_entry_points_follow_rank_0(rank: Any) -> None:
    rank(1)
    for enter in (follow_if_not_rank_0, open_engine, lambda config: start(config).send(None)):
        with pytest.raises(FollowedError) as followed:
            enter(TWO)
        assert followed.value.args == ("connection of rank 1", 1)
    rank(0)
    follow_if_not_rank_0(TWO)


def test_a_constructor_returns_or_raises(rank: Any) -> None:
    rank(1)
    with pytest.raises(
        ParameterError, match=r"RANK must be 0 for Engine\(\): .*fa_serve.engine.open_engine\(config\).*, got 1"
    ):
        Engine(TWO)


def test_an_engine_of_one_rank_is_opened_on_every_rank(rank: Any) -> None:
    """The ranks of a training job may each have one."""
    rank(1)
    engine = open_engine(EngineConfig(device="cpu", num_pages=64))
    assert isinstance(engine, Engine)
    assert engine.config.num_pages == 64
    engine.close()
