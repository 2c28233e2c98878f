"""Reference, critic and reward model: what each says, alone and in a run.

Not covered: GPUs, and here a critic of several processes, which is in `end_to_end/test_layouts.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from llamarl.algorithms.advantages.gae import Gae
from llamarl.algorithms.losses.ppo_clip import PpoClip
from llamarl.config import ConfigError, RunConfig
from llamarl.data.tokenizer import Tokenizer
from llamarl.executors.models import CriticExecutor, ReferenceExecutor, RewardModelExecutor
from llamarl.models.hf import load_model
from llamarl.parts.sft.bpe import train_byte_bpe
from llamarl.run.folder import RunFolder
from llamarl.run.prepare import prepare
from llamarl.training.packing import pack, to_sample_group
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import OBSERVED, FinishReason, Outcome, Prompt, RewardResult, Rollout, RolloutGroup
from tests.end_to_end.tiny import rows
from tests.executors.runs import learnt, tiny_config, train
from tests.nightly import nightly

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def make_config(model: Path, tmp_path: Path) -> MakeConfig:
    return partial(tiny_config, model, tmp_path)


@pytest.fixture
def group(model: Path) -> RolloutGroup:
    """Three responses; the second one failed."""
    rng, tokenizer = np.random.default_rng(0), Tokenizer(model)
    prompt = Prompt(prompt_id="p", text="Roy has 2", token_ids_T=tokenizer.encode("Roy has 2"), answer="")
    lengths, ends = (7, 3, 1), (FinishReason.STOP, FinishReason.FAILED, FinishReason.LENGTH)
    rollouts = tuple(
        Rollout(
            group_id=0,
            index=index,
            columns={
                "token_ids": rng.integers(0, 200, length).astype(np.int32),
                "behavior_logprobs": np.zeros(length, np.float32),
                "policy_versions": np.zeros(length, np.int32),
            },
            finish_reason=end,
        )
        for index, (length, end) in enumerate(zip(lengths, ends, strict=True))
    )
    results = tuple(RewardResult(outcome=Outcome.SCORE, value=float(n)) for n in range(3))
    return RolloutGroup(group_id=0, prompt=prompt, rollouts=rollouts, results=results, responses=("", "", ""))


def rollout_of(ids: np.ndarray, **more: np.ndarray) -> Rollout:
    columns = {"token_ids": ids.astype(np.int32), "policy_versions": np.zeros(len(ids), np.int32), **more}
    return Rollout(group_id=0, index=0, columns=columns, finish_reason=FinishReason.STOP)


def agents_rollout(ids: np.ndarray) -> Rollout:
    """Of two sequences: two tokens of the prompt and seven more, of which one was observed; three, and the rest."""
    versions = np.where(np.isin(np.arange(len(ids)), (0, 1, 4, 9, 10, 11)), OBSERVED, 0)
    return rollout_of(ids, policy_versions=versions, sequence=(np.arange(len(ids)) >= 9).astype(np.int32))


class TestReference:
    def test_it_is_the_trainer_before_its_first_step(self, make_config: MakeConfig, group: RolloutGroup) -> None:
        config = make_config()
        ((first, failed, last),) = ReferenceExecutor(config).score([(group.prompt, group.rollouts)])
        trainer = Trainer(
            load_model(config.model.path, torch.float32, "cpu"),
            config.trainer,
            Objective(loss=PpoClip(), advantage=Gae(), temperature=0.8),
        )
        (batch,) = pack([to_sample_group(group, [np.zeros(7), np.zeros(3), np.zeros(1)])], 1000)
        np.testing.assert_allclose(np.concatenate([first, last]), trainer.logprobs(batch).detach(), atol=1e-5)
        assert first.dtype == np.float32 and (failed == 0).all() and len(failed) == 3

    def test_each_sequence_of_an_agent_is_read_by_itself(self, make_config: MakeConfig, group: RolloutGroup) -> None:
        reference, ids = ReferenceExecutor(make_config(trainer={"microbatch_tokens": 12})), np.arange(3, 20)
        episode = agents_rollout(ids)
        silent = replace(episode, columns={name: values[:0] for name, values in group.rollouts[0].columns.items()})
        ((found, nothing, again),) = reference.score([(group.prompt, (episode, silent, episode))])
        prompts = [replace(group.prompt, token_ids_T=part.astype(np.int32)) for part in (ids[:2], ids[9:12])]
        rests = [rollout_of(part) for part in (ids[2:9], ids[12:])]
        ((first,),), ((second,),) = (
            reference.score([(prompt, (rest,))]) for prompt, rest in zip(prompts, rests, strict=True)
        )
        np.testing.assert_allclose(found, np.concatenate([np.zeros(2), first, np.zeros(3), second]), atol=1e-5)
        np.testing.assert_allclose(again, found, atol=1e-5)
        assert not len(nothing)

    def test_quantized_it_is_close(self, make_config: MakeConfig, group: RolloutGroup) -> None:
        said = [
            np.concatenate(ReferenceExecutor(config).score([(group.prompt, group.rollouts)])[0])
            for config in (make_config(), make_config(reference={"dtype": "int8", "kl_coefficient": 0.1}))
        ]
        assert 0 < np.abs(said[0] - said[1]).max() < 0.3


@pytest.fixture
def classifier(model: Path, tmp_path: Path) -> Path:
    """A reward model with the policy's tokenizer, written by transformers."""
    import transformers

    made = transformers.AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, pad_token_id=0, torch_dtype=torch.float32
    )
    torch.nn.init.normal_(made.score.weight, generator=torch.Generator().manual_seed(1))
    made.save_pretrained(tmp_path / "classifier")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model / name, tmp_path / "classifier" / name)
    return tmp_path / "classifier"


def judge(config: RunConfig) -> RewardModelExecutor:
    return RewardModelExecutor(config)


def by_transformers(classifier: Path, ids_T: np.ndarray) -> float:
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(classifier, torch_dtype=torch.float32)
    with torch.no_grad():
        return float(model(torch.from_numpy(ids_T.astype(np.int64))[None]).logits)


class TestRewardModel:
    def test_it_reads_the_tokens_that_were_sampled(
        self, make_config: MakeConfig, classifier: Path, group: RolloutGroup
    ) -> None:
        config = make_config(
            reward={
                "model": {
                    "path": str(classifier),
                }
            }
        )
        (results,) = judge(config).score([(group.prompt, group.rollouts)])
        for rollout, result in zip(group.rollouts, results, strict=True):
            ids_T = np.concatenate([group.prompt.token_ids_T, rollout.token_ids_T])
            assert result.outcome is Outcome.SCORE
            assert result.value == pytest.approx(by_transformers(classifier, ids_T), abs=1e-4)
        assert len({result.value for result in results}) == 3

    def test_with_a_tokenizer_of_its_own_it_reads_the_text(
        self, make_config: MakeConfig, classifier: Path, group: RolloutGroup, tmp_path: Path
    ) -> None:
        own = train_byte_bpe(["Roy has 2 apples", "Ben has 3 books"], tmp_path / "own", 280)
        shutil.copyfile(own.folder / "tokenizer.json", classifier / "tokenizer.json")
        config = make_config(reward={"model": {"path": str(classifier)}})
        ((result, *_),) = judge(config).score([(group.prompt, group.rollouts[:1])])
        text = group.prompt.text + Tokenizer(config.model.path).decode(group.rollouts[0].token_ids_T)
        assert result.value == pytest.approx(by_transformers(classifier, own.encode(text)), abs=1e-4)

    @pytest.mark.parametrize("has_own", [False, True])
    def test_of_an_agent_it_reads_the_longest_sequence(
        self, make_config: MakeConfig, classifier: Path, group: RolloutGroup, tmp_path: Path, has_own: bool
    ) -> None:
        ids = np.arange(70, 87)
        expected = ids[:9]
        config = make_config(reward={"model": {"path": str(classifier)}})
        if has_own:
            own = train_byte_bpe(["Roy has 2 apples", "Ben has 3 books"], tmp_path / "own", 280)
            shutil.copyfile(own.folder / "tokenizer.json", classifier / "tokenizer.json")
            expected = own.encode(Tokenizer(config.model.path).decode(expected))
        ((result,),) = judge(config).score([(group.prompt, (agents_rollout(ids),))])
        assert result.value == pytest.approx(by_transformers(classifier, expected), abs=1e-4)

    def test_what_it_cannot_read_is_invalid(
        self, make_config: MakeConfig, classifier: Path, group: RolloutGroup
    ) -> None:
        config = make_config(reward={"model": {"path": str(classifier)}})
        long = replace(group.rollouts[0], columns=group.rollouts[0].columns | {"token_ids": np.ones(300, np.int32)})
        ((result, fine),) = judge(config).score([(group.prompt, (long, group.rollouts[2]))])
        assert result.outcome is Outcome.INVALID and "the reward model reads 1 to 256" in result.reason
        assert fine.outcome is Outcome.SCORE


def finished(critic: CriticExecutor, group: RolloutGroup, step: int) -> dict[str, float]:
    learn(critic, group, step)
    while (result := critic.learn_on(step)) is None:
        pass
    return result.metrics | {"critic_s": 0}


