"""MLCommons' LoadGen runs its four scenarios, and its accuracy test, on a trained model.

Needs: pip install 'reconv[loadgen]'
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import reconv
from reconv.cli import main

pytest.importorskip("mlperf_loadgen", reason="pip install 'reconv[loadgen]'")
pytestmark = pytest.mark.external


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("loadgen") / "run"
    reconv.train("quickstart", epochs=1, out=str(out))
    return out


@pytest.mark.parametrize("scenario", ["single", "multi", "offline", "server"])
def test_loadgen_judges_each_scenario_and_its_accuracy_is_that_of_eval(
    run: Path, scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--loadgen", scenario, "--duration", "3", "--out", str(tmp_path / "logs"), "--json"]
    rate = ["--target-qps", "200", "--target-latency", "5000"] if scenario == "server" else []
    with pytest.raises(SystemExit) as end:
        main(["bench", "infer", str(run), *words, *rate])
    assert end.value.code == 0
    result = json.loads(capsys.readouterr().out)
    assert result["valid"], result["recommendations"]
    assert result["accuracy"] == pytest.approx(reconv.load(run).evaluate().metrics["top1"])
    assert "Result is : VALID" in (tmp_path / "logs" / "mlperf_log_summary.txt").read_text()


def test_a_server_needs_a_rate(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "infer", str(run), "--loadgen", "server", "--out", str(tmp_path)])
    assert end.value.code == 2 and "--target-qps" in capsys.readouterr().err
