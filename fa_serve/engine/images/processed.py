"""What a model's processor makes of one picture, and how it travels from a process that may die to the server.

    image = PixelProcessor(processor).process(picture)   # a PIL image -> ProcessedImage
    told = image.write(file)                             # writes the tensors to the file, and describes them for JSON
    same = ProcessedImage.read(told, file)

A processor resizes and normalises pixels in Python, Pillow and NumPy, and holds the interpreter of its process for tens of
milliseconds at a time. So pictures of strangers are processed in the process that decodes them (server/images), and their
tensors come back through memory that both processes share (shared_tensors.py).

Left out: the prompt that contains the picture (processor.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa_serve.engine.images.shared_tensors import SharedTensors, share_tensors
from fa_serve.spec import ParameterError

ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class ProcessedImage:
    """inputs: arguments of the towers, on the CPU; text: what stands for the picture in a prompt

    key: hash of the picture's file and of the salt of its request, which separates clients; empty for a picture without a file
    """

    inputs: Mapping[str, Tensor]
    text: str
    key: bytes = b""

    @property
    def num_bytes(self) -> int:
        """The memory that the tensors take."""
        if isinstance(self.inputs, SharedTensors):
            return self.inputs.num_bytes
        return sum(x.nbytes for x in self.inputs.values())

    def write(self, file: int) -> dict[str, Any]:
        """Write the tensors to this file descriptor, at its current position. Returns what `read` needs, as JSON values.

        Raises OSError if they do not fit into the file.
        """
        described = []
        place = 0
        for name, x in self.inputs.items():
            _write_all(file, bytes(-place % ALIGNMENT))
            place += -place % ALIGNMENT
            described.append({"name": name, "dtype": str(x.dtype).removeprefix("torch."), "shape": [*x.shape], "place": place})
            values = x.contiguous().reshape(-1).view(torch.uint8).numpy().data
            _write_all(file, values)
            place += len(values)
        return {"inputs": described, "text": self.text, "bytes": place}

    @classmethod
    def read(cls, told: Mapping[str, Any], file: int, key: bytes = b"") -> ProcessedImage:
        """Read the image from a file whose writer has ended. Raises ValueError for tensors that lie outside of the file."""
        return cls(share_tensors(told, file), told["text"], key)


class PixelProcessor:
    """The part of a model's processor that sees pixels. Safe to use from any thread."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    @classmethod
    def of_model(cls, path: str, *, trust_remote_code: bool) -> PixelProcessor:
        """Load a model's processor. Raises ParameterError, with the reason, for a model without one that takes images."""
        from fa_serve.hf.processors import (
            load_processor,
        )  # this imports transformers, which a server leaves to its engine

        return cls(load_processor(path, trust_remote_code=trust_remote_code))

    def process(self, image: Any) -> ProcessedImage:
        """The towers' inputs for an image. It is processed by itself, so that they do not depend on other images.

        image: a PIL image in RGB, or (height, width, 3) uint8

        Raises ParameterError for an image that the processor refuses, and MemoryError.
        """
        from fa_serve.hf.processors import process_image

        try:
            inputs, text = process_image(self._processor, image)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise MemoryError from error
        except Exception as error:  # a processor's code may raise anything for the shape of an image
            told = f"{type(error).__name__}: {str(error)[:200]}"
            rule = f"hold images that the model's processor accepts ({told})"
            raise ParameterError("images", rule, _described(image)) from error
        return ProcessedImage(inputs, text)


def _described(image: Any) -> str:
    """How an error describes an image, within the 30 characters that it shows of a value."""
    shape = getattr(image, "shape", None) or getattr(image, "size", None)
    kind = "a picture" if hasattr(image, "mode") else "an array"
    return f"{kind} of {' x '.join(map(str, shape))}" if isinstance(shape, tuple) else f"type {type(image).__name__}"


def _write_all(file: int, data: bytes | memoryview) -> None:
    written = 0
    while written < len(data):
        written += os.write(file, data[written:])
