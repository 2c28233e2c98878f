"""Packing of scored groups into microbatches, and `Shaping`: what each token of a group has earned.

A group's prompt is packed, and later computed, once for all its samples. Layout of one microbatch, group after group::

    [prompt] [response 0] [response 1] ...   [prompt] [response 0] ...

Prompts with the same beginning (a system prompt, examples) may share it. It is then in front of all groups::

    [beginning]   [rest of prompt] [response 0] ...   [rest of prompt] [response 0] ...

A response's last token predicts nothing, so it is a target but no input. The token at response position 0 is predicted
by the prompt's last position, position t > 0 by the response's input t - 1.

Shape suffixes: N packed input tokens, R response tokens (targets), G samples or rollouts of a group, T tokens of one
sequence, W experts of a token in all layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from operator import itemgetter

import numpy as np

from llamarl.algorithms.advantages._base import GroupRewards
from llamarl.algorithms.kl import KlPenalty, estimate, penalty
from llamarl.algorithms.shaping import OVERLONG_SHARE, length_share, overlong_share
from llamarl.config.schema import RunConfig, ShapingConfig
from llamarl.types import (
    COLUMNS,
    Columns,
    FinishReason,
    Outcome,
    Rollout,
    RolloutGroup,
    SampleGroup,
    TrainSample,
    packed_columns,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Packed tokens of several groups."""

    token_ids_N: np.ndarray
    """int64."""
    positions_N: np.ndarray
    """Position of each input in its sequence, int64. Responses continue the positions of their prompt."""
    prompt_lengths: tuple[int, ...]
    """Tokens of each group's prompt, without shared ones."""
    response_lengths: tuple[tuple[int, ...], ...]
    """Input tokens of each response, one less than its tokens, per group."""
    predictors_R: np.ndarray
    """Index in N of the position that predicts each target, int64."""
    targets_R: np.ndarray
    """int64."""
    sequence_R: np.ndarray
    """Response of each target, counted over the microbatch, int64."""
    columns_R: Columns
    """Columns of the targets, except `token_ids` and `routes`."""
    shared_tokens: int = 0
    """Tokens in front of all groups, with which every prompt begins."""
    routes_N_W: np.ndarray | None = None
    """Recorded experts of each input, layer after layer, int64; -1 means not recorded. None means that none are."""

    @property
    def behavior_logprobs_R(self) -> np.ndarray:
        """float32."""
        return self.columns_R["behavior_logprobs"]

    @property
    def policy_versions_R(self) -> np.ndarray:
        """int32."""
        return self.columns_R["policy_versions"]

    @property
    def advantages_R(self) -> np.ndarray:
        """float32."""
        return self.columns_R["advantages"]

    @property
    def loss_mask_R(self) -> np.ndarray:
        """bool."""
        return self.columns_R["loss_mask"]

    @property
    def values_R(self) -> np.ndarray:
        """float32."""
        return self.columns_R["values"]


LEAST_SHARED = 16
"""Smallest number of common first tokens that a microbatch shares."""
NOT_RECORDED = -1
"""Route of a token without a record: the router chooses itself."""
EMPTY = Microbatch(
    token_ids_N=np.zeros(0, np.int64),
    positions_N=np.zeros(0, np.int64),
    prompt_lengths=(),
    response_lengths=(),
    predictors_R=np.zeros(0, np.int64),
    targets_R=np.zeros(0, np.int64),
    sequence_R=np.zeros(0, np.int64),
    columns_R={column.name: np.zeros(0, column.dtype) for column in COLUMNS.values() if not column.is_wide},
)
"""Microbatch without groups."""


def padded(microbatch: Microbatch, multiple: int) -> Microbatch:
    """Adds tokens up to a multiple of `multiple`, at least one token in all. They form a prompt that predicts
    nothing."""
    num = len(microbatch.token_ids_N)
    num_more = -num % multiple if num else multiple
    if not num_more:
        return microbatch
    return replace(
        microbatch,
        token_ids_N=np.pad(microbatch.token_ids_N, (0, num_more)),
        positions_N=np.pad(microbatch.positions_N, (0, num_more)),
        prompt_lengths=(*microbatch.prompt_lengths, num_more),
        response_lengths=(*microbatch.response_lengths, ()),
        routes_N_W=routes if (routes := microbatch.routes_N_W) is None else _padded_routes(routes, num_more),
    )


def _padded_routes(routes_N_W: np.ndarray, num_more: int) -> np.ndarray:
    return np.pad(routes_N_W, ((0, num_more), (0, 0)), constant_values=NOT_RECORDED)


