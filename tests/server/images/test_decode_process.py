"""What the process that decodes writes into the file that it is given. tests/server/images/test_loader.py starts it."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fa_serve.server.images.decode_process import STRIP, prepare
from image_models import picture, png, save_llava
from security.hostile_images import animated, bomb
from transformers import LlavaProcessor

from fa_serve.engine.images.processed import PixelProcessor, ProcessedImage

LIMIT = 1 << 21


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "shared", os.O_RDWR | os.O_CREAT)
    os.ftruncate(number, 4 * LIMIT)
    yield number
    os.close(number)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the process sets for itself is set back."""
    for name in ("CUDA_VISIBLE_DEVICES", "KINETO_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def test_pixels_of_several_strips(file: int) -> None:
    work = prepare({"max_pixels": LIMIT, "processor": None})
    image = picture(1, 1200, 1000)
    assert image.width * image.height > STRIP
    told = json.loads(work(base64.b64encode(png(image)) + b"\n", file))
    assert told == {"width": 1200, "height": 1000, "reason": ""}
    pixels = np.frombuffer(os.pread(file, 4 * 1200 * 1000, 0), np.uint8).reshape(1000, 1200, 4)
    assert np.array_equal(pixels[..., :3], np.asarray(image))


def _decoded(data: bytes, file: int) -> np.ndarray:
    told = json.loads(prepare({"max_pixels": LIMIT, "processor": None})(base64.b64encode(data), file))
    assert "error" not in told, told
    count = 4 * told["width"] * told["height"]
    return np.frombuffer(os.pread(file, count, 0), np.uint8).reshape(told["height"], told["width"], 4)[..., :3]


def test_a_palette_with_transparency(file: int) -> None:
    """Optimised PNGs have one for each colour. The decoder warns of them."""
    image = picture(1).convert("P")
    pixels = _decoded(png(image, transparency=bytes([0, 120] * 100)), file)
    assert np.array_equal(pixels, np.asarray(image.convert("RGB")))


def test_spoilt_exif(file: int) -> None:
    """The decoder warns of EXIF that ends too early. It is left out."""
    spoilt = b"Exif\0\0II*\0\x08\0\0\0\xff\0" + b"\x12\x01" * 4
    assert _decoded(png(picture(1), "JPEG", exif=spoilt), file).shape == (32, 40, 3)


def test_a_picture_of_a_camera_with_a_preview(file: int) -> None:
    """A JPEG with others behind it, which Pillow calls MPO, is no animation."""
    first = _decoded(png(picture(0), "JPEG"), file).copy()
    os.lseek(file, 0, os.SEEK_SET)
    assert np.array_equal(_decoded(animated("MPO"), file), first)


def test_refused_files_write_nothing(file: int) -> None:
    work = prepare({"max_pixels": LIMIT, "processor": None})
    told = json.loads(work(base64.b64encode(bomb(3000, 1000)), file))
    assert told == {"error": f"have at most {LIMIT} pixels (--max-image-pixels), got 3000 x 1000"}
    assert json.loads(work(b"", file)) == {"error": "hold an image, got no bytes"}
    assert os.lseek(file, 0, os.SEEK_CUR) == 0


@pytest.mark.usefixtures("threads")
def test_the_models_processor(tmp_path: Path, file: int) -> None:
    save_llava(tmp_path)
    given = {"path": str(tmp_path), "trust_remote_code": False}
    work = prepare({"max_pixels": LIMIT, "processor": given})
    assert torch.get_num_threads() == 1, "a child of the process has no other threads"
    expected = PixelProcessor.of_model(str(tmp_path), trust_remote_code=False).process(picture(3))
    found = ProcessedImage.read(json.loads(work(base64.b64encode(png(picture(3))), file)), file)
    assert found.text == expected.text
    assert [*found.inputs] == [*expected.inputs]
    torch.testing.assert_close(found.inputs["pixel_values"], expected.inputs["pixel_values"], rtol=0, atol=0)


@pytest.mark.usefixtures("threads")
def test_a_processor_that_is_not_there(tmp_path: Path, file: int) -> None:
    work = prepare({"max_pixels": LIMIT, "processor": {"path": str(tmp_path), "trust_remote_code": False}})
    told = json.loads(work(base64.b64encode(png(picture(1))), file))
    assert (told["width"], told["height"]) == (40, 32)
    assert told["reason"].startswith("ParameterError: images must be empty, because the model's processor cannot be loaded")


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("error", ["memory", "shapes", "value", "wrapped"])
def test_torch_without_memory(tmp_path: Path, file: int, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """Its error has the type of one about shapes, and a processor may wrap it. The profiler tells them apart."""
    save_llava(tmp_path)
    work = prepare({"max_pixels": LIMIT, "processor": {"path": str(tmp_path), "trust_remote_code": False}})

    def fail(*_: Any, **__: Any) -> None:
        if error == "value":
            raise ValueError("mean must have 3 elements")
        if error == "shapes":
            torch.zeros(2, 3) @ torch.zeros(2, 3)
        try:
            torch.empty(1 << 60, dtype=torch.uint8)
        except RuntimeError as raised:
            if error == "wrapped":
                raise ValueError("the picture cannot be resized") from raised
            raise

    monkeypatch.setattr(LlavaProcessor, "_process_images", fail)
    request = base64.b64encode(png(picture(1)))
    if error in ("memory", "wrapped"):
        with pytest.raises(MemoryError):
            work(request, file)
    else:
        told = json.loads(work(request, file))
        rule = told["rule"]
        assert told["value"] == "a picture of 40 x 32"
        assert rule.startswith("hold images that the model's processor accepts (")
        assert ("RuntimeError: " in rule) == (error == "shapes")
