"""Command lines are split as a shell does, and launchers are recognized."""

from __future__ import annotations

import pytest

from reconv.migrate.command_line import quote, split_commands, unfilled
from reconv.migrate.launchers import ProgramLaunch, strip_launchers
from reconv.migrate.migration import migrate_command


def words(text: str) -> list[list[str]]:
    return [command.words for command in split_commands(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b  c", [["a", "b", "c"]]),
        ("a 'b c' \"d e\"", [["a", "b c", "d e"]]),
        ("a \\\n  b", [["a", "b"]]),
        ("a; b && c | d", [["a"], ["b"], ["c"], ["d"]]),
        ("a # comment\nb", [["a"], ["b"]]),
        ("a <path to imagenet> b", [["a", "<path to imagenet>", "b"]]),
        ("a > out.log 2>&1", [["a"]]),
        ("./{DGX1, DGX2}_{50,90}E.sh x", [["./{DGX1, DGX2}_{50,90}E.sh", "x"]]),
        ("x=1 a $x ${x} ${y:-z} $y", [["a", "1", "1", "z", "$y"]]),
        ("a --precision AMP|FP32 --image x", [["a", "--precision", "AMP|FP32", "--image", "x"]]),
        ('a --flag=\'{"k": "v"}\'', [["a", '--flag={"k": "v"}']]),
        ("a `b c` $(d e)", [["a", "`b c`", "$(d e)"]]),
        ("a \\  \n  b", [["a", "b"]]),  # a space after the backslash, which a shell would not forgive
        ("a --b=1\n  --c 2\n  -d\nb", [["a", "--b=1", "--c", "2", "-d"], ["b"]]),  # wrapped without backslashes
        ("a;\n--b", [["a"], ["--b"]]),
        ("a [folder with images] b", [["a", "[folder with images]", "b"]]),
        ('x=\'1 2\' a $x "$x" --f="$x"', [["a", "1", "2", "1 2", "--f=1 2"]]),
        ("a >& out.log; b |& c", [["a"], ["b"], ["c"]]),
    ],
)
def test_a_text_is_split_as_a_shell_does(text: str, expected: list[list[str]]) -> None:
    assert words(text) == expected


def test_assignments_are_apart_from_words() -> None:
    first, second = split_commands("export A=1 B='2 3'; C=4 python main.py D=5")
    assert first.assignments == [("A", "1"), ("B", "2 3")]
    assert second.assignments == [("C", "4")]
    assert second.words == ["python", "main.py", "D=5"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<batch size>", "<batch size>"),
        ("/data/$USER/x", "$USER"),
        ("your_dataset_path", "your_dataset_path"),
        ("path-to/imagenet", "path-to/imagenet"),
        ("[folder with images]", "[folder with images]"),
        ("$(pwd)/imagenet", "$(pwd)"),
        ("[0.3,0.6]", None),
        ("/data/imagenet", None),
    ],
)
def test_what_has_to_be_filled_in_is_found(text: str, expected: str | None) -> None:
    assert unfilled(text) == expected


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("a-b/c.d", "a-b/c.d"),
        ("a b", "'a b'"),
        ("~/a", "~/a"),
        ("$A/b", '"$A/b"'),
        ("<a b>", "'<a b>'"),
        ("'", "''\"'\"''"),
    ],
)
def test_words_are_quoted_for_a_shell(word: str, quoted: str) -> None:
    assert quote(word) == quoted


@pytest.mark.parametrize(
    ("command", "processes", "hosts", "program"),
    [
        ("python -u main.py x", 1, 1, "main.py"),
        ("mpirun -n 8 --bind-to core -x A python3 train.py", 8, 1, "train.py"),
        ("mpirun --np 16 -H a:8,b:8 --mca x y $PYTHON -u train.py", 16, 2, "train.py"),
        ("horovodrun -np 4 -H a:2,b:2 python m.py", 4, 2, "m.py"),
        ("torchrun --nproc_per_node=8 --nnodes 2 train.py", 16, 2, "train.py"),
        ("python -m torch.distributed.launch --nproc_per_node=8 --use_env train.py", 8, 1, "train.py"),
        ("python ./multiproc.py --nproc_per_node 8 ./main.py --arch resnet50", 8, 1, "./main.py"),
        ("poprun -vv --host a,b, c,d --num-replicas=16 --num-instances 8 python3 train.py", 16, 4, "train.py"),
        ("srun -N 2 --ntasks-per-node 4 python main.py", 8, 2, "main.py"),
        ("./distributed_train.sh 4 /imagenet --model resnet50", 4, 1, "train.py"),
        ("nohup nice python3 -W ignore main.py", 1, 1, "main.py"),
        ("bash run.sh", 1, 1, "run.sh"),
        ("mpirun -np 2 numactl -N 0 -m 0 python main.py", 2, 1, "main.py"),
    ],
)
def test_launchers_give_the_number_of_processes(command: str, processes: int, hosts: int, program: str) -> None:
    launch = ProgramLaunch()
    rest = strip_launchers(split_commands(command)[0].words, launch)
    assert (launch.num_processes, launch.num_hosts, rest[0]) == (processes, hosts, program)


PLAIN = "python main.py --arch resnet50 --epochs 3 /imagenet"


@pytest.mark.parametrize(
    "command",
    [
        "bash -c '{}'",
        "sh -lc 'cd x && {}'",
        "nohup {} > log 2>&1 &",
        "{} 2>&1 | tee log",
        "{} |& tee log",
        "{} || exit 1",
        "$ {}",
        "!{}",
        "nice -n 10 {}",
        "timeout -s INT 3600 {}",
        "taskset -c 0-7 {}",
        "numactl -N 0 -m 0 {}",
        "env A=1 OMP_NUM_THREADS=4 {}",
        "conda run -n rn50 {}",
        "screen -dmS train {}",
        "tmux new -d '{}'",
        "ssh host '{}'",
        "sbatch --gres=gpu:8 --wrap '{}'",
        "docker run --gpus all -v /a:/b image {}",
        "docker run image bash -c 'cd /workspace && {}'",
        "kubectl exec pod -- {}",
        "for lr in 1 2; do {}; done",
        "if [ -d /imagenet ]; then {}; fi",
        "unset A; trap x ERR; {}",
        "set -e; CUDA_VISIBLE_DEVICES=0 {} # a comment",
    ],
)
def test_what_starts_a_program_changes_nothing_and_has_a_row(command: str) -> None:
    plain = migrate_command(PLAIN)
    found = migrate_command(command.format(PLAIN))
    assert {name: item.value for name, item in found.settings.items()} == {
        name: item.value for name, item in plain.settings.items()
    }
    assert found.action == plain.action
    rows = [row for row in found.rows if row not in plain.rows]
    assert {row.status for row in rows} <= {"no effect", "same"}
    assert rows or command[0] in "$!{"
