from __future__ import annotations

import subprocess
import sys

from reconv.recipe.presets import nearest, preset_names, preset_path


def test_every_preset_has_a_file() -> None:
    names = preset_names()
    assert {"quickstart", "synthetic", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"} <= set(names)
    assert {"cifar10-resnet20", "cifar100-resnet20"} <= set(names)
    assert all(preset_path(name).is_file() for name in names)


def test_the_nearest_name_is_found_or_none() -> None:
    assert nearest("resnet5", ["resnet50", "quickstart"]) == "resnet50"
    assert nearest("COSINE", ["cosine"]) == "cosine"
    assert nearest("zzz", ["resnet50"]) is None


def test_names_cost_neither_pydantic_nor_yaml() -> None:
    check = "import sys, reconv.recipe.presets; print({'pydantic', 'yaml', 'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_recipe_room_costs_no_torch() -> None:
    check = "import sys, reconv.recipe.loader, reconv.recipe.plan; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
