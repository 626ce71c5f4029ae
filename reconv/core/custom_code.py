"""Your own code: what a recipe names by import path (`my_pkg.nets:make`, `./nets.py:make`), and what Python passes in.

Code is imported by `load_object` and nowhere else. An exception in it becomes a `CustomCodeError` that shows its line.

`train` imports what its recipe names, on every rank and before there is a run directory. `eval`, `predict`, `resume`,
`bench infer` and teachers import what a saved recipe names only with the user's trust (`require_trust`, called
wherever a saved recipe is read). A checkpoint's `state.json` has the sha256 of the files (`code`).
tests/laws/test_law_own_code.py and tests/core/test_custom_code.py prove it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import os
import re
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from reconv.core.code_folders import add_folders, allow_name, code_files, find_module, search_path
from reconv.core.errors import ReconvError, UsageError

FROM_PYTHON = "python"  # the module of objects that were passed from Python and cannot be imported
EXAMPLE = "my_pkg.nets:make or ./nets.py:make"
_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_IMPORT_PATH = re.compile(rf"(?P<module>[^:\s][^:\n]*\.py|{_NAME}):(?P<attribute>{_NAME})")


@dataclass(frozen=True, slots=True)
class CodeSource:
    """Code that a saved recipe names: the field, the import path, and the file to import if there is one."""

    field: str
    path: str
    file: Path | None
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)  # sha256 of its files, by their paths

    def __str__(self) -> str:
        return f"{self.field}: {self.path} ({self.file or 'no such file here'})"


_MAX_CODE_BYTES = 1 << 28
_PACKAGE = Path(__file__).resolve().parent.parent
_provided: dict[str, Any] = {}  # objects from Python, by the name that stands for them in a recipe
_roots: dict[str, Path] = {}  # the package folder or the file of everything that was loaded, by import path


class CustomCodeError(UsageError):
    """An exception in your own code."""


class OtherCodeError(UsageError):
    """Code that is not what the user has agreed to import."""


def is_import_path(text: str) -> bool:
    """True if a text has the form `package.module:attribute` or `file.py:attribute`."""
    return _IMPORT_PATH.fullmatch(text) is not None


def is_file_path(text: str) -> bool:
    """True if an import path names a file instead of a module."""
    return is_import_path(text) and _split(text)[0].endswith(".py")


def anchor(path: str, folder: Path) -> str:
    """The import path with an absolute file name; one that names a module stays."""
    if not is_file_path(path):
        return path
    file, attribute = _split(path)
    return f"{os.path.abspath(folder / os.path.expanduser(file))}:{attribute}"


def provide(objects: Mapping[str, Any]) -> None:
    """Use these objects instead of an import wherever a recipe has their names."""
    _provided.update(objects)
    for name, value in objects.items():
        module = sys.modules.get(getattr(value, "__module__", None) or type(value).__module__)
        if module is not None and getattr(module, "__file__", None):
            _roots[name] = _root_of(module)


def is_provided(path: str) -> bool:
    """True if an object was passed from Python under this name, so that nothing needs to be imported."""
    return path in _provided


def name_object(value: Any, taken: Mapping[str, Any]) -> str:
    """The import path of a class or a function, else `python:NAME` with a name that is not taken by another object."""
    named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    qualified = getattr(named, "__qualname__", "")
    if named is value and re.fullmatch(_NAME, qualified):
        module = named.__module__
        if module == "__main__":
            module = os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or "")
        path = f"{module}:{qualified}"
        if is_import_path(path):
            return path
    stem = re.sub(r"\W", "_", qualified.rpartition(".")[2])
    names = (f"{FROM_PYTHON}:{stem}{'' if number == 1 else f'_{number}'}" for number in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken or taken[name] is value)


def load_object(path: str) -> Any:
    """The object that an import path names; its module is imported."""
    if path in _provided:
        return _provided[path]
    module_name, attribute = _split(path)
    if module_name == FROM_PYTHON:
        raise UsageError(
            f"{attribute} was passed from Python and is not part of the run",
            why="only classes and functions of a module or a file can be imported again",
            hint="pass it again from Python, or move it to a file and name it by import path",
        )
    is_file = module_name.endswith(".py")
    module = _import_file(Path(module_name), path) if is_file else _import_module(module_name, path)
    _roots[path] = _root_of(module)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in vars(module) if not name.startswith("_")]
            raise UsageError(
                f"{path}: there is no {attribute} in {module.__name__}",
                where=str(getattr(module, "__file__", "")),
                why=f"it has {', '.join(names[:12])}" if names else "it is empty",
                hint="correct the name after the colon",
            )
        found = getattr(found, part)
    return found


def build_object(path: str, options: Mapping[str, Any], what: str) -> Any:
    """The object of an import path: a class is called with the options, a function is bound to them.

    `what` says what is built, for errors: "a callback".
    """
    found = load_object(path)
    if isinstance(found, type) or options:
        if not callable(found):
            raise UsageError(f"{path} is not a class or a function, so it takes no options", why=f"it is {found!r}")
        check_arguments(found if isinstance(found, type) else partial(_bind, found), options, path)
    if not isinstance(found, type):
        return partial(found, **options) if options else found
    with code_errors(f"{path}, which builds {what},"):
        return found(**options)


def _bind(*args: Any, **options: Any) -> None:
    """A function whose other arguments are known only when it is called."""


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], path: str) -> None:
    """Refuse keyword arguments that a class or function does not take."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins have none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UsageError(
            f"{path} cannot be called with {', '.join(arguments) or 'no arguments'}",
            why=f"{error}; its arguments are {signature}",
            hint="change its arguments, or the options in the recipe",
        ) from error


