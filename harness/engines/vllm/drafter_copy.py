"""A local copy of a drafter's folder whose config.json suits vLLM 0.28.0; the weights are linked, not copied.

What vLLM would otherwise get wrong without a word (facts/vllm.md, sections 2 and 3):

- ``max_position_embeddings`` sizes the drafter's rope table and, on the V1 runner, is the context beyond which the
  drafter is no longer run. Drafters trained on short texts declare short contexts, so it is raised to what is served.
- Sliding layers would be stored in blocks that are freed behind the window, where no method could read older entries.
  All layers are stored as full attention; the plugin reads what they were trained as from the original, which the copy
  carries under ``fold_bench_original_config``.
- z-lab's drafting keys are read from ``dflash_config`` only, also where a checkpoint has them at the top level.
- DeepSpec's drafters run on the V2 runner only. The V1 runner serves them as ``dflash``, by the plugin's classes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from harness.drafters import DrafterError, parse_config
from harness.drafters.checkpoint import fetch

CONFIG = "config.json"
ORIGINAL = "fold_bench_original_config"


def copy_drafter(source: Path, into: Path, *, context: int, runner_v2: bool) -> Path:
    """Make ``into`` the drafter of folder ``source`` for a served context of so many tokens. Returns ``into``.

    Raises DrafterError for a config.json that is none of a supported drafter, FileExistsError if ``into`` is not empty.
    """
    where = f"{source / CONFIG}"
    try:
        original = json.loads((source / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise DrafterError(f"{where} is unreadable ({error})") from None
    if not isinstance(original, dict):
        raise DrafterError(f"{where} is not a JSON object")
    served = served_config(original, context=context, runner_v2=runner_v2, where=where)
    into.mkdir(parents=True, exist_ok=True)
    if next(into.iterdir(), None) is not None:
        raise FileExistsError(f"{into} is not empty")
    (into / CONFIG).write_text(json.dumps(served, indent=2) + "\n", encoding="utf-8")
    for path in source.iterdir():
        if path.name != CONFIG and path.is_file():
            (into / path.name).symlink_to(path.resolve())
    return into


def served_config(original: dict[str, Any], *, context: int, runner_v2: bool, where: str = CONFIG) -> dict[str, Any]:
    """A checkpoint's config.json, changed as above. Raises DrafterError."""
    original = original.get(ORIGINAL, original)
    config = parse_config(original, where=where)
    served = {
        key: value
        for key, value in original.items()
        if key not in ("sliding_window", "use_sliding_window", "max_window_layers")
    }
    served |= {
        ORIGINAL: original,
        "layer_types": ["full_attention"] * len(config.layers),
        "is_causal": False,
        # The block stands behind the last committed entry.
        "max_position_embeddings": max(config.max_positions, context + config.block + 1),
    }
    if config.family == "dflash" or not runner_v2:
        drafting = original.get("dflash_config") or {}
        served["dflash_config"] = {
            **{key: value for key, value in drafting.items() if key not in ("use_swa", "swa_window_size", "causal")},
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        }
    return served


def speculative_config(folder: Path, *, runner_v2: bool) -> dict[str, Any]:
    """vLLM's speculative_config for a folder made by :func:`copy_drafter`: method, model and K. Raises DrafterError."""
    original = json.loads((folder / CONFIG).read_bytes())[ORIGINAL]
    config = parse_config(original, where=str(folder / CONFIG))
    method = "dflash" if config.family == "dflash" or not runner_v2 else "dspark"
    return {"method": method, "model": str(folder), "num_speculative_tokens": config.proposals}


def main(arguments: list[str] | None = None) -> int:
    """``python -m harness.engines.vllm.drafter_copy DRAFTER FOLDER --context N``: a drafter for ``vllm serve``.

    Prints the --speculative-config that goes with it.
    """
    parser = argparse.ArgumentParser(description="copy a drafter's folder for vLLM, with its positions raised")
    parser.add_argument("drafter", help="folder or Hub id")
    parser.add_argument("folder", type=Path, help="new folder; the weights are linked")
    parser.add_argument("--revision", help="of a Hub repository")
    parser.add_argument("--context", type=int, required=True, help="tokens that will be served (--max-model-len)")
    parser.add_argument("--runner", choices=("v1", "v2"), default="v2", help="v1 on a CPU and for hybrid targets")
    given = parser.parse_args(arguments)
    if given.context < 1:
        parser.error(f"--context {given.context}: must be at least 1")
    try:
        source, v2 = fetch(given.drafter, revision=given.revision), given.runner == "v2"
        folder = copy_drafter(source, given.folder.absolute(), context=given.context, runner_v2=v2)
        print(json.dumps(speculative_config(folder, runner_v2=v2)))
    except (DrafterError, OSError) as error:
        print(f"drafter_copy: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