def learn(critic: CriticExecutor, group: RolloutGroup, step: int) -> None:
    values = critic.score([(group.prompt, group.rollouts)])[0]
    rollouts = tuple(
        replace(
            one,
            group_id=step,
            columns=one.columns | {"values": values_T, "reference_logprobs": np.zeros(one.num_tokens, np.float32)},
        )
        for one, values_T in zip(group.rollouts, values, strict=True)
    )
    critic.add_groups([replace(group, group_id=step, rollouts=rollouts)])
    critic.learn(step, [step])


def values_of(critic: CriticExecutor, group: RolloutGroup) -> np.ndarray:
    return np.concatenate(critic.score([(group.prompt, group.rollouts)])[0])


class TestCritic:
    def test_it_values_new_rollouts_while_it_learns(
        self, make_config: MakeConfig, group: RolloutGroup, tmp_path: Path
    ) -> None:
        """By the weights of the last finished step; without staleness it finishes the step first."""
        cut = {"microbatch_tokens": len(group.prompt.token_ids_T) + 6}
        for staleness in (1, 0):
            config = make_config(trainer=cut, rollout={"max_staleness": staleness})
            critic = CriticExecutor(config, str(tmp_path))
            before = values_of(critic, group)
            learn(critic, group, 1)
            assert critic.learn_on(1) is None, "one microbatch of two"
            assert np.array_equal(values_of(critic, group), before) == (staleness == 1)
            while (result := critic.learn_on(1)) is None:
                pass
            assert not np.array_equal(values_of(critic, group), before)
            assert result.metrics["value_loss"] > 0 and result.metrics["critic_s"] > 0

    def test_a_step_is_finished_before_the_next(
        self, make_config: MakeConfig, group: RolloutGroup, tmp_path: Path
    ) -> None:
        """Both are asked for in turn; each answers with its own numbers."""
        apart, together = (CriticExecutor(make_config(), str(tmp_path)) for _ in range(2))
        for step in (1, 2):
            learn(together, group, step)
        expected = [finished(apart, group, 1)]
        learn(apart, group, 2)
        found = dict[int, dict[str, float]]()
        while len(found) < 2:
            for step in {1, 2} - found.keys():
                if (result := together.learn_on(step)) is not None:
                    found[step] = result.metrics | {"critic_s": 0}
        assert list(found) == [1, 2] and found[1] == expected[0] and found[2] != found[1]

    def test_it_goes_on_from_its_checkpoint_bit_for_bit(
        self, make_config: MakeConfig, group: RolloutGroup, tmp_path: Path
    ) -> None:
        first, second = (CriticExecutor(make_config(), str(tmp_path)) for _ in range(2))
        finished(first, group, 1)
        learn(first, group, 2)
        first.save(2).result()  # finishes the second step
        assert (committed := first.commit()) is not None and committed.result().endswith("step-00000002")
        second.resume(2)
        assert np.array_equal(values_of(first, group), values_of(second, group))
        assert finished(first, group, 3) == finished(second, group, 3)
        assert np.array_equal(values_of(first, group), values_of(second, group))


@pytest.fixture
def whole_run(make_config: MakeConfig) -> tuple[RunConfig, RunFolder]:
    config = make_config()
    return config, train(config)


def test_a_run_with_all_of_them(
    whole_run: tuple[RunConfig, RunFolder], make_config: MakeConfig, classifier: Path
) -> None:
    """The reference is the first policy; it costs nothing to leave it by nothing. A model's score is in the reward."""
    _, folder = whole_run
    steps = learnt(folder)
    assert abs(steps[0]["extra.kl_to_reference"]) < 1e-6 < steps[-1]["extra.kl_to_reference"]
    assert all(step["extra.value_loss"] > 0 for step in steps)

    judged = train(make_config(name="judged", steps=1, reward={"model": {"path": str(classifier), "weight": 0.5}}))
    for plain, row in zip(rows(folder.rollouts), rows(judged.rollouts), strict=False):
        assert plain["token_ids"] == row["token_ids"]
        assert row["reward"] != plain["reward"], "the model's share is missing"


@nightly("a run each; by day a run has all of these models, and each is tested alone")
def test_an_agent_of_several_sequences_with_a_critic(make_config: MakeConfig) -> None:
    agent = {"name": "tests.parts.episodes.agents:forgetful", "episode_s": 60.0}
    folder = train(make_config(steps=2, rollout={"agent": agent, "max_new_tokens": 40}))
    steps = [row for row in rows(folder.metrics) if row["kind"] == "step"]
    assert len(steps) == 2 and all(np.isfinite(row["extra.value_loss"]) for row in steps)
    for row in rows(folder.rollouts):
        assert set(row["sequence"]) == {0, 1} and row["reward"] == 0.5


@nightly("a run each; by day a run has all of these models, and each is tested alone")
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_an_agent_with_a_reference_and_a_reward_model(make_config: MakeConfig, classifier: Path, kl_in: str) -> None:
    agent = {"name": "tests.parts.episodes.agents:run", "episode_s": 60.0}
    config = make_config(
        steps=2, rollout={"agent": agent, "max_new_tokens": 40}, reference={"kl_in": kl_in, "kl_estimator": "k3"},
        trainer={"advantage": "group_normalized", "learning_rate": 0.1},
        reward={"model": {"path": str(classifier), "weight": 0.5}},
    )  # fmt: skip
    folder = train(config)
    first, second = (row for row in rows(folder.metrics) if row["kind"] == "step")
    assert abs(first["extra.kl_to_reference"]) < 1e-5 < abs(second["extra.kl_to_reference"])
    rewards = [row["reward"] for row in rows(folder.rollouts)]
    assert len(rewards) == 24 and len(set(rewards)) > 12, "0.5 of the agent, and what the model says of each"


@nightly("a run that goes on; by day a run has all of these models")
def test_resumed_it_is_the_uninterrupted_run(whole_run: tuple[RunConfig, RunFolder], make_config: MakeConfig) -> None:
    """Policy, critic and reference; without staleness to the last bit."""
    config, folder = whole_run
    half = make_config(name="half", steps=2)
    train(half)
    resumed = train(half.model_copy(update={"steps": config.steps}), resume=True)
    assert learnt(resumed) == learnt(folder)
    assert rows(resumed.rollouts) == rows(folder.rollouts)


@nightly("by day a run has all of them in one process; end_to_end/test_processes.py has processes")
def test_inline_and_monarch_do_the_same(whole_run: tuple[RunConfig, RunFolder], make_config: MakeConfig) -> None:
    _, folder = whole_run
    apart = train(make_config(name="apart", cluster={"kind": "monarch"}))
    assert learnt(apart) == learnt(folder)
    assert rows(apart.rollouts) == rows(folder.rollouts)
    logs = {path.name for path in apart.logs.iterdir()}
    assert logs == {f"{name}.log" for name in ("generator-0", "reward", "trainer", "reference", "critic", "monarch")}


def test_a_reference_with_other_tokens_is_refused(make_config: MakeConfig, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    text = (other / "config.json").read_text()
    size = load_model(model, torch.float32, "cpu").shape.vocab_size
    (other / "config.json").write_text(text.replace(f'"vocab_size": {size}', f'"vocab_size": {size + 1}'))
    weights = load_file(other / "model.safetensors")
    rows_V = [name for name, tensor in weights.items() if len(tensor) == size]
    save_file(weights | {name: F.pad(weights[name], (0, 0, 0, 1)) for name in rows_V}, other / "model.safetensors")
    prepare(make_config(reference={"path": str(other)}))  # one more row, which no token has
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for executor in ("reference", "critic"):
        with pytest.raises(ConfigError, match=rf"{executor}.path = .* as token 5"):
            prepare(make_config(**{executor: {"path": str(other)}}))
    (other / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=rf"reference.path = .* has {size + 1} tokens and model.path {size}"):
        prepare(make_config(reference={"path": str(other)}))


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ({"tp": 4}, r"critic.parallelism.tp = 4 cannot share the 2 key/value heads of .* evenly; use one of 1, 2"),
        ({"pp": 3}, r"critic.parallelism.pp = 3 is more than the 2 layers of .*; use at most 2"),
    ],
)
def test_a_critic_that_cannot_be_cut_so_is_refused(
    make_config: MakeConfig, layout: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        prepare(make_config(critic={"parallelism": layout}, cluster={"kind": "monarch"}))
    with pytest.raises(ValueError, match=r"critic.parallelism asks for \d processes, .* use cluster.kind = 'monarch'"):
        make_config(critic={"parallelism": layout})


def test_what_is_not_simulated_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    from llamarl.parts.forecast.costs import Costs
    from llamarl.parts.forecast.simulator.faults import Faults
    from llamarl.parts.forecast.simulator.run import simulate
    from llamarl.parts.forecast.simulator.split import choose_split

    config, costs = make_config(), Costs()
    layout = choose_split(config, costs, None, None)
    with pytest.raises(ConfigError, match=r"not reference, critic; leave them out"):
        simulate(config, costs, Faults.parse("", layout.replicas), layout, tmp_path / "metrics.jsonl")