def accepts(function: Callable[..., Any], name: str) -> bool:
    """True if a class or function takes a keyword argument of this name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def find_source(path: str, folders: Sequence[str] = ()) -> Path | None:
    """The file that an import path would import, found without importing anything; None if there is none."""
    module_name = _split(path)[0]
    if module_name.endswith(".py"):
        return Path(module_name) if Path(module_name).is_file() else None
    return find_module(module_name, [*folders, os.getcwd()])


def describe_source(field: str, path: str, folders: Sequence[str] = ()) -> CodeSource:
    """The code that a recipe's field names, with the digests of its files; nothing is imported."""
    file = find_source(path, folders)
    if file is None:
        return CodeSource(field, path, None)
    name = _split(path)[0]
    num_packages = 0 if name.endswith(".py") else name.count(".") + (file.stem == "__init__")
    files = code_files(file, num_packages, [*folders, os.getcwd()])
    return CodeSource(field, path, file, {str(each): _file_digest(each) for each in files})


def _file_digest(file: Path) -> str:
    """The sha256 of a regular file; of a very large one, which is no code, its size."""
    with suppress(OSError), open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as content:
        status = os.fstat(content.fileno())
        if not stat.S_ISREG(status.st_mode):
            return "not a regular file"
        is_large = status.st_size > _MAX_CODE_BYTES
        return f"{status.st_size} bytes" if is_large else hashlib.file_digest(content, "sha256").hexdigest()
    return ""


class CodeConsent:
    """A user's consent to import what saved recipes name: for the files there at the first question, and no others."""

    def __init__(self, trust: bool | Callable[[Sequence[CodeSource]], bool] = False) -> None:
        self._trust = trust
        self._digests: dict[str, Mapping[str, str]] | None = None  # of the files of each import path; None: not asked

    @classmethod
    def of(cls, trust: TrustCode) -> CodeConsent:
        """The consent itself, or a new one."""
        return trust if isinstance(trust, CodeConsent) else cls(trust)

    def require(self, references: Sequence[tuple[str, str]], folders: Sequence[str], where: str) -> None:
        """Raise unless the user agrees to import what a saved recipe names, as (field, import path).

        What was passed from Python needs no import.
        """
        named = [(field, path) for field, path in references if not is_provided(path)]
        if lost := [field for field, path in named if path.startswith(f"{FROM_PYTHON}:")]:
            raise UsageError(
                f"{', '.join(lost)} {'was' if len(lost) == 1 else 'were'} passed from Python, not stored with the run",
                where=where,
                why="only classes and functions of a module or a file can be imported again",
                hint="pass the same objects: reconv.train(..., out=RUN, resume=True), or reconv.load(RUN, model=...)",
            )
        sources = [describe_source(field, path, folders) for field, path in named]
        if self._digests is None:
            if sources and self._trust is not True and not (callable(self._trust) and self._trust(sources)):
                raise UsageError(
                    "the recipe of this run names code that would be imported",
                    where=where,
                    why="; ".join(map(str, sources)),
                    hint="look at the code; if you trust it, add --trust-code (in Python: trust_code=True)",
                )
            self._digests = {source.path: source.digests for source in sources}
        if other := [source for source in sources if self._digests.get(source.path) != source.digests]:
            raise OtherCodeError(
                "the recipe names other code than what you agreed to import",
                where=where,
                why="; ".join(map(str, other)),
                hint="look at it; if you trust it, start a new command with --trust-code",
            )

    def without_question(self) -> CodeConsent:
        """The same for a process that cannot ask."""
        consent = CodeConsent(self._trust is True)
        consent._digests = self._digests
        return consent

    def __getstate__(self) -> dict[str, Any]:
        return vars(self.without_question())


# Whether the code of a saved recipe may be imported: yes, no, a question that is asked about it, or what came of that.
TrustCode = bool | Callable[[Sequence[CodeSource]], bool] | CodeConsent


def require_trust(references: Sequence[tuple[str, str]], folders: Sequence[str], trust: TrustCode, where: str) -> None:
    """Refuse to import what a saved recipe names, unless the user trusts it."""
    CodeConsent.of(trust).require(references, folders, where)


