"""The recurrences in compiled code for the CPU: states in a core's cache, a few tokens a step.

`steps` has the equations and writes them as vector instructions through `emitter`, `tracks` walks
sequences with them, `machine` makes machine code of it, and `operation` is what PyTorch sees.
"""

from rankone.ops.walk.operation import Call, forward

__all__ = ["Call", "forward"]
