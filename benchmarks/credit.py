"""Credit by turn on a task of two turns: how many steps until the policy is right, by `shaping.credit`.

    python benchmarks/credit.py [--seeds 16]

Fixed before the first run: each of two turns chooses one of ten actions, one of which is right and earns 1, plus
normal noise of standard deviation 1. The policy is a table of softmax logits. A step has 8 groups of 2 episodes;
advantages are those of the package (`Shaping`, `group_mean`), the gradient is the plain policy gradient. Each way of
credit has the best of six learning rates. A run is there when the probability of being right, averaged over turns, is
0.85, and gives up after 500 steps.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np
from _record import write_result

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.config.schema import ShapingConfig
from llamarl.training.packing import Shaping
from llamarl.types import OBSERVED, FinishReason, Outcome, Prompt, RewardResult, Rollout, RolloutGroup

TURNS, ACTIONS, GROUPS, GROUP_SIZE, GOAL, NOISE, MOST_STEPS = 2, 10, 8, 2, 0.85, 1.0, 500
RATES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
WAYS: dict[str, dict[str, Any]] = {
    "episode": {},
    "turn": {"credit": "turn"},
    "to_go": {"credit": "discounted", "turn_discount": 1.0},
}
NOTES = [
    "steps: median over seeds until the policy is right, at the best rate; credit_steps_ratio: turn over episode.",
    "best_rate at an end of `rates` means that the way may have been tuned further.",
]


def episode(index: int, actions: np.ndarray, rewards: np.ndarray) -> tuple[Rollout, RewardResult]:
    """Returns an episode of one token per turn, with the reply of the environment between turns."""
    tokens, versions, earned = list[int](), list[int](), list[float]()
    for turn, (action, reward) in enumerate(zip(actions, rewards, strict=True)):
        replies = turn < len(actions) - 1
        tokens += [int(action), *[0] * replies]
        versions += [0, *[OBSERVED] * replies]
        earned += [float(reward), 0.0] if replies else [0.0]
    columns = {
        "token_ids": np.array(tokens, np.int32),
        "behavior_logprobs": np.zeros(len(tokens), np.float32),
        "policy_versions": np.array(versions, np.int32),
        "turn_rewards": np.array(earned, np.float32),
    }
    total = float(np.float32(rewards[:-1]).sum(dtype=np.float64) + rewards[-1])
    rollout = Rollout(group_id=0, index=index, columns=columns, finish_reason=FinishReason.STOP)
    return rollout, RewardResult(outcome=Outcome.SCORE, value=total)


def steps_to_goal(settings: dict[str, Any], rate: float, seed: int) -> int:
    rng, logits = np.random.default_rng(seed), np.zeros((TURNS, ACTIONS))
    prompt = Prompt(prompt_id="p", text="", token_ids_T=np.array([1], np.int32), answer="")
    shaping, turns = Shaping(ShapingConfig(**settings), TURNS * 2), np.arange(TURNS)
    for step in range(MOST_STEPS):
        probabilities = np.exp(logits - logits.max(1, keepdims=True))
        probabilities /= probabilities.sum(1, keepdims=True)
        if probabilities[:, 0].mean() >= GOAL:
            return step
        gradient = np.zeros_like(logits)
        for _ in range(GROUPS):
            made, actions = [], []
            for index in range(GROUP_SIZE):
                chosen = np.array([rng.choice(ACTIONS, p=row) for row in probabilities])
                made.append(episode(index, chosen, (chosen == 0) + NOISE * rng.normal(size=TURNS)))
                actions.append(chosen)
            rollouts, results = zip(*made, strict=True)
            group = RolloutGroup(group_id=0, prompt=prompt, rollouts=rollouts, results=results, responses=("",) * 2)
            (advantages,) = GroupMean().of_batch([shaping.rewards(group)])
            for chosen, advantages_T in zip(actions, advantages, strict=True):
                by_turn = advantages_T[::2][:, None]
                one_hot = np.eye(ACTIONS)[chosen]
                gradient[turns] += by_turn * (one_hot - probabilities)
        logits += rate * gradient / (GROUPS * GROUP_SIZE)
    return MOST_STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=16)
    options = parser.parse_args()
    found = dict[str, Any]()
    for way, settings in WAYS.items():
        by_rate = {
            rate: statistics.median(steps_to_goal(settings, rate, seed) for seed in range(options.seeds))
            for rate in RATES
        }
        best = min(by_rate, key=lambda rate: by_rate[rate])
        found[way] = {"steps": by_rate[best], "best_rate": best, "by_rate": by_rate}
        print(way, found[way], flush=True)
    ratios = {f"{way}_over_episode": found[way]["steps"] / found["episode"]["steps"] for way in ("turn", "to_go")}
    settings = {"seeds": options.seeds, "groups": GROUPS, "group_size": GROUP_SIZE, "noise": NOISE, "goal": GOAL}
    values = {"credit_steps_ratio": ratios["turn_over_episode"], **ratios, **found}
    print(write_result("credit", settings, values, NOTES))


if __name__ == "__main__":
    main()
