"""The launch of the Hopper kernel: what reaches the driver, what is encoded again, and when Triton's own way is taken."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from fa_serve.backends.hopper import launch as module
from fa_serve.backends.hopper.launch import Descriptor, View, launch

CUDA = torch.device("cuda", 0)
METADATA = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 64, 1, 64]}


class Base:
    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def closure_of(native: Callable[..., None], **free: Any) -> Callable[..., None]:
    """As Triton wraps a launcher of a kernel with descriptors."""
    launcher, tensordesc_meta = native, free["tensordesc_meta"]

    def inner(*args: Any) -> None:
        launcher(*args, tensordesc_meta)

    return inner


class World:
    """A kernel whose compiled form records how it is launched, and a driver that counts encodings."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.native: list[tuple[Any, ...]] = []
        self.through_triton: list[tuple[Any, ...]] = []
        self.encoded: list[tuple[Any, ...]] = []
        self.run = SimpleNamespace(
            launch=closure_of(lambda *args: self.native.append(args), tensordesc_meta=[METADATA]), global_scratch_size=0,
            profile_scratch_size=0, launch_cooperative_grid=False, launch_pdl=False,
        )  # fmt: skip
        utils = SimpleNamespace(fill_tma_descriptor=lambda *args: self.encoded.append(args) or f"map {args[0]}")
        active = SimpleNamespace(utils=utils, get_current_stream=lambda device: 77 + device)
        patch.setattr(module, "driver", SimpleNamespace(active=active))
        patch.setattr(module, "_COMPILED", {})
        patch.setattr(module, "TensorDescriptor", lambda *args: ("descriptor", *args))

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def through_triton(*args: Any, **options: Any) -> World:
            self.through_triton.append((grid, args, options))
            return self

        return through_triton

    function, packed_metadata = "function", "packed"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


VIEW = ((4, 200, 2, 64), (9, 8, 8, 1), (1, 64, 1, 64), "layout")
NUMBERS = (4, 200, 2, 64, 9, 8, 8, 1)


def test_the_first_launch_goes_through_triton_and_the_next_ones_to_the_driver(world: World) -> None:
    view = View(*VIEW, NUMBERS, {})
    for address in (4096, 4096, 8192, 4096):
        launch(world, ("key",), (5, 1, 1), (None, Descriptor(Base(address), view)), (3.5, 7), CUDA, num_warps=4)
    [(grid, (none, descriptor, *others), options)] = world.through_triton
    assert (grid, none, others, options) == ((5, 1, 1), None, [3.5, 7], {"num_warps": 4})
    assert descriptor[0] == "descriptor"
    assert descriptor[2:] == VIEW
    base = (5, 1, 1, 77, "function", False, False, None, None, "packed", None, None, None)
    assert world.native == [(*base, None, f"map {a}", *NUMBERS, 3.5, 7) for a in (4096, 8192, 4096)]
    assert [args[0] for args in world.encoded] == [4096, 8192], "each address is encoded once"
    host_type = 9  # bfloat16 is 10 on the device
    assert world.encoded[0][1:] == (3, 2, host_type, [1, 64, 1, 64], VIEW[0], VIEW[1], 0)


def test_a_plan_remembers_a_limited_number_of_addresses(world: World) -> None:
    view = View(*VIEW, NUMBERS, {})
    for address in range(2 * module._ENCODED + 10):
        launch(world, ("key",), (1, 1, 1), [Descriptor(Base(address), view)], (), CUDA)
    assert 0 < len(view.encoded) <= module._ENCODED


def test_another_key_is_compiled_again(world: World) -> None:
    for key in ("a", "b", "a"):
        launch(world, (key,), (1, 1, 1), [Descriptor(Base(16), View(*VIEW, NUMBERS, {}))], (), CUDA)
    assert (len(world.through_triton), len(world.native)) == (2, 1)


def test_a_profiler_sees_every_launch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = triton.knobs.HookChain()
    hook.add(lambda metadata: None)
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", hook)
    for _ in range(3):
        launch(world, ("key",), (1, 1, 1), [Descriptor(Base(16), View(*VIEW, NUMBERS, {}))], (), CUDA)
    assert (len(world.through_triton), world.native) == (3, [])


@pytest.mark.parametrize(
    "change", [{"global_scratch_size": 8}, {"launch": closure_of(print, tensordesc_meta=[None])}], ids="".join
)
def test_an_unknown_launcher_is_left_to_triton(world: World, change: dict[str, Any]) -> None:
    vars(world.run).update(change)
    for _ in range(2):
        launch(world, ("key",), (1, 1, 1), [Descriptor(Base(16), View(*VIEW, NUMBERS, {}))], (), CUDA)
    assert (len(world.through_triton), world.native) == (2, [])
