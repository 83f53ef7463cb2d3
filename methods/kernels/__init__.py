"""Fast executors of a read: Triton kernels, and FlashAttention where it is installed.

They implement the protocols of :mod:`methods.paged` and are drop-ins for its torch functions::

    from methods.kernels import unavailable
    from methods.kernels.split_read import SplitRead    # needs Triton, as the next two
    from methods.kernels.rotate import rotate
    from methods.kernels.merge import merge
    from methods.kernels.flash import FlashAttend       # needs nothing: the engine hands its function over

    read = SplitRead(longest=max_context)
    reader = PagedReader(method, geometry, max_context=..., dtype=..., device="cuda",
                         attend=read, fused=read.fused, rotate=rotate, merge=merge)

``kernels.executors(max_context)`` is the same as a dict of those four arguments.

``SplitRead(...)(q, keys, values, table, length, left=, right=, scale=) -> out, lse`` is one call (paged, or contiguous
with ``table=None``); ``SplitRead(...).fused([Call, Call]) -> out, mass`` is a whole read: near, far and merge in two
launches. ``rotate`` turns the query for both reads and counts them in one launch. Everything that depends on the
context's length is read from device memory. ``splits.chosen()`` says which splits and tiles were measured best.

On a machine without a GPU the kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` before the first import), in
float32 and float16; its bfloat16 products are wrong.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch


def unavailable() -> str | None:
    """Why the Triton kernels cannot run here, in one line; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton needs a GPU, or its interpreter: set TRITON_INTERPRET=1"
    return None


def executors(longest: int) -> dict[str, Any]:
    """The Triton executors as keyword arguments of :class:`methods.paged.PagedReader`: ``attend``, ``fused``,
    ``rotate``, ``merge``.

    ``longest``: most keys a read can have, for the choice of splits. Raises RuntimeError, in one line, where Triton
    cannot run.
    """
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    from methods.kernels.merge import merge
    from methods.kernels.rotate import rotate
    from methods.kernels.split_read import SplitRead

    read = SplitRead(longest)
    return {"attend": read, "fused": read.fused, "rotate": rotate, "merge": merge}
