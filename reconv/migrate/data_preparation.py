"""Commands that prepare data: unpacking, moving, converting and downloading, and what to type instead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from reconv.migrate.flag_tables import read_flags
from reconv.migrate.flags import FlagParser
from reconv.migrate.translation import Action, Row

_ARCHIVES = (
    "`reconv data convert` reads ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar as they are; "
    "folders of classes are read as they are, too"
)
_SHELL = {
    "tar": _ARCHIVES,
    "find": _ARCHIVES,
    "mv": "validation images may be in val/ or validation/",
    "rm": "nothing has to be deleted",
    "mkdir": "folders are made where they are needed",
    "ln": "any path can be given to --data",
    "cp": "any path can be given to --data",
    "wget": "`reconv data get` downloads cifar10, cifar100 and coco2017; ImageNet needs an account",
    "curl": "`reconv data get` downloads cifar10, cifar100 and coco2017; ImageNet needs an account",
    "unzip": "`reconv data get coco2017` downloads and unpacks COCO",
    "basename": _ARCHIVES,
}
_NOTHING = {
    **dict.fromkeys(("for", "while", "until", "if"), "is about the shell: write it around the new command"),
    **dict.fromkeys(("do", "done", "read", "then", "fi", "else", "{", "}", "[", "[["), "is about the shell"),
    **dict.fromkeys(
        ("unset", "disown", "alias", "trap", "wait", "shopt", "exit", "return", "pushd", "popd"), "is about the shell"
    ),
    **dict.fromkeys(("ls", "cat", "pwd", "tail", "watch", "df", "printenv", "which"), "prints something"),
    "cd": "paths are relative to the folder that you are in",
    "source": "the environment of their program is not needed",
    "set": "is about the shell",
    "ulimit": "is about the shell",
    "echo": "prints something",
    "sleep": "waits",
    "clear": "is about the shell",
    "date": "prints something",
    "module": "loads software; see `reconv doctor`",
    "conda": "see `reconv doctor` for what is installed",
    "pip": "see `reconv doctor` for what is installed",
    "pip3": "see `reconv doctor` for what is installed",
    "apt-get": "see `reconv doctor` for what is installed",
    "git": "Reconv has the recipes built in",
    "nvidia-smi": "see `reconv doctor`",
    "docker": "see docs/how-to/container.md for Reconv's own container",
    "nvidia-docker": "see docs/how-to/container.md for Reconv's own container",
}
_TFRECORDS = FlagParser("preprocess_imagenet.py", read_flags("habana_tensorflow", "preprocess_imagenet"))
_SCRIPTS = ("preprocess_imagenet.py", "download_and_preprocess_coco.sh", "download_dataset.sh")
_STATIC = "generate_static_dataset.py"


def shell_row(words: Sequence[str]) -> Row | None:
    """The row of a shell command that is about files or the shell; None: another command."""
    head, shown = words[0], " ".join(words)
    if head in ("bash", "sh", "zsh") and all(word.startswith("-") for word in words[1:]):
        return Row("shell", shown, "no effect", "runs what another command prints, which is not read here")
    if head in _SHELL:
        return Row("data", shown, "no effect", f"nothing to do: {_SHELL[head]}")
    if head in _NOTHING:
        return Row("shell", shown, "no effect", _NOTHING[head])
    return None


def is_data_script(script: str) -> bool:
    """True if a program prepares data."""
    name = PurePosixPath(script).name
    return name in _SCRIPTS or name == _STATIC


def data_command(script: str, words: Sequence[str]) -> tuple[Action, list[Row], list[tuple[str, str]]]:
    """The command to type instead of a program that prepares data, its rows, and what to fill in."""
    name = PurePosixPath(script).name
    if name == "preprocess_imagenet.py":
        parsed = _TFRECORDS.parse(words)
        values = {item.flag.key: item.value for item in parsed.typed}
        source = values.get("raw_data_dir", "IMAGENET")
        dest = values.get("local_scratch_dir", f"{source}/tf_records")
        to_fill = [] if "raw_data_dir" in values else [("IMAGENET", "the folder with ImageNet or its archives")]
        rows = [
            Row(name, item.text, "no effect" if item.flag.none else "renamed", item.flag.none or "an argument")
            for item in parsed.typed
        ]
        action = Action("data convert", [source, dest], [("--to", "tfrecord")], False)
        return action, rows, to_fill
    if name == "download_and_preprocess_coco.sh":
        folder = words[0] if words else "DATA"
        rows = [Row(name, word, "renamed", "the folder of the data") for word in words[:1]]
        rows += [Row(name, word, "no effect", "takes one folder") for word in words[1:]]
        return Action("data get", ["coco2017", folder], [("--to", "tfrecord")], False), rows, []
    if name == "download_dataset.sh":
        rows = [Row(name, word, "no effect", _ARCHIVES) for word in words]
        action = Action("data convert", ["ARCHIVES", "IMAGENET"], [("--to", "folder")], False)
        return action, rows, [("ARCHIVES", "the folder with ImageNet's archives"), ("IMAGENET", "a new folder")]
    rows = [Row(name, " ".join(words), "no effect", "the same seed gives the same crops, so nothing has to be stored")]
    return Action("nothing", [], [], False), rows, []
