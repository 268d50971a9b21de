"""A number of bytes as people write it, such as 16MiB.

    class Limits(BaseModel):
        body: Size = 16 * 2**20         # also "16MiB", "16Mi", "16777216"; and "16M" and "16 mb", which are 16,000,000

    is_size(Limits.model_fields["body"].annotation)     # True
    shown_size(16 * 2**20)                              # "16MiB"

pydantic's ByteSize also accepts bits (16mbit is 2 MB), fractions of a byte, and any text after a unit. `Size` refuses these.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, ByteSize
from pydantic_core import PydanticCustomError

SIZE = re.compile(r"\s*(\d[\d_]*\s*b?|\d+(\.\d+)?\s*[kmgtpe](i?b)?)\s*", re.IGNORECASE | re.ASCII)
KUBERNETES = re.compile(r"\s*\d+(\.\d+)?\s*[kmgtpe]i\s*", re.IGNORECASE | re.ASCII)
"""A size as Kubernetes writes it, such as 64Gi."""
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


def _in_bytes(value: Any) -> Any:
    if isinstance(value, str) and KUBERNETES.fullmatch(value):
        return value.strip() + "B"
    if isinstance(value, bool) or (isinstance(value, str) and not SIZE.fullmatch(value)):
        raise PydanticCustomError("byte_size", "no number of bytes")
    return value


Size = Annotated[ByteSize, BeforeValidator(_in_bytes)]


def is_size(annotation: Any) -> bool:
    """Whether the annotation of a field is `Size` or `Size | None`. For `Size`, pydantic strips `Annotated`."""
    return any(kind is ByteSize or ByteSize in get_args(kind) for kind in (annotation, *get_args(annotation)))


def shown_size(size: int) -> str:
    """The size in the largest unit that divides it."""
    unit, factor = next(each for each in UNITS.items() if size % each[1] == 0)
    return f"{size // factor}{unit}"
