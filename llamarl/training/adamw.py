"""torch's AdamW, without what its first call would import."""

from __future__ import annotations

from inspect import unwrap

import torch


class Uncompiled(torch.optim.Optimizer):
    """Without what keeps these methods out of compiled code: their first call would import torch's compiler, which is
    as large as the rest of torch."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(Uncompiled, torch.optim.AdamW):
    """torch's."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
