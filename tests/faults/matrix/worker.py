"""A process that runs cases: one JSON line with a case on stdin, one with its outcome on stdout."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

from classes import CLASSES
from lab import Lab


def serve() -> None:
    """Run the cases that come in."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    parent = Path(os.environ["FAULTS_FOLDER"])
    folder = Path(tempfile.mkdtemp(prefix="worker-", dir=parent)).resolve()
    os.environ["RECONV_CACHE"] = str(folder / "cache")
    os.chdir(folder)
    lab = Lab(folder)
    answers.write(json.dumps({"is_ready": True}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        if "class" not in request:
            answers.write(json.dumps(list(CLASSES)) + "\n")
            continue
        fault_class = CLASSES[request["class"]]
        if "case" not in request:
            lab.sample = request["sample"]
            answers.write(json.dumps({"cases": list(fault_class.cases(lab)), "limit": fault_class.limit}) + "\n")
            continue
        start_s = time.monotonic()
        case_folder = lab.new_folder()
        try:
            problem = fault_class.run(lab, request["case"], case_folder)
        except Exception:
            problem = traceback.format_exc()
        answers.write(json.dumps({"problem": problem, "seconds": time.monotonic() - start_s}) + "\n")
        with suppress(OSError):
            shutil.rmtree(case_folder)
    shutil.rmtree(folder, ignore_errors=True)
