"""Which of several processes this one is, by what each launcher sets."""

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.place import Place, master_in, place_in

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
STEP = {
    "SLURM_JOB_ID": "81234567",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "rack[2-3]gpu[07,09-12],login",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (TORCHRUN, Place(5, 16, 1, 4)),
        # accelerate, and Ray Train, which name more
        (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no", "NODE_RANK": "1"}, Place(5, 16, 1, 4)),
        # a pod of Kubernetes' training operator is one process
        ({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0"}, Place(3, 4, 0, 1)),
        (STEP, Place(9, 11, 1, 3)),
        (STEP | TORCHRUN, Place(5, 16, 1, 4)),  # torchrun in a step of one task a node
        # a batch script outside of srun, which knows how many tasks there could be
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, Place(0, 1, 0, 1)),
        ({"RANK": "3"}, Place(0, 1, 0, 1)),
        ({}, Place(0, 1, 0, 1)),
    ],
)
def test_place_is_what_the_launcher_says(environment: dict[str, str], place: Place) -> None:
    assert place_in(environment) == place
    assert place_in(place.variables) == place


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"RANK": "16"}, "rank outside of the world: RANK=16, WORLD_SIZE=16; "),
        ({"LOCAL_RANK": "one"}, "environment variable is no number: LOCAL_RANK=one; "),
        ({"WORLD_SIZE": "-1"}, "environment variable is no number: WORLD_SIZE=-1; "),
    ],
)
def test_numbers_that_cannot_be_are_refused(wrong: dict[str, str], reported: str) -> None:
    with pytest.raises(UserError, match=f"^{reported}"):
        place_in(TORCHRUN | wrong)


def test_the_first_process_of_a_step_is_on_its_first_node() -> None:
    host, port = master_in(STEP)
    assert host == "rack2gpu07"
    assert 20_000 <= port < 30_000
    assert master_in(STEP | {"SLURM_PROCID": "0"}) == (host, port), "all tell the same"
    assert master_in(STEP | {"SLURM_STEP_ID": "3"})[1] != port, "steps of a job share its nodes"
    assert master_in(STEP | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}) == ("a", 1)
    with pytest.raises(UserError, match="no address of the first one: MASTER_ADDR and "):
        master_in(TORCHRUN)
