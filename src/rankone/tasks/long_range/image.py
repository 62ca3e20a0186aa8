"""Pictures as sequences of pixels: handwritten digits, or CIFAR-10 from a folder.

The Long Range Arena reads CIFAR-10 in grey, a row after another. It cannot be shipped: `cifar`
reads its binary version from a folder. `digits` are those that come with scikit-learn, 8 by 8
pixels made 32 by 32 and moved about, so that as many tokens have to be read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from rankone.tasks.long_range.examples import Examples, Splits

VOCABULARY = 256
"""Padding, and grey levels one more than themselves; 254 and 255 are one."""
SIDE = 32
_GREY = (0.299, 0.587, 0.114)
_CIFAR = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")


def digits(sizes: tuple[int, int, int] = (20_000, 2_000, 2_000), *, seed: int = 0) -> Splits:
    """Digits of scikit-learn, enlarged, moved by up to four pixels and with noise on them.

    Every picture is one of 1,797 originals; no original is in two splits.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(
            "the digits come with scikit-learn (pip install scikit-learn); or give a folder with "
            "CIFAR-10's binary version"
        ) from error
    found = load_digits()
    images, labels = torch.from_numpy(found.images) / 16, torch.from_numpy(found.target)
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=g)
    held = len(labels) // 10
    shares = order[2 * held :], order[:held], order[held : 2 * held]
    parts = []
    for share, size in zip(shares, sizes, strict=True):
        which = share[torch.randint(len(share), (size,), generator=g)]
        parts.append(Examples(_enlarged(images[which], g), labels[which]))
    return Splits(*parts)


def _enlarged(images: Tensor, g: Generator) -> Tensor:
    """[N, 8, 8] from 0 to 1 to tokens [N, 1024]."""
    wide = torch.nn.functional.interpolate(
        images[:, None].float(), size=(24, 24), mode="bilinear", align_corners=False
    )[:, 0]
    place = torch.randint(0, SIDE - 24 + 1, (len(images), 2), generator=g)
    canvas = torch.zeros(len(images), SIDE, SIDE)
    for row, picture, (y, x) in zip(canvas, wide, place.tolist(), strict=True):
        row[y : y + 24, x : x + 24] = picture
    noisy = canvas + 0.1 * torch.randn(canvas.shape, generator=g)
    return _tokens(255 * noisy.clamp(0, 1))


def _tokens(grey: Tensor) -> Tensor:
    """Grey levels of pictures [N, 32, 32] to tokens [N, 1024]."""
    return (1 + grey.round().clamp(0, 254)).to(torch.uint8).flatten(1)


def cifar(folder: Path) -> Splits:
    """CIFAR-10 from the folder that holds data_batch_1.bin to 5 and test_batch.bin, in grey.

    The last 5,000 pictures for training are for validation.
    """
    check(folder)
    train = [_read(folder / f"{name}.bin") for name in _CIFAR]
    tokens, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
    kept = len(labels) - 5000
    if kept < 1:
        raise ValueError(
            f"{folder} has {len(labels)} pictures for training, and 5,000 of them are for "
            "validation; CIFAR-10 has 50,000, get it again"
        )
    return Splits(
        Examples(tokens[:kept], labels[:kept]),
        Examples(tokens[kept:], labels[kept:]),
        Examples(*_read(folder / "test_batch.bin")),
    )


def check(folder: Path) -> None:
    """Raises ValueError where a file is missing."""
    missing = [n for n in (*_CIFAR, "test_batch") if not (folder / f"{n}.bin").is_file()]
    if missing:
        raise ValueError(
            f"{folder} must hold CIFAR-10's binary version, but has no {missing[0]}.bin; the "
            "archive cifar-10-binary.tar.gz has it in its folder cifar-10-batches-bin"
        )


def _read(path: Path) -> tuple[Tensor, Tensor]:
    rows = np.fromfile(path, dtype=np.uint8)
    size = 1 + 3 * SIDE * SIDE
    if len(rows) == 0 or len(rows) % size:
        raise ValueError(f"{path} does not hold whole pictures of {size} bytes; get it again")
    pictures = torch.from_numpy(rows).view(-1, size)
    colours = pictures[:, 1:].view(-1, 3, SIDE, SIDE).float()
    grey = (colours * torch.tensor(_GREY).view(3, 1, 1)).sum(1)
    return _tokens(grey), pictures[:, 0].long()
