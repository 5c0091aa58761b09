"""The last report of a distributed trial reaches Tune, however busy Tune is (weekly).

With Ray's TuneReportCallback the search can wait for it for ever; the lesson on searches
has a relay of its own, which is what runs here.
"""

import os
import sys
import threading
import time

from utils.cluster import start_ray

import nbformat
import pytest
import ray
import ray.train
from ray import tune
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.queue import Queue

from tests.skips import lacks_electives
from tests.tools import notebooks
from tests.tools.repeat import busy
from utils import events

LESSON = notebooks.ROOT / "02-ddp-pytorch-ray/electives/02_hyperparameter_search.ipynb"
TRIALS, REPORTS, AT_ONCE = 30, 9, 3
LIMIT = 1600  # seconds for all trials; below what ends a test


def train_fn(config):
    for number in range(REPORTS):
        ray.train.report({"loss": number})


def fit(config, callback):
    """Fit as the lesson does, with one worker and without torch, as 30 of them run."""
    DataParallelTrainer(
        train_fn,
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(
            name=f"trial_{config['number']}",
            storage_path=config["folder"],
            callbacks=[callback],
        ),
    ).fit()
    events.note(config["log"], "fit returned", number=config["number"])


class Busy(tune.Callback):
    """Keeps Tune from asking for a trial's last report before its `fit()` has returned."""

    def on_trial_result(self, iteration, trials, trial, result, **info):
        if result["training_iteration"] == REPORTS - 1:
            config = trial.config
            events.wait_for(config["log"], "fit returned", number=config["number"])
            time.sleep(0.5)  # the driver function ends

    def on_trial_complete(self, iteration, trials, trial, **info):
        reports = trial.last_result["training_iteration"]
        number = trial.config["number"]
        events.note(trial.config["log"], "ended", number=number, reports=reports)


def relayed():
    """Return the driver function of the lesson, as its reader copies it, with our `fit`."""
    cells = {cell.id: cell.source for cell in nbformat.read(LESSON, 4).cells}
    imported = {"ray": ray, "tune": tune, "Queue": Queue, "threading": threading}
    namespace = imported | {"fit": fit, "__name__": "__main__"}
    exec(cells["driver"], namespace)
    return namespace["driver"]


def search(function, folder):
    """Run the trials, as many at once as fit."""
    fixed = {"folder": str(folder), "log": str(folder / "log")}
    tune.Tuner(
        function,
        param_space={"number": tune.grid_search([*range(TRIALS)])} | fixed,
        tune_config=tune.TuneConfig(max_concurrent_trials=AT_ONCE),
        run_config=tune.RunConfig(
            name="search",
            storage_path=str(folder),
            callbacks=[Busy()],
            verbose=0,
            progress_reporter=tune.CLIReporter(),
        ),
    ).fit()


@pytest.mark.weekly
@pytest.mark.elective
@pytest.mark.part02
@pytest.mark.xdist_group("ray")
@pytest.mark.skipif(lacks_electives(), reason="not installed: `make electives`")
def test_thirty_last_reports_arrive_beside_busy_loops(tmp_path, monkeypatch):
    """A search that waits for ever is a thread that has not ended."""
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0")
    start_ray(AT_ONCE, {"CPU": 2}, address="local")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    arguments = {"target": search, "args": (relayed(), tmp_path), "daemon": True}
    searching = threading.Thread(**arguments)
    try:
        with busy(os.cpu_count() or 1):
            searching.start()
            searching.join(LIMIT)
        returned = events.noted(tmp_path / "log", "fit returned")
        ended = events.noted(tmp_path / "log", "ended")
        arrived = {each["number"]: each["reports"] for each in ended}
        waiting = {each["number"] for each in returned} - arrived.keys()
        assert not waiting, (
            f"their fit() has returned, and they have not ended: {waiting}"
        )
        assert arrived == dict.fromkeys(range(TRIALS), REPORTS)
        assert not searching.is_alive()
    finally:
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
        ray.shutdown()
