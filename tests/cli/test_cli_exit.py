"""The program ends at once when it has used a GPU, with everything that an exit owes its callers."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, sys, threading, time, types
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: {is_initialized}))
from reconv.cli import main

def last_words():
    time.sleep(0.8)  # longer than the command takes, unless the machine is busy
    print("thread", flush=True)

atexit.register(print, "exit handler")
threading.Thread(target=last_words).start()
sys.argv = ["reconv", "recipes", "show", "{recipe}"]
main()
"""


def run(recipe: str, is_initialized: bool) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(recipe=recipe, is_initialized=is_initialized)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_threads_are_waited_for_and_exit_handlers_called() -> None:
    ended = run("quickstart", is_initialized=True)
    assert ended.returncode == 0 and "length" in ended.stdout
    assert "thread\n" in ended.stdout and ended.stdout.endswith("exit handler\n")


def test_its_exit_code_is_that_of_the_command() -> None:
    ended = run("nothing", is_initialized=True)
    assert ended.returncode == run("nothing", is_initialized=False).returncode == 2
    assert "not found" in ended.stderr and "exit handler" in ended.stdout
