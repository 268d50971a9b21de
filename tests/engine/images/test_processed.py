"""What a processor makes of a picture comes unchanged through a file that two processes share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from image_models import picture, save_llava
from transformers import AutoProcessor

from fa_serve.engine.images.processed import PixelProcessor, ProcessedImage
from fa_serve.spec import ParameterError

SIZE = 1 << 16


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "shared", os.O_RDWR | os.O_CREAT)
    os.ftruncate(number, SIZE)
    yield number
    os.close(number)


def through(image: ProcessedImage, file: int) -> ProcessedImage:
    return ProcessedImage.read(json.loads(json.dumps(image.write(file))), file)


def test_tensors_of_every_kind(file: int) -> None:
    inputs = {
        "pixel_values": torch.randn(3, 5, 7),
        "turned": torch.randn(4, 6).T,
        "bytes": torch.arange(5, dtype=torch.uint8),
        "halves": torch.randn(3).bfloat16(),
        "grid": torch.tensor([[1, 2, -(2**40)]]),
        "mask": torch.tensor([True, False, True]),
        "number": torch.tensor(7),
        "nothing": torch.empty(0, 4),
        "last": torch.randn(9, dtype=torch.float64),
    }
    found = through(ProcessedImage(inputs, "<image>\n\u2603"), file)
    assert found.text == "<image>\n\u2603"
    assert [*found.inputs] == [*inputs]
    for name, x in inputs.items():
        assert found.inputs[name].dtype == x.dtype
        torch.testing.assert_close(found.inputs[name], x, rtol=0, atol=0)


def test_nothing_that_is_read_changes_with_the_file(file: int) -> None:
    found = through(ProcessedImage({"x": torch.ones(8)}, ""), file)
    os.pwrite(file, bytes(SIZE), 0)
    assert found.inputs["x"].tolist() == [1.0] * 8


def test_an_image_without_tensors(file: int) -> None:
    assert through(ProcessedImage({}, "text"), file) == ProcessedImage({}, "text")


def test_as_the_processor(tmp_path: Path, file: int) -> None:
    save_llava(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    expected = processor(text="<image>", images=[picture(1)], return_tensors="pt")["pixel_values"]
    found = through(PixelProcessor(processor).process(picture(1)), file)
    assert found.text == "<image>" * 4
    assert [*found.inputs] == ["pixel_values"]
    torch.testing.assert_close(found.inputs["pixel_values"], expected, rtol=0, atol=0)


def without_memory() -> None:
    raise MemoryError


def without_memory_of_a_device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("fill", [without_memory, without_memory_of_a_device])
def test_what_does_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill: Callable[[], None]) -> None:
    """It is no fault of the picture: the error ends the process, and the client is told of the limit."""
    save_llava(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    monkeypatch.setattr(processor, "_process_images", lambda *_, **__: fill())
    with pytest.raises(MemoryError):
        PixelProcessor(processor).process(picture(1))


def test_what_the_processor_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llava(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    pixels = PixelProcessor(processor)
    with pytest.raises(ParameterError, match="images must hold images that the model's processor accepts"):
        pixels.process("no picture")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("sizes do not match")

    monkeypatch.setattr(processor, "_process_images", fail)
    with pytest.raises(ParameterError, match=r"RuntimeError: sizes do not match.*, got 'a picture of 40 x 32'$"):
        pixels.process(picture(1))
