"""vLLM's V2 runner on a CPU: its Triton kernels run in Triton's interpreter. A program of its own, for one process.

    python -m tests.vllm.v2_session SESSION.json

vLLM's CPU package takes the V2 runner for impossible without Triton's CPU backend; the interpreter does as well, if it
is switched on before anything is imported. Reads a list of pairs, ``{"target", "drafter", "folder", "requests":
[...]}``, and writes what each request gave beside it, as ``SESSION.json.out``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any


class _ForcedTriton:
    """Imports ``vllm.triton_utils.importing`` as if Triton had found a driver."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "vllm.triton_utils.importing":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def forced(module: Any) -> None:
            load(module)
            module.HAS_TRITON = True

        spec.loader.exec_module = forced  # type: ignore[method-assign]
        return spec


def main(session: Path) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    sys.meta_path.insert(0, _ForcedTriton())  # type: ignore[arg-type]
    from harness.engines.vllm import plugin, speculator
    from methods import make_method
    from tests.vllm.pairs import save_pair
    from tests.vllm.running import Guide, Running

    plugin.register()
    speculator.install()  # register() leaves a CPU alone
    answers: list[list[dict[str, Any]]] = []
    for asked in json.loads(session.read_text()):
        pair = save_pair(Path(asked["folder"]), asked["target"], asked["drafter"], context=512, runner_v2=True)
        running = Running(pair, "fold", {"window": 64}, context=512, chunk=128)
        assert type(running.drafter).__name__ in ("PlannedDFlashSpeculator", "PlannedDSparkSpeculator")
        answers.append([])
        outputs: dict[str, list[int]] = {}
        for request in asked["requests"]:
            prompt, limit = request["prompt"], request["limit"]
            if str(prompt) not in outputs:
                outputs[str(prompt)] = running.generate(prompt, limit).output
            running.use(make_method(request["method"], **request["options"]), kernels=request.get("kernels"))
            run = running.generate(prompt, limit, Guide(prompt + outputs[str(prompt)], seed=len(answers[-1])))
            answers[-1].append({"output": run.output, "expected": outputs[str(prompt)], "report": run.report})
        running.close()
    session.with_name(session.name + ".out").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
