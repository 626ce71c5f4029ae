"""Whole shell texts: variables, containers, conditions and commands that are none of ours."""

from __future__ import annotations

import pytest

from reconv.core.errors import UsageError
from reconv.migrate.command_line import MAX_CHARACTERS, split_commands
from reconv.migrate.migration import Migration, migrate_command

NVIDIA = "python main.py --arch resnet50 --epochs 3"
GRAPHCORE = "python3 train.py --config mk2_resnet50_mlperf_pod16"


def option(migration: Migration, name: str) -> str | None:
    return dict(migration.action.options).get(name)


def rows(migration: Migration, source: str) -> dict[str, str]:
    return {row.typed: row.status for row in migration.rows if row.source == source}


@pytest.mark.parametrize(
    "text",
    [
        f"export DATA_DIR=/d/imagenet; {GRAPHCORE}",
        f"DATA_DIR=/d/imagenet\n{GRAPHCORE}",
        f"export ROOT=/d\nexport DATA_DIR=$ROOT/imagenet && {GRAPHCORE}",
        f"DATA_DIR=/d/imagenet {GRAPHCORE}",
        f"{GRAPHCORE} --data-dir /d/imagenet",
        f"DATA_DIR=/else {GRAPHCORE} --data-dir /d/imagenet",
    ],
)
def test_a_variable_that_the_program_reads_is_taken_over(text: str) -> None:
    migration = migrate_command(text)
    assert option(migration, "--data") == "/d/imagenet"
    assert migration.to_fill == []


def test_the_row_of_a_variable_that_is_taken_over_says_so() -> None:
    assert rows(migrate_command(f"DATA_DIR=/d {GRAPHCORE}"), "environment") == {"DATA_DIR=/d": "renamed"}


def test_variables_of_the_text_around_are_known_inside_quotes() -> None:
    migration = migrate_command("N=4; bash -c 'mpirun -np $N python train.py --hmp --batch-size 16 --data-path /d'")
    assert migration.settings["batch.size"].value == 64


@pytest.mark.parametrize(
    ("prefix", "path", "expected"),
    [
        ("docker run -v /raid/imagenet:/imagenet image", "/imagenet", "/raid/imagenet"),
        ("docker run --volume=/raid:/data:ro image", "/data/imagenet", "/raid/imagenet"),
        ("docker run -v /raid:/data -v /fast/in:/data/in image", "/data/in/train", "/fast/in/train"),
        ("docker run -v $(pwd)/in:/data image", "/data/x", "./in/x"),
        ("docker run --mount type=bind,source=/raid,target=/data image", "/data/x", "/raid/x"),
        ("nvidia-docker run -v /raid:/data -w /data image", "in", "/raid/in"),
        ("singularity exec -B /raid:/data image.sif", "/data/x", "/raid/x"),
        ("podman run -v /raid:/raid image", "/raid/x", "/raid/x"),
        ("srun --container-mounts=/raid:/data,/out:/results", "/data/x", "/raid/x"),
    ],
)
def test_paths_inside_a_container_become_paths_of_this_machine(prefix: str, path: str, expected: str) -> None:
    migration = migrate_command(f"{prefix} {NVIDIA} {path}")
    assert option(migration, "--data") == expected
    assert migration.to_fill == []
    assert [row.text for row in migration.rows if row.typed == path] == [f"--data {expected}"]


def test_weights_and_results_inside_a_container_are_translated_too() -> None:
    mounts = "-v /raid:/imagenet -v /home/me/out:/results"
    migration = migrate_command(
        f"docker run {mounts} image {NVIDIA} --pretrained-weights /results/w.pth --workspace /results/a /imagenet"
    )
    assert migration.settings["model.init"].value == "/home/me/out/w.pth"
    assert option(migration, "--out") == "/home/me/out/a"


@pytest.mark.parametrize("mounts", ["", "-v imagenet:/imagenet", "-v /raid:/other", "-v /raid:/image"])
def test_a_path_that_is_not_mounted_from_this_machine_has_to_be_filled_in(mounts: str) -> None:
    migration = migrate_command(f"docker run {mounts} image {NVIDIA} /imagenet")
    assert [part for part, _ in migration.to_fill] == ["/imagenet"]


@pytest.mark.parametrize(
    "block",
    [
        "if [ -d /x ]; then D=/x; else D=/y; fi",
        "for D in /x /y; do echo $D; done",
        "D=/x; while read D; do D=/y; done",
        "D=/x; for D in /y; do ls; done",
        "D=/x; read -r D",
        "D=/z; [ -d /x ] && D=/x",
        "D=/z\ncase $1 in a) D=/x;; esac",
        "ls /x || D=/y",
    ],
)
def test_a_value_that_depends_on_a_condition_has_to_be_filled_in(block: str) -> None:
    migration = migrate_command(f"{block}\n{NVIDIA} $D/train")
    assert option(migration, "--data") == "$D/train"
    assert [part for part, _ in migration.to_fill] == ["$D"]


def test_conditions_loops_and_other_programs_are_named_and_not_read() -> None:
    text = f"""
    pip install -r requirements.txt && python setup.py install
    wget -qO- http://example.org/install.sh | bash
    ./configure --prefix /x; make -j8
    if [ ! -d /imagenet ]; then
      aria2c --torrent x
    fi
    {NVIDIA} /imagenet
    python plot.py --lr 3
    """
    migration = migrate_command(text)
    assert migration.program is not None and migration.program.name == "nvidia"
    assert migration.settings["schedule.lr"].value == 0.1
    named = rows(migration, "shell")
    for word in ("python setup.py install", "bash", "./configure --prefix /x", "make -j8", "aria2c --torrent x"):
        assert named[word] == "no effect"
    assert migration.launch.num_processes == 1


def test_a_launcher_of_another_program_does_not_count() -> None:
    migration = migrate_command(f"mpirun -np 8 ./all_reduce_perf -b 8; {NVIDIA} /imagenet")
    assert migration.settings["batch.size"].value == 256


def test_a_text_of_unknown_programs_alone_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"'plot\.py' is not a program that can be migrated"):
        migrate_command("python plot.py; python setup.py install")


def test_a_wrong_flag_is_an_error_beside_other_commands_too() -> None:
    with pytest.raises(UsageError, match="--epoks"):
        migrate_command(f"make; {NVIDIA} --epoks 3 /imagenet")


@pytest.mark.parametrize(
    "text",
    [
        "A=xx; " + "A=$A$A; " * 60 + f"{NVIDIA} $A",
        f"A={'x' * 1000}; {NVIDIA} " + "$A " * 1000,
    ],
)
def test_variables_that_grow_without_end_are_an_error(text: str) -> None:
    with pytest.raises(UsageError, match=f"more than {MAX_CHARACTERS:,} characters"):
        split_commands(text)
