"""Two processes do what one does, share a time limit, and refuse shards that they cannot share."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.training import make_recipe, make_trainer, rows_of, state_of
from support.training import one_thread as in_one_thread

ROOT = Path(__file__).parents[2]
STEPS = 6
SCRIPT = f"""
import sys
from pathlib import Path
import torch
from accelerate import Accelerator
from support.training import make_recipe, make_trainer

torch.set_num_threads(1)
folder = Path(sys.argv[1])
index = Accelerator(cpu=True).process_index
assert Accelerator(cpu=True).num_processes == 2
try:
    make_trainer(make_recipe(folder / "odd", num_shards=1))
except ValueError as error:
    (folder / f"refused-{{index}}").write_text(str(error))
recipe = make_recipe(folder / "two", num_shards=2, steps={STEPS}, save_every=0.0, evaluate_every=4)
assert make_trainer(recipe).run() == {STEPS}
# The clocks of two processes never agree: the first one's time is up before the other's.
limited = make_recipe(folder / "limited", num_shards=2, steps=10_000, log_every=50)
done = make_trainer(limited).run(seconds=0.5 + 1.5 * index)
(folder / f"limited-{{index}}").write_text(str(done))
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what two processes did."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "script.py").write_text(SCRIPT)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
    }
    # What `accelerate launch` starts several GPUs with; for CPUs it would start one process.
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    launch += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    launch += [str(folder / "script.py"), str(folder)]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            launch, stdout=output, stderr=output, env=env, start_new_session=True
        )
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # the launcher and both processes, which wait for each other
            process.wait()
    return folder


def test_two_processes_take_the_same_steps_as_one(launched: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "one", num_shards=2, steps=STEPS, evaluate_every=4)
    with in_one_thread():
        make_trainer(recipe).run()
    assert (launched / "two" / "log.jsonl").is_file(), (launched / "output").read_text()[-3000:]
    alone, together = rows_of(tmp_path / "one"), rows_of(launched / "two")
    assert [row["step"] for row in together] == list(range(1, STEPS + 1))
    for one, two in zip(alone, together, strict=True):
        assert one.pop("leading_sampled") is None and two.pop("leading_sampled") is None
        assert two == pytest.approx(one, abs=1e-6, rel=1e-6)
    one_state, two_state = state_of(tmp_path / "one"), state_of(launched / "two")
    for name in ("master", "average"):
        assert torch.allclose(one_state[name], two_state[name], atol=1e-6), name
    assert (launched / "two" / "drafter" / "config.json").is_file()


def test_shards_that_two_processes_cannot_share_are_refused(launched: Path) -> None:
    for index in range(2):
        message = (launched / f"refused-{index}").read_text()
        assert "run.num_shards is 1" in message and "2 processes" in message
        assert "multiple" in message


def test_processes_stop_together_at_a_time_limit(launched: Path) -> None:
    found = [launched / f"limited-{index}" for index in range(2)]
    assert all(path.is_file() for path in found), "one of them went on and waited for the other"
    done = {int(path.read_text()) for path in found}
    assert len(done) == 1
    assert (launched / "limited" / "checkpoints" / f"step-{done.pop():08d}").is_dir()
