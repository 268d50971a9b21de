"""Processed images of files that came before, so that a conversation about a picture has it decoded once.

    kept = KeptImages(max_bytes=512 << 20)
    key = key_of_file(data, salt)
    image = kept.find(key)                   # or None
    kept.keep(image)                         # image.key is that key

The key is a hash of the file and of the salt of its request: requests that share no prefixes share no images either, because
an image that is found makes an answer begin sooner. It becomes the key of the image in the engine, whose embeddings are
shared by the same requests therefore, and nobody hashes pixels.

Left out: the processor, of which a server has one.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from fa_serve.engine.images.processed import ProcessedImage

MAX_IMAGES = 256
"""Each image has a descriptor, of which a process may have 1024 by default."""


def key_of_file(data: bytes | memoryview, salt: str | None) -> bytes:
    """16 bytes. data: in base64; salt: as `Isolation.cache_salt` gives it"""
    salted = blake2b(salt.encode(), digest_size=32).digest() if salt is not None else b""
    return blake2b(data, digest_size=16, key=salted, person=b"file").digest()


class KeptImages:
    """Owner of the images, to be used on the event loop. What was found least recently goes first.

    max_bytes: of their tensors; num_bytes: that they take
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._images: OrderedDict[bytes, ProcessedImage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._images)

    def find(self, key: bytes) -> ProcessedImage | None:
        found = self._images.get(key)
        if found is not None:
            self._images.move_to_end(key)
        return found

    def keep(self, image: ProcessedImage) -> None:
        """Keep an image, unless it is larger than the budget."""
        if image.num_bytes > self.max_bytes:
            return
        self._drop(image.key)
        self._images[image.key] = image
        self.num_bytes += image.num_bytes
        while self.num_bytes > self.max_bytes or len(self._images) > MAX_IMAGES:
            self._drop(next(iter(self._images)))

    def _drop(self, key: bytes) -> None:
        image = self._images.pop(key, None)
        if image is not None:
            self.num_bytes -= image.num_bytes
