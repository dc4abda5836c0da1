"""Images of a column of files or bytes, read into memory."""

import concurrent.futures
import functools
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sam_optax.experiments.errors import UserError

FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded; Pillow has others, one of which starts a program."""
_UNASKED = 2e9  # maximum number of bytes of images in memory, unless their size is given
_CHUNK = 200  # images decoded at once
_RESIZE = "give --image-size, such as 224, to resize all to squares."


class Encoded(NamedTuple):
    """The images of a split, not decoded."""

    cells: Any  # the column of a ``datasets.Dataset``
    split: str  # for messages
    roots: Sequence[Path]  # the files that the column names are in these folders

    def image(self, row: int, side: int | None) -> Any:
        """One image of mode RGB, or L if it is grey: unchanged, or its central square resized."""
        from PIL import Image, ImageOps

        cell = self.cells[row].column(0)[0].as_py() or {"bytes": None, "path": None}
        try:
            image = decoded(cell["bytes"] or self._file(cell["path"]))
        except MemoryError:
            raise
        except Exception as error:  # Pillow's plugins raise many types
            name = f" ({os.path.basename(cell['path'])})" if cell["path"] else ""
            why = f"image {row}{name} cannot be read ({error}); replace or remove it."
            raise UserError(f"{self.split}: {why}") from error
        return ImageOps.fit(image, (side, side), Image.Resampling.BILINEAR) if side else image

    def _file(self, path: str | None) -> bytes:
        if path is None:
            raise ValueError("missing")
        if not any(Path(os.path.abspath(path)).is_relative_to(root) for root in self.roots):
            raise ValueError(f"{path} is outside the folder of the data set")
        return Path(path).read_bytes()


def decoded(content: bytes) -> Any:
    """An image as ``datasets`` decodes it, upright; transparent pixels are on white."""
    from PIL import Image, ImageOps

    try:
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(content), formats=FORMATS))
    except Image.UnidentifiedImageError as error:
        raise ValueError(f"damaged, or not one of {', '.join(FORMATS)}") from error
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"more than 8 bits, mode {image.mode}")
    mode = "L" if image.mode in ("1", "L", "LA") else "RGB"
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def in_memory(parts: Sequence[Encoded], side: int | None) -> list[np.ndarray]:
    """All images, uint8, (n, height, width, channels): one channel if all are grey, else three.

    Raises:
      UserError: without a ``side``, if their sizes differ or all together exceed 2 GB.
    """
    first, counts = parts[0].image(0, side), [len(part.cells) for part in parts]
    size = 3 * sum(counts) * math.prod(first.size)
    if size > _UNASKED and not side:
        raise UserError(f"the images take {size / 1e9:.1f} GB of memory; {_RESIZE}")
    found = [np.empty((count, first.height, first.width, 3), np.uint8) for count in counts]
    colour = False
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for x, part in zip(found, parts, strict=True):
            read = functools.partial(part.image, side=side)
            for start in range(0, len(x), _CHUNK):
                rows = range(start, min(start + _CHUNK, len(x)))
                for row, image in zip(rows, pool.map(read, rows), strict=True):
                    if image.size != first.size:
                        one, other = (f"{of.width}×{of.height}" for of in (first, image))
                        what = f"the images differ in size, such as {one} and {other} pixels"
                        raise UserError(f"{what}; {_RESIZE}")
                    colour |= image.mode != "L"
                    x[row] = image.convert("RGB")
    return found if colour else [x[..., :1].copy() for x in found]


def statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation per channel, in [0, 1]."""
    # Computed from counts, without a copy of the images as floats.
    channels = range(images.shape[-1])
    counts = np.zeros((len(channels), 256))
    for start in range(0, len(images), _CHUNK):
        chunk = images[start : start + _CHUNK]
        counts += [np.bincount(chunk[..., c].ravel(), minlength=256) for c in channels]
    shares, values = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
    mean = shares @ values
    std = np.sqrt(shares @ values**2 - mean**2)
    return mean, np.where(std > 0, std, 1.0)
