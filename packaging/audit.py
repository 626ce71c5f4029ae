"""Look for known vulnerabilities of the packages of a Python: `python packaging/audit.py .venv/bin/python`.

Runs the pip-audit beside this Python. Ends with 1 where one is found, with 0 where none is or the vulnerability service
cannot be reached, which is said, and with 2 where pip-audit itself fails.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

_UNREACHABLE = re.compile(r"connect|timed out|timeout|name resolution|proxy|service unavailable", re.IGNORECASE)
_NOT_AUDITED = "packages were not audited: the vulnerability service cannot be reached from here"


def judge(stdout: str, stderr: str) -> tuple[str, int]:
    """The lines to print about the output of `pip-audit --format json`, and the exit code."""
    try:
        dependencies = json.loads(stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        if _UNREACHABLE.search(stderr):
            return _NOT_AUDITED, 0
        return f"pip-audit failed:\n{stderr.strip()}", 2
    vulnerable = [
        f"  {package['name']} {package['version']}: {found['id']}, fixed in {' '.join(found['fix_versions']) or 'none'}"
        for package in dependencies
        for found in package.get("vulns", ())
    ]
    if vulnerable:
        return "\n".join(["known vulnerabilities:", *vulnerable]), 1
    skipped = [package["name"] for package in dependencies if "skip_reason" in package]
    num_audited = len(dependencies) - len(skipped)
    if not num_audited:
        return _NOT_AUDITED, 0
    rest = f"; not audited: {', '.join(skipped)}" if skipped else ""
    return f"{num_audited} packages audited, no known vulnerabilities{rest}", 0


def main() -> int:
    """Audit the packages of the Python that is named on the command line."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([sys.argv[1], "-c", where], check=True, capture_output=True, text=True).stdout.strip()
    tool = Path(sys.executable).with_name("pip-audit")
    options = ["--format", "json", "--progress-spinner", "off", "--timeout", "5", "--skip-editable", "--path", packages]
    done = subprocess.run([tool, *options], capture_output=True, text=True)
    text, code = judge(done.stdout, done.stderr)
    print(text)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
