"""Beyond one request at a time: several at once, and prompts that begin alike."""

from __future__ import annotations

from typing import Any

import pytest

from methods import make_method
from tests.vllm.pairs import Pair, dflash, save_pair
from tests.vllm.replay import Reference
from tests.vllm.running import Run, Running, prompt

FOLD = {"window": 64, "alpha": 2.0}
LIMIT = 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("llama"), "llama", dflash(), context=512)


@pytest.fixture(scope="module")
def reference(pair: Pair) -> Reference:
    return Reference(pair)


def test_requests_at_once_are_drafted_as_each_alone(pair: Pair, reference: Reference) -> None:
    from vllm import SamplingParams

    running = Running(pair, "fold", FOLD, context=512, chunk=128, max_num_seqs=2)
    prompts = [prompt(200, 1), prompt(90, 2)]
    drafted: list[dict[str, Any]] = []
    own = running.drafter.propose

    def watched(*arguments: Any, **named: Any) -> Any:
        drafts = own(*arguments, **named)
        metadata, rejected = named["common_attn_metadata"], named["num_rejected_tokens_gpu"]
        for row, request in enumerate(running.runner.input_batch.req_ids):
            context = int(metadata.seq_lens[row]) - (0 if rejected is None else int(rejected[row]))
            if context >= len(prompts[int(request.split("-")[0])]):
                anchor = int(named["next_token_ids"][row])
                drafted.append(
                    {"request": request, "context": context, "anchor": anchor, "drafts": drafts[row].tolist()}
                )
        return drafts

    running.drafter.propose = watched
    parameters = SamplingParams(temperature=0, max_tokens=LIMIT, ignore_eos=True, detokenize=False)
    done = running.llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
    for index, (ids, answer) in enumerate(zip(prompts, done, strict=True)):
        rounds = [each for each in drafted if each["request"].startswith(f"{index}-")]
        run = Run(list(answer.outputs[0].token_ids), {"drafts": rounds})
        reference.compare(make_method("fold", **FOLD), ids, LIMIT, run).check(tie=0.01)
        assert len(rounds) > LIMIT // 8
    assert {each["request"][0] for each in drafted} == {"0", "1"}
    running.close()


def test_a_prompt_served_from_the_prefix_cache_is_drafted_alike(pair: Pair, reference: Reference) -> None:
    running = Running(pair, "fold", FOLD, context=512, chunk=128, enable_prefix_caching=True)
    start = prompt(200, 3)
    for ids in (start + prompt(20, 4), start + prompt(30, 5)):
        run = running.generate(ids, LIMIT)
        reference.compare(make_method("fold", **FOLD), ids, LIMIT, run).check(tie=0.01)
        assert run.report["rounds"] == len(run.drafts)
    assert run.cached == 160  # pages of the common beginning, unrotated keys included; vLLM drafts from the last anew
    running.close()
