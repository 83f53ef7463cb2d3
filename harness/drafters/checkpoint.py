"""Drafter checkpoints on disk: found in a folder or on the Hub, checked before a weight is read, written back.

Weights are safetensors only. Pickled files are never opened and code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.drafters.config import HEAD_TENSORS, DrafterConfig, as_json, parse_config, tensor_shapes
from harness.drafters.errors import DrafterError

_INDEX = "model.safetensors.index.json"

Take = Callable[[str], Tensor | None]
"""Gives the tensor of a checkpoint name, in the checkpoint's dtype on the CPU; None if the checkpoint has none."""


def read_config(
    source: str | Path, *, revision: str | None = None, block: int | None = None, offline: bool = False
) -> DrafterConfig:
    """Read and check ``config.json`` of a local folder or a Hub repository, without its weights.

    ``revision`` pins a Hub repository and is ignored for a folder. ``block`` is compared with the checkpoint's block
    size. ``offline`` looks into the Hub's local cache only. Raises ``DrafterError``.
    """
    where = f"{source}: config.json"
    folder = _local(source)
    if folder is None:
        path = Path(_download("hf_hub_download", source, revision, offline, filename="config.json"))
    else:
        path = folder / "config.json"
    return parse_config(_read_json(path, where), where=where, block=block)


def fetch(source: str | Path, *, revision: str | None = None, offline: bool = False) -> Path:
    """The folder that holds the checkpoint, downloaded first if ``source`` is a Hub id. Raises ``DrafterError``."""
    folder = _local(source)
    if folder is not None:
        return folder
    patterns = ["config.json", "*.safetensors", _INDEX]
    return Path(_download("snapshot_download", source, revision, offline, allow_patterns=patterns))


@contextmanager
def open_weights(folder: Path, config: DrafterConfig) -> Iterator[Take]:
    """Open the safetensors of ``folder`` and compare every name and shape with ``config`` before anything is loaded.

    Raises ``DrafterError`` for missing, unexpected or misshapen tensors, unreadable files, and pickled weights.
    """
    from safetensors import SafetensorError, safe_open  # drafters of random weights do without

    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for path in _weight_files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise DrafterError(f"{path}: not a readable safetensors file ({error})") from error
            for name in file.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                if name in found:
                    raise DrafterError(f"{folder}: tensor {name} is in two weight files")
                found[name] = file
        _check_tensors(config, {name: tuple(file.get_slice(name).get_shape()) for name, file in found.items()}, folder)
        yield lambda name: found[name].get_tensor(name) if name in found else None


def save_drafter(folder: str | Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors`` in the format of the config's family, names and dtypes as given.

    Raises ``DrafterError`` if the tensors are not those of the config. Each file appears complete or not at all.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    _check_tensors(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, folder)
    folder.mkdir(parents=True, exist_ok=True)
    raw = as_json(config) | {"dtype": str(tensors["fc.weight"].dtype).removeprefix("torch.")}
    partial = folder / "model.safetensors.partial"
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    partial = folder / "config.json.partial"
    partial.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / "config.json")


def random_tensors(config: DrafterConfig, seed: int) -> dict[str, Tensor]:
    """Float32 weights of the right names and shapes that keep activations of order one.

    A tensor depends on the seed, its name and its shape only.
    """
    return {name: random_tensor(name, shape, seed) for name, shape in tensor_shapes(config).items()}


def random_tensor(name: str, shape: tuple[int, ...], seed: int, device: torch.device | str = "cpu") -> Tensor:
    """One of :func:`random_tensors`, made on ``device`` (each kind of device has random numbers of its own)."""
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    noise = torch.randn(shape, generator=generator, device=device)
    if len(shape) == 1:  # norms, layer scalars and the confidence head's bias
        return 1.0 + 0.1 * noise
    return noise if name == "embed_tokens.weight" else noise / shape[-1] ** 0.5


def _check_tensors(config: DrafterConfig, shapes: Mapping[str, tuple[int, ...]], where: str | Path) -> None:
    """Raise ``DrafterError`` unless ``shapes`` (name to shape) is exactly what a checkpoint of ``config`` holds."""
    expected = tensor_shapes(config)
    allowed = expected | dict.fromkeys(HEAD_TENSORS, (config.vocab, config.hidden))
    if missing := sorted(expected.keys() - shapes.keys()):
        raise DrafterError(f"{where}: missing tensor {_first(missing)}")
    if extra := sorted(shapes.keys() - allowed.keys()):
        raise DrafterError(f"{where}: unexpected tensor {_first(extra)}")
    for name, shape in shapes.items():
        if tuple(shape) != allowed[name]:
            wanted = list(allowed[name])
            raise DrafterError(f"{where}: tensor {name} has shape {list(shape)}, config.json asks for {wanted}")


def _local(source: str | Path) -> Path | None:
    """``source`` as a folder, or None for a Hub id. Raises ``DrafterError`` for a path that is not there."""
    path, text = Path(source).expanduser(), str(source)
    if path.is_dir():
        return path
    if isinstance(source, Path) or path.is_absolute() or text.startswith((".", "~")) or text.count("/") != 1:
        raise DrafterError(f"{source}: no such folder, and not a Hub id of the form owner/name")
    return None


def _download(name: str, source: str | Path, revision: str | None, offline: bool, **what: Any) -> str:
    import huggingface_hub

    try:
        return getattr(huggingface_hub, name)(str(source), revision=revision, local_files_only=offline, **what)
    except Exception as error:  # the Hub client's own, httpx's and the system's errors alike: the user needs one line
        at = f" at revision {revision}" if revision else ""
        where = "in the local Hub cache (offline)" if offline else "on the Hub"
        reason = " ".join(f"{type(error).__name__} {error}".split())
        raise DrafterError(f"{source}{at}: not readable {where}; a local folder works too. ({reason})") from error


def _read_json(path: Path, where: str) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DrafterError(f"{where}: not found") from error
    except (OSError, ValueError) as error:
        raise DrafterError(f"{where}: not readable as JSON ({error})") from error
    if not isinstance(raw, dict):
        raise DrafterError(f"{where}: not a JSON object")
    return raw


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        names = _read_json(folder / _INDEX, f"{folder}: {_INDEX}").get("weight_map")
        if not isinstance(names, dict):
            raise DrafterError(f"{folder}: {_INDEX} has no weight_map")
        # Only the base name: an index must not lead out of its folder.
        files = sorted({folder / Path(str(name)).name for name in names.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if absent := [path.name for path in files if not path.is_file()]:
        raise DrafterError(f"{folder}: missing weight file {_first(absent)}")
    if not files:
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        if pickled:
            raise DrafterError(f"{folder}: only pickled weights ({_first(pickled)}), which are never loaded")
        raise DrafterError(f"{folder}: no safetensors file")
    return files


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