def valid_rollouts(group: RolloutGroup, *, mask_truncated: bool = False) -> np.ndarray:
    """Returns which rollouts of a group are trained on, bool [G]: generated without failure, judged and, with
    `mask_truncated`, not ended by length."""
    refused = {FinishReason.FAILED, FinishReason.LENGTH} if mask_truncated else {FinishReason.FAILED}
    return np.array(
        [
            rollout.num_tokens > 0 and rollout.finish_reason not in refused and result.outcome is not Outcome.INVALID
            for rollout, result in zip(group.rollouts, group.results, strict=True)
        ]
    )


def is_flat(group: RolloutGroup, *, mask_truncated: bool = False) -> bool:
    """Returns True if all judged rollouts of a group have equal rewards, so that comparing them teaches nothing.

    Returns False if none was judged (the share of invalid rewards counts such groups), and for a group of one.
    """
    valid_G = valid_rollouts(group, mask_truncated=mask_truncated)
    values = {result.value for result, valid in zip(group.results, valid_G, strict=True) if valid}
    return len(values) == 1 and len(group.rollouts) > 1


def to_sample_group(
    group: RolloutGroup, advantages: Sequence[np.ndarray] | np.ndarray, valid_G: np.ndarray | None = None
) -> SampleGroup:
    """Returns the trainable part of a group, without invalid rollouts. Sequences of agents become samples without a
    prompt.

    Args:
        advantages: per rollout one number, or one for each of its tokens.
        valid_G: bool; None means the result of `valid_rollouts`.
    """
    valid_G = valid_rollouts(group) if valid_G is None else valid_G
    samples = [
        {"loss_mask": rollout.is_sampled_T}
        | rollout.columns
        | {"advantages": np.full(rollout.num_tokens, advantage, np.float32)}
        for rollout, advantage, valid in zip(group.rollouts, advantages, valid_G, strict=True)
        if valid
    ]
    prompt_T = group.prompt.token_ids_T
    routes = (rollout.prompt_routes for rollout, valid in zip(group.rollouts, valid_G, strict=True) if valid)
    prompt_routes = next((array for array in routes if array is not None), None)
    if any("sequence" in columns for columns in samples):
        prompt_T, samples = prompt_T[:0], [sequence for columns in samples for sequence in sequences_of(columns)]
    return SampleGroup(
        prompt_token_ids_T=prompt_T, samples=tuple(TrainSample(columns=columns) for columns in samples),
        prompt_routes=prompt_routes,
    )  # fmt: skip


def sequences_of(columns: Columns) -> list[Columns]:
    """Returns the columns of each sequence of an agent's episode."""
    cuts = [0, *np.flatnonzero(np.diff(columns["sequence"])) + 1, len(columns["sequence"])]
    return [
        {name: values_T[start:end] for name, values_T in columns.items() if name != "sequence"}
        for start, end in pairwise(cuts)
    ]


def with_advantage(groups: Sequence[SampleGroup]) -> list[SampleGroup]:
    """Returns the samples with any advantage. Groups of equal rewards become empty."""
    return [
        replace(group, samples=tuple(sample for sample in group.samples if sample.advantages_T.any()))
        for group in groups
    ]


def recorded_kl(groups: Sequence[SampleGroup]) -> float | None:
    """Returns the sum, over the trainable tokens of samples without any advantage, of the k3 estimate of the divergence
    from the reference. These samples are not computed, so the estimate uses the log-probabilities of their sampling.
    None means that there is no reference."""
    samples = [sample for group in groups for sample in group.samples if not sample.advantages_T.any()]
    all_samples = (sample for group in groups for sample in group.samples)
    total, is_known = 0.0, any("reference_logprobs" in sample.columns for sample in all_samples)
    for sample in samples if is_known else ():
        log_ratio_T = sample.columns["behavior_logprobs"].astype(np.float64) - sample.columns["reference_logprobs"]
        total += float(estimate(log_ratio_T[sample.loss_mask_T], "k3").sum())
    return total if is_known else None


def num_loss_tokens(groups: Iterable[SampleGroup]) -> int:
    """Returns the number of trainable positions: the global denominator of token-mean losses."""
    return int(sum(sample.loss_mask_T.sum() for group in groups for sample in group.samples))


def num_loss_sequences(groups: Iterable[SampleGroup]) -> int:
    """Returns the number of samples with a trainable position: the global denominator of sequence-mean losses."""
    return sum(bool(sample.loss_mask_T.any()) for group in groups for sample in group.samples)


