# mypy: disallow-untyped-calls=False
"""Launches of GPU kernels that cost the host little.

Triton looks at every argument of every launch to find the kernel that was compiled for such ones:
some fifteen microseconds here, several times what a launch takes. The kernels of this package are
compiled for the dtypes of their tensors and for their constants, and for nothing else that changes
from call to call, so that what was found once can be found again by these.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from triton import knobs
from triton.runtime import driver

_compiled: dict[Any, tuple[Any, ...]] = {}
"""Device, kernel, kinds of arguments and constants → how the kernel is run. Kernels are never gone,
so that their places in memory tell them apart."""
_ALIGNED = 16
"""Bytes: Triton reads tensors that begin at multiples of these with wider instructions."""


@no_type_check
def launch(kernel, programs, arguments, constants, *, warps, registers=None):
    """Runs `programs` programs of a kernel on the device of its tensors.

    `arguments` are tensors, None or numbers in the order of the kernel's parameters; `constants`
    its constexprs by name, which are the last of them. Tensors lie together.
    """
    options = {"num_warps": warps} | ({} if registers is None else {"maxnreg": registers})
    device = next(x for x in arguments if x is not None).get_device()
    if device < 0:  # Triton's interpreter, or tensors without data
        kernel[(programs,)](*arguments, **constants, **options)
    elif device != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(device, kernel, programs, arguments, constants, options)
    else:
        _launch(device, kernel, programs, arguments, constants, options)


def _watched() -> bool:
    """Whether a profiler wants to be told of launches."""
    return bool(getattr(knobs.runtime.launch_enter_hook, "calls", None))


@no_type_check
def _launch(device, kernel, programs, arguments, constants, options):
    kinds, values, bits = [], [], 0
    for x in arguments:
        if x is None:
            kinds.append(None)
        elif type(x) is int:
            kinds.append(-0x80000000 <= x < 0x80000000)
        elif type(x) is float:
            kinds.append(float)
        else:
            kinds.append(x.dtype)
            x = x.data_ptr()
            bits |= x
        values.append(x)
    key = (device, id(kernel), *kinds, *constants.values(), *options.values())
    found = None if bits % _ALIGNED else _compiled.get(key)
    if found is None or _watched():
        compiled = kernel[(programs,)](*arguments, **constants, **options)
        if not bits % _ALIGNED:
            # The constants' places are asked for, their values are not.
            rest = [None] * (len(kernel.params) - len(arguments))
            _compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, rest
        return
    run, function, metadata, rest = found
    stream = driver.active.get_current_stream(device)
    run(programs, 1, 1, stream, function, metadata, None, None, None, *values, *rest)
