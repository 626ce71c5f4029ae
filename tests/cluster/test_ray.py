"""Ray without Ray: nothing of it is imported before a run starts, and without the package the extra is named."""

from __future__ import annotations

import subprocess
import sys

import pytest

from reconv.cluster.ray import Ray
from reconv.core.errors import UsageError

TRAIN_WITHOUT_RAY = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import reconv
from reconv.core.errors import UsageError
try:
    reconv.train("quickstart", out="run", launch=reconv.Ray(nodes="1:4"))
except UsageError as error:
    print(error)
"""


def test_without_the_package_the_extra_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", TRAIN_WITHOUT_RAY], check=True, capture_output=True, text=True)
    assert "training on Ray needs the package ray" in done.stdout
    assert "pip install 'reconv[ray]'" in done.stdout


def test_training_on_this_machine_imports_nothing_of_ray() -> None:
    code = (
        "import sys, reconv\n"
        "reconv.train('quickstart', overrides={'length': '1step', 'schedule.warmup': '0ep'}, console='quiet')\n"
        "assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(("nodes", "limits"), [(3, (3, 3)), ("2", (2, 2)), ("1:4", (1, 4))])
def test_nodes_are_a_number_or_a_range(nodes: int | str, limits: tuple[int, int]) -> None:
    launch = Ray(nodes=nodes, devices_per_node=8)
    assert (launch.limits, launch.num_ranks) == (limits, 8 * limits[1])


@pytest.mark.parametrize("nodes", [0, "0:2", "3:2", ":2", "1:", "a", "-1"])
def test_other_numbers_of_nodes_are_refused(nodes: int | str) -> None:
    with pytest.raises(UsageError, match="nodes is"):
        _ = Ray(nodes=nodes).limits
