"""Code that runs under vLLM's interpreter: the process that supervises the server, and the engine that receives weights
in its workers. Only this file imports vLLM.

Written for vLLM 0.32. The environment needs vLLM, numpy and xxhash; a link on PYTHONPATH makes this package importable.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

GRACE_S = 15.0
"""Seconds for the server to stop by itself."""
TRACKER_S = 3.0
"""Seconds for the server's helpers to stop after it, before they are killed."""
POLL_S = 0.2
ENTRY_POINT = "[vllm.general_plugins]\nllamarl = llamarl.parts.vllm.plugin:register\n"
"""Metadata by which vLLM finds `register` in each of its processes."""


def keep(scratch: str, command: list[str]) -> int:
    """Runs the server until it exits or stdin closes, which happens when the adapter closes it or dies.

    Kills the whole process group. The folder with socket and log stays if the server exited by itself: the adapter
    reads the log and removes the folder.
    """
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while server.poll() is None and not select.select([sys.stdin], [], [], POLL_S)[0]:
        pass
    if server.returncode is None:
        server.terminate()
        try:
            server.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            _say(f"the server did not stop within {GRACE_S} s and is killed")
        shutil.rmtree(scratch, ignore_errors=True)
    else:
        _say(f"the server ended with status {server.returncode}")
    # Python's resource tracker outlives the server to remove its shared memory.
    deadline_s = time.monotonic() + TRACKER_S
    while _is_followed() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    os.killpg(0, signal.SIGKILL)
    return 1


def _is_followed() -> bool:
    """Returns whether another process of this group is alive."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and os.getpgid(int(entry.name)) == os.getpgrp():
                return True
        except ProcessLookupError:
            continue
    return False


def _say(text: str) -> None:
    """Writes a line into the server's log."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


@dataclass
class InitInfo:
    """Starts to fetch a version while vLLM continues to decode."""

    version: int
    source: str
    """Pickled `(specs, address, options)` of the reader, in base64, from a socket that only this user can access."""


@dataclass
class UpdateInfo:
    """Loads the fetched version."""

    version: int


class Receiver:
    """Fetches in a thread and loads between two steps. `register` adds vLLM's base class."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    model: Any
    model_config: Any
    parallel_config: Any

    _subscriber: Any = None
    _publisher = ""
    _thread: threading.Thread | None = None
    _tensors: Mapping[str, Any] = MappingProxyType({})
    version: int | None = None
    """Version that is fetched and not loaded yet."""
    fetch_error = ""
    """Pickled error, in base64."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Starts to fetch."""
        if self._thread is not None:
            self._thread.join()
        self.version, self.fetch_error = None, ""
        self._thread = threading.Thread(target=self._fetch, args=(init_info,), daemon=True)
        self._thread.start()

    def _fetch(self, info: InitInfo) -> None:
        from llamarl.weight_sync.select import open_subscriber  # not needed by the process that keeps the server

        specs, address, options = pickle.loads(base64.b64decode(info.source))
        try:
            if address.publisher != self._publisher:
                if self._subscriber is not None:
                    self._subscriber.close()
                self._subscriber = open_subscriber(address, specs, self.parallel_config.rank, **options)
                self._publisher = address.publisher
            self._tensors = self._subscriber.fetch(info.version, address)
            self.version = info.version
        except (RuntimeError, OSError) as error:
            self.fetch_error = base64.b64encode(pickle.dumps(error)).decode()

    @property
    def is_fetching(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def state(self) -> dict[str, Any]:
        """Returns whether a fetch is in progress, version, error, and fingerprint and bytes of a fetched version."""
        state = {"fetching": self.is_fetching, "version": self.version, "error": self.fetch_error}
        if self.version is not None:
            subscriber = self._subscriber
            state |= {"fingerprint": subscriber.fingerprint, "num_bytes": subscriber.received_bytes}
        return state

    def start_weight_update(self) -> None:
        """Prepares modules whose weights were packed at load time."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload  # pyrefly: ignore

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads the fetched weights."""
        assert self.version == update_info.version, f"version {update_info.version} was not fetched"
        self.model.load_weights(self._tensors.items())

    def finish_weight_update(self) -> None:
        """Packs the new weights.

        vLLM's CPU build packs a module's matrix when the module is loaded. A tied head is never loaded and would keep
        the packed copy of the old embedding, so it is packed here.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # pyrefly: ignore

        finalize_layerwise_reload(self.model, self.model_config)
        owners = [module for module in self.model.modules() if getattr(module, "quant_method", None) is not None]
        uses = Counter(id(getattr(module, "weight", module)) for module in owners)
        for module in owners:
            if uses[id(getattr(module, "weight", module))] > 1:
                module.quant_method.process_weights_after_loading(module)
        self.version, self._tensors = None, {}

    def shutdown(self) -> None:
        if self._thread is not None:
            self._thread.join(GRACE_S)


class WorkerExtension:
    """Methods that are added to vLLM's workers, for `/collective_rpc`."""

    weight_transfer_engine: Any
    model_runner: Any

    def fetch_state(self) -> dict[str, Any]:
        return self.weight_transfer_engine.state()

    def remove_ids(self, spans: str) -> None:
        """Sets the probability of ids without a token to zero, in samples and in scores.

        Args:
            spans: JSON list of [first, last + 1].
        """
        model, found = self.model_runner.get_model(), json.loads(spans)
        compute_logits = model.compute_logits

        def without_ids(*args: Any, **options: Any) -> Any:
            logits_N_V = compute_logits(*args, **options)
            if logits_N_V is not None:  # only some ranks get them
                for first, stop in found:
                    logits_N_V[:, first:stop] = -float("inf")
            return logits_N_V

        model.compute_logits = without_ids

    def zero_kv_cache(self) -> None:
        """Zeroes the cache. Attention multiplies masked values by 0, which keeps NaN, so a NaN in a free block would
        spread."""
        for cache in self.model_runner.kv_caches:
            cache.zero_()


def register() -> None:
    """Registers the engine. vLLM calls this in each of its processes, more than once."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine  # pyrefly: ignore
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # pyrefly: ignore

    engine = type("LlamarlWeights", (Receiver, WeightTransferEngine), {})
    if "llamarl" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("llamarl", engine)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1], sys.argv[2:]))
