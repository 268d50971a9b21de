"""Files of strangers: the process that decodes dies of them, or says what is wrong, and the server goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from fa_serve.server.errors import BadRequest
from fa_serve.server.images.loader import ImageLoader, decode
from fa_serve.server.settings import Settings
from image_models import picture, png
from security.hostile_images import animated, bomb, uri

pytestmark = pytest.mark.anyio


@pytest.fixture
async def loader() -> AsyncIterator[ImageLoader]:
    made = ImageLoader(Settings(max_images=1000, max_image_pixels=10_000, image_timeout=5.0))
    yield made
    made.close()


@pytest.mark.parametrize(("form", "kind"), [("PNG", "png"), ("JPEG", "jpeg"), ("WEBP", "webp"), ("GIF", "gif")])
async def test_formats(loader: ImageLoader, form: str, kind: str) -> None:
    [image] = await loader.load([uri(png(picture(1), form), kind)], None)
    assert (image.mode, image.size) == ("RGB", (40, 32))
    if form == "PNG":
        assert np.array_equal(np.asarray(image), np.asarray(picture(1)))


async def test_transparency_and_orientation(loader: ImageLoader) -> None:
    turned = picture(1).getexif()
    turned[0x0112] = 6  # the camera was turned
    [image] = await loader.load([uri(png(picture(1), "JPEG", exif=turned), "jpeg")], None)
    assert image.size == (32, 40)
    [image] = await loader.load([uri(png(picture(1).convert("RGBA")))], None)
    assert image.mode == "RGB"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(bomb(20_000, 20_000), "at most 10000 pixels .*, got 20000 x 20000", id="bomb"),
        pytest.param(bomb(10_000, 1), r"at most 200 times the other, got 10000 x 1", id="thin"),
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
        await loader.load([uri(data)], None)
    import re

    assert re.search(message, error.value.message), error.value.message
    assert error.value.param == "messages"
    [image] = await loader.load([uri(png(picture(1)))], None)
    assert image.size == (40, 32)


async def test_a_decoder_that_takes_too_much_memory_dies_alone() -> None:
    limited = ImageLoader(Settings(max_image_pixels=400_000_000, image_memory=2**20, image_timeout=5.0))
    try:
        with pytest.raises(BadRequest, match=r"image_url must be decoded within 1048576 bytes \(--image-memory\)"):
            await limited.load([uri(bomb(16_000, 16_000))], None)
        [image] = await limited.load([uri(png(picture(1)))], None)
        assert image.size == (40, 32)
    finally:
        limited.close()


async def test_too_many_images_cost_nothing() -> None:
    limited = ImageLoader(Settings(max_images=16))
    with pytest.raises(BadRequest, match=r"at most 16 images \(--max-images\), got 1000"):
        await limited.load(["data:image/png;base64,QUJD"] * 1000, None)
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
    images = await loader.load([uri(png(picture(seed))) for seed in range(40)], None)
    beating.cancel()
    assert len(images) == 40
    assert sorted(pauses)[len(pauses) // 2] < 0.05


async def test_fetching_is_off_by_default(loader: ImageLoader) -> None:
    with pytest.raises(BadRequest, match="this server fetches no images"):
        await loader.load(["https://images.example.org/cat.png"], None)


async def test_a_large_picture_hardly_takes_the_interpreter() -> None:
    """16 million pixels in the server's own thread: not their base64, and no copy but that of Pillow, which lets others run."""
    large = ImageLoader(Settings(image_timeout=60.0))
    await large.load([uri(png(picture(1)))], None)
    seconds: list[float] = []

    def timed(data: memoryview, *others: Any) -> Any:
        begin = time.thread_time()
        image = decode(data, *others)
        seconds.append(time.thread_time() - begin)
        return image

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fa_serve.server.images.loader.decode", timed)
            [image] = await large.load([uri(bomb(4000, 4000))], None)
    finally:
        large.close()
    assert (image.mode, image.size) == ("RGB", (4000, 4000))
    assert seconds[0] < 0.15, "with pixels in base64 it took 0.3 s"


@pytest.mark.parametrize("text", ["QUJ", "####", "QU\nJD", "Ä"])
async def test_base64_that_is_wrong(loader: ImageLoader, text: str) -> None:
    with pytest.raises(BadRequest, match="image_url must be a data URI whose base64 is complete and without other characters"):
        await loader.load([f"data:image/png;base64,{text}"], None)


async def test_an_address_without_an_image(loader: ImageLoader) -> None:
    with pytest.raises(BadRequest, match="image_url must hold an image, got no bytes"):
        await loader.load(["data:image/png;base64,"], None)
