import itertools

import numba
import numpy as np
import pytest

from rankone.lanes import lane_count, lane_dot

LANES = 4
SHAPE = (3, 2, 4)  # rows, inner, columns


def run(dot, a, b, out):
    numba.njit(lambda a, b, out: dot(a, b, out))(a, b, out)
    return out


def operand(rows, columns, *, transposed, shared, rng):
    """An operand in its own layout, and as [rows, columns, lanes]."""
    lanes = () if shared else (LANES,)
    stored = rng.standard_normal((columns, rows, *lanes) if transposed else (rows, columns, *lanes))
    plain = stored.swapaxes(0, 1) if transposed else stored
    return stored, np.broadcast_to(plain[..., None], (*plain.shape, LANES)) if shared else plain


@pytest.mark.parametrize("start", ["zero", "out", "eye"])
@pytest.mark.parametrize(
    ("transpose_a", "transpose_b", "shared_a", "shared_b"),
    # Two operands, each stored four ways: all of one beside all of the other.
    [c for c in itertools.product([False, True], repeat=4) if c[0] == c[3] or c[1] == c[2]],
)
def test_lane_dot_is_the_product_in_every_lane(transpose_a, transpose_b, shared_a, shared_b, start):
    rng = np.random.default_rng(0)
    rows, inner, columns = SHAPE
    a, A = operand(rows, inner, transposed=transpose_a, shared=shared_a, rng=rng)
    b, B = operand(inner, columns, transposed=transpose_b, shared=shared_b, rng=rng)
    out = rng.standard_normal((rows, columns, LANES))
    first = {"zero": 0 * out, "out": out.copy(), "eye": np.eye(rows, columns)[..., None]}[start]
    dot = lane_dot(
        *SHAPE,
        LANES,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        shared_a=shared_a,
        shared_b=shared_b,
        start=start,
    )
    expected = first + np.einsum("ikw,kjw->ijw", A, B)
    np.testing.assert_allclose(run(dot, a, b, out), expected, rtol=1e-13)


@pytest.mark.parametrize("start", ["zero", "out", "twice_symmetric"])
def test_symmetric_products_are_whole(start):
    rng = np.random.default_rng(1)
    a = rng.standard_normal((3, 3, LANES))
    out = rng.standard_normal((3, 3, LANES))
    if start == "out":
        out = out + out.swapaxes(0, 1)
    first = {"zero": 0 * out, "out": out.copy(), "twice_symmetric": out + out.swapaxes(0, 1)}
    dot = lane_dot(3, 3, 3, LANES, transpose_b=True, symmetric=True, start=start)
    expected = first[start] + np.einsum("ikw,jkw->ijw", a, a)
    np.testing.assert_allclose(run(dot, a, a, out), expected, rtol=1e-13, atol=1e-13)


def test_lanes_may_hold_float32():
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((3, 3, 8)).astype(np.float32) for _ in range(2))
    out = run(lane_dot(3, 3, 3, 8), a, b, np.empty((3, 3, 8), np.float32))
    np.testing.assert_allclose(out, np.einsum("ikw,kjw->ijw", a, b), rtol=1e-5, atol=1e-5)


def test_there_is_a_power_of_two_of_lanes():
    assert lane_count() in (8, 16)
