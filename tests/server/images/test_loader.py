"""Files of strangers: the process that decodes dies of them, or says what is wrong, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fa_serve.server.errors import ApiError, BadRequest, Unavailable
from fa_serve.server.images import decode_process, fetching
from fa_serve.server.images.addresses import Remote, RequestImage
from fa_serve.server.images.fetching import FetchLimits
from fa_serve.server.images.loader import MAX_FETCHES, MAX_FETCHES_OF_HOST, ImageLoader, decode
from fa_serve.server.settings import Settings
from image_models import picture, png, save_llava
from PIL import Image
from security.hostile_images import animated, bomb, uri
from transformers import AutoProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from warm_processes import end_processes, forked_trials

from fa_serve.engine import EngineConfig
from fa_serve.engine.images.processed import PixelProcessor, ProcessedImage
from fa_serve.sandbox import trials
from fa_serve.sandbox.trials import TrialError, TrialLimits

pytestmark = pytest.mark.anyio
PLACE = "messages[0].content[{}].image_url.url"


def sent(urls: Sequence[str]) -> list[RequestImage]:
    """The images of a message without a text."""
    return [RequestImage(url, PLACE.format(number)) for number, url in enumerate(urls)]


@pytest.fixture
async def loader() -> AsyncIterator[ImageLoader]:
    made = ImageLoader(Settings(max_images=1000, max_image_pixels=10_000, image_timeout=5.0))
    yield made
    made.close()


@pytest.mark.parametrize(("form", "kind"), [("PNG", "png"), ("JPEG", "jpeg"), ("WEBP", "webp"), ("GIF", "gif")])
async def test_formats(loader: ImageLoader, form: str, kind: str) -> None:
    [image] = await loader.load(sent([uri(png(picture(1), form), kind)]), None)
    assert (image.mode, image.size) == ("RGB", (40, 32))
    if form == "PNG":
        assert np.array_equal(np.asarray(image), np.asarray(picture(1)))


async def test_transparency_and_orientation(loader: ImageLoader) -> None:
    turned = picture(1).getexif()
    turned[0x0112] = 6  # the camera was turned
    [image] = await loader.load(sent([uri(png(picture(1), "JPEG", exif=turned), "jpeg")]), None)
    assert image.size == (32, 40)
    [image] = await loader.load(sent([uri(png(picture(1).convert("RGBA")))]), None)
    assert image.mode == "RGB"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(bomb(20_000, 20_000), "at most 10000 pixels .*, got 20000 x 20000", id="bomb"),
        pytest.param(bomb(10_000, 1), r"at most 200 times the shorter one, got 10000 x 1", id="thin"),
        pytest.param(png(picture(1))[:-600], "be a complete PNG, JPEG, WebP or GIF", id="truncated"),
        pytest.param(png(picture(1), "JPEG")[:-200], "be a complete PNG, JPEG, WebP or GIF", id="truncated-jpeg"),
        pytest.param(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "be a complete PNG, JPEG, WebP or GIF", id="svg"),
        pytest.param(png(picture(1), "TIFF"), "be a complete PNG, JPEG, WebP or GIF", id="tiff"),
        pytest.param(b"%PDF-1.4", "be a complete PNG, JPEG, WebP or GIF", id="pdf"),
        pytest.param(animated("GIF"), "a single picture, got an animated one", id="animated-gif"),
        pytest.param(animated("WEBP"), "a single picture, got an animated one", id="animated-webp"),
        pytest.param(animated("PNG"), "a single picture, got an animated one", id="animated-png"),
    ],
)
async def test_files_that_are_refused(loader: ImageLoader, data: bytes, message: str) -> None:
    with pytest.raises(BadRequest) as error:
        await loader.load(sent([uri(data)]), None)
    assert re.search(message, error.value.message), error.value.message
    assert error.value.param == PLACE.format(0)
    [image] = await loader.load(sent([uri(png(picture(1)))]), None)
    assert image.size == (40, 32)


async def test_a_decoder_that_takes_too_much_memory_dies_alone() -> None:
    limited = ImageLoader(Settings(max_image_pixels=400_000_000, image_memory=2**20, image_timeout=5.0))
    try:
        with pytest.raises(
            BadRequest, match=r"image_url[.]url must be decoded and processed within 1048576 bytes \(--image-memory\)\.$"
        ):
            await limited.load(sent([uri(bomb(16_000, 16_000))]), None)
        [image] = await limited.load(sent([uri(png(picture(1)))]), None)
        assert image.size == (40, 32)
    finally:
        limited.close()


async def test_too_many_images_cost_nothing() -> None:
    limited = ImageLoader(Settings(max_images=16))
    with pytest.raises(BadRequest, match=r"at most 16 images \(--max-images\), got 1000") as refused:
        await limited.load(sent(["data:image/png;base64,QUJD"] * 1000), None)
    assert refused.value.param == PLACE.format(16)  # the first one too many
    assert "_trials" not in vars(limited)
    limited.close()


async def test_the_event_loop_goes_on_beside_many_images(loader: ImageLoader) -> None:
    pauses = []

    async def beat() -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(0.005)
            pauses.append(time.perf_counter() - begin - 0.005)

    beating = asyncio.create_task(beat())
    images = await loader.load(sent([uri(png(picture(seed))) for seed in range(40)]), None)
    beating.cancel()
    assert len(images) == 40
    assert sorted(pauses)[len(pauses) // 2] < 0.05


async def test_an_error_says_which_image_it_is_about(loader: ImageLoader) -> None:
    good = uri(png(picture(1)))
    for bad, rule in (("ftp://a/b", "be a data URI or an https address"), (uri(b"%PDF"), "be a complete PNG")):
        with pytest.raises(BadRequest) as error:
            await loader.load(sent([good, good, bad, bad]), None)
        assert error.value.param == PLACE.format(2)
        assert error.value.message.startswith(f"{PLACE.format(2)} must {rule}")


async def test_a_slow_host_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, one thread fetched the images of all hosts for all clients."""
    answers = png(picture(1))
    slow = threading.Semaphore(0)
    began: list[str] = []

    def fetch(remote: Remote, limits: FetchLimits) -> bytes:
        began.append(remote.host)
        if remote.host == "slow.org":
            slow.acquire(timeout=20)
        return answers if remote.host in limits.hosts else fetching.fetch(remote, limits)

    monkeypatch.setattr("fa_serve.server.images.loader.fetch", fetch)
    loader = ImageLoader(Settings(image_hosts=("slow.org", "fast.org"), image_timeout=20.0))
    try:
        waiting = [
            asyncio.create_task(loader.load(sent(["https://slow.org/a"]), f"client {number}"))
            for number in range(MAX_FETCHES + 4)
        ]
        while len(began) < MAX_FETCHES_OF_HOST:
            await asyncio.sleep(0.01)
        for client in ("client 0", "other"):
            [image] = await asyncio.wait_for(loader.load(sent(["https://fast.org/a"]), client), 10)
            assert image.size == (40, 32)
        with pytest.raises(BadRequest, match=r"it allows only slow[.]org, fast[.]org"):
            await asyncio.wait_for(loader.load(sent(["https://other.org/a"]), "other"), 10)
        assert began.count("slow.org") == MAX_FETCHES_OF_HOST < MAX_FETCHES
        assert not any(task.done() for task in waiting)
        slow.release(len(waiting))
        assert len(await asyncio.gather(*waiting)) == len(waiting)
    finally:
        loader.close()


