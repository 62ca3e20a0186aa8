"""Pathfinder: are two discs at the ends of one dashed curve, among other dashed curves?

Images are drawn as those of the Long Range Arena's hard split were (Linsley et al. 2018; Tay et al.
2021): two curves of 14 dashes each grow by turns from seeds seven pixels apart, five short curves
distract, and one disc is on the first dash of one long curve, the other on the last dash of the
same (label 1) or of the other one (label 0). A dash is drawn at twice the size and reduced; a mask
keeps dashes apart.

As in the original, distracting curves are brighter than the long ones, which says something about
the answer's whereabouts; `equal_contrast` draws all alike.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from rankone.tasks.long_range.examples import Splits, split

VOCABULARY = 256
"""Padding, and grey levels one more than themselves; 254 and 255 are one."""
CHUNK = 500
"""Images that are drawn from one seed."""
_LENGTH, _MARGIN, _SCALE = 2, 1, 2
_REACH = _LENGTH + 1 + _MARGIN
"""Pixels around the middle of a dash that its picture needs."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Scene:
    """What an image holds."""

    size: int = 32
    dashes: int = 14
    """Of each of the two curves; 6 is the easy split and 9 the middle one."""
    seed_distance: int = 7
    distractors: int = 20
    """Dashes of all distracting curves, each of which has a third of those of a long one."""
    marker: float = 1.5
    """Radius of the discs."""
    contrast: float = 1.5
    """Of the long curves; that of distracting ones is 2, that of discs 1."""
    equal_contrast: bool = False
    retries: int = 4
    """Of a distracting curve."""


class Dash(NamedTuple):
    """A dash around its beginning, which is in the middle of both pictures."""

    picture: Array
    mask: Array


def pathfinder(
    sizes: tuple[int, int, int] = (16_000, 2_000, 2_000),
    *,
    scene: Scene | None = None,
    seed: int = 0,
    processes: int = 1,
    advance: Callable[[], None] | None = None,
) -> Splits:
    """The three splits, drawn by some processes, which changes no image.

    `advance` is called after every `CHUNK` images, each of which take a processor some seconds.
    """
    scene, total = scene or Scene(), sum(sizes)
    jobs = [(min(CHUNK, total - first), scene, (seed, first)) for first in range(0, total, CHUNK)]
    chunks = []
    for chunk in _each(_draw_chunk, jobs, processes):
        chunks.append(chunk)
        if advance is not None:
            advance()
    pictures = torch.from_numpy(np.concatenate([pictures for pictures, _ in chunks]))
    labels = torch.from_numpy(np.concatenate([labels for _, labels in chunks]))
    return split(pictures, labels, sizes)


def _each(work: Callable[[Any], Any], jobs: Sequence[Any], processes: int) -> Iterator[Any]:
    """What comes of all jobs, in their order."""
    if processes < 2:
        yield from map(work, jobs)
        return
    # Processes that begin anew: one that was copied would have no threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(work, jobs)


def _draw_chunk(job: tuple[int, Scene, tuple[int, int]]) -> tuple[Array, Array]:
    count, scene, seed = job
    rng = np.random.default_rng(seed)
    found = [draw(rng, scene) for _ in range(count)]
    pictures = np.stack([picture.reshape(-1) for picture, _ in found])
    tokens = np.minimum(pictures, 254) + 1  # 0 is where no token is
    return tokens, np.array([label for _, label in found])


