"""A request's context entries, stored once for all methods, and the shape of the drafter that reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from methods.reading import LayerGeometry
from methods.rope import Rope


@dataclass(frozen=True, eq=False)
class DrafterGeometry:
    """What a reader must know of a drafter.

    ``scale``: softmax scale; ``rope``: its embedding; ``block``: block positions B. Heads and dims are counts.
    """

    layers: tuple[LayerGeometry, ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    rope: Rope
    block: int

    def __post_init__(self) -> None:
        if not self.layers or min(self.q_heads, self.kv_heads, self.head_dim, self.value_dim, self.block) < 1:
            raise ValueError("DrafterGeometry needs at least one layer, head, dim and block position")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads} query heads cannot share {self.kv_heads} key heads evenly")
        if 2 * len(self.rope.inv_freq) > self.head_dim:
            raise ValueError(f"the rope turns {2 * len(self.rope.inv_freq)} dims, a head has {self.head_dim}")


class ContextCache:
    """Unrotated keys and values of a request's context entries, after the k norm.

    ``keys [L, Hkv, capacity + B, d]``, ``values [L, Hkv, capacity + B, dv]``: rows ``0..length-1`` are context entries.
    The row at ``length`` and the B - 1 after it are scratch, where a reader lays the values of the current block beside
    the context.
    """

    def __init__(
        self, geometry: DrafterGeometry, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ):
        """``capacity``: most context entries the request can reach. Raises ValueError if it is not positive."""
        if capacity < 1:
            raise ValueError(f"a context cache of {capacity} entries holds nothing; give prompt length plus limit")
        self.geometry = geometry
        self.capacity = capacity
        self.length = 0
        rows = capacity + geometry.block
        shape = (len(geometry.layers), geometry.kv_heads, rows)
        self.keys = torch.zeros(*shape, geometry.head_dim, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, geometry.value_dim, dtype=dtype, device=device)

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add n entries: ``k [L, n, Hkv, d]``, ``v [L, n, Hkv, dv]``. Raises ValueError on a wrong shape or a full
        cache.
        """
        layers, kv_heads = self.keys.shape[:2]
        count = k.shape[1] if k.dim() == 4 else -1
        wanted = ((layers, count, kv_heads, self.keys.shape[3]), (layers, count, kv_heads, self.values.shape[3]))
        if (tuple(k.shape), tuple(v.shape)) != wanted:
            got = f"{tuple(k.shape)} and {tuple(v.shape)}"
            raise ValueError(f"append wants k [L,n,Hkv,d] and v [L,n,Hkv,dv]; got {got}")
        end = self.length + count
        if end > self.capacity:
            raise ValueError(f"{end} context entries do not fit a cache of {self.capacity}; open it with more capacity")
        self.keys[:, :, self.length : end] = k.transpose(1, 2)
        self.values[:, :, self.length : end] = v.transpose(1, 2)
        self.length = end

    def crop(self, length: int) -> None:
        """Keep the first ``length`` entries, as after prefill: the next method of the request starts there."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a context of {self.length} entries to {length}")
        self.length = length

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes
