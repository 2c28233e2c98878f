"""`Policy`: a transformer with the log-probabilities of given tokens inside, for any layout; `RankModel` is what it
shares with the critic.

Shape suffixes: N packed tokens of this context rank, M rows of this rank, R targets, O those of them that are predicted
by this context rank's tokens, D model dim, W experts of a token in all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from llamarl.distributed.collectives import gather_rows, summed
from llamarl.distributed.mesh import RankMesh
from llamarl.kernels import train_attention
from llamarl.kernels.half import Rounded
from llamarl.kernels.linear import rounds_activations
from llamarl.models.attention import own_index, packed_attend
from llamarl.models.scalar import ScalarModel
from llamarl.models.transformer import Attend, Transformer
from llamarl.training.logprobs import target_logprobs
from llamarl.training.packing import EMPTY, Microbatch, SampleGroup, pack, padded
from llamarl.types import TrainSample

LARGE = 8
"""So many times its step, and a microbatch is large enough for padding to cost little."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """One microbatch, as a rank computes it."""

    token_ids_N: Tensor
    positions_N: Tensor
    attend: Attend
    predictors_O: Tensor
    """Index in N."""
    targets_O: Tensor
    index_O: Tensor
    """Index in R."""
    num_targets: int
    num_tokens: int
    """Rows of N that are tokens; those behind them fill up what ranks share."""
    routes_N_W: Tensor | None = None
    """Recorded experts, int64, -1 where there are none; None: each router chooses itself."""
    cutoffs_O: Tensor | None = None
    """Cutoffs as in `llamarl.types.COLUMNS`; None: all tokens were candidates."""


Model = TypeVar("Model", Transformer, ScalarModel)


class RankModel(nn.Module, Generic[Model]):
    """Module that FSDP2 wraps: all use of the weights is in its forward."""

    def __init__(self, transformer: Model, mesh: RankMesh) -> None:
        super().__init__()
        self.transformer = transformer
        self.mesh = mesh
        self.hidden_size = transformer.shape.hidden_size
        self.multiple = mesh.tp.size * (2 * mesh.cp.size if mesh.cp.size > 1 else 1)
        """Number of tokens of which the ranks can share every multiple evenly."""
        self.even = 1
        """Number of tokens of which a rank's part of a large microbatch is a multiple."""
        self.fused = False
        """Whether attention may be a kernel of this package."""

    @property
    def shares_beginnings(self) -> bool:
        """Returns True if a microbatch may hold what all its prompts begin with once: attention computes that here."""
        return self.fused and self.mesh.cp.size == 1 and train_attention.serves()

    def hidden_shape(self, microbatch: Microbatch) -> tuple[int, int]:
        """Shape of the hidden states between pipeline stages, [M, D]."""
        num_tokens = len(self._padded(microbatch).token_ids_N)
        return num_tokens // (self.mesh.cp.size * self.mesh.tp.size), self.hidden_size

    def _padded(self, microbatch: Microbatch) -> Microbatch:
        even = self.multiple * self.even
        return padded(microbatch, even if len(microbatch.token_ids_N) >= LARGE * even else self.multiple)

    def place(self, microbatch: Microbatch, device: torch.device) -> Inputs:
        """This rank's part of a microbatch."""
        cp, whole = self.mesh.cp, self._padded(microbatch)
        rows_N = own_index(num_tokens := len(whole.token_ids_N), cp)
        place_of = torch.full((num_tokens,), -1).index_copy(0, rows_N, torch.arange(len(rows_N)))
        predictors_R = place_of[torch.from_numpy(whole.predictors_R)]
        index_O = (predictors_R >= 0).nonzero().squeeze(1)
        cutoffs_R = microbatch.columns_R.get("cutoffs")
        is_cut = cutoffs_R is not None and len(cutoffs_R) > 0
        return Inputs(
            token_ids_N=torch.from_numpy(whole.token_ids_N)[rows_N].to(device, non_blocking=True),
            positions_N=torch.from_numpy(whole.positions_N)[rows_N].to(device, non_blocking=True),
            attend=packed_attend(
                whole.prompt_lengths, whole.response_lengths, device, cp, fused=self.fused, shared=whole.shared_tokens
            ),
            predictors_O=predictors_R[index_O].to(device, non_blocking=True),
            targets_O=torch.from_numpy(whole.targets_R)[index_O].to(device, non_blocking=True),
            index_O=index_O.to(device, non_blocking=True),
            num_targets=len(whole.targets_R),
            num_tokens=int((rows_N < len(microbatch.token_ids_N)).sum()),
            routes_N_W=self._routes(whole, rows_N, device),
            cutoffs_O=torch.from_numpy(cutoffs_R)[index_O].to(device, non_blocking=True) if is_cut else None,
        )

    def _routes(self, whole: Microbatch, rows_N: Tensor, device: torch.device) -> Tensor | None:
        """The policy's were recorded; the critic and the reference choose for themselves."""
        return None

    def hidden(self, inputs: Inputs, hidden_M_D: Tensor | None, bfloat16: bool) -> Tensor:
        """Hidden states of this stage, from those of the stage before, [M, D]."""
        given = inputs.token_ids_N if hidden_M_D is None else hidden_M_D
        with torch.autocast(given.device.type, torch.bfloat16, enabled=bfloat16):
            replayed = () if inputs.routes_N_W is None else (inputs.routes_N_W,)
            return self.transformer(given, inputs.positions_N, inputs.attend, *replayed)


