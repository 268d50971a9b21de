"""A launch by its key: what may change the machine code must be part of it, what is not aligned must not use it, and what
reaches the driver is what Triton would have passed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from inspect import getsource, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.amd.driver import HIPLauncher
from triton.backends.nvidia import driver as nvidia
from triton.experimental.gluon.nvidia import hopper

from fa_serve.launching import launch as module
from fa_serve.launching.launch import Launch, NotCompiledError, View


class Pointer:
    """As much of a CUDA tensor as a launch looks at."""

    is_cuda = True

    def __init__(self, address: int = 4096, dtype: torch.dtype = torch.float16) -> None:
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return 0


class Kernel:
    """Counts what goes through the JIT, and what a compiled kernel is launched with."""

    def __init__(self) -> None:
        self.compiled = 0
        self.first: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.watched: list[tuple[Any, ...]] = []
        self.run = SimpleNamespace(
            launch=self.native,
            global_scratch_size=0,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=True,
            arg_annotations="annotations",
            kernel_signature="signature",
        )

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def jit(*args: object, **options: object) -> Compiled:
            self.compiled += 1
            self.first.append((grid, args, options))
            return Compiled(self)

        return jit

    def native(self, x: int, y: int, z: int, *args: Any) -> None:
        """As Triton's launcher in C takes them: no scratch memory, no description, no hooks."""
        if module._FLAT_ARGUMENTS:
            assert args[:10] == (77, "function", False, True, None, None, "metadata", None, None, None)
            self.launched.append(((x, y, z), args[10:]))
        else:
            *fixed, arguments = args
            assert fixed[:4] == [77, "function", False, True]
            assert fixed[4:] == ["metadata", None, None, None, None, None, "annotations", "signature"]
            self.launched.append(((x, y, z), arguments))


class Compiled:
    function = "function"
    packed_metadata = "metadata"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.run = kernel.run

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.kernel.watched.append((grid, args))


