"""The workflows of .github: pinned actions, few permissions, and what their own shell commands do."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import reconv
from reconv.core.compat import ranges_of, release_numbers

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())["jobs"]
    return found


def script(workflow: str, job: str, step: str) -> str:
    """The shell commands of a named step."""
    (found,) = (each["run"] for each in jobs(workflow)[job]["steps"] if each.get("name") == step)
    return str(found)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_permissions_given_job_by_job(path: Path) -> None:
    text = path.read_text()
    uses = re.findall(r"uses: (.*)", text)
    assert uses and all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use) for use in uses)
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {}
    assert all("permissions" in job and "timeout-minutes" in job for job in workflow["jobs"].values())
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")
    assert "secrets." not in text and "pull_request_target" not in text


def test_only_the_jobs_that_publish_may_write() -> None:
    writing = {
        (path.stem, name): sorted(scope for scope, right in job["permissions"].items() if right == "write")
        for path in WORKFLOWS
        for name, job in jobs(path.stem).items()
    }
    assert {job: scopes for job, scopes in writing.items() if scopes} == {
        ("release", "attest"): ["attestations", "id-token"],
        ("release", "publish"): ["id-token"],
        ("release", "notes"): ["contents"],
    }


def test_a_change_is_tested_with_the_oldest_and_the_newest_torch() -> None:
    environments = runpy.run_path(str(ROOT / "packaging" / "matrix.py"))["environments"]
    versions = jobs("ci")["versions"]["strategy"]["matrix"]["versions"]
    chosen = [environments([version]) for version in versions]
    assert [len(found) for found in chosen] == [1, 1]
    (torch_range,) = ranges_of("torch")
    found = [release_numbers(environment.torch)[:2] for (environment,) in chosen]
    assert found == [release_numbers(torch_range.oldest), release_numbers(torch_range.newest)]


@pytest.mark.parametrize(("tag", "is_accepted"), [(f"v{reconv.__version__}", True), ("v0.0.1", False), ("v", False)])
def test_a_release_stops_at_a_tag_that_is_not_the_version(tag: str, is_accepted: bool) -> None:
    command = script("release", "build", "The tag is the version")
    done = subprocess.run(["bash", "-e", "-c", command], cwd=ROOT, env={**os.environ, "GITHUB_REF_NAME": tag})
    assert (done.returncode == 0) is is_accepted


def test_the_notes_of_a_release_are_its_part_of_the_changelog(tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [0.2.0] - 2026\n\n- New\n\n### Fixed\n\n## [0.1.0]\n\n- Old\n"
    )
    gh = tmp_path / "gh"
    gh.write_text("#!/bin/sh\nexit 0\n")
    gh.chmod(0o755)
    command = script("release", "notes", "Create the release, with its part of the changelog")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_REF_NAME": "v0.2.0"}
    subprocess.run(["bash", "-e", "-c", command], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "notes.md").read_text().split("\n") == ["", "- New", "", "### Fixed", "", ""]
