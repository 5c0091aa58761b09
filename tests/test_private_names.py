"""What the workshop uses of other packages although no page describes it, in one list.

An upgrade may move or reword any of it without a word: this says at once what is gone.
"""

import importlib.util
import pkgutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.tools.notebooks import ROOT

P01, P02, P03 = "01-ddp-pytorch-only", "02-ddp-pytorch-ray", "03-fsdp-deepspeed"
CONSTANTS = "ray.train.v2._internal.constants"
TOKEN = "ray._private.authentication.authentication_token_setup._enable_token_auth"
ENGINE = "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine"

# (what it is, a file that uses it). A dotted name is imported. Behind "package: " stands a
# word of that package's code: an attribute of an object, a variable of the environment (one
# of Ray's core without its RAY_), a file that it writes, a message or a process's title.
USED = [
    ("torch._C._distributed_c10d._dump_fr_trace_json", f"{P01}/03_*.ipynb"),
    ("torch._subclasses.fake_tensor.FakeTensorMode", "utils/checks/sharding.py"),
    (
        "torch.distributed._compute_bucket_assignment_by_size",
        "tests/test_timing.py",
    ),
    ("torch.distributed.ProcessGroup.unbox", "utils/comms.py"),
    ("torch.distributed._functional_collectives.all_reduce", "tests/test_comms.py"),
    (
        "torch.distributed._functional_collectives.all_gather_single",
        "tests/test_comms.py",
    ),
    ("torch.distributed.distributed_c10d._resolve_process_group", "utils/comms.py"),
    (
        "torch.testing._internal.distributed.fake_pg.FakeStore",
        "utils/checks/sharding.py",
    ),
    (
        "torch.distributed.ProcessGroupGloo._Options._threads",
        "utils/gloo_in_one_thread.py",
    ),
    (
        "torch.distributed.ProcessGroupGloo.create_device",
        "utils/gloo_in_one_thread.py",
    ),
    (
        "torch.distributed.distributed_c10d._register_builtin_gloo_backend",
        "tests/test_launch.py",
    ),
    (
        "torch.ScriptObject",
        "utils/comms.py",
    ),  # the process group of an operator of c10d
    ("torch.nn.modules.batchnorm._BatchNorm", "utils/parity.py"),
    ("torch.Tag.nondeterministic_seeded", "utils/parity.py"),
    ("torch.utils._python_dispatch.TorchDispatchMode", "utils/comms.py"),
    ("torch: Expected to have finished reduction", "utils/parity.py"),
    ("torch.utils._pytree.tree_leaves", "utils/comms.py"),
    ("torch: _schema", "utils/comms.py"),  # of an operator: its arguments' names
    ("torch: TORCHDYNAMO_DISABLE", "utils/zero.py"),
    (
        "torch: TORCHELASTIC_ERROR_FILE",
        "utils/command_line.py",
    ),  # its JSON is described
    ("torch: TORCH_DISABLE_SHARE_RDZV_TCP_STORE", f"{P01}/03_*.ipynb"),
    ("torch: Root Cause", f"{P01}/03_*.ipynb"),  # in torchrun's summary of a death
    ("torch: keep_alive_max_attempt", f"{P01}/03_*.ipynb"),
    ("torch: failed to pass monitoredBarrier", f"{P01}/03_*.ipynb"),
    ("torch: .metadata", f"{P03}/train_fsdp2.py"),  # a checkpoint's last file
    # of torch.save, on a full disk
    ("torch: inline_container.cc", "utils/checkpoint_files.py"),
    ("torch: Gloo connectFullMesh failed", "utils/failures.py"),
    ("ray._private.internal_api.get_memory_info_reply", "utils/ray_memory.py"),
    ("ray._private.internal_api.get_state_from_address", "utils/ray_memory.py"),
    ("ray._private.parameter.RayParams", "utils/cluster.py"),
    ("ray._private.ray_constants.ENABLE_RAY_CLUSTER", "utils/cluster.py"),
    ("ray._private.ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR", "utils/cluster.py"),
    (
        "ray._private.ray_constants.RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S",
        f"{P02}/05_*.ipynb",
    ),
    (
        "ray._private.runtime_env.constants.RAY_JOB_CONFIG_JSON_ENV_VAR",
        "utils/cluster.py",
    ),
    ("ray._private.services.get_node", "tests/test_cluster.py"),
    ("ray._private.services.get_ray_address_from_environment", "utils/cluster.py"),
    ("ray._private.utils.get_system_memory", "utils/ray_memory.py"),
    ("ray._private.utils.get_used_memory", "utils/ray_memory.py"),
    ("ray._raylet.GcsClient", "utils/cluster.py"),
    (TOKEN, "utils/cluster.py"),
    ("ray.cloudpickle.register_pickle_by_value", "tests/test_faults.py"),
    ("ray.cluster_utils.Cluster", "utils/nodes.py"),
    ("ray.dashboard.modules.dashboard_sdk", f"{P02}/07_*.ipynb"),  # a logger
    (f"{CONSTANTS}.DEFAULT_COLLECTIVE_TIMEOUT_S", f"{P02}/04_*.ipynb"),
    (f"{CONSTANTS}.DEFAULT_COLLECTIVE_WARN_INTERVAL_S", f"{P02}/04_*.ipynb"),
    (f"{CONSTANTS}.DEFAULT_HEALTH_CHECK_INTERVAL_S", f"{P02}/05_*.ipynb"),
    (f"{CONSTANTS}.DEFAULT_PREEMPTION_POLL_INTERVAL_S", f"{P02}/05_*.ipynb"),
    (f"{CONSTANTS}.DEFAULT_WORKER_GROUP_START_TIMEOUT_S", f"{P02}/05_*.ipynb"),
    (f"{CONSTANTS}.DEFAULT_WORKER_HEALTH_CHECK_TIMEOUT_S", f"{P02}/04_*.ipynb"),
    (f"{CONSTANTS}.ENABLE_PREEMPTION_WATCHER_ENV_VAR", "tests/test_cluster.py"),
    ("ray.util.debug.reset_log_once", "utils/recipes.py"),
    ("ray.util.get_node_ip_address", "utils/cluster.py"),
    ("ray: head_node", "utils/nodes.py"),  # of a Cluster, and its dashboard's address
    ("ray: webui_url", "utils/nodes.py"),
    ("ray: list_all_nodes", "utils/nodes.py"),
    ("ray: _system_config", "utils/nodes.py"),
    ("ray: _temp_dir", "tests/test_monitoring.py"),  # of ray.init
    ("ray: AutoscalingCoordinator", "utils/nodes.py"),  # Ray Train's list of nodes
    ("ray: get_reserved_resources", "utils/nodes.py"),
    ("ray: recompute", "utils/nodes.py"),
    ("ray: RAY_CLIENT_RECONNECT_GRACE_PERIOD", f"{P02}/07_*.ipynb"),
    ("ray: RAY_AIR_NEW_OUTPUT", f"{P02}/electives/02_*.ipynb"),
    ("ray: RAY_DATA_USE_DATASOURCE_V2", "utils/processes.py"),
    ("ray: RAY_ENABLE_AUTO_CONNECT", "utils/processes.py"),
    ("ray: RAY_ENABLE_UV_RUN_RUNTIME_ENV", "utils/processes.py"),
    ("ray: RAY_NUM_REDIS_GET_RETRIES", "utils/nodes.py"),
    ("ray: RAY_OVERRIDE_JOB_RUNTIME_ENV", "utils/cluster.py"),
    ("ray: RAY_TRAIN_COLLECTIVE_TIMEOUT_S", f"{P02}/04_*.ipynb"),
    ("ray: RAY_TRAIN_COLLECTIVE_WARN_INTERVAL_S", f"{P02}/04_*.ipynb"),
    ("ray: RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "utils/cluster.py"),
    ("ray: RAY_TRAIN_ENABLE_PRINT_PATCH", "utils/cluster.py"),
    ("ray: RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "utils/cluster.py"),
    ("ray: RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", f"{P02}/05_*.ipynb"),
    ("ray: RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "utils/preflight.py"),
    ("ray: RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", f"{P02}/04_*.ipynb"),
    ("ray: gcs_rpc_server_connect_timeout_s", "utils/cluster.py"),
    ("ray: metrics_report_interval_ms", f"{P02}/cluster/monitoring/produce.py"),
    ("ray: checkpoint_manager_snapshot.json", "tests/test_scripts.py"),
    ("ray: experiment_state", f"{P02}/electives/02_*.ipynb"),  # a file of Tune's
    ("ray: InvalidAuthToken", "utils/cluster.py"),
    ("ray: is meant to only be", "utils/recipes.py"),  # a warning of what does nothing
    ("ray: Ray runtime started", "tests/test_nodes.py"),  # by `ray start`
    ("ray: RayTrainWorker", "tests/scripts.py"),  # titles of Ray Train's processes
    ("ray: TrainController", "tests/test_faults.py"),
    ("ray: The current node timed out during startup", "utils/cluster.py"),
    ("ray: Timed out waiting for file", "utils/cluster.py"),
    ("ray: Failed to find a valid port for dashboard", "utils/cluster.py"),
    ("ray: already occupied", "utils/cluster.py"),
    (f"{ENGINE}.TorchCheckpointEngine", "tests/test_security.py"),
    ("deepspeed.ops.__compatible_ops__", "utils/zero.py"),
    ("deepspeed.runtime.zero.muon.muon_optimizer", "utils/zero.py"),
    ("deepspeed: all_grad_tensors", "utils/zero.py"),  # of an engine's optimizer
    ("deepspeed: averaged_gradients", "utils/zero.py"),
    ("deepspeed: fp32_groups", "utils/zero.py"),
    ("deepspeed: fp32_partitioned_groups_flat", "utils/zero.py"),
    ("deepspeed: single_partition_of_fp32_groups", "utils/zero.py"),
    ("deepspeed: ds_shape", f"{P03}/03_*.ipynb"),  # of a parameter
    ("deepspeed: ds_tensor", "utils/zero.py"),
    ("deepspeed: zero_optimization_stage", f"{P03}/train_deepspeed.py"),
    ("deepspeed: _optim_states.pt", "utils/zero.py"),  # a file for each rank
    ("nbval.plugin.IPyNbCell", "tests/tiers.py"),
    ("nbval.plugin.IPyNbFile.setup", "conftest.py"),
    ("nbval.plugin.IPyNbFile.teardown", "conftest.py"),
]


def is_there(name: str) -> bool:
    """Return whether an entry of the list is in the package that is installed."""
    package, colon, word = name.partition(": ")
    if not colon:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            return False
        return True
    folder = Path(importlib.util.find_spec(package).origin).parent
    kinds = ("*.py", "*.so", "*.dylib", "raylet")
    grep = ["grep", "-rqwF", *(f"--include={kind}" for kind in kinds)]
    return not subprocess.run([*grep, "-e", word, folder], timeout=PATIENCE).returncode


@pytest.mark.slow
@pytest.mark.parametrize(("name", "user"), USED, ids=[name for name, _ in USED])
def test_what_is_listed_is_there_and_in_use(name, user):
    assert is_there(name), f"gone, and {user} needs it"
    word = name.partition(": ")[2] or name.rpartition(".")[2]
    assert any(word in path.read_text() for path in ROOT.glob(user)), (
        f"{user} does not use it: name another file, or take it off the list"
    )


@pytest.mark.parametrize(
    "name",
    [
        "torch._C._made_up",
        "ray._made.up",
        "ray: RAY_TRAIN_MADE_UP",
        "ray: etrics_report",
    ],
)
def test_what_is_gone_is_seen(name):
    assert not is_there(name)