async def test_a_name_that_is_looked_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's resolver cannot be interrupted, so the request does not wait for it."""
    gate = threading.Event()

    def resolve(*_: Any, **__: Any) -> list[Any]:
        gate.wait(20)
        return []

    monkeypatch.setattr(fetching.socket, "getaddrinfo", resolve)
    loader = ImageLoader(Settings(image_hosts=("images.example.org",), image_timeout=0.3))
    try:
        with pytest.raises(BadRequest, match=r"whose image arrives within 0[.]3 seconds \(--image-timeout\)"):
            await asyncio.wait_for(loader.load(sent(["https://images.example.org/a"]), None), 5)
    finally:
        gate.set()
        loader.close()


async def test_fetching_is_off_by_default(loader: ImageLoader) -> None:
    with pytest.raises(BadRequest, match="this server fetches no images"):
        await loader.load(sent(["https://images.example.org/cat.png"]), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llava")
    save_llava(path)
    return path


def loader_of(folder: Path) -> ImageLoader:
    """A loader for the model in a folder."""
    config = EngineConfig(model=folder, device="cpu")
    return ImageLoader(Settings(image_timeout=60.0), lambda: config)


@pytest.fixture(scope="module")
def processing(folder: Path, warm_context: ForkServerContext) -> Iterator[ImageLoader]:
    """One for all tests. Its process is forked; the one whose memory has a limit, below, is a fresh interpreter."""
    made = loader_of(folder)
    with forked_trials() as started:
        made._trials.start()
    yield made
    made.close()
    end_processes(started)


async def test_pictures_come_as_the_models_processor_makes_them(
    folder: Path, processing: ImageLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor runs in the other process: this one may not call it."""
    processor = AutoProcessor.from_pretrained(folder)
    pictures = [picture(1), picture(2, 100, 60)]
    expected = [PixelProcessor(processor).process(each) for each in pictures]

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pixels are processed in the process of the server")

    monkeypatch.setattr(PixelProcessor, "process", refuse)
    monkeypatch.setattr(CLIPImageProcessorPil, "__call__", refuse)
    monkeypatch.setattr(Image, "frombuffer", refuse)
    found = await processing.load(sent([uri(png(each)) for each in pictures]), None)
    for actual, wanted in zip(found, expected, strict=True):
        assert isinstance(actual, ProcessedImage)
        assert actual.text == wanted.text == "<image>" * 4
        torch.testing.assert_close(actual.inputs["pixel_values"], wanted.inputs["pixel_values"], rtol=0, atol=0)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys of the files that go to the process."""
    keys: list[bytes] = []

    def noted(data: bytes | memoryview, max_result: int, trial: Any, key: bytes) -> Any:
        keys.append(key)
        return decode(data, max_result, trial, key)

    monkeypatch.setattr("fa_serve.server.images.loader.decode", noted)
    return keys


async def test_a_file_that_came_before_is_not_decoded_again(processing: ImageLoader, decoded: list[bytes]) -> None:
    urls = [uri(png(picture(seed))) for seed in (11, 12)]
    first = await processing.load(sent(urls), "one", "salt")
    again = await processing.load(sent(urls[::-1]), "other", "salt")
    assert again == first[::-1]
    assert all(one is other for one, other in zip(again, first[::-1], strict=True))
    assert decoded == [image.key for image in first]


async def test_requests_of_another_salt_find_nothing(processing: ImageLoader, decoded: list[bytes]) -> None:
    """Else the time to an answer would tell which pictures others have sent."""
    url = uri(png(picture(13)))
    for salt in ("one", "other", None):
        await processing.load(sent([url]), None, salt)
    assert len(set(decoded)) == 3


@pytest.mark.usefixtures("warm_trials")
@pytest.mark.parametrize("given", [{"prefix_sharing": "none"}, {"kept_image_bytes": 0}], ids=["sharing", "bytes"])
async def test_nothing_is_kept(folder: Path, decoded: list[bytes], given: dict[str, Any]) -> None:
    config = EngineConfig(model=folder, device="cpu")
    own = ImageLoader(Settings(image_timeout=60.0, **given), lambda: config)
    try:
        for _ in range(2):
            await own.load(sent([uri(png(picture(1)))]), None, "salt")
    finally:
        own.close()
    assert len(decoded) == 2


async def test_several_pictures_are_decoded_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other clients, each in a separate process."""
    several = ImageLoader(Settings(image_processes=3, max_image_pixels=10_000, image_timeout=5.0))
    together = threading.Barrier(3, timeout=20)

    def meeting(*given: Any) -> Any:
        together.wait()
        return decode(*given)

    monkeypatch.setattr("fa_serve.server.images.loader.decode", meeting)
    try:
        loading = [several.load(sent([uri(png(picture(seed)))]), f"client {seed}") for seed in range(6)]
        images = await asyncio.gather(*loading)
    finally:
        several.close()
    for seed, [image] in enumerate(images):
        assert np.array_equal(np.asarray(image), np.asarray(picture(seed)))


@pytest.mark.parametrize(("processors", "expected"), [(1, 1), (2, 1), (16, 4), (128, 8)])
def test_as_many_processes_as_the_machine_has_room_for(monkeypatch: pytest.MonkeyPatch, processors: int, expected: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(processors)), raising=False)
    assert ImageLoader(Settings())._decoding._count == expected
    assert ImageLoader(Settings(image_processes=5))._decoding._count == 5


@pytest.mark.usefixtures("warm_trials")
async def test_a_picture_that_the_models_processor_refuses(tmp_path: Path) -> None:
    """It is refused again if it comes again, and others are served."""
    save_llava(tmp_path)
    options = json.loads((tmp_path / "processor_config.json").read_text())
    options["image_processor"]["size"] = {"shortest_edge": 0}
    (tmp_path / "processor_config.json").write_text(json.dumps(options))
    own = loader_of(tmp_path)
    try:
        for _ in range(2):
            with pytest.raises(BadRequest, match="images must hold images that the model's processor accepts") as error:
                await own.load(sent([uri(png(picture(1)))]), None)
            assert (error.value.param, error.value.status) == (PLACE.format(0), 400)
    finally:
        own.close()


async def test_a_result_beyond_its_limit_is_refused(processing: ImageLoader) -> None:
    """The inputs of towers may be larger than the pixels: here 28 x 28 numbers of 4 bytes for each colour."""
    data = uri(png(picture(1))).partition(",")[2].encode()
    trials = processing._trials
    image, _ = decode(data, 9408, trials.trial())
    assert image.inputs["pixel_values"].nbytes == 9408
    with pytest.raises(TrialError, match=r"be decoded and processed within .* bytes \(--image-memory\)"):
        decode(data, 9407, trials.trial())


WORK = """
import importlib.util, os, pathlib, resource

def prepare(given):
    import torch
    from transformers import LlavaProcessor

    parent = os.getpid()

    def fail(*_, **__):
        if os.getpid() == parent:
            raise ValueError("a picture is processed ahead of those of requests")
        if given["fault"] == "shapes":
            torch.zeros(2, 3) @ torch.zeros(2, 3)
        if given["fault"] == "system":
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + (32 << 20)
            limit = min(limit, resource.getrlimit(resource.RLIMIT_AS)[0])  # the work is done twice, and no limit may be raised
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        torch.zeros(1 << 30, dtype=torch.uint8)

    LlavaProcessor._process_images = fail
    spec = importlib.util.spec_from_file_location("decoding", given["path_of_work"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.prepare(given)
"""
"""A processor that needs a gigabyte, or whose system has less than our limit, or which is wrong."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["limit", "system", "shapes"])
async def test_who_is_to_blame_when_torch_fails(
    folder: Path, tmp_path: Path, fault: str, capfd: Any, request: pytest.FixtureRequest
) -> None:
    if fault != "limit":  # whose log is read: torch reads how much its profiler tells when it is imported
        request.getfixturevalue("warm_trials")
    path = tmp_path / "work.py"
    path.write_text(WORK)
    own = loader_of(folder)
    given = {"max_pixels": 10_000, "processor": {"path": str(folder), "trust_remote_code": False}}
    given |= {"fault": fault, "path_of_work": decode_process.__file__}
    limits = TrialLimits("be decoded and processed", 60.0, 256 << 20, "image")
    vars(own)["_trials"] = trials.Trials(str(path), given, limits)
    try:
        with pytest.raises(ApiError) as error:
            await own.load(sent([uri(png(picture(1)))]), None)
    finally:
        own.close()
    status, text = {
        "limit": (400, r"image_url[.]url must be decoded and processed within 268435456 bytes \(--image-memory\)\.$"),
        "system": (503, r"The server is not ready: the sandbox process for images got no memory from the system"),
        "shapes": (400, r"images must hold images that the model's processor accepts \(RuntimeError: "),
    }[fault]
    assert error.value.status == status
    assert re.search(text, error.value.message), error.value.message
    assert ("memory" in error.value.message) == (fault != "shapes")
    assert "USDT" not in capfd.readouterr().err, "the profiler writes to the server's log"


@pytest.mark.slow
@pytest.mark.usefixtures("warm_trials")
async def test_a_processor_that_the_process_cannot_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pixels come then, and the log says once what that costs."""
    own = loader_of(tmp_path)
    try:
        images = [image for _ in range(2) for image in await own.load(sent([uri(png(picture(1)))] * 2), None)]
    finally:
        own.close()
    assert all(np.array_equal(np.asarray(image), np.asarray(picture(1))) for image in images)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "cannot load the model's processor: ParameterError: images must be empty, because" in warnings[0]


async def test_pictures_of_two_clients_never_meet_in_a_process(loader: ImageLoader) -> None:
    """A file that subverts its decoder could change what becomes of later ones. Those of one client share a process."""

    async def process(client: str | None, salt: str | None, seed: int) -> int:
        await loader.load(sent([uri(png(picture(seed)))]), client, salt)
        return loader._trials._waiting[-1].pid

    first = await process("one", None, 1)
    assert await process("one", None, 2) == first
    assert await process("other", None, 3) != first
    assert await process("one", "salt", 4) != first, "of another user, whom the client names"


@pytest.mark.parametrize("processed", [True, False], ids=["processed", "pixels"])
async def test_a_large_picture_hardly_takes_the_interpreter(processing: ImageLoader, processed: bool) -> None:
    """16 million pixels in the server's own thread: not their base64, and no copy but that of Pillow, which lets others run.
    If the process has the model's processor, they do not come here at all."""
    large = processing if processed else ImageLoader(Settings(image_timeout=60.0))
    await large.load(sent([uri(png(picture(1)))]), None)
    seconds: list[float] = []

    def timed(data: memoryview, *others: Any) -> Any:
        begin = time.thread_time()
        image = decode(data, *others)
        seconds.append(time.thread_time() - begin)
        return image

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fa_serve.server.images.loader.decode", timed)
            [image] = await large.load(sent([uri(bomb(4000, 4000))]), None)
    finally:
        if not processed:
            large.close()
    if processed:
        assert image.inputs["pixel_values"].shape == (1, 3, 28, 28)
        assert seconds[0] < 0.03, "decoding and processing took 0.4 s"
    else:
        assert (image.mode, image.size) == ("RGB", (4000, 4000))
        assert seconds[0] < 0.15, "with pixels in base64 it took 0.3 s"


@pytest.mark.parametrize("text", ["QUJ", "####", "QU\nJD", "Ä"])
async def test_base64_that_is_wrong(loader: ImageLoader, text: str) -> None:
    with pytest.raises(BadRequest, match=r"image_url[.]url must have complete base64 without invalid characters"):
        await loader.load(sent([f"data:image/png;base64,{text}"]), None)


async def test_an_address_without_an_image(loader: ImageLoader) -> None:
    with pytest.raises(BadRequest, match=r"image_url[.]url must hold an image, got no bytes"):
        await loader.load(sent(["data:image/png;base64,"]), None)


async def test_a_process_that_does_not_start_in_time_is_no_fault_of_the_picture(
    loader: ImageLoader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next picture starts another one."""
    with monkeypatch.context() as patch:
        patch.setattr(trials, "START_SECONDS", 1e-3)
        told = "The server is not ready: the sandbox process for images did not start within 0.001 seconds."
        with pytest.raises(Unavailable, match=re.escape(told)) as error:
            await loader.load(sent([uri(png(picture(1)))]), None)
        assert (error.value.status, error.value.retry_after) == (503, 5)
        loader.start()
        while not caplog.records:
            await asyncio.sleep(0.01)
    assert "requests with images get a 503 until" in caplog.text
    [image] = await loader.load(sent([uri(png(picture(1)))]), None)
    assert image.size == (40, 32)


async def test_closing_cancels_a_picture_that_waits(loader: ImageLoader) -> None:
    loading = asyncio.create_task(loader.load(sent([uri(png(picture(1)))]), None))
    while "_trials" not in vars(loader) or loader._trials._process is None:
        await asyncio.sleep(0.001)
    loader.close()
    with pytest.raises(Unavailable, match="The server is not ready: the server is shutting down"):
        await loading


async def test_a_server_without_images_starts_no_process() -> None:
    none = ImageLoader(Settings(max_images=0))
    none.start()
    assert "_trials" not in vars(none)
    none.close()
