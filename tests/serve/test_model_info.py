from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import reconv
from reconv.recipe.load.adapt import describe
from reconv.serve.model_info import model_card


def test_the_card_does_not_name_folders_of_the_server(classifier: Path) -> None:
    predictor = reconv.load(classifier, device="cpu", backend="eager", log=lambda text: None)
    changed = describe(["data.root /secret/photos"])
    card = model_card(replace(predictor, recipe=predictor.recipe.model_copy(update={"description": changed})))
    assert "secret" in changed and "secret" not in card and str(classifier.parent.parent) not in card
    described = predictor.recipe.model_copy(update={"description": "handwritten digits"})
    assert "handwritten digits" in model_card(replace(predictor, recipe=described))
