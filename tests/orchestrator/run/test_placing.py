"""Which ranks that a former driver has left are taken over."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.run import placing


@pytest.mark.parametrize("bundles", [2, 8])
def test_the_places_of_another_mesh_are_not_adopted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bundles: int
) -> None:
    monkeypatch.setattr(placing, "can_adopt", lambda *_: True)
    config = load(None, [f"run.folder={tmp_path}", "mesh.dp=4", "schedule.microbatches=2", "batch.global_batch_size=8"])
    lease: Any = SimpleNamespace(ranks="", placement=lambda: SimpleNamespace(bundle_count=bundles))
    cluster: Any = None
    assert placing._left(config, make_plan(config, "cpu"), cluster, lease, "") is None
