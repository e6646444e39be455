"""The last steps of a run in Ray's own dashboard: Jobs > the job > Task Timeline > Download, a file for Perfetto.

Ray draws one slice per profile event of a task. Each rank gets synthetic tasks whose profile events are the compute
instructions that it ran, with measured times; they are sent to Ray's control store (GCS) as workers send theirs. A
replica is a process ('Node pentad dp0') and a rank a thread ('worker:0003' is rank 3). Transfers and collectives are
left out, because they overlap with compute and the slices of a thread must nest; trace.json.gz in the run folder has
them.

The GCS keeps the newest KEPT_SPANS events of a task, so each rank reuses a few tasks cyclically and the job's list of
tasks does not grow.

Measured on two cores: a push of 520 slices (4 ranks, 5 steps of the quickstart) takes 3 to 5 ms in a thread of its own,
at most once a second, and `on_steps` 0.1 ms in the driver's; 96 000 slices (64 ranks) take 0.4 s every 21 s.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grpc
import ray

from pentad.orchestrator.monitoring.run_state import RunView, Watcher
from pentad.schedules.draw.palette import op_style
from pentad.schedules.simulate.timeline import Span, grouped
from pentad.schedules.spec.mesh import Coordinates

MIN_INTERVAL_SECONDS = 1.0  # between two pushes
MAX_DUTY_CYCLE = 0.02  # share of the time spent in pushes
TIMEOUT_SECONDS = 2.0
KEPT_SPANS = 1000  # Ray's default of task_events_max_num_profile_events_per_task
MAX_TASKS = 128  # for all ranks together: a file of at most 50 MB
# Nanoseconds left between adjacent slices: the dashboard rounds times by up to half of it, and Perfetto drops overlaps.
GAP = 1000
# Ray's dashboard colours a slice like the Ray event that it names; these events have the colours of our drawings.
EVENT_OF_COLOUR = {
    "rail_response": "task",
    "rail_idle": "task:store_outputs",
    "rail_load": "task:deserialize_arguments",
    "rail_animation": "task:execute",
}


class RayRow(NamedTuple):
    """Where Ray shows a rank: process title, thread ID (whose hexadecimal digits are the rank), coordinates, and row
    number."""

    process: str
    thread: bytes
    name: str
    number: int


class Step(NamedTuple):
    """The spans of a step or of a round of an evaluation on all ranks, and each rank's row."""

    name: str
    rows: dict[int, RayRow]
    spans: tuple[Span, ...]


