"""Weight matrices laid out once for many small products.

Decoding multiplies the same weights with 1 to B rows thousands of times. On a CPU, oneDNN keeps bf16 and fp32 weights
in a blocked layout that ``torch.nn.functional.linear`` would redo on every call; laid out once, a product of 1 to 8
rows takes about half the time (measured in ``benchmarks/engine_cpu.py``). Elsewhere this is an ordinary linear.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
ROWS_HINT = 8  # the layout is chosen for a verification's rows; one row is as fast with it


def pack(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return ``x [rows, in] -> x @ weight.T + bias [rows, out]``, in the weight's dtype.

    ``weight`` is [out, in]. The returned callable owns a packed copy where the CPU has one (bf16 with native or
    emulated oneDNN support, fp32), so the caller may drop the original; otherwise it keeps ``weight`` itself.
    """
    if _packable(weight):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
        product = torch.ops.mkldnn._linear_pointwise

        def packed_linear(x: Tensor) -> Tensor:
            return product(x, packed, bias, "none", [], "")

        return packed_linear

    def linear(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    return linear


def _packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
