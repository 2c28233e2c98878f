"""What a GPU does not do, one function each. Runs where `guard.begin` has been called."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.gpu.pretend import GPU, Ledger, ledger

ON_GPU = {"device": GPU}


def mixed_operands() -> None:
    torch.ones(3, **ON_GPU) + torch.ones(3)


def mixed_index() -> None:
    torch.ones(3)[torch.tensor([1], **ON_GPU)]


def mixed_layer() -> None:
    F.linear(torch.ones(2, 3, **ON_GPU), torch.ones(4, 3))


def an_array() -> None:
    torch.ones(3, **ON_GPU).numpy()


def a_number_while_capturing() -> None:
    x = torch.ones(3, **ON_GPU)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()


def a_copy_while_capturing() -> None:
    x = torch.ones(3, **ON_GPU)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.copy_(torch.ones(3), non_blocking=True)


def few_rows_of_int8() -> None:
    torch._int_mm(torch.ones(16, 8, dtype=torch.int8, **ON_GPU), torch.ones(8, 8, dtype=torch.int8, **ON_GPU))


def odd_columns_of_float8() -> None:
    a, b = (torch.ones(n, 32, **ON_GPU).to(torch.float8_e4m3fn) for n in (8, 24))
    scales = torch.ones(8, 1, **ON_GPU), torch.ones(1, 24, **ON_GPU)
    torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16)


def wide_sums_of_float32() -> None:
    torch.mm(torch.ones(2, 2, **ON_GPU), torch.ones(2, 2, **ON_GPU), out_dtype=torch.float32)


REFUSALS = {
    mixed_operands: "WrongDevice", mixed_index: "WrongDevice", mixed_layer: "WrongDevice", an_array: "WrongDevice",
    a_number_while_capturing: "CaptureBroken", a_copy_while_capturing: "CaptureBroken",
    few_rows_of_int8: "Refused", odd_columns_of_float8: "Refused", wide_sums_of_float32: "Refused",
}  # fmt: skip


def refused(name: str) -> str:
    """The error's name."""
    try:
        next(one for one in REFUSALS if one.__name__ == name)()
    except RuntimeError as error:
        return type(error).__name__
    return ""


def counted() -> tuple[Ledger, list[float], list[float]]:
    """Copies and waits of some lines, and what a graph and backward make of them."""
    with ledger() as found:
        x = torch.arange(4.0).to(GPU)  # nothing is under way
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x * 2).cumsum(0)
        x.copy_(torch.ones(4), non_blocking=True)
        graph.replay()
        replayed = y.cpu().tolist()
        y[y > 4].sum().item()
        y.zero_()
        x.copy_(torch.ones(4))
        weight = torch.ones(4, requires_grad=True, **ON_GPU)
        (weight * x).square().sum().backward()
        assert weight.grad is not None
        gradient = weight.grad.tolist()
    return found, replayed, gradient
