"""Rules about the source that no other linter checks; `make lint` runs them too."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "reconv"
FILES = sorted(PACKAGE.rglob("*.py"))
SHARED_MODULE_NAMES = {"__init__", "__main__", "ops", "triton"}  # one of each in every package of a kind
VAGUE_MODULE_NAMES = {"utils", "helpers", "common", "misc", "manager", "core"}
# Pickles of others are read by a restricted unpickler; our own travel between processes of one run, never to a file.
PICKLE_READERS = {"reconv/data/readers/cifar.py"}
# torchvision reads pickles alone; its tensors are the only thing that `export --to torchvision-pth` puts into one.
TORCH_SAVE = {"reconv/exporters/formats/weights.py"}
TORCH_DISTRIBUTED = {"cluster/elastic.py", "cluster/torchrun_rendezvous.py", "optim/sharded_optimizer.py"}
RUN_SCRIPTS = PACKAGE / "exporters" / "run_template"  # programs of their own, which Reconv does not import
PICKLE_IN_MEMORY = {"reconv/data/pipeline/workers/shared_pickle.py"}
PICKLE_SENT = {"reconv/cluster/ray.py"}  # over a pipe of a process that it starts


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports(file: Path) -> set[str]:
    """Every module a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def public_classes() -> Iterator[tuple[str, Path]]:
    for file in FILES:
        for node in tree(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, file


def modules() -> Iterator[tuple[str, Path]]:
    for file in FILES:
        if file.stem not in SHARED_MODULE_NAMES:
            yield file.stem, file


def test_names_of_public_classes_are_unique_in_the_package() -> None:
    places = defaultdict(list)
    for name, file in public_classes():
        places[name].append(str(file.relative_to(ROOT)))
    assert len(places) > 60
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


# One entry for each network, preset or kernel. The package itself holds the packages that ARCHITECTURE.md draws.
LONG_FOLDERS = {"", "models", "recipes/graphcore", "recipes/habana", "recipes/nvidia", "kernels/ops", "kernels/triton"}
MAX_ENTRIES = 20


def test_a_folder_has_at_most_twenty_entries() -> None:
    folders = [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir() and path.name != "__pycache__")]
    sizes = {
        str(folder.relative_to(PACKAGE)).lstrip("."): sum(
            path.name != "__pycache__" and path.suffix != ".so" for path in folder.iterdir()
        )
        for folder in folders
    }
    assert len(sizes) > 50
    assert {name: size for name, size in sizes.items() if size > MAX_ENTRIES and name not in LONG_FOLDERS} == {}


def words(name: str) -> set[str]:
    """The words of a module's name, in the singular."""
    return {re.sub(r"(?<=[a-z]{3})(ies|es|s)$", "", word) for word in name.split("_")}


def test_a_module_does_not_repeat_the_name_of_its_folder() -> None:
    assert words("shard_index") & words("shards") and not words("index") & words("shards")
    stutter = [
        str(f.relative_to(PACKAGE)) for f in FILES if f.parent != PACKAGE and words(f.stem) & words(f.parent.name)
    ]
    assert stutter == []


def test_module_names_say_what_is_inside() -> None:
    assert {name for name, _ in modules()}.isdisjoint(VAGUE_MODULE_NAMES)


BANNED_OPENINGS = {
    "What", "How", "Where", "Why", "Which", "When", "Who", "Whether", "If", "That", "Those", "As", "Of",
}  # fmt: skip
DOCUMENTED = [
    *FILES,
    *(file for name in ("benchmarks", "docs", "examples", "packaging") for file in (ROOT / name).rglob("*.py")),
]


def docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def test_a_docstring_begins_with_a_verb_or_a_noun() -> None:
    texts = [(text, file) for file in DOCUMENTED for text in docstrings(file)]
    assert len(texts) > 4500
    banned = [f"{file}: {text}" for text, file in texts if re.split(r"\W", text, maxsplit=1)[0] in BANNED_OPENINGS]
    assert banned == []


ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def drawn_floors() -> list[set[str]]:
    """The packages of each floor in ARCHITECTURE.md, from the highest to the lowest."""
    drawing = ARCHITECTURE.split("\n## Floors\n")[1].split("\n## ")[0]
    rows = re.findall(r"^    ([a-z]+(?: \| [a-z]+)*)  ", drawing, re.MULTILINE)
    return [set(row.split(" | ")) for row in rows]


