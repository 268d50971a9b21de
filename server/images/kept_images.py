"""Processed images of earlier requests, so that a picture is decoded only once in a conversation about it.

    kept = KeptImages(max_bytes=512 << 20)
    key = key_of_file(data, salt)
    image = kept.find(key)                   # or None
    kept.keep(image)                         # image.key is that key

The key is a hash of the file and of the salt of its request. Requests that share no prefixes share no images either: an answer
begins sooner if its image is found, and another client could see that. The same key identifies the image in the engine, so the
same requests also share its embeddings, and its pixels need not be hashed.

The key does not name the processor, because a server has only one.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from fa_serve.engine.images.processed import ProcessedImage

MAX_IMAGES = 256
"""How many images are kept at most. Each image holds a file descriptor, and a process may have 1024 of them by default."""


def key_of_file(data: bytes | memoryview, salt: str | None) -> bytes:
    """The key of a file, 16 bytes. data: the file in base64; salt: the result of `Isolation.cache_salt`"""
    salted = blake2b(salt.encode(), digest_size=32).digest() if salt is not None else b""
    return blake2b(data, digest_size=16, key=salted, person=b"file").digest()


class KeptImages:
    """Owner of the images. Use it only on the event loop. The least recently used image is dropped first.

    max_bytes: the most bytes that the images' tensors may take; num_bytes: the bytes that they take now
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