def pack(groups: Sequence[SampleGroup], microbatch_tokens: int, *, shares: bool = False) -> list[Microbatch]:
    """Returns microbatches of at most `microbatch_tokens` inputs, in order. A longer sample gets its own microbatch.

    Args:
        shares: whether a common beginning of all prompts is packed once per microbatch.
    """
    with_prompts = [group for group in chain.from_iterable(map(_with_prompt, groups)) if group.samples]
    shared = _common_beginning(with_prompts) if shares else 0
    batches: list[list[SampleGroup]] = [[]]
    num_left = limit = microbatch_tokens - shared
    for group in _split([_without_beginning(group, shared) for group in with_prompts], limit):
        size = _num_inputs(group)
        if batches[-1] and size > num_left:
            batches.append([])
            num_left = limit
        batches[-1].append(group)
        num_left -= size
    beginning_T = with_prompts[0].prompt_token_ids_T[:shared] if with_prompts else np.zeros(0, np.int32)
    return [_pack(batch, beginning_T) for batch in batches if batch]


def _common_beginning(groups: Sequence[SampleGroup]) -> int:
    """Returns the number of common first tokens of all prompts, without the last token of any prompt, which predicts.

    Returns 0 for fewer than `LEAST_SHARED`, and for recorded experts, which belong to the prompt of one group.
    """
    if len(groups) < 2 or any("routes" in sample.columns for group in groups for sample in group.samples):
        return 0
    prompts = [group.prompt_token_ids_T for group in groups]
    if (num := min(map(len, prompts)) - 1) < LEAST_SHARED:  # prompts of samples without sampled tokens may be empty
        return 0
    differs = [np.flatnonzero(prompt[:num] != prompts[0][:num]) for prompt in prompts]
    num = min((int(places[0]) for places in differs if len(places)), default=num)
    return num if num >= LEAST_SHARED else 0


def _without_beginning(group: SampleGroup, num_tokens: int) -> SampleGroup:
    return replace(group, prompt_token_ids_T=group.prompt_token_ids_T[num_tokens:]) if num_tokens else group


def packed_samples(groups: Sequence[SampleGroup]) -> list[TrainSample]:
    """Returns all samples in the order of `pack`'s targets, cut to their targets."""
    return [sample for group in groups for part in _with_prompt(group) for sample in part.samples]


