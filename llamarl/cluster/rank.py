"""One rank of one executor: a thread that owns the executor, and a queue of calls for that thread."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.cluster import start_up
from llamarl.cluster.api import Deal, Executor, ExecutorSpec, HostStatus, Reply, error_reply, parts, pickled
from llamarl.observability.notes import keep_notes_in
from llamarl.observability.spans import Span, SpanLog, now_s, stage, stage_of, usage

_PACKAGE, _LIBRARIES = str(Path(__file__).parents[1]), (sys.prefix, sys.base_prefix)
READY = "@ready"
"""Answered once the executor is built, with `Executor.SHARES_CALLS`."""
FAILURE = "@failure"
"""Answered, with the error, when `work()` raises."""
STATUS = "@status"
"""Answered at once, with a HostStatus. Clears the spans."""
PEEK = "@peek"
"""Answered like `STATUS`, but keeps the spans."""
PART = "@part"
"""A part of the arguments of the next call; answered at once."""
DEALT = "@dealt"
"""A part of distributed arguments, with the number of the deal and its place; answered at once."""
DEAL = "@deal"
"""A call whose arguments were `DEALT` before; the payload is a `Deal`."""
REST = "@rest"
"""Answered with the next part of a long result, which the first part's `rest_of` names."""
CLOSE = "@close"
"""Refuses further calls; answered once the running method has ended and `close()` has run."""
ABANDONED_S = 5.0
"""Time after the caller's deadline at which the rest of a long result is dropped."""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disables garbage collection during the import of modules, which then takes a sixth less time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclass(eq=False, slots=True)
class _QueuedCall:
    """A queued or running call."""

    method: str
    payload: bytes | Deal
    """The pickled (args, kwargs, whether each rank answers)."""
    deadline_s: float
    """Time on the monotonic clock after which the caller no longer waits."""
    number: int
    """Number in the order of the calls, from 1; the same on all ranks."""
    reply: Future[Reply]
    is_answered: bool = True
    """Whether the caller wants this rank's result."""


