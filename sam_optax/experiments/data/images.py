"""Images that stay on disk, and their processing when they are read."""

import concurrent.futures
import dataclasses
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sam_optax.experiments.errors import UserError

FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded; Pillow has others, one of which starts a program."""
_CENTRAL = 0.875  # side of the central crop, of the shorter side of the image: 224 of 256 pixels
_SAMPLE = 1000  # images for mean and deviation, if they stay on disk
_RESIDENT = 2e9  # maximum number of bytes of images in memory
_CHUNK = 200  # images decoded at once


@dataclasses.dataclass(frozen=True, eq=False)
class ImageColumn:
    """Images on disk, read as squares of ``size`` pixels."""

    cells: Any  # the column of a ``datasets.Dataset``, not decoded
    indices: np.ndarray  # of the rows that are used
    size: int
    where: str  # data set and split, for messages
    roots: Sequence[Path]  # the files that the column names are in these folders

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, indices: np.ndarray) -> "ImageColumn":
        return dataclasses.replace(self, indices=self.indices[indices])

    def image(self, i: int, rng: np.random.Generator | None) -> np.ndarray:
        """One image, uint8, (size, size, 3): a random crop, or without ``rng`` the central crop.

        Random crops are those of Inception (Szegedy et al. 2015): 8 to 100 % of the area, with an
        aspect ratio from 3:4 to 4:3.
        """
        from PIL import Image, ImageOps

        image, shape = self.original(i).convert("RGB"), (self.size, self.size)
        way = Image.Resampling.BILINEAR
        if rng is None:
            return np.asarray(ImageOps.fit(image, shape, way, bleed=(1 - _CENTRAL) / 2))
        width, height = image.size
        for _ in range(10):
            area = rng.uniform(0.08, 1.0) * width * height
            ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
            w, h = np.sqrt(area * ratio), np.sqrt(area / ratio)
            if w <= width and h <= height:
                break
        else:
            w, h = float(width), float(height)
        left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
        return np.asarray(image.resize(shape, way, box=(left, top, left + w, top + h)))

    def original(self, i: int) -> Any:
        """One image in its original size, of mode RGB, or L if it is grey."""
        row = int(self.indices[i])
        cell = self.cells[row].column(0)[0].as_py() or {"bytes": None, "path": None}
        try:
            return decoded(cell["bytes"] or self._file(cell["path"]))
        except Exception as error:  # Pillow's plugins raise many types
            name = f" ({os.path.basename(cell['path'])})" if cell["path"] else ""
            why = f"image {row}{name} cannot be read ({error}); replace or remove it."
            raise UserError(f"{self.where}: {why}") from error

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


def statistics(images: np.ndarray | ImageColumn) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation per channel, in [0, 1]; from a fixed sample if images are on disk."""
    if not isinstance(images, np.ndarray):
        source, n = images, len(images)
        sample = np.random.default_rng(0).choice(n, min(n, _SAMPLE), replace=False)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            images = np.stack([*pool.map(lambda i: source.image(int(i), None), sample)])
    # Computed from counts, without a float copy of the images.
    values = np.arange(256) / 255
    counts = [np.bincount(images[..., c].ravel(), minlength=256) for c in range(images.shape[-1])]
    shares = np.array([count / count.sum() for count in counts])
    mean = shares @ values
    std = np.sqrt(shares @ values**2 - mean**2)
    return mean, np.where(std > 0, std, 1.0)


def in_memory(sources: Sequence[ImageColumn]) -> list[np.ndarray] | None:
    """All images, uint8, (n, height, width, channels): one channel if all are grey, else three.

    ``None`` if they differ in size or take too much memory.
    """
    first = sources[0].original(0)
    shape, colour = (first.height, first.width, 3), False
    if sum(map(len, sources)) * math.prod(shape) > _RESIDENT:
        return None
    found = [np.empty((len(source), *shape), np.uint8) for source in sources]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for x, source in zip(found, sources, strict=True):
            for start in range(0, len(x), _CHUNK):
                chunk = range(start, min(start + _CHUNK, len(x)))
                for i, image in zip(chunk, pool.map(source.original, chunk), strict=True):
                    if image.size != first.size:
                        return None
                    colour |= image.mode != "L"
                    x[i] = image.convert("RGB")
    return found if colour else [x[..., :1].copy() for x in found]