def draw(rng: np.random.Generator, scene: Scene) -> tuple[Array, int]:
    """One image [size, size] of bytes, and its label."""
    label = int(rng.integers(2))
    found = None
    while found is None:
        found = _two_curves(rng, scene)
    canvas, mask, starts, ends = found
    contrast = scene.contrast if scene.equal_contrast else 2.0
    length = scene.dashes // 3
    for _ in range(scene.distractors // length):
        for _ in range(scene.retries + 1):
            more = _short_curve(rng, scene, canvas, mask, length, contrast)
            if more is not None:
                canvas, mask = more
                break
    origin = int(rng.integers(2))
    end = origin if label else 1 - origin
    for place in (starts[origin], ends[end]):
        canvas = np.maximum(canvas, _disc(scene, place))
    return _bytes(canvas), label


Point = tuple[int, int]


def _two_curves(
    rng: np.random.Generator, scene: Scene
) -> tuple[Array, Array, list[Point], list[Point]] | None:
    """Both long curves, None where they got stuck: picture, mask, beginnings and ends."""
    size = scene.size
    mask = np.zeros((size, size))
    mask[[0, -1], :] = mask[:, [0, -1]] = 1.0
    first = _seed(rng, size, lambda angle: _central(scene, angle))
    if first is None:
        return None
    second = _beside(rng, scene, first)
    if second is None:
        return None
    tips, canvas = [first, second], np.zeros((size, size))
    masks = []
    for tip in tips:
        canvas = np.maximum(
            canvas, scene.contrast * _place(_dash(tip.angle).picture, tip.tail, size)
        )
        masks.append(_place(_dash(tip.angle).mask, tip.tail, size))
    starts, ends = [tip.tail for tip in tips], [tip.tail for tip in tips]
    for _ in range(scene.dashes - 1):
        for n in range(2):
            step = _extend(rng, size, mask, tips[n])
            if step is None:
                return None
            dash, tips[n], ends[n] = step
            canvas = np.maximum(canvas, scene.contrast * _place(dash.picture, ends[n], size))
            mask = np.maximum(mask, masks[n])
            masks[n] = _place(dash.mask, ends[n], size)
    return canvas, np.maximum(mask, masks[1]), starts, ends


def _short_curve(
    rng: np.random.Generator, scene: Scene, canvas: Array, mask: Array, length: int, contrast: float
) -> tuple[Array, Array] | None:
    """A distracting curve added to both, or None where it got stuck."""
    size = scene.size
    if (mask <= 0.3).mean() < 0.01:
        return None
    lined = mask.copy()
    lined[[0, -1], :] = lined[:, [0, -1]] = 1.0
    tip = _seed(rng, size, lambda angle: _room(lined, angle))
    if tip is None:
        return None
    canvas = np.maximum(canvas, contrast * _place(_dash(tip.angle).picture, tip.tail, size))
    last = _place(_dash(tip.angle).mask, tip.tail, size)
    for _ in range(length - 1):
        step = _extend(rng, size, mask, tip)
        if step is None:
            return None
        dash, tip, end = step
        canvas = np.maximum(canvas, contrast * _place(dash.picture, end, size))
        mask = np.maximum(mask, last)
        last = _place(dash.mask, end, size)
    return canvas, np.maximum(mask, last)


class _Tip(NamedTuple):
    """Where a curve goes on: the pivot of its last dash and the angle; `tail` is a seed's."""

    pivot: Point
    angle: float
    tail: Point


def _moved(point: Point, angle: float, distance: float) -> Point:
    """Rounded up, as the original does."""
    y, x = point
    return math.ceil(y + distance * math.sin(angle)), math.ceil(x + distance * math.cos(angle))


def _turned(angle: float) -> float:
    return angle + math.pi if angle < 0 else angle - math.pi


def _inside(point: Point, size: int) -> bool:
    return 0 <= point[0] < size and 0 <= point[1] < size


def _tip(tail: Point, angle: float, size: int) -> _Tip | None:
    """The dash of a seed, None if it leaves the image."""
    head = _moved(tail, angle, _LENGTH)
    pivot = _moved(head, _turned(angle), _LENGTH + _MARGIN)
    return _Tip(pivot, angle, tail) if _inside(head, size) and _inside(pivot, size) else None


def _angle(rng: np.random.Generator) -> float:
    return float(rng.integers(-180, 180)) * math.pi / 180


def _seed(
    rng: np.random.Generator, size: int, room: Callable[[float], Array | None]
) -> _Tip | None:
    """A dash at an even place where there is room for one at its angle, in at most three tries."""
    for _ in range(3):
        angle = _angle(rng)
        free = room(angle)
        if free is None:
            return None
        y, x = free[rng.integers(len(free))]
        tip = _tip((int(y), int(x)), angle, size)
        if tip is not None:
            return tip
    return None


def _room(taken: Array, angle: float) -> Array | None:
    """The pixels where a dash fits, None if there are none; and where one at some corner would lie
    outside altogether, which is when the original gives up."""
    room = _dilated(taken, _footprint(angle))
    free = np.argwhere(room <= 0.3)
    return free if len(free) and np.isfinite(room).all() else None


@cache
def _central(scene: Scene, angle: float) -> Array | None:
    """The same in the middle of an empty image, two seed distances from its border."""
    taken, far = np.ones((scene.size, scene.size)), 2 * scene.seed_distance
    taken[far : scene.size - far, far : scene.size - far] = 0.0
    return _room(taken, angle)


def _beside(rng: np.random.Generator, scene: Scene, first: _Tip) -> _Tip | None:
    """The second seed, at a distance of the first one in any direction."""
    for _ in range(3):
        angle, direction = _angle(rng), float(rng.integers(360)) * math.pi / 180
        y = round(first.tail[0] + scene.seed_distance * math.sin(direction))
        x = round(first.tail[1] + scene.seed_distance * math.cos(direction))
        tip = _tip((y, x), angle, scene.size)
        if tip is not None:
            return tip
    return None


def _extend(
    rng: np.random.Generator, size: int, mask: Array, tip: _Tip
) -> tuple[Dash, _Tip, Point] | None:
    """The next dash, where the curve goes on from there, and the dash's far end."""
    pivot = _moved(tip.pivot, tip.angle, _LENGTH + 2 * _MARGIN)
    points, angles = _around(pivot, size)
    if len(points) == 0:
        return None
    away = np.abs(angles - tip.angle)
    away = np.minimum(np.minimum(away, 2 * math.pi - away), 0.5 * math.pi)
    free = 1.0 - _dilated(mask, _CROSS)[points[:, 0], points[:, 1]]
    weights = free * np.maximum(np.cos(away), 0.0) ** 2
    if weights.sum() < 1e-4:
        return None
    chances = np.cumsum(weights / weights.sum())
    for _ in range(3):
        n = int(np.argmax(chances > rng.random()))
        end, angle = (int(points[n, 0]), int(points[n, 1])), float(angles[n])
        dash = _dash(_turned(angle))
        if (mask + _place(dash.mask, end, size)).max() < 1.8:
            return dash, _Tip(pivot, angle, end), end
    return None


@cache
def _around(pivot: Point, size: int) -> tuple[Array, Array]:
    """The different pixels on a circle around a pivot, and the angles at which they are."""
    radius = _LENGTH + _MARGIN
    turn = np.arange(0.0, 360.0, 360.0 / (2 * radius * math.pi)) * math.pi / 180
    y, x = pivot[0] + radius * np.sin(turn), pivot[1] + radius * np.cos(turn)
    inside = (y >= 0) & (y < size) & (x >= 0) & (x < size)
    points = np.unique(np.stack([y[inside], x[inside]], axis=1).astype(int), axis=0)
    away = points - np.array(pivot)
    return points, np.arctan2(away[:, 0], away[:, 1])


_Offsets = tuple[tuple[int, int], ...]
_CROSS: _Offsets = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))