class RayTimeline(Watcher):
    """Pushes steps to Ray from a thread. Passes its first error to `note`, in the caller's thread; the run continues
    with an incomplete timeline."""

    def __init__(self, keep: int, note: Callable[[str], None]) -> None:
        """Publishes at least the last `keep` steps (0: none). Ranks beyond MAX_TASKS, and spans beyond KEPT_SPANS of a
        rank and step, may be missing."""
        self._keep, self._note = keep, note
        self._wall = time.time_ns() - time.monotonic_ns()
        self._numbers: dict[Coordinates, int] = {}
        self._rows: dict[int, RayRow] = {}
        self._pending: deque[Step] = deque(maxlen=keep)
        self._closing = threading.Event()
        self._error: str | None = None
        self._reported = False
        self._thread: threading.Thread | None = None

    def on_ranks_placed(self, view: RunView) -> None:
        self._rows = {}
        for rank in sorted(view.ranks, key=lambda rank: rank.coordinates):
            at = rank.coordinates
            number = self._numbers.setdefault(at, len(self._numbers))
            if number < MAX_TASKS:
                self._rows[rank.rank] = RayRow(f"pentad dp{at.dp}", _thread_id(rank.rank), str(at), number)

    def on_steps(self, rows: Sequence[dict[str, Any]], spans: Sequence[tuple[Span, ...]]) -> None:
        self._enqueue([Step(f"step {step[0].step}", self._rows, step) for step in spans])

    def on_evaluation(self, rows: Sequence[dict[str, Any]], spans: tuple[Span, ...]) -> None:
        self._enqueue([Step(f"evaluation after {rows[0]['step']} steps", self._rows, spans)])

    def _enqueue(self, steps: Sequence[Step]) -> None:
        self._report()
        if not self._keep or not self._rows:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ray-timeline", daemon=True)
            self._thread.start()
        self._pending.extend(steps)

    def on_view(self, view: RunView) -> None:
        self._report()

    def close(self) -> None:
        """Pushes the remaining steps, waiting for at most TIMEOUT_SECONDS."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(TIMEOUT_SECONDS)
        self._report()

    def _report(self) -> None:
        if self._error is not None and not self._reported:
            self._reported = True
            self._note(f"the timeline in Ray's dashboard is incomplete: {self._error}")

    def _run(self) -> None:
        try:
            with _channel() as channel:
                push, pause, closing = _Push(channel, self._keep, self._wall), MIN_INTERVAL_SECONDS, False
                while not closing:
                    closing = self._closing.wait(pause)
                    began = time.monotonic()
                    if steps := [self._pending.popleft() for _ in range(len(self._pending))]:
                        self._try(lambda: push.steps(steps))
                    spent = time.monotonic() - began
                    pause = max(MIN_INTERVAL_SECONDS, spent / MAX_DUTY_CYCLE) - spent
                self._try(push.finish)
        except Exception as error:  # such as with another version of Ray
            self._error = f"{type(error).__name__}: {error}"

    def _try(self, push: Callable[[], None]) -> None:
        """Pushes, and remembers an error: a later push may succeed."""
        try:
            push()
        except grpc.RpcError as error:
            self._error = f"{error.code().name}: {error.details()}"


class _Push:
    """Writes steps to the GCS at `channel`; `wall` is the offset from the spans' clock to Unix time, in nanoseconds."""

    def __init__(self, channel: grpc.Channel, keep: int, wall: int) -> None:
        from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

        self.request = gcs_service_pb2.AddTaskEventDataRequest
        self.add = gcs_service_pb2_grpc.TaskInfoGcsServiceStub(channel).AddTaskEventData
        self.metadata = [("ray_cluster_id", _driver().gcs_client.cluster_id.hex())]
        self.job = _driver().current_job_id.binary()
        self.keep, self.wall = keep, wall
        self.count = 0
        self.tasks: set[bytes] = set()

    def steps(self, steps: Sequence[Step]) -> None:
        """Sends steps. Raises grpc.RpcError after TIMEOUT_SECONDS."""
        request = self.request()
        for step in steps:
            for rank, spans in _by_rank(step).items():
                self._task(request, f"{step.name} {step.rows[rank].name}", step.rows[rank], spans, len(step.rows))
            self.count += 1
        self._send(request)

    def finish(self) -> None:
        """Marks the tasks as finished; Ray would list them as failed otherwise."""
        request = self.request()
        for task in sorted(self.tasks):
            events = request.data.events_by_task.add(task_id=task, job_id=self.job)
            events.state_updates.state_ts_ns[_states().Value("FINISHED")] = time.time_ns()
        self._send(request)

    def _send(self, request: Any) -> None:
        request.data.job_id = self.job
        reply = self.add(request, timeout=TIMEOUT_SECONDS, metadata=self.metadata)
        if reply.status.code:
            raise RuntimeError(f"the GCS answers {reply.status.message}")

    def _task(self, request: Any, name: str, row: RayRow, spans: list[Span], ranks: int) -> None:
        task = self._id(row, self.count % _tasks_per_rank(len(spans), self.keep, ranks))
        self.tasks.add(task)
        events = request.data.events_by_task.add(task_id=task, job_id=self.job)
        info = events.task_info
        info.name, info.func_or_class_name = name, "pentad.step"
        info.task_id, info.job_id = task, self.job
        # The GCS evicts running tasks last.
        events.state_updates.state_ts_ns[_states().Value("RUNNING")] = self._time(spans[0].start)
        profile = events.profile_events
        profile.component_type, profile.component_id, profile.node_ip_address = "worker", row.thread, row.process
        limits = [*(self._time(span.start) - GAP for span in spans[1:]), self._time(spans[-1].end)]
        for span, limit in zip(spans, limits, strict=True):
            start = self._time(span.start)
            end = max(start, min(self._time(span.end), limit))
            profile.events.add(event_name=span.op, extra_data=json.dumps(_facts(span)), start_time=start, end_time=end)

    def _id(self, row: RayRow, slot: int) -> bytes:
        """A task ID that sorts first among the 10 000 tasks that the dashboard shows, with ranks in order."""
        return bytes(3) + row.number.to_bytes(3) + slot.to_bytes(2) + b"\xff" * 12 + self.job

    def _time(self, seconds: float) -> int:
        return round(seconds * 1e9) + self.wall


def _channel() -> grpc.Channel:
    """A channel to the GCS with the token and certificates of Ray's own connections."""
    from ray._private.grpc_utils import init_grpc_channel

    return init_grpc_channel(_driver().gcs_client.address)


def _driver() -> Any:
    """This process's Ray worker; the public API would start a cluster if there were none."""
    return ray._private.worker.global_worker


def _states() -> Any:
    from ray.core.generated.common_pb2 import TaskStatus

    return TaskStatus


def _thread_id(rank: int) -> bytes:
    """The bytes whose hexadecimal digits are the decimal digits of the rank."""
    digits = str(rank)
    return bytes.fromhex(digits.zfill(max(4, len(digits) + len(digits) % 2)))


def _tasks_per_rank(spans: int, keep: int, ranks: int) -> int:
    """The number of tasks that a rank needs for `keep` steps of `spans` spans each, within MAX_TASKS."""
    steps_per_task = max(1, KEPT_SPANS // spans)
    return max(1, min(-(-keep // steps_per_task), MAX_TASKS // ranks))


def _by_rank(step: Step) -> dict[int, list[Span]]:
    """The spans shown in each rank's row."""
    shown = [s for s in step.spans if s.rank in step.rows and (s.lane == "compute" or s.op in ("NORM", "LOSS"))]
    by_rank = grouped(sorted(shown, key=lambda span: span.start), lambda span: span.rank)
    return {rank: list(_merged(spans)) for rank, spans in by_rank.items()}


def _merged(spans: Sequence[Span]) -> Iterator[Span]:
    """A rank's spans, sorted by start, with overlapping ones, such as those of an `Overlap`, merged."""
    last = spans[0]
    for span in spans[1:]:
        if span.start < last.end:
            last = last._replace(name=f"{last.name} + {span.name}", end=max(last.end, span.end))
        else:
            yield last
            last = span
    yield last


def _facts(span: Span) -> dict[str, Any]:
    colour = EVENT_OF_COLOUR.get(op_style(span.op).cname, "")
    return {"name": span.name, "cname": colour, "step": span.step, "stage": span.stage, "microbatch": span.microbatch}