def source_digests(paths: Sequence[str]) -> dict[str, str]:
    """The sha256 of the source files behind loaded import paths: of each the file, or all loaded files of its package.

    Files are named relative to the folder they were imported from.
    """
    digests: dict[str, str] = {}
    roots = [_roots[path] for path in dict.fromkeys(paths) if path in _roots]
    if not roots:
        return digests  # thousands of modules may be loaded
    loaded = _loaded_files()
    for root in roots:
        inside = f"{root}{os.sep}"
        files = [root] if root.is_file() else sorted(Path(file) for file in loaded if file.startswith(inside))
        for file in files:
            digests[str(file.relative_to(root.parent))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digests


def _loaded_files() -> set[str]:
    """The source files of all loaded modules, with links resolved; of a folder once, as many files share it."""
    resolve_folder = cache(os.path.realpath)
    files = set()
    for module in list(sys.modules.values()):
        if name := _file_of(module):
            folder, base = os.path.split(name)
            file = os.path.join(resolve_folder(folder), base)
            files.add(os.path.realpath(file) if os.path.islink(file) else file)
    return files


@contextmanager
def code_errors(what: str = "") -> Iterator[None]:
    """Turn an exception in your own code into a `CustomCodeError` with its line; others pass.

    With `what`, every exception counts as one of this code.
    """
    try:
        yield
    except (ReconvError, MemoryError):
        raise
    except Exception as error:
        line = _user_line(error, is_ours=not what)
        if _is_of_device(error) or not (what or line):
            raise
        raise CustomCodeError(
            f"{what or 'your own code'} raised {type(error).__name__}: {error}".replace(", raised", " raised"),
            where=line,
            why="the error is in this code, not in Reconv",
            hint="correct it; --debug shows the whole traceback",
        ) from error


def _is_of_device(error: Exception) -> bool:
    """True if a device is out of memory or has failed, or a rank is lost, which may show at any call."""
    is_fault = type(error).__name__ in ("OutOfMemoryError", "AcceleratorError")
    return is_fault or any(word in str(error) for word in ("gloo", "NCCL", "HCCL"))


def _user_line(error: Exception, is_ours: bool) -> str:
    """The last line of the traceback that is in loaded code, with its place; empty if none is.

    Where the error cannot be ours, any file counts that is neither Reconv's nor installed: worker processes do not
    know what was loaded.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    roots = set(_roots.values())
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).resolve()
        is_installed = file.is_relative_to(sys.prefix) or file.is_relative_to(sys.base_prefix)
        is_foreign = file.is_file() and not is_installed and not file.is_relative_to(_PACKAGE)
        if (is_foreign and not is_ours) or any(root == file or root in file.parents for root in roots):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return ""


def _split(path: str) -> tuple[str, str]:
    match = _IMPORT_PATH.fullmatch(path)
    if match is None:
        raise UsageError(f"{path!r} is not an import path", hint=f"write it as in {EXAMPLE}")
    return match["module"], match["attribute"]


def _import_module(name: str, path: str) -> ModuleType:
    add_folders([os.getcwd()])
    allow_name(name)
    importlib.invalidate_caches()
    source = find_source(path)
    if source is not None:  # before the import, so that an exception in it is known to be in this code
        is_package = source.name == "__init__.py"
        is_inside = is_package or "." in name
        _roots[path] = source.resolve().parents[name.count(".") - (not is_package)] if is_inside else source.resolve()
    try:
        with code_errors():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{path}: there is no module {error.name or name}",
            where=", ".join(_searched()),
            why="it is neither in these folders nor installed",
            hint="put its folder into code_path, name the file as in ./nets.py:make, or install the package",
        ) from error


def _searched() -> list[str]:
    """The folders in which code is looked for, without those of installed packages."""
    prefixes = (sys.prefix, sys.base_prefix)
    return [folder for folder in search_path() if folder and not folder.startswith(prefixes)] or [os.getcwd()]


def _import_file(file: Path, path: str) -> ModuleType:
    """The module of a file, imported by its name: worker processes and other ranks import it in the same way."""
    if not file.is_file():
        raise UsageError(f"{path}: there is no file {file}", hint="check the path; it is relative to the recipe file")
    if not file.stem.isidentifier():
        raise UsageError(f"{path}: {file.stem} is not a module name", hint="use letters, digits and _ in the file name")
    add_folders([str(file.parent)])
    module = _import_module(file.stem, f"{file.stem}:{_split(path)[1]}")
    found = _file_of(module)
    if found is None or Path(found).resolve() != file.resolve():
        raise UsageError(
            f"{path}: another module is called {file.stem}",
            where=str(found or "it is a part of Python"),
            why="Python imports that one first",
            hint="rename the file",
        )
    return module


def _file_of(module: object) -> str | None:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and file.endswith(".py") else None


def _root_of(module: ModuleType) -> Path:
    """The folder of the top-level package of a module, or the file of a module without a package."""
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    folders = getattr(top, "__path__", None)
    return Path(next(iter(folders)) if folders else str(getattr(module, "__file__", ""))).resolve()