def _dilated(mask: Array, offsets: _Offsets) -> Array:
    """The largest value at some offsets from each pixel, of those inside; -∞ where none is."""
    size, reach = mask.shape[0], _REACH
    wide = np.full((size + 2 * reach, size + 2 * reach), -np.inf)
    wide[reach : reach + size, reach : reach + size] = mask
    found = np.full_like(mask, -np.inf)
    for y, x in offsets:
        near = wide[reach + y : reach + y + size, reach + x : reach + x + size]
        np.maximum(found, near, out=found)
    return found


@cache
def _footprint(angle: float) -> _Offsets:
    """The offsets at which a dash that begins at a pixel leaves its full mask; its picture is one
    pixel off the middle, as the original has it."""
    side = 2 * (_LENGTH + _MARGIN) + 1
    whole = _place(_dash(angle).mask, (side // 2 + 1, side // 2 + 1), side) >= 1.0
    return tuple((int(y) - side // 2, int(x) - side // 2) for y, x in np.argwhere(whole))


@cache
def _dash(angle: float) -> Dash:
    """A dash that begins in the middle, drawn large and reduced."""
    from PIL import Image, ImageDraw

    middle = _REACH * _SCALE
    y, x = _moved((middle, middle), angle, _LENGTH * _SCALE)
    large = Image.new("F", (2 * middle + 1, 2 * middle + 1), 0.0)
    ImageDraw.Draw(large).line([(middle, middle), (x, y)], fill=255.0, width=1)
    line = np.asarray(large)
    near = [
        (a, b) for a in range(-2, 3) for b in range(-2, 3) if a**2 + b**2 <= (_MARGIN * _SCALE) ** 2
    ]
    side = 2 * _REACH + 1
    return Dash(_reduced(line, side), _reduced(_dilated(line, tuple(near)), side))


def _reduced(large: Array, side: int) -> Array:
    """Stretched over all grey levels and resampled to a side, from 0 to 1."""
    from PIL import Image

    image = Image.fromarray(_bytes(large)).resize((side, side), Image.Resampling.LANCZOS)
    return np.asarray(image).astype(float) / 255


def _bytes(picture: Array) -> Array:
    """Stretched over all grey levels."""
    low, high = float(picture.min()), float(picture.max())
    scale = 255.0 / ((high - low) or 1.0)
    return ((picture - low) * scale + 0.5).clip(0, 255).astype(np.uint8)


def _place(small: Array, middle: Point, size: int) -> Array:
    """A small picture with its middle at a pixel of a larger one."""
    reach = small.shape[0] // 2
    wide = np.zeros((size + 2 * reach, size + 2 * reach))
    y, x = middle
    wide[y : y + small.shape[0], x : x + small.shape[1]] = small
    return wide[reach : reach + size, reach : reach + size]


@cache
def _disc(scene: Scene, middle: Point) -> Array:
    size, scale = scene.size, _SCALE
    y, x = np.ogrid[: size * scale, : size * scale]
    inside = (y - middle[0] * scale) ** 2 + (x - middle[1] * scale) ** 2
    return _reduced((inside <= (scene.marker * scale) ** 2).astype(float), size)
