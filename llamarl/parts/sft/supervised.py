"""`Supervised`: the objective of supervised training, next to those of trainer and critic, on the ranks of a mesh.

Shape suffixes: M rows of this rank, R response tokens (targets), D model dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llamarl.config.roles import TrainerConfig
from llamarl.distributed.mesh import ALONE, RankMesh
from llamarl.models.experts import Router
from llamarl.models.transformer import Transformer
from llamarl.training.cost import step_cost
from llamarl.training.optimization import Optimization, Totals, finished
from llamarl.training.packing import Microbatch, num_loss_tokens
from llamarl.training.parallel import Read
from llamarl.training.policy import Policy
from llamarl.training.result import StepResult
from llamarl.types import SampleGroup


class Loads:
    """Imbalance of expert routing in the last forward.

    For each layer, E * sum over experts of (share of the choices) * (mean probability), which is 1 if all are equal
    (Switch Transformer, arXiv 2101.03961, equations 4 to 6, with the k choices of a token counted as k).
    """

    def __init__(self, model: Transformer) -> None:
        self._found = list[Tensor]()
        for router in (one for one in model.modules() if isinstance(one, Router)):
            router.register_forward_hook(self._seen)

    def _seen(self, router: Router, given: tuple[Tensor, ...], chosen: tuple[Tensor, Tensor]) -> None:
        scores_N_E = router.scores(given[0])
        shares_E = chosen[0].flatten().bincount(minlength=scores_N_E.shape[1]) / chosen[0].numel()
        likely_E = (scores_N_E / scores_N_E.sum(-1, keepdim=True)).mean(0)
        self._found.append(scores_N_E.shape[1] * (shares_E * likely_E).sum())

    def taken(self) -> Tensor:
        """Returns the sum over all layers and resets it."""
        total = torch.stack(self._found).sum()
        self._found.clear()
        return total


class Supervised(Optimization[Transformer]):
    """Minimizes the mean negative log-likelihood of all tokens in the loss mask."""

    def __init__(
        self,
        model: Transformer,
        config: TrainerConfig,
        mesh: RankMesh = ALONE,
        device: torch.device | None = None,
        read: Read | None = None,
        balance: float = 0.0,
    ) -> None:
        """See `Trainer` for other arguments.

        Args:
            balance: weight of the loss that balances the load of experts. Without it, a model from scratch uses only a
                few.
        """
        self.policy = Policy(model, mesh)
        self._loads = Loads(model) if balance and model.shape.moe else None
        self._balance = balance
        super().__init__(
            self.policy, config, mesh, device or model.device, model.kv_dtype, read, "trainer.learning_rate"
        )

    def step(self, documents: Sequence[SampleGroup]) -> StepResult:
        """Runs `trainer.passes` updates on these prompts and responses.

        Raises:
            NonFiniteStep: loss or gradient is NaN or infinite, and the training must stop.
        """
        num_targets = num_loss_tokens(documents)
        taken = finished(self.update(documents, max(num_targets, 1)))
        metrics = {
            "loss": taken.loss,
            "grad_norm": taken.grad_norm,
            "learning_rate": taken.learning_rate,
            "num_loss_tokens": float(num_targets),
            "num_input_tokens": taken.sums["num_input_tokens"],
            "num_flops": step_cost(self.model.shape, documents, self.config.lora).flops * taken.num_passes,
        }
        return StepResult(policy_version=self.policy_version, skipped=taken.skipped, cause=taken.cause, metrics=metrics)

    def _forward(self, microbatch: Microbatch, hidden_M_D: Tensor | None) -> Tensor:
        inputs = self.policy.place(microbatch, self.device)
        return self.policy(inputs, hidden_M_D, 1.0, self.config.dtype == "bfloat16")

    def _loss(self, microbatch: Microbatch, output_R: Tensor, first_R: Tensor | None, totals: Totals) -> Tensor:
        """Returns the sum over the tokens."""
        mask_R = self.tensor(microbatch.loss_mask_R)
        loss = -output_R.masked_fill(~mask_R, 0.0).sum()
        if self._loads is None:
            return loss
        return loss + self._balance * mask_R.sum() * self._loads.taken()