def placed(groups: Sequence[RolloutGroup], samples: Sequence[TrainSample]) -> list[tuple[int, int, int]]:
    """Returns the group id and index of the rollout of each sample, and the rollout's token at which the sample
    begins."""
    # A sample holds views of the arrays of its rollout.
    rollouts = (rollout for group in groups for rollout in group.rollouts)
    owners = sorted((_address(rollout), rollout.group_id, rollout.index) for rollout in rollouts)
    places = list[tuple[int, int, int]]()
    for sample in samples:
        address, group_id, index = owners[bisect_right(owners, _address(sample), key=itemgetter(0)) - 1]
        places.append((group_id, index, (_address(sample) - address) // sample.token_ids_T.itemsize))
    return places


def _address(tokens: Rollout | TrainSample) -> int:
    return int(tokens.token_ids_T.__array_interface__["data"][0]) if tokens.num_tokens else 0


def _num_inputs(group: SampleGroup) -> int:
    return len(group.prompt_token_ids_T) + sum(len(sample.token_ids_T) - 1 for sample in group.samples)


def _with_prompt(group: SampleGroup) -> list[SampleGroup]:
    """Moves the common beginning of samples without a prompt, up to the first sampled token, into a prompt."""
    if len(group.prompt_token_ids_T):
        return [group]
    by_first_token = defaultdict[int, list[TrainSample]](list)
    for sample in group.samples:
        by_first_token[int(sample.token_ids_T[0])].append(sample)
    parts = list[SampleGroup]()
    for samples in by_first_token.values():
        num = min(int(np.argmax(sample.loss_mask_T)) for sample in samples)
        first_T = samples[0].token_ids_T[:num]
        differs = [np.flatnonzero(sample.token_ids_T[:num] != first_T) for sample in samples]
        num = min((int(places[0]) for places in differs if len(places)), default=num)
        rests = ({name: values_T[num:] for name, values_T in sample.columns.items()} for sample in samples)
        cut = (TrainSample(columns=columns) for columns in rests)
        # A token's row belongs to the token before it, so the last shared token's row is the first of each response.
        routes = next((sample.columns["routes"][1:num] for sample in samples if "routes" in sample.columns), None)
        parts.append(SampleGroup(prompt_token_ids_T=first_T[:num], samples=tuple(cut), prompt_routes=routes))
    return parts


def _split(groups: Iterable[SampleGroup], microbatch_tokens: int) -> Iterator[SampleGroup]:
    """Cuts groups over the budget into several that repeat the prompt. Drops groups without samples."""
    for group in groups:
        part, num_left = list[TrainSample](), 0
        for sample in group.samples:
            size = len(sample.token_ids_T) - 1
            if part and size > max(num_left, 0):
                yield replace(group, samples=tuple(part))
                part = []
            if not part:
                num_left = microbatch_tokens - len(group.prompt_token_ids_T)
            part.append(sample)
            num_left -= size
        if part:
            yield replace(group, samples=tuple(part))


def _pack(groups: Sequence[SampleGroup], beginning_T: np.ndarray) -> Microbatch:
    shared = start = len(beginning_T)
    token_ids, positions, predictors = [beginning_T], [np.arange(shared)], list[np.ndarray]()
    for group in groups:
        prompt = group.prompt_token_ids_T
        last_of_prompt = start + len(prompt) - 1
        token_ids.append(prompt)
        positions.append(np.arange(shared, shared + len(prompt)))
        start += len(prompt)
        for sample in group.samples:
            inputs = sample.token_ids_T[:-1]
            token_ids.append(inputs)
            positions.append(shared + np.arange(len(prompt), len(prompt) + len(inputs)))
            predictors += [np.array([last_of_prompt]), np.arange(start, start + len(inputs))]
            start += len(inputs)
    samples = [sample for group in groups for sample in group.samples]
    columns_R = packed_columns([sample.columns for sample in samples])
    predictors_R, routes_R_W = np.concatenate(predictors), columns_R.pop("routes", None)
    return Microbatch(
        token_ids_N=np.concatenate(token_ids).astype(np.int64),
        positions_N=np.concatenate(positions),
        prompt_lengths=tuple(len(group.prompt_token_ids_T) for group in groups),
        response_lengths=tuple(tuple(len(sample.token_ids_T) - 1 for sample in group.samples) for group in groups),
        predictors_R=predictors_R,
        targets_R=columns_R.pop("token_ids").astype(np.int64),
        sequence_R=np.repeat(np.arange(len(samples)), [sample.num_tokens for sample in samples]),
        columns_R=columns_R,
        shared_tokens=shared,
        routes_N_W=None if routes_R_W is None else _placed_routes(groups, routes_R_W, predictors_R, start),
    )


def _placed_routes(
    groups: Sequence[SampleGroup], routes_R_W: np.ndarray, predictors_R: np.ndarray, num_inputs: int
) -> np.ndarray:
    """Returns the routes of each packed input.

    The responses of a group share the last token of their prompt, which each of them has fed; the first response's
    routes count.
    """
    unknown, routes_N_W = np.iinfo(routes_R_W.dtype).max, np.full((num_inputs, routes_R_W.shape[1]), NOT_RECORDED)
    known_R = np.flatnonzero((routes_R_W != unknown).any(1))[::-1]  # responses share a prompt's last token
    routes_N_W[predictors_R[known_R]] = routes_R_W[known_R]
    start = 0
    for group in groups:
        if group.prompt_routes is not None:
            routes_N_W[start : start + len(group.prompt_routes)] = group.prompt_routes
        start += _num_inputs(group)
    routes_N_W[routes_N_W == unknown] = NOT_RECORDED
    return routes_N_W


@dataclass(frozen=True, slots=True)
class Shaping:
    """The only place that changes rewards. The recorded groups keep the rewards as judged."""

    config: ShapingConfig
    max_tokens: int
    """`rollout.max_new_tokens`."""
    kl: KlPenalty | None = None
    """Penalty of each token for leaving the reference. None means no penalty."""
    max_tokens_of: Mapping[str, int] = field(default_factory=dict)
    """`max_new_tokens` of sources of a mixture, by label."""

    def rewards(self, group: RolloutGroup) -> GroupRewards:
        """Returns the response's reward less its penalties at the last token, rewards of turns at theirs, and the
        penalty for leaving the reference at each token. The greedy response's reward is unshaped."""
        cost_G = sum(self._penalties(group).values(), np.zeros(len(group.rollouts)))
        scores_G = np.array([result.value for result in group.results], np.float64) - cost_G
        divergences = tuple(self._divergence(rollout) for rollout in group.rollouts)
        token_rewards = list[np.ndarray]()
        for rollout, divergence_T, score in zip(group.rollouts, divergences, scores_G, strict=True):
            of_turns_T = rollout.turn_rewards_T.astype(np.float64)
            of_turns_T[-1:] += score - of_turns_T.sum()  # the last token of a response was sampled
            token_rewards.append(divergence_T + of_turns_T)
        turns, turn_returns = self._by_turn(group, token_rewards)
        baseline = group.baseline
        return GroupRewards(
            token_rewards=tuple(token_rewards),
            divergences=divergences if self.kl else (),
            valid_G=valid_rollouts(group, mask_truncated=self.config.mask_truncated),
            values=tuple(rollout.values_T for rollout in group.rollouts),
            is_sampled=tuple(rollout.is_sampled_T for rollout in group.rollouts),
            scores_G=scores_G,
            turns=turns,
            turn_returns=turn_returns,
            baseline=np.nan if baseline is None or baseline.outcome is Outcome.INVALID else baseline.value,
        )

    def _by_turn(
        self, group: RolloutGroup, token_rewards: Sequence[np.ndarray]
    ) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """Returns the turn of each token, and the return of each turn, per rollout. () if turns are not told apart."""
        if self.config.credit == "episode":
            return (), ()
        turns = tuple(rollout.turn_T for rollout in group.rollouts)
        returns = list[np.ndarray]()
        for turn_T, rewards_T in zip(turns, token_rewards, strict=True):
            earned = np.bincount(turn_T, rewards_T)
            if self.config.credit == "discounted":
                for turn in range(len(earned) - 2, -1, -1):
                    earned[turn] += self.config.turn_discount * earned[turn + 1]
            returns.append(earned)
        return turns, tuple(returns)

    def batch(
        self, groups: Sequence[RolloutGroup], advantages: Callable[[Sequence[GroupRewards]], list[list[np.ndarray]]]
    ) -> tuple[list[SampleGroup], list[list[np.ndarray]]]:
        """Returns the samples to train on and their advantages [T], per group and rollout."""
        rewards = [self.rewards(group) for group in groups]
        by_group = advantages(rewards)
        samples = [
            to_sample_group(group, of_group, earned.valid_G)
            for group, of_group, earned in zip(groups, by_group, rewards, strict=True)
        ]
        return samples, by_group

    def _divergence(self, rollout: Rollout) -> np.ndarray:
        """Returns minus the penalty of each token for leaving the reference, float64 [T]."""
        if self.kl is None:
            return np.zeros(rollout.num_tokens)
        cost_T = self.kl(rollout.behavior_logprobs_T.astype(np.float64) - rollout.reference_logprobs_T)
        return np.where(rollout.is_sampled_T, -cost_T, 0.0)

    def _penalties(self, group: RolloutGroup) -> dict[str, np.ndarray]:
        """Returns the penalties in use, by name, [G] each."""
        config, penalties = self.config, dict[str, np.ndarray]()
        max_tokens = self.max_tokens_of.get(group.prompt.source, self.max_tokens)
        num_tokens_G = np.array([rollout.is_sampled_T.sum() for rollout in group.rollouts])
        if config.length_penalty:
            penalties["length_penalty"] = config.length_penalty * length_share(num_tokens_G, max_tokens)
        if config.overlong_penalty:
            share_G = overlong_share(num_tokens_G, max_tokens, OVERLONG_SHARE * max_tokens)
            penalties["overlong_penalty"] = config.overlong_penalty * share_G
        return penalties

    def metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Returns the mean penalty per rollout, the share of rollouts masked as truncated, and the mean reward of
        greedy responses."""
        penalties = [self._penalties(group) for group in groups]
        metrics = {
            f"{name}_mean": float(np.concatenate([of_group[name] for of_group in penalties]).mean())
            for name in (penalties[0] if penalties else ())
        }
        if self.config.mask_truncated:
            reasons = [rollout.finish_reason for group in groups for rollout in group.rollouts]
            metrics["masked_truncated_share"] = reasons.count(FinishReason.LENGTH) / max(len(reasons), 1)
        greedy = [group.baseline for group in groups if group.baseline is not None]
        if judged := [result.value for result in greedy if result.outcome is not Outcome.INVALID]:
            metrics["greedy_reward_mean"] = float(np.mean(judged))
        return metrics


UNSHAPED = Shaping(ShapingConfig(), 1)


def shaping(config: RunConfig) -> Shaping:
    """Returns the shaping of rewards for trainer and critic."""
    limits = {label: settings.rollout.max_new_tokens for label, settings in config.by_source.items()}
    return Shaping(config.shaping, limits.pop(""), penalty(config.reference, "reward"), limits)
