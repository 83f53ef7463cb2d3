"""InfiniteBench (Zhang et al., 2024): Retr.KV, En.Sum, En.QA, En.MC, En.Dia, and generated key-value retrieval."""

from __future__ import annotations

import hashlib
import json
import uuid

# Our own wording: the official prompt is read from its upstream file, which a generated benchmark does not need.
_KV_REQUEST = "The JSON object below maps keys to values. Find the key that is named after it and write down its value."


def generated_kv(name: str, pairs: int) -> tuple[str, str]:
    """A key-value retrieval prompt of InfiniteBench's form with `pairs` UUID pairs: the user turn and the answer.

    The same layout as its kv_retrieval rows (construct_synthetic_dataset.py, build_kv_retrieval): `JSON data:`, one
    object of UUID pairs, the key, and an open sentence. Keys, values and the place of the answer follow from `name`.
    """

    def identifier(kind: str, index: int) -> str:
        return str(uuid.UUID(bytes=hashlib.sha256(f"{name}/{kind}/{index}".encode()).digest()[:16], version=4))

    data = {identifier("key", i): identifier("value", i) for i in range(pairs)}
    place = int.from_bytes(hashlib.sha256(f"{name}/place".encode()).digest()[:4], "big") * pairs >> 32
    key = identifier("key", place)
    text = (
        f"{_KV_REQUEST}\n\nJSON data:\n{json.dumps(data)}\n\n"
        f'Key: "{key}"\nThe value associated with the specified key is: '
    )
    return text, data[key]