def test_the_drawing_of_the_floors_is_the_import_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (layers,) = [contract["layers"] for contract in settings["contracts"] if contract["id"] == "floors"]
    assert not any(":" in layer for layer in layers)  # `:` joins siblings that may import each other
    floors = [{name.strip().removeprefix("reconv.") for name in layer.split("|")} for layer in layers]
    assert drawn_floors() == [floor for floor in floors if floor != {"__main__"}]
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set().union(*drawn_floors()) == packages


def test_the_architecture_fits_on_a_few_screens() -> None:
    lines = ARCHITECTURE.splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 160] == []


def path_tails() -> set[str]:
    """Every file and folder of the repository, with and without the folders above it: `data/readers/`, `folder.py`."""
    names = ("tests", "docs", "benchmarks", "examples", "csrc", "packaging")
    folders = (PACKAGE, *(ROOT / name for name in names))
    paths = [path for folder in folders for path in (folder, *folder.rglob("*"))] + list(ROOT.glob("*.*"))
    ends = [(path.relative_to(ROOT).parts, "/" if path.is_dir() else "") for path in paths]
    return {"/".join(parts[start:]) + end for parts, end in ends for start in range(len(parts))}


def missing_paths(text: str) -> list[str]:
    """The paths in a text that the repository does not have."""
    named = re.findall(r"(?<![\w./*-])(?:[\w-]+/)*[\w-]+(?:/|\.(?:py|md|toml|csv))(?![\w*])", text)
    return sorted({path for path in named if "NAME" not in path} - path_tails())


def test_paths_in_the_architecture_exist() -> None:
    assert missing_paths("`trainer/nowhere.py` and `trainer/loop.py`, in gone/") == ["gone/", "trainer/nowhere.py"]
    assert len(re.findall(r"\.py\b", ARCHITECTURE)) > 60
    assert missing_paths(ARCHITECTURE) == []


def test_tests_that_docstrings_name_exist() -> None:
    named = [
        (file, folder, name)
        for file in FILES
        for text in docstrings(file)
        for folder, names in re.findall(r"(tests/[\w/]*?)/?(test_\w+\.py(?:, test_\w+\.py| and test_\w+\.py)*)", text)
        for name in re.findall(r"test_\w+\.py", names)
    ]
    assert len(named) > 60
    assert [f"{file}: {folder}/{name}" for file, folder, name in named if not (ROOT / folder / name).is_file()] == []


def test_only_the_distributed_package_imports_torch_distributed() -> None:
    """And the optimizer that is sharded, and the agent that makes a store for its nodes."""
    using = [file for file in FILES if any(name.startswith("torch.distributed") for name in imports(file))]
    assert all(PACKAGE / name in using for name in TORCH_DISTRIBUTED)
    using = [file for file in using if str(file.relative_to(PACKAGE)) not in TORCH_DISTRIBUTED]
    assert using
    assert [file for file in using if PACKAGE / "distributed" not in file.parents] == []


def test_ranks_exchange_no_pickles() -> None:
    """torch's collectives of objects unpickle what they receive; `reconv.distributed.collectives` has our own."""
    pickled = re.compile(r"\b\w*(gather|broadcast|scatter|send|recv)_object\w*|_(object_to_tensor|tensor_to_object)\b")
    assert pickled.search("dist.all_gather_object(items, item)") and pickled.search("broadcast_object_list(x)")
    assert [str(file) for file in FILES if pickled.search(file.read_text())] == []


def test_nothing_imports_torchvision_and_nothing_writes_a_pickle() -> None:
    banned = {"torchvision", "pickle", "cloudpickle", "dill"}
    assert all((ROOT / name).is_file() for name in PICKLE_READERS | PICKLE_IN_MEMORY)
    for file in FILES:
        roots = {name.partition(".")[0] for name in imports(file)}
        if file.parent == RUN_SCRIPTS:
            roots -= {"torchvision"}
        is_allowed = str(file.relative_to(ROOT)) in PICKLE_READERS | PICKLE_IN_MEMORY | PICKLE_SENT
        assert not (roots & banned) - ({"pickle"} if is_allowed else set()), file
        is_saving = bool(re.search(r"(?<![.\w])torch\.save\b", file.read_text()))
        assert is_saving == (str(file.relative_to(ROOT)) in TORCH_SAVE), file
    for name in PICKLE_IN_MEMORY:
        assert not re.search(r"\bopen\(|write_bytes|\bPath\b", (ROOT / name).read_text()), name
