"""One rank of one executor: a thread that owns it, and a queue of calls in front of that thread."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llamarl.cluster.api import ExecutorSpec, HostStatus
from llamarl.cluster.executor import Executor
from llamarl.cluster.payload import Reply, error_reply, parts, pickled
from llamarl.observability.spans import Span, SpanLog, now_s
from llamarl.observability.stages import stage, stage_of
from llamarl.observability.usage import usage

READY = "@ready"
"""Answered once the executor is built."""
FAILURE = "@failure"
"""Answered, with the error, when `work()` raises."""
STATUS = "@status"
"""Answered at once, with a HostStatus that takes the spans."""
PEEK = "@peek"
"""Call that is answered as `STATUS` is, and leaves the spans."""
PART = "@part"
"""A part of the arguments of the next call; answered at once."""
REST = "@rest"
"""Answered with the next part of a long result, which the first part's `rest_of` names."""
CLOSE = "@close"
"""Refuses further calls; answered once the running method has ended and `close()` has run."""


ABANDONED_S = 5.0
"""A long result that nobody has taken so long after the caller's deadline is dropped."""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Meanwhile nobody looks for garbage: modules stay, and that takes a sixth of their import."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclass(eq=False, slots=True)
class _QueuedCall:
    """One call on its way through the host."""

    method: str
    payload: bytes
    """The pickled (args, kwargs)."""
    deadline_s: float
    """Time on the monotonic clock, in seconds, after which nobody waits for the answer."""
    number: int
    """Number in the order of the calls, from 1; the same on all ranks."""
    reply: Future[Reply]


class ExecutorRank:
    """Builds the executor on its own thread and runs every call there, first in, first out."""

    def __init__(self, spec: ExecutorSpec) -> None:
        self._spec = spec
        self._queue: queue.SimpleQueue[_QueuedCall | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[_QueuedCall] = set()
        """Calls without an answer."""
        self._refusal: Reply | None = None
        """Answer to every call once the executor has failed or closes."""
        self._deferred: list[tuple[_QueuedCall, Future[Any]]] = []
        """Calls whose method answered with a future; used on the executor's thread only."""
        self._arriving: list[bytes] = []
        """The first parts of a call's arguments."""
        self._num_calls = 0
        self._leaving: dict[int, tuple[float, list[bytes]]] = {}
        """Rest of long results by call: until when somebody waits for it, and its parts."""
        self._closing = threading.Event()
        self._ready, self._failure, self._closed = _promise(), _promise(), _promise()
        self._span_log = SpanLog()
        self._span_names: dict[str, str] = {}
        self._busy_s: dict[str, float] = {}
        self._doing = ("start", now_s())
        self._thread = threading.Thread(target=self._run, name=spec.name, daemon=True)
        self._thread.start()

    def submit(self, method: str, payload: bytes, timeout_s: float) -> Future[Reply]:
        """Queues a call, or answers one of the host's own (`READY`, `STATUS`, ...). Any thread may submit."""
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
            return self._closed
        with self._lock:
            if method == PART:
                self._arriving.append(payload)
                return _answered(Reply())
            if method == REST:
                return _answered(self._next_part(pickle.loads(payload)))
            payload = b"".join((*self._arriving, payload))
            self._arriving.clear()
            self._num_calls += 1
            call = _QueuedCall(method, payload, time.monotonic() + timeout_s, self._num_calls, _promise())
            if self._refusal is not None:
                return _answered(self._refusal)
            self._open.add(call)
        self._queue.put(call)
        return call.reply

    def _run(self) -> None:
        try:
            reply = self._live()
        except BaseException as error:  # no memory was left to say so where it happened
            reply = Reply(method=self._doing[0], remote_traceback=f"{type(error).__name__}: {error}")
            if not self._failure.done():
                self._fail(reply)
            for promise in (self._ready, self._closed):
                if not promise.done():
                    promise.set_result(reply)
        else:  # what the executor held is freed: a process that ended meanwhile would be torn apart
            self._begin("closed")
            self._closed.set_result(reply)

    def _live(self) -> Reply:
        """Builds the executor, has it serve, closes it; the answer to that."""
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
                reply = error_reply(error, "close")
            self._end()
        return reply

    def _build(self) -> Executor | None:
        """The executor, or None when its constructor (or the import of its module) raised."""
        module_name, _, class_name = self._spec.target.partition(":")
        try:
            with stage("imports modules"), _uncollected():
                executor_class: type[Executor] = getattr(importlib.import_module(module_name), class_name)
            self._span_names = executor_class.SPANS
            executor = executor_class(**self._spec.options)
        except BaseException as error:
            reply = error_reply(error, "__init__")
            self._fail(reply)
            self._ready.set_result(reply)
            return None
        self._end()
        self._ready.set_result(Reply(value=pickle.dumps(None)))
        return executor

    def _serve(self, executor: Executor) -> None:
        """Calls first, then `work()`; returns when the host closes or `work()` raises."""
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
                self._fail(error_reply(error, "work"))
                return
            self._end(is_work=not asleep)

    def _next_call(self, wait: bool) -> _QueuedCall | None:
        """The next call; None when none is queued, or when `wait` ends at the deadline of a deferred reply."""
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
            args, kwargs = pickle.loads(call.payload)
            result = getattr(executor, call.method)(*args, **kwargs)
            if isinstance(result, Future):
                self._deferred.append((call, result))
                result.add_done_callback(lambda future: self._answer(call, self._deferred_reply(call, future)))
            else:
                reply = self._value_reply(call.method, result)
        except BaseException as error:
            reply = error_reply(error, call.method)
        self._end()
        if reply is not None:
            self._answer(call, reply)

    def _value_reply(self, method: str, value: Any) -> Reply:
        return Reply(value=pickled(value, self._spec.name, f"the result of {method}"))

    def _deferred_reply(self, call: _QueuedCall, future: Future[Any]) -> Reply:
        if future.cancelled():
            if time.monotonic() >= call.deadline_s:
                return Reply(expired=True)
            return Reply(method=call.method, remote_traceback="the executor canceled its deferred reply")
        error = future.exception()
        if error is not None:
            return error_reply(error, call.method, caught=False)
        try:
            return self._value_reply(call.method, future.result())
        except BaseException as error:
            return error_reply(error, call.method)

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

    def _next_part(self, number: int) -> Reply:
        """Next part of a long result; with the lock held. Empty where this rank's result is shorter than another's."""
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
            doing=doing,
            stage=stage_of(self._thread.ident),
            doing_age_s=age_s,
            busy_s=busy_s,
            queued_calls=self._queue.qsize(),
            spans=self._span_log.drain() if take_spans else [],
            usage=usage(),
        )


def _promise() -> Future[Reply]:
    """A future that a backend which stops waiting cannot cancel."""
    future: Future[Reply] = Future()
    future.set_running_or_notify_cancel()
    return future


def _answered(reply: Reply) -> Future[Reply]:
    future = _promise()
    future.set_result(reply)
    return future