class Policy(RankModel[Transformer]):
    """Knows how likely given tokens are. A mixture computes them with the experts that sampled them, where these were
    recorded (router replay, arXiv 2510.11370): gates are its own, so that a gradient reaches the router."""

    def _routes(self, whole: Microbatch, rows_N: Tensor, device: torch.device) -> Tensor | None:
        if whole.routes_N_W is None:
            return None
        return torch.from_numpy(whole.routes_N_W)[rows_N].to(device, non_blocking=True)

    def forward(self, inputs: Inputs, hidden_M_D: Tensor | None, temperature: float, bfloat16: bool) -> Tensor:
        """Log-probs [R] of all targets, the same on all tensor and context ranks; before the last stage, [M, D]."""
        output_M_D = self.hidden(inputs, hidden_M_D, bfloat16)
        if not self.mesh.pp.is_last:
            return output_M_D
        hidden_O_D = gather_rows(output_M_D, self.mesh.tp).index_select(0, inputs.predictors_O)
        if bfloat16 and hidden_O_D.device.type == "cuda":
            hidden_O_D = hidden_O_D.bfloat16()  # sums of the head's product stay float32; its factors need not be
        weight_V_D = self.transformer.head_weight_V_D
        head_V_D = weight_V_D.to(hidden_O_D.dtype)
        rounds = bfloat16 and hidden_O_D.device.type == "cpu" and weight_V_D.dtype == torch.float32
        if rounds and not rounds_activations():
            head_V_D, rounds = Rounded.apply(head_V_D), False  # as generators serve it; activations stay float32
        targets = inputs.targets_O, temperature, self.mesh.tp, inputs.cutoffs_O, self.transformer.unused_ids
        logprobs_O = target_logprobs(hidden_O_D, head_V_D, *targets, rounds=rounds)
        if self.mesh.cp.size == 1:
            return logprobs_O
        logprobs_R = logprobs_O.new_zeros(inputs.num_targets).index_copy(0, inputs.index_O, logprobs_O)
        return summed(logprobs_R, self.mesh.cp)


def outputs_of(samples: Sequence[TrainSample], outputs: Mapping[int, Tensor]) -> list[np.ndarray]:
    """Float32 [T] for each sample of this data-parallel rank's share, in order, from [R] of each of its microbatches.
    Waits for the device, once."""
    if not samples:
        return []
    ends = np.cumsum([sample.num_tokens for sample in samples])
    return np.split(
        torch.cat([outputs[index] for index in sorted(outputs)]).float().cpu().numpy()[: ends[-1]], ends[:-1]
    )


def own_share(
    groups: Sequence[SampleGroup], mesh: RankMesh, microbatch_tokens: int, *, shares_beginnings: bool = False
) -> list[Microbatch]:
    """Microbatches that this data-parallel rank computes of a step: as many as whoever has the most, the others' last
    ones empty, as they all take part in each collective."""
    own = pack(shares(groups, mesh.fsdp.size)[mesh.fsdp.rank], microbatch_tokens, shares=shares_beginnings)
    return own + [EMPTY] * (max(mesh.exchange(len(own))) - len(own))


def shares(groups: Sequence[SampleGroup], num: int) -> list[list[SampleGroup]]:
    """`groups` dealt to `num` ranks with about as many tokens each, the largest first to whoever has the fewest."""
    tokens = [
        len(group.prompt_token_ids_T) + sum(len(sample.token_ids_T) for sample in group.samples) for group in groups
    ]
    loads, found = [0] * num, [list[int]() for _ in range(num)]
    for index in sorted(range(len(groups)), key=lambda index: -tokens[index]):
        rank = loads.index(min(loads))
        loads[rank] += tokens[index]
        found[rank].append(index)
    return [[groups[index] for index in sorted(indexes)] for indexes in found]
