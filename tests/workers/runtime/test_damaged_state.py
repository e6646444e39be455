"""A rank that finds a checkpoint damaged says so; then no rank restores it, and all can restore another one."""

from __future__ import annotations

import pytest
from checkpoints import flip
from plans import SHALLOW, plan_of
from worker_processes import call_all, ranks_of, start_run

from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.checksums import Damaged
from pentad.workers.checkpoint.manifest import Shard


@pytest.mark.timeout(150)
def test_all_ranks_restore_the_checkpoint_before_the_one_that_a_rank_finds_damaged(workers, corpus, tmp_path):
    plan = plan_of("1f1b", 2, 2, 4, corpus, "float32", model=SHALLOW)
    with ranks_of(workers, plan.mesh.size) as ranks:
        start_run(ranks, plan)
        folders, losses = {}, {}
        for step in (1, 2, 3):
            losses[step] = [result[0].losses for result in call_all(ranks, "run", step - 1, 1)]
            folders[step] = checkpoint.folder_of(tmp_path, step)
            entries = [
                Shard.from_plain(each) for its in call_all(ranks, "save", str(folders[step]), step) for each in its
            ]
            checkpoint.commit(folders[step], step=step, shards=entries, meta={})
        path = min(folders[2].glob("*.safetensors"))
        flip(path, path.stat().st_size - 1)
        asked, refusals = [(worker, worker.call("restore", str(folders[2]), 2, True)) for worker in ranks], list[str]()
        for worker, number in asked:
            try:
                assert worker.answer(number) is None
            except Damaged as error:
                refusals.append(str(error))
        assert len(refusals) == 1 and refusals[0].startswith(f"{path.name}, bytes 0 to ")
        assert call_all(ranks, "restore", str(folders[1]), 1, True) == [None] * 4
        for step in (2, 3):
            assert [result[0].losses for result in call_all(ranks, "run", step - 1, 1)] == losses[step]
        call_all(ranks, "close")
