"""A mixture's rollouts are drawn again with the experts on record."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llamarl.generation.engine import Engine, EngineSettings
from llamarl.parts.replay.replayer import Replayer
from llamarl.types import GenerationRequest, Rollout, SamplingParams
from tests.generation.mixtures import mixture
from tests.generation.references import run_segments
from tests.generation.test_model import loaded


def test_experts_are_compared_bit_for_bit() -> None:
    model = loaded(mixture("qwen3_moe_odd"), "float32")
    engine = Engine(model, EngineSettings(max_running=3, prefill_tokens=8, kv_bytes=1 << 22))
    request = GenerationRequest(
        group_id=0, prompt_token_ids_T=np.arange(3, 24, dtype=np.int32), group_size=3, segment_tokens=5,
        sampling=SamplingParams(max_new_tokens=12),
    )  # fmt: skip
    rollouts = [*run_segments(engine, [request])[0].values()]
    assert not any(one.num_tokens < 12 for one in rollouts)

    def found(*changed: Rollout) -> list[tuple[int, int, str]]:
        replayer = Replayer(Engine(model, EngineSettings(max_running=3, prefill_tokens=8, kv_bytes=1 << 22)))
        assert replayer.add([(request, one) for one in changed]) == []
        done = replayer.advance(0)
        assert done.num_tokens == 12 * len(changed)
        return [(one.index, one.token, one.found) for one in done.differences]

    assert found(*rollouts) == []
    other = rollouts[1].columns["routes"].copy()
    was = other[7].tolist()
    other[7, 2] = (other[7, 2] + 1) % 8
    other[3] = 255  # not on record
    changed = replace(rollouts[1], columns=rollouts[1].columns | {"routes": other})
    assert found(rollouts[0], changed, rollouts[2]) == [(1, 7, f"experts {was}")]

    prompt = rollouts[0].prompt_routes
    assert prompt is not None and len(prompt) == 20
    other = prompt.copy()
    other[13, 1] = (other[13, 1] + 1) % 8
    other[17] = 255
    said = f"experts {prompt[13].tolist()} of the prompt's token 13"
    assert found(replace(rollouts[0], prompt_routes=other), *rollouts[1:]) == [(0, 0, said)]