class ExecutorRank:
    """Builds the executor on its own thread and runs every call there, in the order of arrival."""

    def __init__(self, spec: ExecutorSpec, log: Path | None = None) -> None:
        """
        Args:
            log: file of the executor's technical notes. None means standard output.
        """
        self._spec = spec
        self._log = log
        self._rank = int(os.environ.get("RANK", "0")) if spec.num_ranks > 1 else None
        """None means that there is only one rank."""
        self._queue: queue.SimpleQueue[_QueuedCall | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        """Notified when a part of a deal has arrived."""
        self._open: set[_QueuedCall] = set()
        """Calls without an answer."""
        self._refusal: Reply | None = None
        """Answer to every call once the executor has failed or closes. None before."""
        self._deferred: list[tuple[_QueuedCall, Future[Any]]] = []
        """Calls whose method returned a future; used only on the executor's thread."""
        self._arriving: list[bytes] = []
        """The first parts of a call's arguments."""
        self._dealt = dict[tuple[int, int], bytes]()
        """Parts of deals for this rank, by deal and place."""
        self._num_calls = 0
        self._leaving: dict[int, tuple[float, list[bytes]]] = {}
        """Rest of long results by call: time at which it is dropped, and its parts."""
        self._closing = threading.Event()
        self._ready, self._failure, self._closed = _promise(), _promise(), _promise()
        self._span_log = SpanLog()
        self._span_names: dict[str, str] = {}
        self._busy_s: dict[str, float] = {}
        self._doing = ("start", now_s())
        self._thread = threading.Thread(target=self._run, name=spec.name, daemon=True)
        self._thread.start()

    def submit(self, method: str, payload: bytes, timeout_s: float) -> Future[Reply]:
        """Queues a call, or answers a call of the rank itself (`READY`, `STATUS`, ...). Thread-safe."""
        if method == READY:
            return self._ready
        if method == FAILURE:
            return self._failure
        if method in (STATUS, PEEK):
            return _answered(Reply(value=pickle.dumps(self._status(take_spans=method == STATUS))))
        if method == CLOSE:
            self._refuse(Reply(method=CLOSE, remote_traceback=f"{self._spec.name} was stopped"))
            self._closing.set()
            self._queue.put(None)
            with self._lock:
                self._lock.notify_all()
            return self._closed
        with self._lock:
            if method in (PART, DEALT, REST):
                return _answered(self._part(method, payload))
            arguments: bytes | Deal = b"".join((*self._arriving, payload))
            self._arriving.clear()
            if method == DEAL:
                deal: Deal = pickle.loads(payload)
                method, arguments = deal.method, deal
            self._num_calls += 1
            call = _QueuedCall(method, arguments, time.monotonic() + timeout_s, self._num_calls, _promise())
            if self._refusal is not None:
                return _answered(self._refusal)
            self._open.add(call)
        self._queue.put(call)
        return call.reply

    def _run(self) -> None:
        if self._log is not None:
            keep_notes_in(self._log)
        try:
            reply = self._live()
        except BaseException as error:  # no memory was left to report the error where it occurred
            text = f"{type(error).__name__}: {error}"
            reply = Reply(method=self._doing[0], remote_traceback=text, rank=self._rank)
            if not self._failure.done():
                self._fail(reply)
            for promise in (self._ready, self._closed):
                if not promise.done():
                    promise.set_result(reply)
        else:  # frees the executor's objects first: a process that ended meanwhile would crash
            self._begin("closed")
            self._closed.set_result(reply)

    def _live(self) -> Reply:
        """Builds the executor, serves calls and closes it. Returns the reply to the close."""
        executor = self._build()
        if executor is not None:
            self._serve(executor)
        self._closing.wait()
        for _, future in self._deferred:
            future.cancel()
        reply = Reply(value=pickle.dumps(None))
        if executor is not None:
            self._begin("close")
            try:
                executor.close()
            except BaseException as error:
                reply = error_reply(error, "close", self._rank)
            self._end()
        return reply

    def _build(self) -> Executor | None:
        """Returns the executor, or None if its constructor or the import of its module raised."""
        module_name, _, class_name = self._spec.target.partition(":")
        try:
            with stage("imports modules"), _uncollected():
                executor_class: type[Executor] = getattr(importlib.import_module(module_name), class_name)
            self._span_names = executor_class.SPANS
            executor = executor_class(**self._spec.options)
        except BaseException as error:
            reply = error_reply(error, "__init__", self._rank)
            self._fail(reply)
            self._ready.set_result(reply)
            return None
        self._end()
        self._ready.set_result(Reply(value=pickle.dumps(executor.SHARES_CALLS)))
        return executor

    def _serve(self, executor: Executor) -> None:
        """Runs calls first, then `work()`. Returns when the rank closes or `work()` raises."""
        asleep = False
        while True:
            self._cancel_expired()
            call = self._next_call(wait=asleep)
            if self._closing.is_set():
                return
            if call is not None:
                self._execute(executor, call)
                asleep = False
                continue
            self._begin("work")
            try:
                asleep = not executor.work()
            except BaseException as error:
                self._fail(error_reply(error, "work", self._rank))
                return
            self._end(is_work=not asleep)

    def _next_call(self, wait: bool) -> _QueuedCall | None:
        """Returns the next call. None if no call is queued, or, with `wait`, none until the deadline of a deferred
        reply."""
        timeout_s = None
        if wait and self._deferred:
            timeout_s = max(0.0, min(call.deadline_s for call, _ in self._deferred) - time.monotonic())
        try:
            return self._queue.get(block=wait, timeout=timeout_s)
        except queue.Empty:
            return None

    def _execute(self, executor: Executor, call: _QueuedCall) -> None:
        if time.monotonic() > call.deadline_s:
            self._answer(call, Reply(expired=True))
            return
        self._begin(call.method)
        reply = None
        try:
            args, kwargs, is_each = pickle.loads(self._arguments(executor, call))
            call.is_answered = is_each or not self._rank
            result = getattr(executor, call.method)(*args, **kwargs)
            if isinstance(result, Future):
                self._deferred.append((call, result))
                result.add_done_callback(lambda future: self._answer(call, self._deferred_reply(call, future)))
            else:
                reply = self._value_reply(call, result)
        except BaseException as error:
            reply = error_reply(error, call.method, self._rank)
        self._end()
        if reply is not None:
            self._answer(call, reply)

    def _arguments(self, executor: Executor, call: _QueuedCall) -> bytes | memoryview:
        """Returns pickled arguments. All ranks join distributed arguments once this rank's parts have arrived."""
        deal = call.payload
        if not isinstance(deal, Deal):
            return deal
        owners = deal.owners(self._spec.num_ranks)
        own = [(deal.number, place) for place, owner in enumerate(owners) if owner == self._rank]
        with self._lock:
            self._lock.wait_for(
                lambda: self._closing.is_set() or self._dealt.keys() >= set(own), call.deadline_s - time.monotonic()
            )
            dealt = {place: part for (number, place), part in self._dealt.items() if number == deal.number}
            self._dealt = {key: part for key, part in self._dealt.items() if key[0] > deal.number}
        return executor.whole(dealt, owners, deal.num_bytes)

    def _value_reply(self, call: _QueuedCall, value: Any) -> Reply:
        if not call.is_answered:
            return Reply(value=pickle.dumps(None))
        return Reply(value=pickled(value, self._spec.name, f"the result of {call.method}"))

    def _deferred_reply(self, call: _QueuedCall, future: Future[Any]) -> Reply:
        if future.cancelled():
            if time.monotonic() >= call.deadline_s:
                return Reply(expired=True)
            return Reply(method=call.method, remote_traceback="the executor canceled its deferred reply")
        error = future.exception()
        if error is not None:
            return error_reply(error, call.method, self._rank, caught=False)
        try:
            return self._value_reply(call, future.result())
        except BaseException as error:
            return error_reply(error, call.method, self._rank)

    def _cancel_expired(self) -> None:
        if not self._deferred:
            return
        now = time.monotonic()
        for call, future in self._deferred:
            if now >= call.deadline_s:
                future.cancel()
        self._deferred = [
            (call, future) for call, future in self._deferred if not future.done() and now < call.deadline_s
        ]

    def _answer(self, call: _QueuedCall, reply: Reply) -> None:
        first, *others = parts(reply.value)
        with self._lock:
            if call not in self._open:
                return
            self._open.remove(call)
            now_s = time.monotonic()
            self._leaving = {number: left for number, left in self._leaving.items() if left[0] > now_s}
            if others:
                self._leaving[call.number] = call.deadline_s + ABANDONED_S, others
                reply = reply._replace(value=first, rest_of=call.number)
        call.reply.set_result(reply)

    def _part(self, method: str, payload: bytes) -> Reply:
        """Stores a part of arguments, or returns a part of a result. The lock is held."""
        if method == REST:
            return self._next_part(pickle.loads(payload))
        if method == PART:
            self._arriving.append(payload)
        else:
            deal, place, part = pickle.loads(payload)
            self._dealt[deal, place] = part
            self._lock.notify_all()
        return Reply()

    def _next_part(self, number: int) -> Reply:
        """Returns the next part of a long result, empty if this rank's result is shorter than another's. The lock is
        held."""
        deadline_s, left = self._leaving.pop(number, (0.0, []))
        if len(left) > 1:
            self._leaving[number] = deadline_s, left[1:]
        return Reply(value=left[0] if left else b"", rest_of=number if len(left) > 1 else 0)

    def _fail(self, reply: Reply) -> None:
        self._begin("failed")
        self._refuse(reply)
        self._failure.set_result(reply)

    def _refuse(self, reply: Reply) -> None:
        """Answers every open and later call with the first refusal."""
        with self._lock:
            self._refusal = self._refusal or reply
            calls, self._open = self._open, set()
        for call in calls:
            call.reply.set_result(self._refusal)

    def _begin(self, doing: str) -> None:
        self._doing = (doing, now_s())

    def _end(self, is_work: bool = True) -> None:
        doing, start_s = self._doing
        self._doing = ("idle", now_s())
        span_name = self._span_names.get(doing)
        if span_name is None or not is_work:
            return
        end_s = now_s()
        self._span_log.add(Span(span_name, start_s, end_s))
        self._busy_s = self._busy_s | {span_name: self._busy_s.get(span_name, 0.0) + end_s - start_s}

    def _status(self, take_spans: bool) -> HostStatus:
        doing, since_s = self._doing
        age_s = now_s() - since_s
        busy_s = dict(self._busy_s)
        span_name = self._span_names.get(doing)
        if span_name is not None:
            busy_s[span_name] = busy_s.get(span_name, 0.0) + age_s
        return HostStatus(
            pid=os.getpid(),
            launcher_pid=start_up.launcher_pid,
            doing=doing,
            stage=stage_of(self._thread.ident),
            where="" if take_spans else _line_of(self._thread.ident),
            doing_age_s=age_s,
            busy_s=busy_s,
            queued_calls=self._queue.qsize(),
            spans=self._span_log.drain() if take_spans else [],
            usage=usage(),
        )


def _line_of(thread: int | None) -> str:
    """Returns the line of an executor's code at which its thread is, outside of libraries. Empty means that none
    runs. It shows a collective that never ends, for which NCCL has no time limit here."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        if frame.f_code.co_filename.startswith(_PACKAGE):
            break
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename == __file__:
        return ""
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _promise() -> Future[Reply]:
    """Returns a future that a backend which stops waiting cannot cancel."""
    future: Future[Reply] = Future()
    future.set_running_or_notify_cancel()
    return future


def _answered(reply: Reply) -> Future[Reply]:
    future = _promise()
    future.set_result(reply)
    return future
