from __future__ import annotations

import json

import pytest
import torch
from oracle_cases import CASES, FIXTURES, Case, images, network, shown

from reconv.models import AuxOutput
from reconv.models.layers.dropout import Dropout

OUTPUTS = json.loads(FIXTURES.read_text())["outputs"]


def test_every_case_has_a_fixture_and_every_fixture_a_case() -> None:
    assert set(OUTPUTS) == {f"{case.id}-{case.side}" for case in CASES} | {"googlenet-train"}
    assert len(OUTPUTS) == 33


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=f"{c.id}-{c.side}", marks=[pytest.mark.slow] if c.is_large else []) for c in CASES],
)
def test_outputs_equal_those_of_another_implementation(case: Case) -> None:
    model = network(case).eval()
    with torch.no_grad():
        logits = model(images(case))
    expected = torch.tensor(OUTPUTS[f"{case.id}-{case.side}"]["logits"], dtype=torch.float64)
    assert expected.std() > 0
    actual = torch.tensor(shown(logits), dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())


def test_googlenet_auxiliary_outputs_equal_those_of_another_implementation() -> None:
    case = next(case for case in CASES if case.id == "googlenet")
    model = network(case).train()
    for module in model.modules():
        if isinstance(module, Dropout):
            module.rate = 0.0
    with torch.no_grad():
        outputs = model(images(case))
    assert isinstance(outputs, AuxOutput)
    assert outputs.weight == 0.3
    expected = OUTPUTS["googlenet-train"]
    for actual, name in ((outputs.logits, "logits"), (outputs.auxiliary[0], "aux1"), (outputs.auxiliary[1], "aux2")):
        wanted = torch.tensor(expected[name], dtype=torch.float64)
        torch.testing.assert_close(torch.tensor(shown(actual), dtype=torch.float64), wanted, rtol=1e-6, atol=1e-6)
