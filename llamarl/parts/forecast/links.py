"""Durations of collectives over NVLink and the network."""

from __future__ import annotations

import numpy as np

from llamarl.parts.forecast.constants import Constants
from llamarl.parts.forecast.hardware import Gpu


def collective_bandwidth(gpu: Gpu, constants: Constants, size: np.ndarray, inner: np.ndarray | int) -> np.ndarray:
    """Returns the bytes per second and GPU of a large ring collective over `size` ranks that are `inner` GPUs apart.

    Inside a node this is the node's link. Across nodes the ring enters each node once, over the adapters of the group's
    GPUs there, so the network bandwidth is multiplied by the group's members per node (NCCL's bus bandwidth).
    """
    members = np.clip(gpu.node_gpus // np.maximum(inner, 1), 1, np.maximum(size, 1))
    is_inside = size * inner <= gpu.node_gpus
    across = np.minimum(gpu.node_bandwidth, gpu.network_bandwidth * members)
    return np.where(is_inside, gpu.node_bandwidth, across) * constants.link_efficiency


def exchange_s(gpu: Gpu, constants: Constants, size: np.ndarray, sent_bytes: np.ndarray) -> np.ndarray:
    """Returns the seconds of an all-to-all in which each of `size` neighbors sends `sent_bytes`. Traffic within a node
    uses the node's link, in parallel with traffic over the GPU's network adapter."""
    others = np.maximum(size - 1, 1)
    inside = np.minimum(size, gpu.node_gpus) - 1
    slower = np.maximum(inside / gpu.node_bandwidth, (size - 1 - inside) / gpu.network_bandwidth)
    return sent_bytes / others * slower / constants.link_efficiency


def small_reduction_s(gpu: Gpu, constants: Constants, size: np.ndarray) -> np.ndarray:
    """Returns the latency of an all-reduce over `size` neighbors: one hop in the node, then a tree of nodes.

    Zero for one rank, `node_latency_s` inside a node, and two network hops per additional tree level (alpha-beta model,
    Thakur et al. 2005).
    """
    nodes = np.ceil(size / gpu.node_gpus)
    tree = 2 * np.ceil(np.log2(nodes)) * constants.network_latency_s
    return (size > 1) * constants.node_latency_s + tree