@pytest.fixture
def encoded() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture(params=["flat", "packed"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, encoded: list[tuple[Any, ...]]) -> Kernel:
    """Launched as Triton 3.6 (flat) and as later releases (packed) launch, whichever is installed."""
    is_flat = request.param == "flat"
    monkeypatch.setattr(module, "_FLAT_ARGUMENTS", is_flat)
    monkeypatch.setattr(module, "_HAS_KNOWN_LAUNCHER", True)
    monkeypatch.setattr(Launch, "_send", Launch._send_flat if is_flat else Launch._send_packed)
    monkeypatch.setattr(module, "_COMPILED", {})
    monkeypatch.setattr(module, "current_device", lambda: 0)
    encoder = "fill_tma_descriptor" if is_flat else "fill_tma_descriptor_tiled"
    utils = SimpleNamespace(**{encoder: lambda *args: encoded.append(args) or f"map {args[0]}"})
    active = SimpleNamespace(utils=utils, get_current_stream=lambda device: 77 + device)
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(hopper, "TensorDescriptor", lambda *args: ("descriptor", *args))
    return Kernel()


def launch(
    kernel: Kernel,
    *,
    grid: int,
    pointers: Sequence[Pointer | None],
    varying: Sequence[float],
    fixed: Sequence[Any],
    options: dict[str, Any],
    strides: Sequence[int],
    late: Sequence[int] = (),
) -> None:
    """One call of a new Launch."""
    Launch(kernel, grid, varying, fixed, options, strides)(pointers, *late)


BASE: dict[str, Any] = {
    "grid": 3,
    "pointers": (Pointer(), None),
    "varying": (1, 0.5),
    "fixed": (16, True),
    "options": {"num_warps": 4},
    "strides": (32, 64),
}


def test_the_second_launch_skips_the_jit(kernel: Kernel) -> None:
    launch(kernel, **BASE)
    launch(kernel, **(BASE | {"pointers": (Pointer(8192), None), "varying": (7, 0.25), "grid": 5}))
    assert kernel.compiled == 1
    assert kernel.launched == [((5, 1, 1), (8192, 0, 7, 0.25, 32, 64, 16, True))]


def test_the_number_of_compiled_kernels_is_limited(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_COMPILED", 3)
    for block in (1, 2, 3, 4, 4, 1):
        launch(kernel, **(BASE | {"fixed": (block, True)}))
    assert len(module._COMPILED) == 2
    assert [args[-2] for _, args in kernel.launched] == [4], "all others went through the JIT"


@pytest.mark.parametrize("known", [True, False], ids=["known launcher", "unknown launcher"])
def test_shared_memory_is_asked_for_once(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    asked: list[object] = []
    monkeypatch.setattr(module, "prefer_shared_memory", asked.append)
    monkeypatch.setattr(module, "_HAS_KNOWN_LAUNCHER", known)
    given = (kernel, BASE["grid"], BASE["varying"], BASE["fixed"], BASE["options"], BASE["strides"])
    Launch(*given)(BASE["pointers"])
    assert asked == [], "nothing prefers it"
    module._COMPILED.clear()
    for _ in range(3):
        Launch(*given, prefers_shared_memory=True)(BASE["pointers"])
    assert asked == ["function"]


def test_late_numbers_come_right_after_the_tensors(kernel: Kernel) -> None:
    kept = Launch(kernel, 3, (1, 0.5), (16, True), {"num_warps": 4}, (32, 64))
    for late in ((100, 640), (101, 656), (102, 672)):
        kept((Pointer(), None), *late)
    assert kernel.compiled == 1
    assert kernel.launched == [((3, 1, 1), (4096, 0, *late, 1, 0.5, 32, 64, 16, True)) for late in ((101, 656), (102, 672))]


def test_a_plan_keeps_all_but_addresses(kernel: Kernel) -> None:
    kept = Launch(kernel, 3, (1, 0.5), (16, True), {"num_warps": 4}, (32, 64))
    for address in (4096, 8192, 4096):
        kept((Pointer(address), None, Pointer(16)))
    kept((Pointer(), None, Pointer(8)))
    assert kernel.compiled == 2, "once at first, once unaligned"
    assert kernel.launched == [((3, 1, 1), (a, 0, 16, 1, 0.5, 32, 64, 16, True)) for a in (8192, 4096)]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_watched_launch_takes_tritons_own_way(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    kept = Launch(kernel, 3, (), (), {})
    for _ in range(2):
        kept(BASE["pointers"])
    chain = triton.knobs.HookChain()
    chain.add(lambda metadata: None)
    monkeypatch.setattr(triton.knobs.runtime, hook, chain)
    kept(BASE["pointers"])
    assert (kernel.compiled, len(kernel.launched)) == (1, 1)
    assert kernel.watched == [((3, 1, 1), BASE["pointers"])]


def wrapped(launcher: Callable[..., None], tensordesc_meta: Any) -> Callable[..., None]:
    """As Triton wraps a launcher of a kernel with descriptors."""

    def inner(*args: Any) -> None:
        launcher(*args, tensordesc_meta)

    return inner


@pytest.mark.every_case
@pytest.mark.parametrize(
    "change",
    [
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
        {"launch": wrapped(print, [None])},
        {"launch_pdl": None},
        {"gsan_enabled": True},
    ],
    ids="".join,
)
def test_an_unknown_launcher_is_left_to_triton(kernel: Kernel, change: dict[str, Any]) -> None:
    vars(kernel.run).update(change)
    if change == {"launch_pdl": None}:
        del kernel.run.launch_pdl  # as AMD's, whose launcher takes something else
    for _ in range(2):
        launch(kernel, **BASE)
    assert (kernel.compiled, len(kernel.watched), kernel.launched) == (1, 1, [])


def test_another_release_of_triton_is_launched_as_it_documents(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HAS_KNOWN_LAUNCHER", False)
    launch(kernel, **BASE)
    launch(kernel, **BASE)
    assert (kernel.compiled, len(kernel.watched), kernel.launched) == (1, 1, [])


def test_what_is_called_is_tritons_own_launcher() -> None:
    """The grid, a stream, the code, two switches, then scratch, metadata, the launch's own and two hooks in the order of the
    release; numbers pass for pointers."""
    assert list(signature(nvidia.CudaLauncher.__call__).parameters)[1:6] == ["gridX", "gridY", "gridZ", "stream", "function"]
    assert "launch_pdl" not in getsource(HIPLauncher), "would be taken for NVIDIA's"
    if not module._FLAT_ARGUMENTS:
        source = (Path(nvidia.__file__).parent / "driver.c").read_text()
        assert '"iiiKKpp(iii)OOOOOOy*O"' in source
        order = ["&launch_pdl,", "&num_warps,", "&launch_metadata,", "&launch_enter_hook,", "&global_scratch_obj,"]
        order += ["&profile_scratch_obj,", "&arg_annotations,", "&signature,", "&kernel_args)"]
        call = source[source.index('"iiiKKpp(iii)OOOOOOy*O"') :]
        assert sorted(order, key=call.index) == order
        pointer = source[source.index("extractPointer(void *ptr") :]
        assert pointer.index("PyLong_Check(obj)") < pointer.index("cuPointerGetAttribute")
        assert "KiiiOOOi" in source, "the arguments of the encoder of descriptors"
        return
    assert nvidia._BASE_ARGS_FORMAT == "iiiKKppOOOOOO"
    source = getsource(nvidia.make_launcher)
    order = [
        "&gridX",
        "&_stream",
        "&_function",
        "&launch_cooperative_grid",
        "&launch_pdl",
        "&global_scratch_obj",
        "&profile_scratch_obj",
        "&kernel_metadata",
        "&launch_metadata",
        "&launch_enter_hook",
    ]
    assert sorted(order, key=source.index) == order
    assert "if (PyLong_Check(obj)) {{\n    ptr_info.dev_ptr = PyLong_AsUnsignedLongLong(obj);" in source


def test_a_stride_that_grows_with_a_cache_is_of_one_kind(kernel: Kernel) -> None:
    for length in range(1, 9):
        launch(kernel, **(BASE | {"strides": (64, 64 * length)}))
    assert kernel.compiled == 1
    assert [args[5] for _, args in kernel.launched] == [64 * length for length in range(2, 9)]


@pytest.mark.every_case
@pytest.mark.parametrize(
    "change",
    [
        {"pointers": (Pointer(), Pointer())},
        {"pointers": (Pointer(dtype=torch.bfloat16), None)},
        {"pointers": (Pointer(4104), None)},
        {"fixed": (32, True)},
        {"fixed": (16, False)},
        {"options": {"num_warps": 8}},
        {"strides": (8, 64)},
        {"strides": (1, 64)},
        {"strides": (32, 1 << 35)},
        {"late": (640, 8)},
    ],
    ids=["presence", "dtype", "alignment", "stride", "constexpr", "option", "multiple of 16", "one", "width", "late"],
)
def test_what_changes_the_code_goes_through_the_jit(kernel: Kernel, change: dict[str, Any]) -> None:
    launch(kernel, **(BASE | {"late": (640, 16)} if "late" in change else BASE))
    launch(kernel, **(BASE | change))
    assert kernel.compiled == 2
    assert not kernel.launched


def test_each_device_has_its_own(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch runs on the device of its tensors, even if another device is current or the launch was made on another one."""
    current = [0]
    monkeypatch.setattr(module, "current_device", lambda: current[0])

    @contextmanager
    def switch(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", switch)
    went_to: list[int] = []
    original = Kernel.__getitem__
    monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: went_to.append(current[0]) or original(self, grid))
    kept = Launch(kernel, 3, (), (), {})
    for _ in range(2):
        kept(BASE["pointers"])
    monkeypatch.setattr(Pointer, "get_device", lambda self: 1)
    kept(BASE["pointers"])
    assert went_to == [0, 1]
    assert current == [0]
    assert len(kernel.launched) == 1


def test_an_unaligned_launch_is_never_remembered(kernel: Kernel) -> None:
    for _ in range(3):
        launch(kernel, **(BASE | {"pointers": (Pointer(), Pointer(4100))}))
    assert kernel.compiled == 3
    assert not module._COMPILED


def future_kernel(future: Future[Any]) -> triton.FutureKernel:
    """What a thread compiles, with functions that do nothing: one in Triton 3.6, and since 3.9 another one."""
    functions = [lambda compiled: None] * (len(signature(triton.FutureKernel).parameters) - 1)
    return triton.FutureKernel(*functions, future)


def test_with_threads_nothing_is_launched_before_it_is_compiled(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A computation ends at its first kernel that is missing, so what follows reads nothing that was not written."""
    other = Kernel()
    futures: dict[int, Future[Any]] = {}

    def warmup(self: Kernel, *args: object, **options: object) -> triton.FutureKernel:
        assert id(self) not in futures, "is asked for once"
        futures[id(self)] = Future()
        return future_kernel(futures[id(self)])

    monkeypatch.setattr(Kernel, "warmup", warmup, raising=False)

    def compute() -> None:
        launch(kernel, **BASE)
        launch(other, **BASE)

    with module.compiling_in_threads(2):
        for _ in range(2):
            with pytest.raises(NotCompiledError) as caught:
                compute()
            assert caught.value.compiled is futures[id(kernel)]
        assert list(futures) == [id(kernel)]
        assert not kernel.launched
        futures[id(kernel)].set_result(Compiled(kernel))
        with pytest.raises(NotCompiledError):
            compute()
        assert (len(kernel.launched), other.launched) == (1, [])
        futures[id(other)].set_result(Compiled(other))
        compute()
        assert (len(kernel.launched), len(other.launched)) == (2, 1)
    compute()
    assert (kernel.compiled, other.compiled) == (0, 0), "nothing went through the JIT"
    assert kernel.launched[0] == ((3, 1, 1), (4096, 0, 1, 0.5, 32, 64, 16, True))


def test_a_kernel_that_cannot_be_compiled_fails_at_its_launch(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    future: Future[Any] = Future()
    monkeypatch.setattr(Kernel, "warmup", lambda self, *args, **options: future_kernel(future), raising=False)
    with module.compiling_in_threads(1):
        with pytest.raises(NotCompiledError):
            launch(kernel, **BASE)
        future.set_exception(ValueError("no such instruction"))
        with pytest.raises(ValueError, match="no such instruction"):
            launch(kernel, **BASE)
    assert not kernel.launched


def test_with_threads_what_the_jit_has_is_launched_at_once(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "warmup", lambda self, *args, **options: Compiled(self), raising=False)
    with module.compiling_in_threads(1):
        launch(kernel, **BASE)
    assert (kernel.compiled, len(kernel.launched)) == (0, 1)


def test_with_threads_two_keys_of_one_kernel_are_launched(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of different keys may need one machine code. Triton 3.9 forgets the future when one has taken the result."""
    resolved = SimpleNamespace(future=None, result=lambda: Compiled(kernel))
    monkeypatch.setattr(triton, "FutureKernel", SimpleNamespace)
    monkeypatch.setattr(Kernel, "warmup", lambda self, *args, **options: resolved, raising=False)
    with module.compiling_in_threads(1):
        launch(kernel, **BASE)
    assert (kernel.compiled, len(kernel.launched)) == (0, 1)


METADATA = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 64, 1, 64]}
VIEW = ((4, 200, 2, 64), (9, 8, 8, 1), (1, 64, 1, 64), "layout")


def with_views(kernel: Kernel, views: Sequence[View | None]) -> Launch:
    kernel.run.launch = wrapped(kernel.native, [METADATA] * (len(views) - views.count(None)))
    return Launch(kernel, 5, (3.5, 7), ("variant",), {"num_warps": 4}, views=views)


def test_descriptors_are_encoded_once_for_an_address(kernel: Kernel, encoded: list[tuple[Any, ...]]) -> None:
    kept = with_views(kernel, (View(*VIEW), None))
    for address in (4096, 4096, 8192, 4096):
        kept((Pointer(address), Pointer(), Pointer(32)))
    [(grid, (descriptor, none, pointer, *numbers), options)] = kernel.first
    assert (grid, none, pointer.address, numbers) == ((5, 1, 1), None, 32, [3.5, 7, "variant"])
    assert options == {"enable_fp_fusion": True, "num_warps": 4}
    assert descriptor[0] == "descriptor"
    assert descriptor[2:] == VIEW
    rest = (*VIEW[0], *VIEW[1], None, 32, 3.5, 7, "variant")
    assert kernel.launched == [((5, 1, 1), (f"map {a}", *rest)) for a in (4096, 8192, 4096)]
    assert [args[0] for args in encoded] == [4096, 8192]
    host_type = 9  # bfloat16 is 10 on the device
    assert encoded[0][1:] == (3, 2, host_type, [1, 64, 1, 64], VIEW[0], VIEW[1], 0)


def test_a_sender_is_shared_when_its_views_can_be_encoded(kernel: Kernel, encoded: list[tuple[Any, ...]]) -> None:
    """Another thread that finds it goes by it at once."""
    shared: list[bool] = []

    class Watched(View):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "metadata" and value:
                shared.append(kept._driver is not None)
            super().__setattr__(name, value)

    kept = with_views(kernel, (Watched(*VIEW), Watched(*VIEW)))
    for _ in range(3):
        kept((Pointer(), Pointer()))
    assert shared == [False, False]
    assert len(kernel.launched) == 2


def test_views_of_other_shapes_share_what_is_compiled(kernel: Kernel, encoded: list[tuple[Any, ...]]) -> None:
    for shape in ((4, 200, 2, 64), (4, 100, 2, 64)):
        kept = with_views(kernel, (View(shape, *VIEW[1:]),))
        for _ in range(2):
            kept((Pointer(),))
    assert kernel.compiled == 1
    assert [args[5] for args in encoded] == [(4, 200, 2, 64), (4, 100, 2, 64)]


def test_a_view_remembers_a_limited_number_of_addresses(kernel: Kernel) -> None:
    view = View(*VIEW)
    kept = with_views(kernel, (view,))
    for i in range(2 * module._MAX_ENCODED + 10):
        kept((Pointer(16 * i),))
    assert 0 < len(view) <= module._MAX_ENCODED


def test_a_known_launch_does_not_start_cuda_again(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own function asks at each call whether CUDA has been started, which takes longer than the answer."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("CUDA has been started: the tensors are there"))
    kept = Launch(kernel, 3, (), (), {})
    for _ in range(2):
        kept([Pointer(32)])
    assert (kernel.compiled, len(kernel.launched)) == (1, 1)
