"""The programs whose commands can be migrated, and which of them a command starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from reconv.core.errors import UsageError
from reconv.migrate.command_line import shorten
from reconv.migrate.programs.base import Program
from reconv.migrate.programs.detection_references import NVIDIA_SSD, TORCHVISION_DETECTION
from reconv.migrate.programs.graphcore import GRAPHCORE_TRAIN
from reconv.migrate.programs.graphcore_tools import EMBEDDED, RESTORE, UPLOAD, VALIDATION, WEIGHT_AVERAGE
from reconv.migrate.programs.habana import HABANA_DEMO, HABANA_GOOGLENET, HABANA_GOOGLENET_DEMO, HABANA_TRAIN
from reconv.migrate.programs.habana_ssd import HABANA_INFERENCE, HABANA_SSD
from reconv.migrate.programs.habana_tensorflow import HABANA_RESNEXT
from reconv.migrate.programs.nvidia import NVIDIA_2019, NVIDIA_CONVNETS, NVIDIA_QUANTIZED
from reconv.migrate.programs.nvidia_launch import LAUNCH
from reconv.migrate.programs.nvidia_tools import CHECKPOINT_TO_MODEL, CLASSIFY, MODEL_TO_ONNX
from reconv.migrate.programs.pytorch_imagenet import PYTORCH_IMAGENET
from reconv.migrate.programs.timm_train import TIMM_TRAIN
from reconv.migrate.programs.torchvision_reference import TORCHVISION_TRAIN
from reconv.recipe.presets import nearest

PROGRAMS: tuple[Program, ...] = (
    NVIDIA_2019,
    NVIDIA_CONVNETS,
    NVIDIA_QUANTIZED,
    NVIDIA_SSD,
    LAUNCH,
    CLASSIFY,
    MODEL_TO_ONNX,
    CHECKPOINT_TO_MODEL,
    HABANA_TRAIN,
    HABANA_DEMO,
    HABANA_GOOGLENET,
    HABANA_GOOGLENET_DEMO,
    HABANA_RESNEXT,
    HABANA_SSD,
    HABANA_INFERENCE,
    GRAPHCORE_TRAIN,
    RESTORE,
    VALIDATION,
    EMBEDDED,
    WEIGHT_AVERAGE,
    UPLOAD,
    TORCHVISION_TRAIN,
    TORCHVISION_DETECTION,
    TIMM_TRAIN,
    PYTORCH_IMAGENET,
)


class UnknownProgramError(UsageError):
    """A command that starts no program that is known here."""


def program_named(name: str) -> Program:
    """The program of --program."""
    for program in PROGRAMS:
        if program.name == name:
            return program
    near = nearest(name, [program.name for program in PROGRAMS])
    known = ", ".join(program.name for program in PROGRAMS)
    raise UsageError(f"there is no program {name!r}", hint=f"did you mean {near}?" if near else f"they are: {known}")


def related_program(name: str, script: str, words: Sequence[str]) -> Program:
    """The program of --program, or the one of the same vendor that has this script's name."""
    program = program_named(name)
    file = PurePosixPath(script).name
    others = [other for other in PROGRAMS if file in other.scripts and other.vendor == program.vendor]
    if file in program.scripts or not others:
        return program
    return others[0] if len(others) == 1 else _by_flags(file, others, words, ())[0]


def find_program(script: str, words: Sequence[str], launchers: Sequence[str] = ()) -> tuple[Program, list[Program]]:
    """The program that a script is, by its name, path, flags and launcher, and others that it could be.

    Raises UsageError if it is not certain.
    """
    name = PurePosixPath(script).name
    named = [program for program in PROGRAMS if name in program.scripts]
    if not named:
        known = sorted({script for program in PROGRAMS for script in program.scripts})
        near = nearest(name, known)
        raise UnknownProgramError(
            f"{shorten(name)!r} is not a program that can be migrated",
            hint=f"did you mean {near}?" if near else f"the programs are: {', '.join(known)}; see --program",
        )
    at_path = [program for program in named if program.is_at(script)]
    candidates = at_path or named
    if len(candidates) == 1:
        return candidates[0], []
    return _by_flags(name, candidates, words, launchers)


def _by_flags(
    name: str, candidates: Sequence[Program], words: Sequence[str], launchers: Sequence[str]
) -> tuple[Program, list[Program]]:
    accepting = [program for program in candidates if program.accepts(words)]
    if not accepting:
        raise _refused(candidates, words)
    if len({program.help_verb for program in accepting}) == 1 and {"-h", "--help"} & set(words):
        return accepting[0], []
    by_launcher = [program for program in accepting if set(launchers) & set(program.launchers)]
    for narrowed in (
        accepting,
        [program for program in accepting if program.usual],
        by_launcher,
        [program for program in by_launcher if program.is_complete(words)],
        [program for program in by_launcher or accepting if program.is_certain(words)],
    ):
        if len(narrowed) == 1:
            return narrowed[0], [program for program in accepting if program is not narrowed[0]]
    raise UsageError(
        f"several programs are called {name} and have these flags",
        why="; ".join(f"{program.name}: {program.title}" for program in accepting),
        hint="choose one: reconv migrate --program NAME",
    )


def _refused(candidates: Sequence[Program], words: Sequence[str]) -> UsageError:
    """The error of the program that knows the most of the flags."""
    best = max(candidates, key=lambda program: sum(program.parser.knows(word) for word in words))
    try:
        best.parser.parse(words)
    except UsageError as error:
        return error
    return UsageError(
        f"no program called {best.script} takes these arguments",
        why=" ".join(words),
        hint="name the program: reconv migrate --program NAME",
    )


def find_by_flags(words: Sequence[str]) -> Program:
    """The program of flags alone, without a script."""
    accepting = [program for program in PROGRAMS if program.accepts(words, may_lack_values=True)]
    if not accepting:
        raise UsageError(
            "no known program has these flags",
            why=" ".join(words),
            hint="name the program: reconv migrate --program NAME",
        )
    certain = [program for program in accepting if program.accepts(words) and program.is_certain(words)]
    for narrowed in (accepting, certain):
        if len({program.vendor for program in narrowed}) == 1:
            return narrowed[0]
    names = [program.name for program in accepting]
    raise UsageError(
        "several programs have these flags",
        why=", ".join(names),
        hint=f"choose one, as in reconv migrate --program {names[0]}",
    )
